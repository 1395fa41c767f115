"""Least frequently used: evict the resident expert with the fewest uses.

Source: MoE-Infinity's head counts uses per expert (EfficientMoE/MoE-Infinity@d617801, expert cache: minimum visit
count among residents, ties to the lowest expert id, then the lowest layer); FineMoE (arXiv 2502.05370, section 4.5)
and MoEpic (arXiv 2509.08342, Table 1) compare with LFU.
"""

from __future__ import annotations

from typing import Any

from policies.common.cache import ScopedCache
from sim.policy import Piece, Rank, View, param


class Lfu(ScopedCache):
    """Counts every use; `reset_on_evict` forgets them when an expert leaves (MoE-Infinity 2024, FineMoE release 1)."""

    name = "lfu"
    title = "Least frequently used"
    source = "arXiv 2502.05370 section 4.5; EfficientMoE/MoE-Infinity@d617801"
    one_size = "with reset_on_evict it forgets uses of what has left, and each size lets others go"
    reset_on_evict: bool = param(False, "an evicted expert starts again from zero uses")
    counts: str = param(
        "iterations",
        "what one use is: iterations: an expert served, however many tokens of a prompt or batch ask for it; tokens: "
        "each of them (activations, as `lcp` and MoEpic's Table 1 count)",
        ("iterations", "tokens"),
    )

    def bind(self, view: View) -> None:
        super().bind(view)
        self.ranks_by_trace = not self.reset_on_evict
        self.order = order = Rank(view.n_layers * view.n_experts, self.per_layer)
        rank: Any = order.rank
        self._uses: Any = memoryview(rank)  # single numbers are read and written faster so

    def accessed(self, piece: Piece, hit: bool, view: View) -> None:
        self._uses[piece.index] += view.pending_tokens(piece) if self.counts == "tokens" else 1.0

    def evicted(self, piece: Piece, view: View) -> None:
        if self.reset_on_evict:
            self._uses[piece.index] = 0.0
