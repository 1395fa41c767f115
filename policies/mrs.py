"""Minus recent score: HybriMoE's replacement rule as a plain cache of whole experts.

Source: HybriMoE (DAC'25, arXiv 2504.05897, section IV-D) and its code (PKU-SEC-Lab/HybriMoE@508a85b): per layer
S <- alpha * TopP(s) + (1 - alpha) * S, where TopP keeps the p largest gate scores and puts 0 for the others; the
expert of least S leaves, the lowest id first. The code takes the scores of the first token where there are several.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from policies.common.cache import ScopedCache
from sim.policy import Gate, Param, Piece, Serve, Steps, View


class Mrs(ScopedCache):
    """Evict the expert whose gate scores have been least of late; what the running layer needs is safe."""

    name = "mrs"
    title = "Minus recent score (HybriMoE)"
    source = "arXiv 2504.05897 section IV-D; PKU-SEC-Lab/HybriMoE@508a85b"
    needs = frozenset({"experts", "scores"})
    params = (
        *ScopedCache.params,
        Param("alpha", 0.5, "weight of the newest scores (code)", low=0.0, high=1.0),
        Param("top_p", None, "scores that count, the others decay; published: 2 x K (section IV-D)", low=1, high=10**6),
        Param("tokens", "first", "which token's scores count where there are several: the first one's (code), or the "
              "mean of all", ("first", "mean")),
    )  # fmt: skip
    alpha: float
    top_p: int | None
    tokens: str

    def bind(self, view: View) -> None:
        super().bind(view)
        self._n_kept = min(int(self.top_p or 2 * view.top_k), view.n_experts)
        self.settings["top_p"] = self._n_kept
        self._scores = [np.zeros(view.n_experts) for _ in range(view.n_layers)]
        self._held: defaultdict[int, dict[Piece, None]] = defaultdict(dict)

    def gate_done(self, gate: Gate, view: View) -> Steps:
        rows = gate.scores
        # Scores are whole numbers, and their sum is exact; dividing by the number of tokens keeps their scale.
        scores = rows[0] if self.tokens == "first" or len(rows) == 1 else rows.sum(axis=0) / len(rows)
        recent = self._scores[gate.layer]
        recent *= 1.0 - self.alpha
        top = np.argsort(-scores, kind="stable")[: self._n_kept]
        recent[top] += self.alpha * scores[top]
        yield Serve()

    def accessed(self, piece: Piece, hit: bool, view: View) -> None:
        if not hit:
            self._held[self.group(piece)][piece] = None

    def evicted(self, piece: Piece, view: View) -> None:
        del self._held[self.group(piece)][piece]

    def victim(self, piece: Piece, speculative: bool, view: View) -> Piece | None:
        scores = self._scores
        free = (other for other in self._held[self.group(piece)] if view.evictable(other))
        return min(free, key=lambda p: (scores[p.layer][p.expert], p.expert, p.layer), default=None)
