"""MoE-Infinity (arXiv 2401.14361)."""

from policies.moe_infinity.policy import MoeInfinity as MoeInfinity
