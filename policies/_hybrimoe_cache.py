"""HybriMoE's cache: a few experts of every layer on every GPU; the one with the least recent score (MRS) leaves."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from sim.policy import View

Floats = NDArray[np.float64]


class MrsScores:
    """Minus Recent Score: S <- alpha x TopP(s) + (1 - alpha) x S, per layer and iteration; the least leaves first.

    Scores are kept in the trace's integer units. `lru` keeps the time of the last use instead.

    Attributes:
        all: S [L, E]. rows: the same, layer by layer.
    """

    def __init__(self, n_layers: int, n_experts: int, alpha: float, top_p: int, lru: bool = False) -> None:
        self.all = np.zeros((n_layers, n_experts))
        self.rows = list(self.all)
        self._alpha = alpha
        self._top_p = min(top_p, n_experts)
        self._lru = lru
        self._time = 0.0

    def weighed(self, scores: Floats) -> Floats:
        """alpha x TopP(s) of gate scores [L, E]: what an iteration adds to each layer's S."""
        best = np.argsort(-scores, axis=1, kind="stable")[:, : self._top_p]
        best += np.arange(0, scores.size, scores.shape[1])[:, None]
        added = np.zeros(scores.shape)
        added.put(best, self._alpha * scores.take(best))
        return added

    def update(self, layer: int, added: Floats, used: Sequence[int]) -> None:
        """Take in what one layer's scores add [E], and the experts it chose."""
        row = self.rows[layer]
        if self._lru:
            self._time += 1.0
            row[used] = self._time
            return
        row *= 1.0 - self._alpha
        row += added


class LayerCaches:
    """Who is in every layer's cache on every GPU, or on the way there. Experts go by `layer * n_experts + expert`.

    Args:
        sizes: experts of each layer, by GPU.

    Attributes:
        held: 1 where an expert is, or is coming. gpu: where it lives.
    """

    def __init__(self, mrs: MrsScores, sizes: Sequence[int], view: View) -> None:
        self.mrs = mrs
        self._n_experts = view.n_experts
        n = view.n_layers * view.n_experts
        self.gpu = [view.piece(*divmod(at, view.n_experts)).gpu for at in range(n)]
        self._room = [list(sizes) for _ in range(view.n_layers)]
        self._losers: list[list[int] | None] = [None] * view.n_layers  # None: to be found
        self.held = bytearray(n)
        # By layer and GPU: 0 where an expert is, infinity elsewhere.
        self._absent = [[np.full(view.n_experts, math.inf) for _ in sizes] for _ in range(view.n_layers)]

    def add(self, at: int) -> None:
        """An expert takes a place in its layer's cache."""
        self._mark(at, 1, 0.0)

    def remove(self, at: int) -> None:
        """An expert loses its place."""
        self._mark(at, 0, math.inf)

    def _mark(self, at: int, held: int, absent: float) -> None:
        layer, expert = divmod(at, self._n_experts)
        gpu = self.gpu[at]
        self.held[at] = held
        self._absent[layer][gpu][expert] = absent
        self._room[layer][gpu] += 1 - 2 * held
        self._losers[layer] = None

    def update(self, layer: int, added: Floats, used: Sequence[int]) -> None:
        """A layer's gate has spoken."""
        self.mrs.update(layer, added, used)
        self._losers[layer] = None

    def full(self, at: int) -> bool:
        """True when somebody must leave for this expert."""
        return self._room[at // self._n_experts][self.gpu[at]] <= 0

    def losers(self, layer: int) -> list[int]:
        """By GPU, who leaves for an expert that joins a layer: the least score, ties to the lowest id; -1: nobody has
        to, or nobody is there."""
        found = self._losers[layer]
        if found is None:
            found, scores, base = [], self.mrs.rows[layer], layer * self._n_experts
            for absent, room in zip(self._absent[layer], self._room[layer], strict=True):
                found.append(base + int((scores + absent).argmin()) if room <= 0 else -1)
            self._losers[layer] = found
        return found

    def loser(self, at: int, owed: Collection[int]) -> int:
        """Who leaves for this expert but those of its layer that are still to run; -1 when nobody can."""
        layer, gpu = at // self._n_experts, self.gpu[at]
        rank = self.mrs.rows[layer] + self._absent[layer][gpu]
        rank[list(owed)] = math.inf
        expert = int(rank.argmin())
        return layer * self._n_experts + expert if rank[expert] < math.inf else -1
