"""Discrete-event simulation of Mixture-of-Experts offloading: one loop, two machines, any policy."""

__version__ = "0.1.0"

from sim.base.compiled import choose

choose()
