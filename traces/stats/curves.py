"""Hit rates of plain per-layer caches at every size, from selections alone: what a trace's locality is worth.

One cache per layer, tokens one at a time, cold at the start. A hit is a wanted expert that is resident when the gate
asks; a token's own experts are never evicted for one another. These are the rules of `policies.lru`, `lfu` and `lcp`
with scope=layer (a test holds them equal), and one pass counts all sizes (`sim.base.stack_distance`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from sim.base.stack_distance import RankStack, RecencyStack
from traces.format.layout import Array, Floats, Ints

QUARTERS = (0.25, 0.5, 0.75)
FRACS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
_OMEGA, _RHO = 128, 0.25  # of MoEpic's cache priority, as it publishes them


def capacities(n_experts: int, top_k: int, fracs: Sequence[float] = FRACS) -> list[int]:
    """Whole experts per layer at each fraction of a layer's experts; those that cannot hold one token are left out."""
    sizes = [int(frac * n_experts + 1e-9) for frac in fracs]
    return sorted({size for size in sizes if size >= top_k})


def lru_curve(experts: Array, n_experts: int, sizes: Sequence[int], starts: Array | None = None) -> Floats:
    """Hit rates of least-recently-used caches.

    experts: (n, L, K) ids in router order. Of a token's experts those found count as used before those missed.
    sizes: experts per layer, each at least K.
    starts: rows at which the cache is emptied.

    Returns (len(sizes), L).
    """
    stack = partial(RecencyStack, n_experts, experts.shape[2])
    return _counted(experts, sizes, starts, lambda _layer: stack())


def lfu_curve(experts: Array, n_experts: int, sizes: Sequence[int], starts: Array | None = None) -> Floats:
    """Hit rates of least-frequently-used caches; arguments and result as for `lru_curve`.

    Uses are counted for ever (since the cache was last emptied), evicted or not; ties go to the lowest expert id.
    """
    uses = np.zeros((experts.shape[1], n_experts))
    layers = np.arange(experts.shape[1])[:, None]

    def after(row: int, wanted: Ints) -> None:
        uses[layers, wanted] += 1
        if row + 1 in cold:
            uses[:] = 0

    cold = _cold(starts)
    return _evicting(experts, n_experts, sizes, starts, uses, after)


def lcp_curve(experts: Array, n_experts: int, sizes: Sequence[int], starts: Array | None = None) -> Floats:
    """Hit rates of MoEpic's least cache priority, with its own omega and rho; as for `lru_curve`.

    The priority uses * rho ** (tokens since the last use / omega) orders experts as ln(uses) * omega / ln(1 / rho) +
    row of the last use does. Ties go to the lowest expert id.
    """
    uses = np.zeros((experts.shape[1], n_experts), np.int64)
    keys = np.full(uses.shape, float(-np.inf))
    ties = np.arange(n_experts) * 1e-9  # less than two different priorities ever differ by
    layers = np.arange(experts.shape[1])[:, None]
    gain = _OMEGA / -math.log(_RHO)
    cold = _cold(starts)

    def after(row: int, wanted: Ints) -> None:
        uses[layers, wanted] += 1
        keys[layers, wanted] = gain * np.log(uses[layers, wanted]) + row + ties[wanted]
        if row + 1 in cold:
            uses[:], keys[:] = 0, -np.inf

    return _evicting(experts, n_experts, sizes, starts, keys, after)


def random_curve(experts: Array, n_experts: int, sizes: Sequence[int], starts: Array | None = None) -> Floats:
    """Hit rates of random replacement, one seed; as for `lru_curve`."""
    rng = np.random.default_rng(0)
    n_rows, n_layers, top_k = experts.shape
    held = np.zeros((len(sizes), n_layers, n_experts), bool)  # one by one: who is drawn depends on the size
    hits, count = np.zeros((2, len(sizes), n_layers), np.int64)
    limits = np.asarray(sizes)[:, None]
    layers = np.arange(n_layers)[:, None]
    cold = _cold(starts)
    for row in range(n_rows):
        if row in cold:
            held[:], count[:] = False, 0
        wanted = experts[row].astype(np.int64)
        found = held[:, layers, wanted].sum(axis=-1)
        hits += found
        held[:, layers, wanted] = True
        count += top_k - found
        over = np.maximum(count - limits, 0)
        if most := int(over.max()):
            keys = rng.random((n_layers, n_experts))
            keys[layers, wanted] = np.inf
            least = np.where(held, keys[None], np.inf).argsort(axis=-1)[..., :most]
            stays = np.arange(most) >= over[..., None]
            np.put_along_axis(held, least, np.take_along_axis(held, least, -1) & stays, -1)
            count -= over
    return np.asarray(hits / (n_rows * top_k))


