"""Hold runs to a file of figures: `moesim check`."""
