# cython: boundscheck=True, wraparound=True
"""Gate scores of the last iterations: what each expert of a layer scores on average."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class ScoreWindow:
    """Gate scores of every expert over the last `n` iterations, chosen or not, and their means.

    Scores are whole numbers (`Gate.scores`), so that sums are exact and no order of adding matters.

    Args:
        means: where means are written, float64 by `Piece.index`: the ranks of an order, say; [n_layers * n_experts].
    """

    def __init__(self, n: int, n_experts: int, means: NDArray[np.float64]) -> None:
        self.n = n
        self.n_experts = n_experts
        self.n_all = len(means)
        self.means: Any = means.data
        self.sums: Any = np.zeros(self.n_all).data
        self.ring: Any = np.zeros(n * self.n_all).data  # one iteration after the other
        self.n_seen = 0

    def observe(self, layer: int, scores: Sequence[float]) -> None:
        """A layer's gate has spoken in the iteration under way: once, with a score for each of its experts."""
        means, sums, ring = self.means, self.sums, self.ring
        n = self.n_seen + 1 if self.n_seen < self.n else self.n
        at = layer * self.n_experts
        oldest = self.n_seen % self.n * self.n_all + at
        for expert in range(self.n_experts):
            score = scores[expert]
            total = sums[at] + (score - ring[oldest])
            sums[at] = total
            ring[oldest] = score
            means[at] = total / n
            at += 1
            oldest += 1

    def end(self) -> None:
        """All gates of the iteration have spoken."""
        self.n_seen += 1
