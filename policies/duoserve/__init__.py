"""DuoServe-MoE (arXiv 2509.07379): one schedule for prefill, another for decode, and k expert slots on the GPU."""

from policies.duoserve.policy import DuoServe as DuoServe
