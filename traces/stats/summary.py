"""A trace in twenty figures that can be compared across models: skew, repetition, affinity, accuracy, cache curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from traces.format.layout import Floats
from traces.format.reader import Trace
from traces.format.requests import Request
from traces.stats import figures as stats
from traces.stats import observe
from traces.stats.curves import CURVES, QUARTERS, hit_rates

LAGS = (1, 2, 4, 8, 16, 64)
CURVE_ROWS = 12_000
Figures = dict[str, float | None]


@dataclass(frozen=True)
class Summary:
    """Figures of one trace or of some of its requests, means over layers.

    rows: how many rows they are of; curve_rows: how many of them (`decode` rows, or `all`) went through the caches.
    figures: name -> value in [0, 1], None where the trace has nothing to judge by. The names:

    - `chance`: K / E, what any of them would be without skew, memory or knowledge (curves: the fraction cached).
    - `popularity_entropy`: 1 is even; `top_quarter`: share of choices that go to a layer's most popular quarter.
    - `overlap_<lag>`: share of a token's experts that the token so many rows earlier chose; `overlap_same_task`,
      `overlap_other_task`: that a token of another request chose.
    - `affinity`: share of a choice that the choice of the layer before tells (`observe.affinity`).
    - `predicted_<d>`, `predicted_shared`: share of the choice among the K highest of the recorded predictions.
    - `lru_<percent>`, and `lfu`, `lcp`, `random`, `belady`: hit rates of per-layer caches that hold so much of a layer,
      cold at the start of the trace; `lru_cold_<percent>`: cold at the start of every request.
    - `static_<percent>`: share of choices that a layer's most used experts serve (of counts alone, `stats.counts`).
    """

    name: str
    shape: str
    rows: int
    requests: int
    curve_rows: int
    curve_phase: str
    figures: Figures


def summarise(trace: Trace, requests: Sequence[Request] | None = None, fracs: Sequence[float] = QUARTERS) -> Summary:
    """Judge a trace, or some requests of it, on at most `observe.MAX_ROWS` rows (curves on `CURVE_ROWS`)."""
    rows = observe.sample(trace, requests)
    share = observe.popularity(rows)
    quarter = max(1, round(trace.n_experts / 4))
    figures: Figures = {
        "chance": trace.top_k / trace.n_experts,
        "popularity_entropy": _mean(stats.normalised_entropy(np.rint(share * len(rows.experts)).astype(np.int64))),
        "top_quarter": _mean(np.sort(share, axis=1)[:, -quarter:].sum(axis=1) / trace.top_k),
    }
    for lag in LAGS:
        figures[f"overlap_{lag}"] = _mean(observe.overlap(rows, *observe.lag_pairs(rows, lag)))
    figures["overlap_same_task"], figures["overlap_other_task"] = map(_mean, observe.overlap_between(rows))
    affinities = [
        observe.affinity(rows.experts[:, i - 1], rows.experts[:, i], trace.n_experts) for i in range(1, trace.n_layers)
    ]
    figures["affinity"] = _mean(np.array(affinities)) if affinities and len(rows.experts) > 1 else None
    for d in stats.recorded_distances(trace):
        figures[f"predicted_{d}"] = _mean(observe.prediction_overlap(rows, f"next_scores_{d}", d))
    if "shared_scores" in trace.levels:
        figures["predicted_shared"] = _mean(observe.prediction_overlap(rows, "shared_scores", 1))
    kept = rows.scored[:CURVE_ROWS]
    experts, starts = rows.experts[kept], np.flatnonzero(np.diff(rows.request[kept], prepend=-1))
    figures |= hit_rates(experts, trace.n_experts, CURVES, fracs)
    cold = hit_rates(experts, trace.n_experts, ["lru"], fracs, starts)
    figures |= {name.replace("lru", "lru_cold"): value for name, value in cold.items()}
    phase = "decode" if any(request.n_decode for request in rows.requests) else "all"
    return Summary(trace.name, trace.header.shape, len(rows.experts), len(rows.requests), len(experts), phase, figures)


def _mean(values: Floats) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


TITLES = {
    "chance": "by chance (k / experts)",
    "popularity_entropy": "popularity entropy, 1 is even",
    "top_quarter": "choices of the most popular quarter",
    **{f"overlap_{lag}": f"shared with {lag} token{'s' if lag > 1 else ''} earlier" for lag in LAGS},
    "overlap_same_task": "shared with other requests, same task",
    "overlap_other_task": "shared with other requests, other task",
    "affinity": "told by the layer before",
    **{f"predicted_{d}": f"predicted, distance {d}" for d in (1, 2, 3)},
    "predicted_shared": "predicted through the shared expert",
}


NAMES = {"lru": "LRU", "lfu": "LFU", "lcp": "LCP", "random": "random replacement", "belady": "Belady"}
NAMES |= {"static": "fixed, most used:"}


def title(name: str) -> str:
    """What a figure is, in words."""
    if name in TITLES:
        return TITLES[name]
    kind, _, frac = name.rpartition("_")
    return f"{NAMES[kind.split('_')[0]]} hits, {frac} % cached{', cold per request' if kind.endswith('cold') else ''}"
