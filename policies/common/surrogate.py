"""The stand-in for a trained predictor, as policies take it: right as often as it is told to be, and labelled."""

from sim.policy import SURROGATE as PREFIX
from sim.policy import Surrogate, draws_of, shares_of, take

__all__ = ["PREFIX", "Surrogate", "draws_of", "shares_of", "take"]
