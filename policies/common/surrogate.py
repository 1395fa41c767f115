"""The stand-in for a trained predictor, as policies take it: right as often as it is told to be, and labelled."""

from sim.policy import SURROGATE as PREFIX
from sim.policy import Surrogate

__all__ = ["PREFIX", "Surrogate"]