def belady_curve(experts: Array, n_experts: int, sizes: Sequence[int], starts: Array | None = None) -> Floats:
    """Hit rates of Belady's MIN, which evicts who is wanted again farthest away; as for `lru_curve`.

    A token's experts are kept for one another, as by every cache here, while `policies.belady` lets those that have run
    make room: it copies at most as much.
    """
    n_rows, n_layers, _ = experts.shape
    layers = np.arange(n_layers)[:, None]
    later = np.full((n_layers, n_experts), n_rows + 1, np.int64)
    cold = _cold(starts)
    following = np.empty(experts.shape, np.int64)
    for row in range(n_rows - 1, -1, -1):
        wanted = experts[row].astype(np.int64)
        following[row] = later[layers, wanted]
        later[layers, wanted] = row
        if row in cold:
            later[:] = n_rows + 1
    keys = np.zeros((n_layers, n_experts))

    def after(row: int, wanted: Ints) -> None:
        keys[layers, wanted] = -following[row]

    return _evicting(experts, n_experts, sizes, starts, keys, after)


def _cold(starts: Array | None) -> set[int]:
    return set() if starts is None else {int(row) for row in starts}


def _evicting(
    experts: Array,
    n_experts: int,
    sizes: Sequence[int],
    starts: Array | None,
    keys: Floats,
    after: Callable[[int, Ints], None],
) -> Floats:
    """Hit rates of caches that evict whoever has the least key, of equal ones the lowest expert.

    keys: (L, E), changed by after(row, wanted) once a row is served.
    """
    top_k, flat = experts.shape[2], keys.reshape(-1)
    stack = partial(RankStack, n_experts, top_k, range(n_experts))
    return _counted(experts, sizes, starts, lambda layer: stack(layer * n_experts), after, flat)


def _counted(
    experts: Array,
    sizes: Sequence[int],
    starts: Array | None,
    begin: Callable[[int], Any],
    after: Callable[[int, Ints], None] = lambda _row, _wanted: None,
    *keys: Floats,
) -> Floats:
    """Hit rates by size and layer of the stacks that `begin` makes."""
    n_rows, n_layers, top_k = experts.shape
    layers = range(n_layers)
    hits = np.zeros((n_layers, max(sizes, default=0) + 1), np.int64)
    begins = [row for row in sorted({0, *_cold(starts)}) if row < n_rows]
    for first, stop in pairwise([*begins, n_rows]):
        stacks = [begin(layer) for layer in layers]
        for row in range(first, stop):
            wanted = np.ascontiguousarray(experts[row], np.int64)
            ids = wanted.reshape(-1)
            for layer in layers:
                stacks[layer].visit(ids, layer * top_k, top_k, 0, 0, *keys)
            after(row, wanted)
        hits += [stack.hits(0)[: hits.shape[1]] for stack in stacks]
    return np.asarray(hits.T[list(sizes)] / (n_rows * top_k))


CURVES: dict[str, Callable[[Array, int, Sequence[int], Ints | None], Floats]] = {
    "lru": lru_curve,
    "lfu": lfu_curve,
    "lcp": lcp_curve,
    "random": random_curve,
    "belady": belady_curve,
}


def hit_rates(
    experts: Array, n_experts: int, names: Iterable[str], fracs: Sequence[float] = QUARTERS, starts: Ints | None = None
) -> dict[str, float]:
    """`lru_25` and so on: hit rates of these caches at each fraction that holds a token, means over layers."""
    by_size = {size: frac for frac in fracs for size in capacities(n_experts, experts.shape[2], [frac])}
    found: dict[str, float] = {}
    for name in names if by_size else ():
        rates = CURVES[name](experts, n_experts, list(by_size), starts)
        found |= {f"{name}_{100 * f:g}": float(hit.mean()) for f, hit in zip(by_size.values(), rates, strict=True)}
    return found
