"""Hit rates of plain per-layer caches at every size, from selections alone: what a trace's locality is worth.

One cache per layer, tokens one at a time, cold at the start. A hit is a wanted expert that is resident when the gate
asks; a token's own experts are never evicted for one another. These are the rules of `policies.lru` and
`policies.lfu` with scope=layer, written out for all sizes at once (a test holds the two equal).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from traces.format.layout import Array, Floats, Ints

FRACS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)
_NEVER = np.iinfo(np.int64).max


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
    n_rows, n_layers, top_k = experts.shape
    cold = set() if starts is None else {int(row) for row in starts}
    uses = np.zeros((n_layers, n_experts), np.int64)
    held = np.zeros((len(sizes), n_layers, n_experts), bool)
    hits = np.zeros((len(sizes), n_layers), np.int64)
    limits = np.asarray(sizes)[:, None]
    layers, ids = np.arange(n_layers)[:, None], np.arange(n_experts)
    cell = np.indices(held.shape[:2])
    for row in range(n_rows):
        if row in cold:
            uses[:], held[:] = 0, False
        wanted = experts[row].astype(np.int64)
        hits += held[:, layers, wanted].sum(axis=-1)
        held[:, layers, wanted] = True
        over = held.sum(axis=-1) - limits
        if (over > 0).any():
            keys = np.where(held, (uses * n_experts + ids)[None], _NEVER)
            keys[:, layers, wanted] = _NEVER
            for _ in range(top_k):  # at most K newcomers, so at most K have to go
                held[cell[0], cell[1], keys.argmin(axis=-1)] &= over <= 0
                np.put_along_axis(keys, keys.argmin(axis=-1)[..., None], _NEVER, axis=-1)
                over = over - 1
                if not (over > 0).any():
                    break
        uses[layers, wanted] += 1
    found: Floats = hits / (n_rows * top_k)
    return found


CURVES: dict[str, Callable[[Array, int, Sequence[int], Ints | None], Floats]] = {"lru": lru_curve, "lfu": lfu_curve}
