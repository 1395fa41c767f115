"""What no lossless policy can beat."""
