"""Entry points of the commands: whatever lies in the folders of `PYTHONPATH`, `sim` is the one installed here."""

from sim.cli import calibrating, main, simulate

__all__ = ["calibrating", "main", "simulate"]
