"""A trace in twenty figures that can be compared across models: skew, repetition, affinity, accuracy, cache curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from traces.format.layout import Floats, Ints
from traces.format.reader import Trace
from traces.format.requests import Request
from traces.stats import figures as stats
from traces.stats import observe
from traces.stats.curves import CURVES, capacities
from traces.stats.observe import Sample

LAGS = (1, 2, 4, 8, 16, 64)
FRACS = (0.25, 0.5, 0.75)
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


def summarise(trace: Trace, requests: Sequence[Request] | None = None, fracs: Sequence[float] = FRACS) -> Summary:
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
    for d in observe.distances(trace):
        figures[f"predicted_{d}"] = _mean(observe.prediction_overlap(rows, f"next_scores_{d}", d))
    if "shared_scores" in trace.levels:
        figures["predicted_shared"] = _mean(observe.prediction_overlap(rows, "shared_scores", 1))
    experts, starts, phase = _curve_rows(rows)
    figures |= _curves(experts, starts, trace, fracs)
    return Summary(trace.name, trace.header.shape, len(rows.experts), len(rows.requests), len(experts), phase, figures)


def _curve_rows(rows: Sample) -> tuple[Ints, Ints, str]:
    """Rows for the caches, where requests start among them, and which phase they are of."""
    prompt = np.array([request.prompt_len for request in rows.requests])[rows.request]
    decode = rows.position >= prompt
    kept = np.flatnonzero(decode) if decode.any() else np.arange(len(decode))
    kept = kept[:CURVE_ROWS]
    starts = np.flatnonzero(np.diff(rows.request[kept], prepend=-1))
    return rows.experts[kept], starts, "decode" if decode.any() else "all"


def _curves(experts: Ints, starts: Ints, trace: Trace, fracs: Sequence[float]) -> Figures:
    by_size = {size: frac for frac in fracs for size in capacities(trace.n_experts, trace.top_k, [frac])}
    if not by_size:
        return {}
    found: Figures = {}
    for name, curve in CURVES.items():
        for frac, hit in zip(by_size.values(), curve(experts, trace.n_experts, list(by_size), None), strict=True):
            found[f"{name}_{100 * frac:g}"] = float(hit.mean())
    cold = CURVES["lru"](experts, trace.n_experts, list(by_size), starts)
    return found | {f"lru_cold_{100 * f:g}": float(hit.mean()) for f, hit in zip(by_size.values(), cold, strict=True)}


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
