"""What the conformance suite is made of: a small world to run policies in, and the rules by theme."""
