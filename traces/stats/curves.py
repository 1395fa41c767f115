"""Hit rates of plain per-layer caches at every size, from selections alone: what a trace's locality is worth.

One cache per layer, tokens one at a time, cold at the start. A hit is a wanted expert that is resident when the gate
asks; a token's own experts are never evicted for one another. These are the rules of `policies.lru`, `lfu` and `lcp`
with scope=layer, written out for all sizes at once (a test holds them equal).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from traces.format.layout import Array, Floats, Ints

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

    Returns (len(sizes), L). What is held is always what was used most recently, so ages are enough to know.
    """
    n_rows, n_layers, top_k = experts.shape
    cold = set() if starts is None else {int(row) for row in starts}
    last = np.full((len(sizes), n_layers, n_experts), -1, np.int64)  # when used; the order in a token depends on hits
    hits = np.zeros((len(sizes), n_layers), np.int64)
    limits = np.asarray(sizes)[:, None, None]
    layers, rank = np.arange(n_layers)[:, None], np.arange(top_k)
    for row in range(n_rows):
        if row in cold:
            last[:] = -1
        wanted = experts[row].astype(np.int64)
        used = last[:, layers, wanted]
        newer = (last[:, :, None, :] > used[..., None]).sum(axis=-1)
        hit = (used >= 0) & (newer < limits)
        hits += hit.sum(axis=-1)
        last[:, layers, wanted] = 2 * top_k * row + rank + top_k * ~hit
    found: Floats = hits / (n_rows * top_k)
    return found


def lfu_curve(experts: Array, n_experts: int, sizes: Sequence[int], starts: Array | None = None) -> Floats:
    """Hit rates of least-frequently-used caches; arguments and result as for `lru_curve`.

    Uses are counted for ever (since the cache was last emptied), evicted or not; ties go to the lowest expert id.
    """
    uses = np.zeros((experts.shape[1], n_experts), np.int64)
    layers = np.arange(experts.shape[1])[:, None]

    def before(_row: int) -> Array:
        return uses * n_experts + np.arange(n_experts)

    def after(row: int, wanted: Ints) -> None:
        uses[layers, wanted] += 1
        if row + 1 in cold:
            uses[:] = 0

    cold = _cold(starts)
    return _evicting(experts, n_experts, sizes, cold, before, after)


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

    def before(_row: int) -> Array:
        return keys

    def after(row: int, wanted: Ints) -> None:
        uses[layers, wanted] += 1
        keys[layers, wanted] = gain * np.log(uses[layers, wanted]) + row + ties[wanted]
        if row + 1 in cold:
            uses[:], keys[:] = 0, -np.inf

    return _evicting(experts, n_experts, sizes, cold, before, after)


def random_curve(experts: Array, n_experts: int, sizes: Sequence[int], starts: Array | None = None) -> Floats:
    """Hit rates of random replacement, one seed; as for `lru_curve`."""
    rng = np.random.default_rng(0)
    shape = experts.shape[1], n_experts

    def before(_row: int) -> Array:
        return rng.random(shape)

    return _evicting(experts, n_experts, sizes, _cold(starts), before, lambda _row, _wanted: None)


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
    keys = np.zeros((n_layers, n_experts), np.int64)

    def before(_row: int) -> Array:
        return keys

    def after(row: int, wanted: Ints) -> None:
        keys[layers, wanted] = -following[row]

    return _evicting(experts, n_experts, sizes, cold, before, after)


def _cold(starts: Array | None) -> set[int]:
    return set() if starts is None else {int(row) for row in starts}


def _evicting(
    experts: Array,
    n_experts: int,
    sizes: Sequence[int],
    cold: set[int],
    before: Callable[[int], Array],
    after: Callable[[int, Ints], None],
) -> Floats:
    """Hit rates of caches that evict whoever has the least key.

    before(row): (L, E) keys to evict by while a row is served, no two of a layer alike where it matters who leaves;
    after(row, wanted): told once it is.
    """
    n_rows, n_layers, top_k = experts.shape
    held = np.zeros((len(sizes), n_layers, n_experts), bool)
    hits, count = np.zeros((2, len(sizes), n_layers), np.int64)
    limits = np.asarray(sizes)[:, None]
    layers = np.arange(n_layers)[:, None]
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
            keys = before(row).astype(np.float64)
            keys[layers, wanted] = np.inf
            left = np.where(held, keys[None], np.inf)
            least = left.argmin(axis=-1)[..., None] if most == 1 else np.argpartition(left, most - 1)[..., :most]
            if most > 1:
                least = np.take_along_axis(least, np.take_along_axis(left, least, -1).argsort(axis=-1), -1)
            stays = np.arange(most) >= over[..., None]
            np.put_along_axis(held, least, np.take_along_axis(held, least, -1) & stays, -1)
            count -= over
        after(row, wanted)
    rates: Floats = hits / (n_rows * top_k)
    return rates


CURVES: dict[str, Callable[[Array, int, Sequence[int], Ints | None], Floats]] = {
    "lru": lru_curve,
    "lfu": lfu_curve,
    "lcp": lcp_curve,
    "random": random_curve,
    "belady": belady_curve,
}
