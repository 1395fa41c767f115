"""Any grid or list of runs: what it stands for, what each gave, and the one table and summary that come of it."""
