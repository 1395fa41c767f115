"""How far routing shapes lie apart, and which family a model is of: what is nearest to what nobody has recorded."""

from __future__ import annotations

import math
import re

_FAMILY = re.compile(r"[a-z]+")


def family(name: str) -> str:
    """The family of a model by its name or architecture, which is the first word: `qwen` of `qwen3-30b-a3b` and of
    `qwen3_moe`; empty for a name that begins with no letter."""
    found = _FAMILY.match(name.lower())
    return found[0] if found else ""


def apart(n_experts: int, top_k: int, other_experts: int, other_top_k: int) -> tuple[float, float]:
    """Differences in the number of experts and in the share of them that a layer chooses, as logarithms of ratios."""
    share = other_top_k / other_experts / (top_k / n_experts)
    return abs(math.log(other_experts / n_experts)), abs(math.log(share))
