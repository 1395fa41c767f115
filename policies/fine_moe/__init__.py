"""FineMoE (EuroSys'26, arXiv 2502.05370): expert maps guide prefetching and eviction."""

from policies.fine_moe.policy import FineMoe as FineMoe
