"""A trace cut to stretches of equal length, of one task or one request each: only so can hit rates be compared.

A cache that begins empty looks worse the shorter the trace, popularity looks more skewed the fewer tokens it is counted
over, and a mix of tasks looks more even than each of them. So figures are means over windows: so many rows in a row,
of one task, from the start of a request.

And how much a token's experts repeat those of the token before, by every definition under which figures are printed:
the same trace gives figures that differ threefold, so a printed one says nothing without its definition.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from traces.format.layout import Ints
from traces.format.reader import Trace
from traces.stats import observe
from traces.stats.curves import hit_rates
from traces.stats.observe import Sample, sample, spread

CUTS = (120, 128, 800, 4000)  # rows: published prompts, a task of a bundled trace, half of a published data set
LAGS = (1, 4, 16)
WINDOWS = 6
WINDOWS_OF_ONE = 24  # requests differ more than tasks do
PLAIN = ("lru", "lfu", "lcp", "random", "belady")
BATCHES = (2, 4, 8, 16)
_STEPS = 512  # batches drawn to count what they ask for together
_SEED = 20_509_8342
_AT_ONCE = 2048


def windows(rows: Sample, n: int, most: int = WINDOWS, of_one: bool = False) -> Ints | None:
    """(W, n) positions in the sample: stretches of n rows of one task each, evenly spread; None without any.

    of_one: each of one request.

    Decode rows where the trace has any, else all.
    """
    kept = rows.scored
    kept = kept[np.argsort(rows.task[kept], kind="stable")]
    begins = np.flatnonzero(np.diff(rows.request[kept], prepend=-1))
    owner = rows.request if of_one else rows.task
    found: list[Ints] = []
    free = 0
    for at in begins.tolist():
        if at >= free and at + n <= len(kept) and owner[kept[at]] == owner[kept[at + n - 1]]:
            found.append(kept[at : at + n])
            free = at + n
    if not found:
        return None
    return np.stack([found[i] for i in spread(len(found), most)])


def of_one_request(trace: Trace, n: int, policies: tuple[str, ...] = PLAIN) -> dict[str, float] | None:
    """`cut_figures` of the first n rows of requests that have as many: `WINDOWS_OF_ONE` at most, evenly spread."""
    decodes = any(request.n_decode for request in trace.requests)
    long = [request for request in trace.requests if (request.n_decode if decodes else request.n_rows) >= n]
    if not long:
        return None
    some = [long[i] for i in spread(len(long), WINDOWS_OF_ONE)]
    return cut_figures(sample(trace, some), n, policies, WINDOWS_OF_ONE, of_one=True)


def cut_figures(
    rows: Sample, n: int, policies: tuple[str, ...] = PLAIN, most: int = WINDOWS, of_one: bool = False
) -> dict[str, float] | None:
    """Figures of windows of n rows, means over layers and windows; None when no stretch of one task is so long.

    most, of_one: as `windows` takes them.

    `lru_25` and so on: hit rates of per-layer caches that begin empty; `top_quarter`: share of choices that go to a
    layer's most popular quarter; `overlap_<lag>`: share of a token's experts that an earlier one of its request chose.
    """
    at = windows(rows, n, most, of_one)
    if at is None:
        return None
    n_experts, top_k = rows.trace.n_experts, rows.trace.top_k
    chosen = rows.experts[at]  # (W, n, L, K)
    side_by_side = np.moveaxis(chosen, 0, 1).reshape(n, -1, top_k)
    found = hit_rates(side_by_side, n_experts, policies)
    quarter = max(1, round(n_experts / 4))
    each = np.moveaxis(side_by_side, 2, 1).reshape(n * top_k, -1)
    counted = np.apply_along_axis(np.bincount, 0, each, minlength=n_experts)
    found["top_quarter"] = float(np.sort(counted, axis=0)[-quarter:].sum(axis=0).mean() / (n * top_k))
    for lag in LAGS:
        same = rows.request[at[:, lag:]] == rows.request[at[:, :-lag]]
        now, before = chosen[:, lag:][same], chosen[:, :-lag][same]
        shared = (now[..., :, None] == before[..., None, :]).sum(axis=(-1, -2)) / top_k
        found[f"overlap_{lag}"] = float(shared.mean()) if same.any() else float("nan")
    return {name: value for name, value in found.items() if value == value}


def unions(rows: Sample) -> dict[int, float]:
    """Batch size -> distinct experts of a layer that as many tokens ask for together, each of a request of its own.

    Decode rows where the trace has any. Batches that have more tokens than there are requests are left out.
    """
    kept = rows.scored
    of_request = [kept[rows.request[kept] == i] for i in range(len(rows.requests))]
    of_request = [own for own in of_request if len(own)]
    rng = np.random.default_rng(_SEED)
    found = {}
    for batch in BATCHES:
        if batch > len(of_request):
            break
        turns = (rng.permutation(len(of_request))[:batch] for _ in range(_STEPS))
        at = np.array([[of_request[i][rng.integers(len(of_request[i]))] for i in turn] for turn in turns])
        asked = np.zeros((_STEPS, rows.experts.shape[1], rows.trace.n_experts), bool)
        np.put_along_axis(asked, np.moveaxis(rows.experts[at], 1, 2).reshape(*asked.shape[:2], -1), True, axis=-1)
        found[batch] = float(asked.sum(axis=-1).mean())
    return found


def union_by_chance(batch: int, n_experts: int, top_k: int) -> float:
    """Distinct experts that a batch asks for when every choice is even and its own."""
    return float(n_experts * (1 - (1 - top_k / n_experts) ** batch))


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
