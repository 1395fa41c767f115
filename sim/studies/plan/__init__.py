"""What a goal asks of a machine: the cheapest that reaches it, with how little memory, and what the others lack."""
