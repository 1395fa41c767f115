"""Least recently used: the classic cache, over all experts or one per layer.

Source: Mixtral-Offloading (Eliseev and Mazur, arXiv 2312.17238, section 3.1) keeps an LRU cache per layer;
FineMoE (arXiv 2502.05370, section 6.6, Figure 14b) compares with LRU over its whole expert cache.
"""

from __future__ import annotations

from policies.common.cache import OrderedCache
from sim.policy import Piece, View


class Lru(OrderedCache):
    """Evict the expert whose last use is oldest. Experts the running layer still needs are safe."""

    name = "lru"
    title = "Least recently used"
    source = "arXiv 2312.17238 section 3.1; arXiv 2502.05370 section 6.6"

    def accessed(self, piece: Piece, hit: bool, view: View) -> None:
        order = self._order[self.group(piece)]
        order[piece] = None
        if hit:
            order.move_to_end(piece)

    def exchange(self, wanted: list[Piece], room: int, view: View) -> tuple[list[Piece], list[Piece]]:
        order, hits, missing = self._order[0], [], []
        use = order.move_to_end
        for piece in wanted:
            if piece in order:
                use(piece)
                hits.append(piece)
            else:
                missing.append(piece)
        if missing:
            # What is wanted is never the oldest: the hits have just become the latest, and there is room for all.
            oldest = order.popitem
            for _ in range(len(missing) - room):
                oldest(False)
            for piece in missing:
                order[piece] = None
        return hits, missing
