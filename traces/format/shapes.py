"""How far routing shapes lie apart: what is nearest to a shape that nobody has recorded or published."""

from __future__ import annotations

import math


def apart(n_experts: int, top_k: int, other_experts: int, other_top_k: int) -> tuple[float, float]:
    """Differences in the number of experts and in the share of them that a layer chooses, as logarithms of ratios."""
    share = other_top_k / other_experts / (top_k / n_experts)
    return abs(math.log(other_experts / n_experts)), abs(math.log(share))
