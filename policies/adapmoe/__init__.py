"""AdapMoE (ICCAD'24, arXiv 2408.10284)."""

from policies.adapmoe.policy import AdapMoe as AdapMoe
