"""The expert cache of Importance-Driven Expert Scheduling (arXiv 2508.18983, section 5.3) and its public code's."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from sim.policy import Piece, View

Floats = NDArray[np.float64]


class ScoreWindow:
    """Gate scores of every expert over the last `n` iterations, chosen or not; arrays are [E, L].

    A batch counts as the rounded mean over its tokens, so that sums stay whole numbers and no order of adding matters.
    """

    def __init__(self, n: int, n_layers: int, n_experts: int) -> None:
        self._n = n
        self._ring = np.zeros((n_layers, n, n_experts))
        self._sum = np.zeros((n_experts, n_layers))
        self._seen = [0] * n_layers
        self.average = np.zeros((n_experts, n_layers))  # over the iterations seen, n at most
        self.scale = 1.0

    def observe(self, layer: int, scores: Floats, scale: int) -> None:
        """Take in the gate scores [tokens, E] of an iteration's tokens, whole numbers of 1 / `scale`."""
        self.scale = float(scale)
        row = scores[0] if len(scores) == 1 else np.rint(scores.mean(axis=0))
        at = self._seen[layer] % self._n
        self._sum[:, layer] += row - self._ring[layer, at]
        self._ring[layer, at] = row
        self._seen[layer] += 1
        self.average[:, layer] = self._sum[:, layer] / min(self._seen[layer], self._n)


class Residents:
    """Who is on each GPU, and who goes: `score` (section 5.3), `fifo`, `lru` or `score_position` (public code).

    The code's list is meant to be one of recency, but nothing ever calls what marks a use, so that only a load moves an
    expert to its end: as shipped, with no score window, it evicts the expert loaded longest ago (`fifo`).
    With a window it takes the least of mean score x (n + 1) + position in that list of n (`score_position`).
    """

    def __init__(self, rule: str, shield: bool, window: ScoreWindow, view: View) -> None:
        shape = (view.n_experts, view.n_layers)
        self._rule, self._shields, self._window = rule, shield, window
        self._order: list[dict[Piece, None]] = [{} for _ in range(view.n_gpus)]
        self._barred = np.full((view.n_gpus, *shape), math.inf)  # 0 where an expert is, infinity elsewhere
        self._shielded: set[Piece] = set()
        self.aimed: set[Piece] = set()  # prefetches of the layer to come do not push each other out

    def add(self, piece: Piece) -> None:
        """It has been given room."""
        self._order[piece.gpu][piece] = None
        self._barred[piece.gpu, piece.expert, piece.layer] = 0.0

    def remove(self, piece: Piece) -> None:
        del self._order[piece.gpu][piece]
        self._barred[piece.gpu, piece.expert, piece.layer] = math.inf

    def used(self, piece: Piece) -> None:
        """Recency, which only `lru` looks at."""
        if self._rule == "lru":
            order = self._order[piece.gpu]
            del order[piece]
            order[piece] = None

    def shield(self, pieces: Iterable[Piece]) -> None:
        """Section 5.3: what the router selected stays for as long as its layer runs."""
        self._shielded = set(pieces)

    def victim(self, gpu: int, speculative: bool, view: View) -> Piece | None:
        """The unprotected piece to go. A demand that finds none takes one whose computation is over."""
        owed = {view.piece(view.layer, expert) for expert in view.owed()}
        spared = owed | (self._shielded if self._shields else set())
        if speculative:
            return self._worst(gpu, spared | self.aimed, view)
        found = self._worst(gpu, spared, view)
        return self._worst(gpu, owed, view) if found is None and spared != owed else found

    def _worst(self, gpu: int, spared: set[Piece], view: View) -> Piece | None:
        if self._rule == "score":
            rank = self._window.average + self._barred[gpu]
            for piece in spared:
                rank[piece.expert, piece.layer] = math.inf
            expert, layer = divmod(int(rank.argmin()), view.n_layers)
            return view.piece(layer, expert) if rank[expert, layer] < math.inf else None
        candidates = ((at, piece) for at, piece in enumerate(self._order[gpu]) if piece not in spared)
        if self._rule == "score_position":
            n, mean, scale = len(self._order[gpu]), self._window.average, self._window.scale
            ranked = ((mean[piece.expert, piece.layer] / scale * (n + 1) + at, at, piece) for at, piece in candidates)
            return min(ranked, key=lambda item: item[:2], default=(0, 0, None))[2]
        return next((piece for _, piece in candidates), None)
