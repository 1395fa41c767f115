"""Least frequently used: evict the resident expert with the fewest uses.

Source: MoE-Infinity's head counts uses per expert (EfficientMoE/MoE-Infinity@d617801, expert cache: minimum visit
count among residents, ties to the lowest expert id, then the lowest layer); FineMoE (arXiv 2502.05370, section 4.5)
and MoEpic (arXiv 2509.08342, Table 1) compare with LFU.
"""

from __future__ import annotations

from policies._cache import ScopedCache
from sim.api import Param
from sim.pieces import Piece
from sim.view import View


class Lfu(ScopedCache):
    """Counts every use; `reset_on_evict` forgets them when an expert leaves (MoE-Infinity 2024, FineMoE release 1)."""

    name = "lfu"
    title = "Least frequently used"
    source = "arXiv 2502.05370 section 4.5; EfficientMoE/MoE-Infinity@d617801"
    params = (
        *ScopedCache.params,
        Param("reset_on_evict", False, "an evicted expert starts again from zero uses"),
    )
    reset_on_evict: bool

    def bind(self, view: View) -> None:
        self._uses: dict[Piece, int] = {}
        self._residents: dict[tuple[int, int], dict[Piece, None]] = {}

    def accessed(self, piece: Piece, hit: bool, view: View) -> None:
        self._uses[piece] = self._uses.get(piece, 0) + 1
        self._residents.setdefault(self.group(piece), {})[piece] = None

    def evicted(self, piece: Piece, view: View) -> None:
        del self._residents[self.group(piece)][piece]
        if self.reset_on_evict:
            del self._uses[piece]

    def victim(self, piece: Piece, speculative: bool, view: View) -> Piece | None:
        candidates = [p for p in self._residents.get(self.group(piece), ()) if view.evictable(p)]
        return min(candidates, key=self._rank, default=None)

    def _rank(self, piece: Piece) -> tuple[int, int, int]:
        return self._uses[piece], piece.expert, piece.layer
