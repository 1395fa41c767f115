"""AdapMoE's cache sizes: the published tables for Mixtral-8x7B and the dynamic program that divides the cache by layer.

Source: PKU-SEC-Lab/AdapMoE@2cfe8df (arXiv 2408.10284, section 4.3). Of equally good sizes the smaller one is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import comb

import numpy as np

# Per layer of Mixtral-8x7B, in thousandths: how often a prefetch is right (a_l), how many tokens keep one expert (r_l).
ACCURACY = (
    0,
    566,
    721,
    789,
    866,
    859,
    830,
    840,
    849,
    801,
    898,
    898,
    893,
    910,
    925,
    881,
    915,
    939,
    905,
    879,
    876,
    893,
    879,
    876,
    888,
    884,
    922,
    913,
    886,
    900,
    903,
    850,
)
SINGLE = (
    0,
    35,
    5,
    1,
    0,
    3,
    8,
    34,
    35,
    49,
    13,
    20,
    30,
    5,
    16,
    28,
    64,
    71,
    141,
    280,
    299,
    365,
    414,
    356,
    495,
    521,
    548,
    618,
    780,
    884,
    975,
    858,
)
SENSITIVITY = (
    46.69,
    17.30,
    13.02,
    7.64,
    4.17,
    2.23,
    1.256,
    0.844,
    0.684,
    0.560,
    0.513,
    0.478,
    0.445,
    0.436,
    0.384,
    0.310,
    0.233,
    0.176,
    0.138,
    0.114,
    0.105,
    0.0954,
    0.0862,
    0.0771,
    0.0694,
    0.0611,
    0.0502,
    0.0426,
    0.0335,
    0.0253,
    0.0207,
    0.0229,
)
PUBLISHED_FOR = "mixtral-8x7b"
UNIT = 2**40  # expected loads are compared in these parts, so that equal ones are equal


def thousandths(table: Sequence[int]) -> list[Fraction]:
    return [Fraction(value, 1000) for value in table]


def expected_loads(n_cached: int, n_experts: int, top_k: int, accuracy: Fraction, single: Fraction) -> Fraction:
    """Loads on demand of one token in one layer: f_l(t).

    With 8 experts and K = 2 this is the code's r (1 - t/8)(1 - a) + (1 - r)[2 P2 (1 - a) + P2 a + P1 (1 - a)], with P2
    and P1 the odds that two or one of the experts are not cached: of j missing ones, a correct prefetch saves one.
    """
    alone = (1 - Fraction(n_cached, n_experts)) * (1 - accuracy)
    several = Fraction(0)
    for n_missing in range(1, top_k + 1):
        ways = comb(n_experts - n_cached, n_missing) * comb(n_cached, top_k - n_missing)
        several += Fraction(ways, comb(n_experts, top_k)) * (n_missing - accuracy)
    return single * alone + (1 - single) * several


def cache_sizes(
    total: int, n_experts: Sequence[int], top_k: int, accuracy: Sequence[Fraction], single: Sequence[Fraction]
) -> list[int]:
    """Experts cached per layer, at least one each, that together make the fewest expected loads.

    Args:
        total: experts to cache; what exceeds all experts is left. n_experts: per layer, those there are.
    """
    total = min(total, sum(n_experts))
    never = np.iinfo(np.int64).max // 2
    best = np.full(total + 1, never, dtype=np.int64)  # by experts used in the layers so far
    best[0] = 0
    chosen = []
    for n, a, r in zip(n_experts, accuracy, single, strict=True):
        found, size = np.full(total + 1, never, dtype=np.int64), np.zeros(total + 1, dtype=np.int64)
        for t in range(min(1, n), min(n, total) + 1):
            loads = round(expected_loads(t, n, min(top_k, n), a, r) * UNIT) if n else 0
            reached = np.full(total + 1, never, dtype=np.int64)
            reached[t:] = np.minimum(best[: total + 1 - t] + loads, never)
            better = reached < found
            found[better], size[better] = reached[better], t
        best = found
        chosen.append(size)
    sizes, left = [], total
    for size in reversed(chosen):
        sizes.append(int(size[left]))
        left -= sizes[-1]
    return sizes[::-1]


def equal_sizes(total: int, n_experts: Sequence[int]) -> list[int]:
    """The same number of experts in every layer; what does not divide goes to the first ones."""
    sizes, left = [0] * len(n_experts), min(total, sum(n_experts))
    while left:
        for layer, n in enumerate(n_experts):
            if left and sizes[layer] < n:
                sizes[layer] += 1
                left -= 1
    return sizes
