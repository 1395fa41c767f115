"""The expert cache of Importance-Driven Expert Scheduling (arXiv 2508.18983, section 5.3) and its public code's."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from sim.policy import FREE, LAST, NEVER, NOT_FOR_PREFETCH, Piece, Rank, Spared, View

Floats = NDArray[np.float64]


class ScoreWindow:
    """Gate scores of every expert over the last `n` iterations, chosen or not.

    A batch counts as the rounded mean over its tokens, so that sums stay whole numbers and no order of adding matters.

    Attributes:
        rows: by layer, the average over the iterations seen, n at most [E]; up to date once it has been observed.
        scale: scores are whole numbers of 1 / `scale`.
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

    def observe(self, layer: int, row: Floats, average: Floats) -> None:
        """A layer's gate has spoken."""
        self._rows[layer] = row
        self.rows[layer] = average

    def end(self) -> None:
        """All gates of the iteration have spoken."""
        oldest = self._ring[self._n_seen % self._n]
        if len(self._rows) == len(oldest):
            rows = np.concatenate(list(self._rows.values())).reshape(oldest.shape)
            self._sum += rows
            self._sum -= oldest
            oldest[:] = rows
        else:
            for layer, row in self._rows.items():
                self._sum[layer] += row - oldest[layer]
                oldest[layer] = row
        self._n_seen += 1
        self._rows.clear()


class Leaving:
    """Who leaves: `score` (section 5.3), `fifo`, `lru` or `score_position` (public code).

    The code's list is meant to be one of recency, but nothing ever calls what marks a use, so that only a load moves an
    expert to its end: as shipped, with no score window, it evicts the expert loaded longest ago (`fifo`).
    With a window it takes the least of mean score x (n + 1) + position in that list of n (`score_position`), which
    changes with every load: that one is worked out each time it is asked for.

    Attributes:
        order: ranks of all experts, and who is spared: what the running layer selected makes room for nobody while
            others can, what is to be prefetched next for no prefetch.
        native: whether the order says it all. by_use: whether uses count.
    """

    def __init__(self, rule: str, shields: bool, window: ScoreWindow, view: View) -> None:
        self.order = Rank(view.n_layers * view.n_experts)
        self.native = rule != "score_position"
        self._by_score, self.by_use, self._by_load = rule == "score", rule == "lru", rule in ("lru", "fifo")
        self._shields = shields
        self._window = window
        self._n_experts = view.n_experts
        self._rows = list(self.order.rank.reshape(view.n_layers, view.n_experts))
        self._rank = self.order.rank.data
        self._spared = Spared(self.order)
        self._means = np.zeros(view.n_layers * view.n_experts)  # average scores by `Piece.index`, for `score_position`
        self._n_stamped = 0
        self._capacities = [view.capacity_of(gpu) for gpu in range(view.n_gpus)]
        self._roomy = min(self._capacities) > view.n_experts  # more than one layer can hold back

    def averaged(self, layer: int, average: Floats) -> None:
        """A layer's average scores have changed."""
        if self._by_score:
            self._rows[layer][:] = average
        elif not self.native:
            self._means[layer * self._n_experts : (layer + 1) * self._n_experts] = average

    def loaded(self, piece: Piece) -> None:
        """It has been given room."""
        if self._by_load:
            self._stamp(piece.index)

    def used(self, piece: Piece) -> None:
        """Recency, which only `lru` looks at."""
        self._stamp(piece.index)

    def _stamp(self, index: int) -> None:
        self._n_stamped += 1
        self._rank[index] = self._n_stamped

    def shield(self, layer: int, experts: Iterable[int]) -> None:
        """Section 5.3: what the router selected stays for as long as its layer runs."""
        if self._shields:
            self._spared.shield(layer * self._n_experts, experts)

    def unshield(self) -> None:
        """The layer's computation is complete."""
        self._spared.unshield()

    def aim(self, layer: int, experts: Iterable[int]) -> None:
        """Prefetches of the layer to come do not push each other out."""
        self._spared.aim(layer * self._n_experts, experts)

    def makes_room(self, piece: Piece, view: View) -> bool:
        """Whether there is room for a piece that is demanded next, or somebody who can go."""
        if self._roomy:
            return True
        here = [view.piece(view.layer, expert) for expert in view.pending_experts()]
        stay = [one for one in here if one.gpu == piece.gpu and view.holds(one)]
        return len(stay) < self._capacities[piece.gpu]

    def victim(self, piece: Piece, speculative: bool, view: View) -> Piece | None:
        """`score_position`: the least among all, those loaded longest ago first."""
        held = [one for one in view.residents() if one.gpu == piece.gpu]
        at = np.array([one.index for one in held], dtype=np.int64)
        rank = self._means[at] / self._window.scale * (len(held) + 1) + np.arange(len(held))
        bars = self.order.bar[at]
        first = view.layer * self._n_experts
        for expert in view.pending_experts():
            bars[at == first + expert] = NEVER
        for allowed in (bars == FREE,) if speculative else (bars <= NOT_FOR_PREFETCH, bars == LAST):
            if allowed.any():
                return held[int(np.where(allowed, rank, np.inf).argmin())]
        return None
