"""What is described: hardware, models, serving stacks, measured curves, and what a user sets on top."""
