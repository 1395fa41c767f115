"""Minus recent score: HybriMoE's replacement rule as a plain cache of whole experts.

Source: HybriMoE (DAC'25, arXiv 2504.05897, section IV-D) and its code (PKU-SEC-Lab/HybriMoE@508a85b): per layer
S <- alpha * TopP(s) + (1 - alpha) * S, where TopP keeps the p largest gate scores and puts 0 for the others; the
expert of least S leaves, the lowest id first. The code takes the scores of the first token where there are several.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from policies.common.cache import ScopedCache
from sim.policy import Decision, Gate, Rank, Serve, View, param

SERVE = (Serve(),)


class Mrs(ScopedCache):
    """Evict the expert whose gate scores have been least of late; what the running layer needs is safe."""

    name = "mrs"
    title = "Minus recent score (HybriMoE)"
    source = "arXiv 2504.05897 section IV-D; PKU-SEC-Lab/HybriMoE@508a85b"
    ranks_by_trace = True
    needs = frozenset({"experts", "scores"})
    alpha: float = param(0.5, "weight of the newest scores (code)", within=(0.0, 1.0))
    top_p: int | None = param(
        None, "scores that count, the others decay; published: 2 x K (section IV-D)", within=(1, 10**6)
    )
    tokens: str = param(
        "first",
        "which token's scores count where there are several: the first one's (code), or the mean of all",
        ("first", "mean"),
    )

    def bind(self, view: View) -> None:
        super().bind(view)
        self._n_kept = min(int(self.top_p or 2 * view.top_k), view.n_experts)
        self.settings["top_p"] = self._n_kept
        self.order = order = Rank(view.n_layers * view.n_experts, self.per_layer)
        self._recent = list(order.rank.reshape(view.n_layers, view.n_experts))

    def gate_done(self, gate: Gate, view: View) -> tuple[Decision, ...]:
        recent = self._recent[gate.layer]
        recent *= 1.0 - self.alpha
        recent += gate.by_layer(self._weighed)
        return SERVE

    def _weighed(self, scores: NDArray[np.float64]) -> list[NDArray[np.float64]]:
        """alpha x TopP(s) by layer, of gate scores [n, L, E]."""
        # Scores are whole numbers, and their sum is exact; dividing by the number of tokens keeps their scale.
        one = self.tokens == "first" or len(scores) == 1
        rows = scores[0] if one else scores.sum(axis=0) / len(scores)
        top = np.argsort(-rows, axis=1, kind="stable")[:, : self._n_kept]
        added = np.zeros(rows.shape)
        np.put_along_axis(added, top, self.alpha * np.take_along_axis(rows, top, 1), 1)
        return list(added)
