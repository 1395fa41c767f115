"""Keep every expert in use without a loss on the load: a bias on the choice, not on the weights.

Wang et al., Auxiliary-Loss-Free Load Balancing (arXiv 2408.15664), as in DeepSeek-V3: experts are chosen by score plus
bias and weighted by score alone; after every step the bias of an expert that got more than an equal share falls by a
fixed amount, and that of one that got less rises. What it evens out is the load over all text, so tasks stay free to
prefer experts of their own, which a loss on every batch works against. The bias belongs to training: it is
faded out while the learning rate decays, standing still (moved on without effect it would grow without end), and the
checkpoint is a model of its class, whose choice follows from its scores.
"""

from __future__ import annotations

import torch

FADES_FROM = 0.4  # share of the decay up to which the bias moves
FADED_AT = 0.7  # and after which none is left; the rest of the decay trains the router as it will be used


class SelectionBias:
    """What is added to the scores [L,E] when experts are chosen."""

    def __init__(self, layers: int, experts: int, step_size: float, device: str) -> None:
        self.values = torch.zeros(layers, experts, device=device)
        self.step_size = step_size

    def applied(self, settled_frac: float) -> torch.Tensor:
        """The bias at a share of the decay."""
        left = (FADED_AT - settled_frac) / (FADED_AT - FADES_FROM)
        return self.values * min(1.0, max(0.0, left))

    def update(self, load: torch.Tensor) -> None:
        """Lower what got more than an equal share of a step's choices, raise what got less; load [L,E] sums to 1."""
        self.values += self.step_size * torch.sign(1 / load.shape[-1] - load)
