"""How fast a run learns, when it settles, and what keeps its experts in use without a loss on the load.

Warm-up, a constant rate for as long as one likes, and a straight line to 5 % over the last `decay_steps` (warm-up,
stable, decay). It depends on no clock: a run that is killed and continued has the rates of one that was not, and one
that was told too few steps is continued from before its decay with more.
"""

from __future__ import annotations

import torch

FINAL_LR_SHARE = 0.05
WARMUP_STEPS = 50
FADES_FROM = 0.4  # share of the decay up to which the bias moves
FADED_AT = 0.7  # and after which none is left; the rest of the decay trains the router as it will be used


def rate_of_step(step: int, steps: int, decay_steps: int, peak: float) -> float:
    """Rate of a step counted from 0, of `steps` of which the last `decay_steps` settle."""
    rising = min(1.0, (step + 1) / WARMUP_STEPS)
    return peak * rising * (1 - (1 - FINAL_LR_SHARE) * settled_frac(step, steps, decay_steps))


def settled_frac(step: int, steps: int, decay_steps: int) -> float:
    """How much of the decay is behind a step: 0 before it, 1 at the end."""
    return min(1.0, max(0.0, (step - steps + decay_steps) / max(1, decay_steps)))


class SelectionBias:
    """What is added to the scores [L,E] when experts are chosen, not to their weights.

    Wang et al., Auxiliary-Loss-Free Load Balancing (arXiv 2408.15664), as in DeepSeek-V3: after every step the bias of
    an expert that got more than an equal share falls by a fixed amount, and that of one that got less rises. What it
    evens out is the load over all text, so tasks stay free to prefer experts of their own, which a loss on every batch
    works against. It is faded out while the learning rate decays, standing still (moved on without effect it would grow
    without end), and the checkpoint is a model of its class, whose choice follows from its scores.
    """

    def __init__(self, layers: int, experts: int, step_size: float) -> None:
        self.values = torch.zeros(layers, experts)
        self.step_size = step_size

    def applied(self, settled_frac: float) -> torch.Tensor:
        """The bias at a share of the decay."""
        left = (FADED_AT - settled_frac) / (FADED_AT - FADES_FROM)
        return self.values * min(1.0, max(0.0, left))

    def update(self, load: torch.Tensor) -> None:
        """Lower what got more than an equal share of a step's choices, raise what got less; load [L,E] sums to 1."""
        self.values += self.step_size * torch.sign(1 / load.shape[-1] - load)
