"""`python -m sim` is `moesim`."""

from sim.cli import main

main()
