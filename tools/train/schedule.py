"""How fast a run learns, by the clock or by steps, and when it settles.

By the clock: warm-up over the first 2 %, then a cosine to 5 % of the peak when the minutes are over, so that a run
always ends annealed; from `SETTLES_AT` on it settles. By steps: warm-up, a constant rate for as long as one likes, and
a straight line to 5 % over the last `decay_steps` (warm-up, stable, decay). The second depends on no clock: a run that
is killed and continued has the rates of one that was not, and one that was told too few steps is continued from before
its decay with more.
"""

from __future__ import annotations

import math

FINAL_LR_SHARE = 0.05
SETTLES_AT = 0.6  # share of a run by the clock from which it counts as settling: its rate is half the peak there
WARMUP_SHARE = 0.02
WARMUP_STEPS = 50


def learning_rate(progress: float, peak: float) -> float:
    """Rate at a share of the budget in [0, 1], by the clock."""
    if progress < WARMUP_SHARE:
        return peak * max(progress / WARMUP_SHARE, 0.01)
    turn = math.pi * min(1.0, (progress - WARMUP_SHARE) / (1 - WARMUP_SHARE))
    return peak * (FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * 0.5 * (1 + math.cos(turn)))


def rate_of_step(step: int, steps: int, decay_steps: int, peak: float) -> float:
    """Rate of a step counted from 0, of `steps` of which the last `decay_steps` settle."""
    rising = min(1.0, (step + 1) / WARMUP_STEPS)
    return peak * rising * (1 - (1 - FINAL_LR_SHARE) * settled_frac(step, steps, decay_steps))


def settled_frac(step: int, steps: int, decay_steps: int) -> float:
    """How much of the decay is behind a step: 0 before it, 1 at the end."""
    begin = steps - decay_steps
    return min(1.0, max(0.0, (step - begin) / max(1, decay_steps)))


def settled_by_clock(progress: float) -> float:
    """The same for a run by the clock, whose cosine has no corner."""
    return min(1.0, max(0.0, (progress - SETTLES_AT) / (1 - SETTLES_AT)))
