"""Least recently used: the classic cache, over all experts or one per layer.

Source: Mixtral-Offloading (Eliseev and Mazur, arXiv 2312.17238, section 3.1) keeps an LRU cache per layer;
FineMoE (arXiv 2502.05370, section 6.6, Figure 14b) compares with LRU over its whole expert cache.
"""

from __future__ import annotations

from collections import defaultdict

from policies._cache import ScopedCache
from sim.pieces import Piece
from sim.view import View


class Lru(ScopedCache):
    """Evict the expert whose last use is oldest. Experts the running layer still needs are safe."""

    name = "lru"
    title = "Least recently used"
    source = "arXiv 2312.17238 section 3.1; arXiv 2502.05370 section 6.6"

    def bind(self, view: View) -> None:
        super().bind(view)
        # A dict is a recency list: it keeps order, and taking out and putting back moves to the end.
        self._order: defaultdict[int, dict[Piece, None]] = defaultdict(dict)

    def accessed(self, piece: Piece, hit: bool, view: View) -> None:
        order = self._order[self.group(piece)]
        if hit:
            del order[piece]
        order[piece] = None

    def evicted(self, piece: Piece, view: View) -> None:
        del self._order[self.group(piece)][piece]

    def victim(self, piece: Piece, speculative: bool, view: View) -> Piece | None:
        for candidate in self._order[self.group(piece)]:
            if view.evictable(candidate):
                return candidate
        return None
