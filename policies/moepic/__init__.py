"""MoEpic (arXiv 2509.08342)."""

from policies.moepic.policy import Moepic as Moepic
