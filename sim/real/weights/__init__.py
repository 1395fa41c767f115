"""What a real run computes with: experts in host memory, everything else on the device."""
