"""Belady's MIN: evict the expert whose next use is farthest away. A bound on copies, not a system.

Source: Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966;
Read-ME (NeurIPS 2024) uses it for experts whose router is known in advance.
"""

from __future__ import annotations

import heapq

from policies._cache import ScopedCache
from sim.pieces import Piece
from sim.view import View


class Belady(ScopedCache):
    """Reads the future: the fewest demand copies any cache of whole experts can need without prefetching."""

    name = "belady"
    title = "Belady's MIN (oracle)"
    source = "Belady 1966, IBM Systems Journal 5(2)"
    traits = frozenset({"oracle", "bound"})

    def bind(self, view: View) -> None:
        self._heaps: dict[tuple[int, int], list[tuple[float, int, Piece]]] = {}

    def accessed(self, piece: Piece, hit: bool, view: View) -> None:
        # The latest entry of a piece is the true one; older ones are recognised by their next use when popped.
        next_use = view.future.next_use(piece.layer, piece.expert)
        heapq.heappush(self._heaps.setdefault(self.group(piece), []), (-next_use, piece.index, piece))

    def victim(self, piece: Piece, speculative: bool, view: View) -> Piece | None:
        heap, kept, found = self._heaps.get(self.group(piece), []), [], None
        while heap:
            entry = heapq.heappop(heap)
            candidate = entry[2]
            if not view.holds(candidate) or -entry[0] != view.future.next_use(candidate.layer, candidate.expert):
                continue  # left the cache, or used since: not the latest entry
            if view.evictable(candidate):
                found = candidate
                break
            kept.append(entry)
        for entry in kept:
            heapq.heappush(heap, entry)
        return found
