"""HybriMoE (DAC'25, arXiv 2504.05897)."""

from policies.hybrimoe.policy import HybriMoe as HybriMoe
