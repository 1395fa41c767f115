"""eMoE (arXiv 2503.06823): a predicted subset of experts per layer, refreshed every few dozen prompts."""

from policies.emoe.policy import Emoe as Emoe
