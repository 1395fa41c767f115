"""What every policy must keep: a small world to run it in, and the rules by theme."""
