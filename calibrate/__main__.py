"""`python -m calibrate` is `calibrate`."""

from sim.cli.calibrate import main

main()
