"""What a trace is like: its figures, its summary, plain caches over it, and what others published of theirs."""
