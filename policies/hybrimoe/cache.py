"""HybriMoE's cache: a few experts of every layer on every GPU; the one with the least recent score (MRS) leaves."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from sim.policy import View

Floats = NDArray[np.float64]


class MrsScores:
    """Minus Recent Score: S <- alpha x TopP(s) + (1 - alpha) x S, per layer and iteration; the least leaves first.

    Scores are kept in the trace's integer units. `lru` keeps the time of the last use instead.

    Attributes:
        all: S [L, E] as it was when the iteration began.
    """

    def __init__(self, n_layers: int, n_experts: int, alpha: float, top_p: int, lru: bool = False) -> None:
        self.all = np.zeros((n_layers, n_experts))
        self._alpha = alpha
        self._top_p = min(top_p, n_experts)
        self._lru = lru
        self._time = 0.0
        self._added: dict[int, Floats] = {}  # layers whose gates have spoken, in order: what their scores add
        self._used: list[list[int]] = []

    def weighed(self, scores: Floats) -> Floats:
        """alpha x TopP(s) of gate scores [L, E]: what an iteration adds to each layer's S."""
        best = np.argsort(-scores, axis=1, kind="stable")[:, : self._top_p]
        best += np.arange(0, scores.size, scores.shape[1])[:, None]
        added = np.zeros(scores.shape)
        added.put(best, self._alpha * scores.take(best))
        return added

    def observe(self, layer: int, added: Floats, used: list[int]) -> None:
        """A layer's gate has spoken: what its scores add [E], and the experts it chose."""
        self._added[layer] = added
        self._used.append(used)

    def now(self, layer: int) -> Floats:
        """S [E] of the layer whose gate has spoken last."""
        row: Floats = self.all[layer].copy()
        if self._lru:
            row[self._used[-1]] = self._time + len(self._used)
            return row
        row *= 1.0 - self._alpha
        row += self._added[layer]
        return row

    def end(self) -> None:
        """All gates of the iteration have spoken."""
        if self._lru:
            for layer, used in zip(self._added, self._used, strict=True):
                self._time += 1.0
                self.all[layer, used] = self._time
        else:
            layers = list(self._added)
            self.all[layers] = (1.0 - self._alpha) * self.all[layers] + np.array(list(self._added.values()))
        self._added.clear()
        self._used.clear()


class LayerCaches:
    """Who is in every layer's cache on every GPU, or on the way there. Experts go by `layer * n_experts + expert`.

    Every cache is full, or has all there are: who joins takes somebody's place.

    Attributes:
        held: 1 where an expert is, or is coming. gpu: where it lives.
    """

    def __init__(self, mrs: MrsScores, view: View) -> None:
        self.mrs = mrs
        self._n_experts = view.n_experts
        n = view.n_layers * view.n_experts
        self.gpu = [view.piece(*divmod(at, view.n_experts)).gpu for at in range(n)]
        self._losers: list[list[int]] = [[-1] * view.n_gpus for _ in range(view.n_layers)]
        self.held = bytearray(n)
        # By GPU, 0 where an expert is, infinity elsewhere.
        self._absent = np.full((view.n_gpus, view.n_layers, view.n_experts), math.inf)
        self._rows = [[(scores, absent[layer]) for absent in self._absent] for layer, scores in enumerate(mrs.all)]

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
        scores, missing = self._rows[layer][gpu]
        missing[expert] = absent
        self._losers[layer][gpu] = layer * self._n_experts + int((scores + missing).argmin())

    def end(self) -> None:
        """All gates of an iteration have spoken."""
        self.mrs.end()
        least = (self.mrs.all + self._absent).argmin(axis=2)
        least += np.arange(0, len(self.held), self._n_experts)
        self._losers = least.T.tolist()

    def losers(self, layer: int) -> list[int]:
        """By GPU, who leaves for an expert that joins a later layer: the least score, ties to the lowest id."""
        return self._losers[layer]

    def loser(self, at: int, owed: Collection[int]) -> int:
        """Who leaves for an expert of the layer that runs: none of those still to run; -1 when nobody can."""
        layer, gpu = at // self._n_experts, self.gpu[at]
        rank = self.mrs.now(layer) + self._absent[gpu, layer]
        rank[list(owed)] = math.inf
        expert = int(rank.argmin())
        return layer * self._n_experts + expert if rank[expert] < math.inf else -1
