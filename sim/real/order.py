"""Whether policies come in the order that was predicted, as far as a measurement can tell them apart at all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import variance
from typing import TYPE_CHECKING

from sim.base.extras import need

if TYPE_CHECKING:
    from sim.real.comparison import Comparison, Order

APART = 2.0
"""Standard errors of a difference from which two policies count as different."""


def grouped(values: Sequence[float], noise: float) -> list[int]:
    """The rank of each value; those no further than `noise` above the least of their group share one."""
    ranks, first, rank = [0] * len(values), -math.inf, -1
    for index in sorted(range(len(values)), key=lambda i: (values[i], i)):
        if values[index] - first > noise:
            rank, first = rank + 1, values[index]
        ranks[index] = rank
    return ranks


def variance_of(found: Comparison) -> float | None:
    """Variance of one comparison's measured TPOT, in s^2: from its repeats, else from the scatter of its iterations."""
    repeats = found["repeats"]["tpot_s"] if "repeats" in found else []
    measured_s, iqr_frac = found["tpot_s"]["measured"], found.get("decode_iqr_frac")
    if len(repeats) > 1:
        # A median of three or more is a little less certain than a mean.
        return float(variance(repeats)) / len(repeats) * (math.pi / 2 if len(repeats) > 2 else 1.0)
    if iqr_frac is None or not measured_s or not found.get("decode_tokens"):
        return None
    return float((iqr_frac * measured_s / 1.349) ** 2 / found["decode_tokens"])


def order(comparisons: Iterable[Comparison]) -> dict[str, Order]:
    """Predicted against measured order of policies by TPOT, per model and capacity of three or more policies.

    Times that differ by less than the noise are ties, in both worlds alike. `tau_b` is Kendall's, which takes ties
    into account: 1 the same order, 0 no relation; None where the noise leaves one group, or is not known. `noise_s` is
    `APART` standard errors of a difference, pooled over the policies; `pairs_apart` of `pairs` are further apart than
    that in both worlds, `pairs_agree` of these in the predicted order.
    """
    need("the order of policies", "scipy")
    from scipy.stats import kendalltau

    by_capacity: dict[str, list[Comparison]] = {}
    for one in comparisons:
        if one["tpot_s"]["predicted"] is not None and one["tpot_s"]["measured"] is not None:
            where = f"{one.get('model', '')} at {one['cache_capacity_bytes'] / 1e6:.0f} MB"
            by_capacity.setdefault(where, []).append(one)
    orders: dict[str, Order] = {}
    for where, cases in by_capacity.items():
        if len(cases) < 3:
            continue
        known = [v for v in map(variance_of, cases) if v is not None]
        found: Order = {
            "policies": len(cases),
            "noise_s": APART * math.sqrt(2 * math.fsum(known) / len(known)) if known else None,
            "tau_b": None,
            "pairs": 0,
            "pairs_apart": 0,
            "pairs_agree": 0,
        }
        orders[where] = found
        if (noise_s := found["noise_s"]) is None:
            continue
        predicted = [case["tpot_s"]["predicted"] or 0.0 for case in cases]
        measured = [case["tpot_s"]["measured"] or 0.0 for case in cases]
        tau = float(kendalltau(grouped(predicted, noise_s), grouped(measured, noise_s), variant="b").statistic)
        pairs = [(predicted[i] - predicted[j], measured[i] - measured[j]) for i in range(len(cases)) for j in range(i)]
        apart = [(a, b) for a, b in pairs if min(abs(a), abs(b)) > noise_s]
        found["tau_b"] = None if math.isnan(tau) else tau
        found["pairs"], found["pairs_apart"] = len(pairs), len(apart)
        found["pairs_agree"] = sum(a * b > 0 for a, b in apart)
    return orders


def told(where: str, row: Order) -> str:
    """One line about one order."""
    head = f"order of {row['policies']} policies, {where}"
    if row["noise_s"] is None:
        return f"{head}: the noise is not known, too little was measured; give --repeat 2 or more"
    noise = f"{1e3 * row['noise_s']:.1f} ms"
    if row["tau_b"] is None:
        return f"{head}: no two of them differ by more than the noise ({noise})"
    return (
        f"{head}: Kendall's tau-b {row['tau_b']:.2f}, differences within the noise ({noise}) taken as ties; "
        f"{row['pairs_apart']} of {row['pairs']} pairs are further apart in both worlds, {row['pairs_agree']} of "
        "these in the predicted order"
    )
