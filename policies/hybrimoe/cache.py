"""HybriMoE's cache: a few experts of every layer on every GPU; the one with the least recent score (MRS) leaves."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.common.placement import every
from sim.policy import Evict, Fetch, Piece, Prefetch, View


class Copies(NamedTuple):
    """An expert's matrices, as pieces, and what is said of all of them."""

    parts: tuple[Piece, ...]
    fetch: list[Fetch]
    prefetch: list[Prefetch]
    evict: list[Evict]


class Experts:
    """The copies that every expert comes in, each made when it is first asked for.

    Args:
        matrices: copies per expert.
    """

    def __init__(self, matrices: int, view: View) -> None:
        self._matrices = matrices
        self._view = view
        self._known: list[Copies | None] = [None] * (view.n_layers * view.n_experts)

    def of(self, at: int) -> Copies:
        """What an expert, `layer * n_experts + expert`, is copied in."""
        found = self._known[at]
        if found is None:
            parts = tuple(self._view.matrices(*divmod(at, self._view.n_experts), self._matrices))
            found = self._known[at] = Copies(
                parts, list(map(Fetch, parts)), list(map(Prefetch, parts)), list(map(Evict, parts))
            )
        return found


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

    def observe(self, layer: int, added: Floats, used: Iterable[int]) -> None:
        """A layer's gate has spoken: what its scores add [E], and the experts it chose."""
        self._added[layer] = added
        if self._lru:
            self._used.append(list(used))

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
            layers, added = list(self._added), np.concatenate(list(self._added.values())).reshape(len(self._added), -1)
            if len(layers) == len(self.all):
                self.all *= 1.0 - self._alpha
                self.all += added
            else:
                self.all[layers] = (1.0 - self._alpha) * self.all[layers] + added
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
        self.gpu = [piece.gpu for piece in every(view)]
        # By layer and GPU, who leaves next: None where that has to be looked for, -1 where nobody is.
        self._losers: list[list[int | None]] = [[None] * view.n_gpus for _ in range(view.n_layers)]
        self.held = bytearray(n)
        # By GPU, 0 where an expert is, infinity elsewhere.
        self._absent = np.full((view.n_gpus, view.n_layers, view.n_experts), math.inf)
        self._rows = [[(scores, absent[layer]) for absent in self._absent] for layer, scores in enumerate(mrs.all)]
        self._empty = np.ones((view.n_gpus, view.n_layers), dtype=bool)

    def add(self, at: int) -> None:
        """An expert is there from the start."""
        layer, expert = divmod(at, self._n_experts)
        self.held[at] = 1
        self._rows[layer][self.gpu[at]][1][expert] = 0.0
        self._losers[layer][self.gpu[at]] = None
        self._empty[self.gpu[at], layer] = False

    def replace(self, loser: int, at: int) -> None:
        """An expert takes the place of another of its layer and GPU."""
        layer, expert = divmod(at, self._n_experts)
        gpu = self.gpu[at]
        self.held[loser], self.held[at] = 0, 1
        absent = self._rows[layer][gpu][1]
        absent[loser - layer * self._n_experts] = math.inf
        absent[expert] = 0.0
        self._losers[layer][gpu] = None

    def end(self) -> None:
        """All gates of an iteration have spoken."""
        self.mrs.end()
        least = (self.mrs.all + self._absent).argmin(axis=2)
        least += np.arange(0, len(self.held), self._n_experts)
        least[self._empty] = -1
        self._losers = least.T.tolist()

    def loser_of(self, layer: int, gpu: int) -> int:
        """Who leaves for an expert that joins a later layer: the least score, ties to the lowest id; -1: nobody."""
        found = self._losers[layer][gpu]
        if found is None:
            scores, absent = self._rows[layer][gpu]
            rank = scores + absent
            expert = int(rank.argmin())
            found = layer * self._n_experts + expert if rank[expert] < math.inf else -1
            self._losers[layer][gpu] = found
        return found

    def loser(self, at: int, pending: Collection[int]) -> int:
        """Who leaves for an expert of the layer that runs: none of those still to run; -1 when nobody can."""
        layer, gpu = at // self._n_experts, self.gpu[at]
        rank = self.mrs.now(layer) + self._absent[gpu, layer]
        rank[list(pending)] = math.inf
        expert = int(rank.argmin())
        return layer * self._n_experts + expert if rank[expert] < math.inf else -1
