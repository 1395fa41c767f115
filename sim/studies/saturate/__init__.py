"""How many requests per second a machine takes, and up to which rate it keeps what it promised."""
