"""A stand-in for a trained predictor: right as often as it is told to be, by seeded chance. Used only on request.

It looks at what the next gate will really choose, which no system can, and so every result that rests on it carries the
label `surrogate`. Policies that know one ask it themselves; for others it draws the levels of a trace
(`sim.workload.drawn_levels`). Of equal seeds all of them hear the same of a token and layer.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import accumulate

from sim.base.errors import BadInput

SURROGATE = "surrogate"  # how its name begins, and the label of every result that rests on one
MAX_LAYERS = 1024  # traces/FORMAT.md


class Surrogate:
    """Names `top_k` experts per prediction.

    Args:
        text: `surrogate:P`, each chosen expert named with probability P on its own (binomial); or `surrogate:ALL/ANY`,
            the shares of predictions that name all chosen experts, and at least one, as DuoServe's Table 3 gives them
            (what lies between is spread as coin tosses would, one case for k = 2).
        seed: equal seeds draw equally for the same trace row and layer, in whatever order.

    Raises:
        BadInput: not of these forms.
    """

    def __init__(self, text: str, top_k: int, n_experts: int, seed: int) -> None:
        self._k, self._n_experts, self._seed = top_k, n_experts, seed
        self._below = list(accumulate(outcomes(text, top_k)))

    def name(self, row: int, layer: int, chosen: Sequence[int]) -> list[int]:
        """The k experts predicted for a layer of a trace row whose gate will choose `chosen`, right ones first.

        Where there are not enough others to be as wrong as told, more are right.
        """
        chance = draws_of(self._seed, row, layer)
        at = chance.random() * self._below[-1]
        n_right = next(m for m, below in enumerate(self._below) if at < below)
        n_right = max(n_right, 2 * self._k - self._n_experts)
        right = take(list(chosen), n_right, chance)
        wrong = [expert for expert in range(self._n_experts) if expert not in chosen]
        return right + take(wrong, self._k - n_right, chance)


def is_surrogate(text: object) -> bool:
    """Whether a predictor is named that stands in for a trained one."""
    return isinstance(text, str) and text.partition(":")[0] == SURROGATE


def outcomes(text: str, top_k: int) -> list[float]:
    """P(m of the k chosen experts are named) for m = 0..k. Raises BadInput."""
    shares = shares_of(
        text,
        "surrogate:0.85, the share of chosen experts that it names, or surrogate:0.6685/0.9545, the shares of "
        "predictions with all and with at least one",
    )
    if len(shares) == 1:
        p = shares[0]
        return [math.comb(top_k, m) * p**m * (1 - p) ** (top_k - m) for m in range(top_k + 1)]
    every, some = shares
    if every > some or (top_k == 1 and every != some):
        raise BadInput(f"predictor, got {text!r}: all of {top_k} are named at most as often as any; swap or mend them")
    between = [math.comb(top_k, m) for m in range(1, top_k)]
    return [1 - some, *((some - every) * n / sum(between) for n in between), every]


def shares_of(text: str, forms: str) -> list[float]:
    """The one or two shares of `surrogate:A/B`. Raises BadInput, which says that one of `forms` is to be written."""
    head, _, figures = text.partition(":")
    try:
        shares = [float(word) for word in figures.split("/")]
    except ValueError:
        shares = []
    if head != SURROGATE or len(shares) not in (1, 2) or not all(0 <= share <= 1 for share in shares):
        raise BadInput(f"predictor, got {text!r}: shares lie in [0, 1]; write {forms}")
    return shares


def draws_of(seed: int, row: int, layer: int) -> random.Random:
    """Chance for one layer of a trace row: the same whatever was drawn before."""
    return random.Random((seed << 80) + row * MAX_LAYERS + layer)  # noqa: S311 - reproducible, not secret


def take(items: list[int], n: int, chance: random.Random) -> list[int]:
    """n of the items (all where there are fewer), drawn one by one."""
    return [items.pop(int(chance.random() * len(items))) for _ in range(min(n, len(items)))]
