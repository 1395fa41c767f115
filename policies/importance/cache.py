"""The expert cache of Importance-Driven Expert Scheduling (arXiv 2508.18983, section 5.3) and its public code's."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sim.policy import FREE, LAST, NEVER, NOT_FOR_PREFETCH, Piece, Rank, ScoreWindow, Spared, View

Floats = NDArray[np.float64]


def counted(scores: Floats) -> list[list[float]]:
    """By layer, what gate scores [tokens, L, E] count as: a batch's as the rounded mean over its tokens, so that sums
    stay whole numbers and no order of adding matters."""
    found: list[list[float]] = (scores[0] if len(scores) == 1 else np.rint(scores.mean(axis=0))).tolist()
    return found


class Leaving:
    """Who leaves: `score` (section 5.3), `fifo`, `lru` or `score_position` (public code).

    The code's list is meant to be one of recency, but nothing ever calls what marks a use, so that only a load moves an
    expert to its end: as shipped, with no score window, it evicts the expert loaded longest ago (`fifo`).
    With a window it takes the least of mean score x (n + 1) + position in that list of n (`score_position`), which
    changes with every load: that one is worked out each time it is asked for.

    Attributes:
        order: ranks of all experts. spared: who makes room for nobody while others can, and who for no prefetch.
        window: mean scores, which are the ranks where the rule is `score`.
        native: whether the order says it all. by_use: whether uses count.
        score_scale: scores are whole numbers of 1 / `score_scale`; looked at by `score_position`.
    """

    def __init__(self, rule: str, n_iterations: int, view: View) -> None:
        self.order = Rank(view.n_layers * view.n_experts)
        self.spared = Spared(self.order, view.n_experts)
        self.native = rule != "score_position"
        self.by_use, self._by_load = rule == "lru", rule in ("lru", "fifo")
        self._means = self.order.rank if rule == "score" else np.zeros(view.n_layers * view.n_experts)
        self.window = ScoreWindow(n_iterations, view.n_experts, self._means)
        self.score_scale = 1.0
        self._n_experts = view.n_experts
        self._rank = self.order.rank.data
        self._n_stamped = 0
        self._capacities = [view.capacity_of(gpu) for gpu in range(view.n_gpus)]
        self._roomy = min(self._capacities) > view.n_experts  # more than one layer can hold back

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
        rank = self._means[at] / self.score_scale * (len(held) + 1) + np.arange(len(held))
        bars = self.order.bar[at]
        first = view.layer * self._n_experts
        for expert in view.pending_experts():
            bars[at == first + expert] = NEVER
        for allowed in (bars == FREE,) if speculative else (bars <= NOT_FOR_PREFETCH, bars == LAST):
            if allowed.any():
                return held[int(np.where(allowed, rank, np.inf).argmin())]
        return None
