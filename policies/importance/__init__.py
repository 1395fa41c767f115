"""Importance-Driven Expert Scheduling (arXiv 2508.18983): low-score experts give way to those already on the GPU."""

from policies.importance.policy import Importance as Importance
