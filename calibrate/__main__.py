"""`python -m calibrate` is `calibrate`."""

from sim.cli import calibrating

calibrating()
