"""The expert cache of Importance-Driven Expert Scheduling (arXiv 2508.18983, section 5.3) and its public code's."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from sim.policy import Piece, View

Floats = NDArray[np.float64]


class ScoreWindow:
    """Gate scores of every expert over the last `n` iterations, chosen or not.

    A batch counts as the rounded mean over its tokens, so that sums stay whole numbers and no order of adding matters.

    Attributes:
        rows: by layer, the average over the iterations seen, n at most [E]; up to date once it has been observed.
    """

    def __init__(self, n: int, n_layers: int, n_experts: int) -> None:
        self._n = n
        self._ring = np.zeros((n, n_layers, n_experts))
        self._sum = np.zeros((n_layers, n_experts))
        self._n_seen = 0
        self._rows: dict[int, Floats] = {}  # of the iteration under way, by layer
        self.rows: list[Floats] = [np.zeros(n_experts)] * n_layers
        self.scale = 1.0

    def averages(self, scores: Floats) -> list[tuple[Floats, Floats]]:
        """By layer, what gate scores [tokens, L, E] count as, and the average with them; nothing is kept yet."""
        rows = scores[0] if len(scores) == 1 else np.rint(scores.mean(axis=0))
        total = self._sum + (rows - self._ring[self._n_seen % self._n])
        return list(zip(rows, total / min(self._n_seen + 1, self._n), strict=True))

    def averages_of(self, layer: int, scores: Floats) -> tuple[Floats, Floats]:
        """The same of one layer's scores [tokens, E]."""
        every = np.zeros((len(scores), *self._sum.shape))
        every[:, layer] = scores
        return self.averages(every)[layer]

    def observe(self, layer: int, row: Floats, average: Floats, scale: int) -> None:
        """A layer's gate has spoken; scores are whole numbers of 1 / `scale`."""
        self.scale = float(scale)
        self._rows[layer] = row
        self.rows[layer] = average

    def end(self) -> None:
        """All gates of the iteration have spoken."""
        layers, rows = list(self._rows), np.array(list(self._rows.values()))
        oldest = self._ring[self._n_seen % self._n]
        self._sum[layers] += rows - oldest[layers]
        oldest[layers] = rows
        self._n_seen += 1
        self._rows.clear()


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
        self._n_layers = view.n_layers
        self._pieces = [view.piece(layer, expert) for expert in range(shape[0]) for layer in range(shape[1])]
        self._barred = np.full((view.n_gpus, *shape), math.inf)  # 0 where an expert is, infinity elsewhere
        self._rank = [np.full(shape, math.inf) for _ in range(view.n_gpus)]  # that and the average: who goes first
        self._flat = [rank.reshape(-1) for rank in self._rank]
        self._columns = [
            [(barred[:, layer], rank[:, layer]) for barred, rank in zip(self._barred, self._rank, strict=True)]
            for layer in range(view.n_layers)
        ]
        self._shielded: set[Piece] = set()
        self.aimed: set[Piece] = set()  # prefetches of the layer to come do not push each other out
        self._told: tuple[Piece, Piece] | None = None  # a newcomer, and who goes for it as things are

    def averaged(self, layer: int) -> None:
        """A layer's average scores have changed."""
        if self._rule == "score":
            average = self._window.rows[layer]
            for barred, rank in self._columns[layer]:
                np.add(average, barred, out=rank)

    def add(self, piece: Piece) -> None:
        """It has been given room."""
        gpu, expert, layer = piece.gpu, piece.expert, piece.layer
        self._order[gpu][piece] = None
        self._barred[gpu, expert, layer] = 0.0
        self._rank[gpu][expert, layer] = self._window.rows[layer][expert]

    def remove(self, piece: Piece) -> None:
        gpu, expert, layer = piece.gpu, piece.expert, piece.layer
        del self._order[gpu][piece]
        self._barred[gpu, expert, layer] = self._rank[gpu][expert, layer] = math.inf

    def used(self, piece: Piece) -> None:
        """Recency, which only `lru` looks at."""
        if self._rule == "lru":
            order = self._order[piece.gpu]
            del order[piece]
            order[piece] = None

    def shield(self, pieces: Iterable[Piece]) -> None:
        """Section 5.3: what the router selected stays for as long as its layer runs."""
        self._shielded = set(pieces)

    def makes_room(self, piece: Piece, view: View) -> bool:
        """Whether somebody can go for a piece that is demanded next."""
        found = self.victim(piece, False, view)
        self._told = None if found is None else (piece, found)
        return found is not None

    def victim(self, piece: Piece, speculative: bool, view: View) -> Piece | None:
        """The unprotected piece to go. A demand that finds none takes one whose computation is over."""
        told, self._told = self._told, None
        if told is not None and told[0] is piece and not speculative:
            return told[1]
        if self._rule == "score":  # mostly it is nobody who is spared
            rank = self._flat[piece.gpu]
            at = int(rank.argmin())
            found = self._pieces[at]
            spared = (self._shields and found in self._shielded) or (speculative and found in self.aimed)
            if not spared and view.evictable(found) and rank[at] < math.inf:
                return found
        owed = {view.piece(view.layer, expert) for expert in view.owed()}
        spared_pieces = owed | (self._shielded if self._shields else set())
        if speculative:
            return self._worst(piece.gpu, spared_pieces | self.aimed, view)
        worst = self._worst(piece.gpu, spared_pieces, view)
        return self._worst(piece.gpu, owed, view) if worst is None and spared_pieces != owed else worst

    def _worst(self, gpu: int, spared: set[Piece], view: View) -> Piece | None:
        if self._rule == "score":
            rank = self._rank[gpu].copy()
            for piece in spared:
                rank[piece.expert, piece.layer] = math.inf
            expert, layer = divmod(int(rank.argmin()), self._n_layers)
            return view.piece(layer, expert) if rank[expert, layer] < math.inf else None
        candidates = ((at, piece) for at, piece in enumerate(self._order[gpu]) if piece not in spared)
        if self._rule == "score_position":
            n, mean, scale = len(self._order[gpu]), self._window.rows, self._window.scale
            ranked = ((mean[piece.layer][piece.expert] / scale * (n + 1) + at, at, piece) for at, piece in candidates)
            return min(ranked, key=lambda item: item[:2], default=(0, 0, None))[2]
        return next((piece for _, piece in candidates), None)
