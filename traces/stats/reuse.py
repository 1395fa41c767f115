"""How much a token's experts repeat those of the token before, by every definition under which figures are printed;
and how a token's weight is spread over them.

The same trace gives figures that differ threefold, so a printed one says nothing without its definition.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from traces.format.layout import Ints
from traces.stats import observe
from traces.stats.observe import Sample

_AT_ONCE = 2048


def definitions(rows: Sample) -> dict[str, float]:
    """Means over layers and pairs of tokens in a row of one request; decode rows where the trace has any, else all.

    share: of a token's experts, those that the token before chose. jaccard: experts both chose over experts either
    chose. first: tokens whose heaviest expert is the heaviest of the token before; only where the order is recorded.
    popularity: what `share` would be if the tokens of a task chose by its popularity alone, each for itself (the sum
    of squares of a layer's popularities over their sum). even: k over the number of experts.
    """
    later = rows.scored[rows.position[rows.scored] >= 1]
    n_layers, top_k = rows.experts.shape[1:]
    ranked = rows.trace.header.expert_order == "router"
    shared, jaccard, first = 0.0, 0.0, 0.0
    for at in range(0, len(later), _AT_ONCE):
        now, before = rows.experts[later[at : at + _AT_ONCE]], rows.experts[later[at : at + _AT_ONCE] - 1]
        both = (now[..., :, None] == before[..., None, :]).sum(axis=(-1, -2))
        shared += float(both.sum())
        jaccard += float((both / (2 * top_k - both)).sum())
        first += float((now[..., 0] == before[..., 0]).sum())
    of_task = [np.flatnonzero(rows.task == task) for task in np.unique(rows.task)]
    by_popularity = sum(len(own) * _by_popularity(rows, own) for own in of_task) / len(rows.task)
    found: dict[str, float] = {}
    if pairs := len(later) * n_layers:
        found = {"share": shared / (pairs * top_k), "jaccard": jaccard / pairs}
        found |= {"first": first / pairs} if ranked else {}
    return found | {"popularity": by_popularity, "even": top_k / rows.trace.n_experts}


def _by_popularity(rows: Sample, own: Ints) -> float:
    popular = observe.popularity(replace(rows, experts=rows.experts[own]))
    return float(((popular**2).sum(axis=-1) / popular.sum(axis=-1)).mean())


def gate_mass(rows: Sample) -> list[float]:
    """[rank] -> share of a token's weight that the expert of this rank has, means over layers and tokens.

    Whether the gate renormalises makes no difference. Empty without weights.
    """
    trace = rows.trace
    if "weights" not in trace.levels:
        return []
    total, n = np.zeros(trace.top_k), 0
    for request in rows.requests:
        for first in range(request.first_row, request.end_row, _AT_ONCE):
            given = trace.weights(first, min(first + _AT_ONCE, request.end_row))
            whole = given.sum(axis=-1, keepdims=True)
            known = whole[..., 0] > 0
            ranked = -np.sort(-given, axis=-1)
            total += np.divide(ranked, whole, out=np.zeros_like(ranked), where=whole > 0).sum(axis=(0, 1))
            n += int(known.sum())
    return [float(value) for value in total / n] if n else []
