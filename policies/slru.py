"""Segmented LRU: what was used again since it came is protected, in most of the cache; the rest leaves first.

Source: tinyserve (e1n00r/tinyserve@9277e68, tinyserve/cache_policy.py, SLRUPolicy): 80 % of the slots are protected. An
expert that comes is on probation. A hit on probation promotes it; where the protected part is full, its least recently
used member is then put on probation, as the youngest there. A hit on a protected expert makes it the youngest of the
protected. The oldest on probation leaves, and where nobody is, the oldest of the protected. One cache over all layers
there; `scope=layer` is this project's, for comparison with per-layer caches.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from policies.common.cache import ScopedCache
from sim.policy import Piece, Rank, View, param

PROTECTED = 2.0**52  # stamps of the protected lie this much higher than all on probation; sums stay exact


class Slru(ScopedCache):
    """Evict the oldest of those that were not used since they came; what the running layer needs is safe."""

    name = "slru"
    title = "Segmented LRU, 80 % protected"
    source = "e1n00r/tinyserve@9277e68 tinyserve/cache_policy.py"
    one_size = "which experts are protected depends on how many places there are"
    protected_frac: float = param(0.8, "share of the slots that is protected (the code's)", within=(0.0, 1.0))

    def bind(self, view: View) -> None:
        super().bind(view)
        self.order = order = Rank(view.n_layers * view.n_experts, self.per_layer)
        rank: Any = order.rank
        self._rank: Any = memoryview(rank)
        self._stamp = count(1)
        divided = self.layer_budgets(view)
        if divided is None:
            slots = [view.capacity_of(gpu) for gpu in range(view.n_gpus)]
        else:  # as `group` numbers them: a layer's caches on all GPUs, then the next layer's
            rooms = [[budget // view.expert_bytes for budget in budgets] for budgets in divided]
            slots = [room[layer] for layer in range(view.n_layers) for room in rooms]
        self._most = [max(1, int(n * self.protected_frac)) for n in slots]
        self._protected: list[dict[int, None]] = [{} for _ in slots]  # by cache: indices, least recently used first

    def accessed(self, piece: Piece, hit: bool, view: View) -> None:
        if hit:
            self._promote(piece)
        else:
            self._rank[piece.index] = next(self._stamp)

    def placed(self, piece: Piece, view: View) -> None:
        self._rank[piece.index] = next(self._stamp)

    def _promote(self, piece: Piece) -> None:
        cache, index = self.group(piece), piece.index
        protected = self._protected[cache]
        if index in protected:
            del protected[index]
        elif len(protected) >= self._most[cache]:
            oldest = next(iter(protected))
            del protected[oldest]
            self._rank[oldest] = next(self._stamp)
        protected[index] = None
        self._rank[index] = PROTECTED + next(self._stamp)

    def evicted(self, piece: Piece, view: View) -> None:
        self._protected[self.group(piece)].pop(piece.index, None)
