"""Two runs beside each other: which inputs differ, where the time went in each, and the first decision that differs."""
