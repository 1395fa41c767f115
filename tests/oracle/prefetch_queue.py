"""A policy's own queue of speculative copies that have not taken room yet."""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oracle.pieces import Piece
    from oracle.protocol import Ticket
    from sim.policy.decisions import Wanted

Item = tuple[float, int, "Piece", "tuple[Ticket, ...]"]  # -priority, how many were asked for before, what, after what


class PrefetchQueue:
    """Largest priority first, ties in order of asking; asking again replaces the priority.

    Every link has a heap of its own, so that what waits for a busy link holds up nothing that another could carry.
    """

    def __init__(self, n_links: int = 1) -> None:
        self._heaps: list[list[Item]] | None = [[] for _ in range(n_links)]  # None: made of `waiting` when asked for
        self.waiting: dict[Piece, Item] = {}  # other items of the heaps were withdrawn, or asked for again
        self._n_links = n_links
        self._asked = 0

    def push(self, piece: Piece, priority: float, after: tuple[Ticket, ...]) -> None:
        self._asked += 1
        item = self.waiting[piece] = (-priority, self._asked, piece, after)
        if self._heaps is not None:
            heap = self._heaps[piece.gpu]
            heapq.heappush(heap, item)
            if len(heap) > 64 + 2 * len(self.waiting):  # withdrawn ones sink to the bottom and would stay there
                self._heaps = None

    def replace(self, wanted: Iterable[Wanted], but: Container[Piece]) -> None:
        """Drop all and push these instead, except pieces in `but`."""
        self.waiting = waiting = {}
        asked = self._asked
        for piece, priority, after in wanted:
            if piece not in but:
                asked += 1
                waiting[piece] = (-priority, asked, piece, after)
        self._asked = asked
        self._heaps = None

    def pop(self, link: int = 0) -> tuple[Piece, tuple[Ticket, ...]] | None:
        """The best piece that waits for a link, with its tickets; None where there is none."""
        heap = (self._heaps or self._sorted())[link]
        while heap:
            item = heapq.heappop(heap)
            piece = item[2]
            if self.waiting.get(piece) is item:
                del self.waiting[piece]
                return piece, item[3]
        return None

    def best(self, links: Iterable[int]) -> int | None:
        """Of these links the one that the best waiting piece is for; None where nothing waits for any."""
        heaps, first, found = self._heaps or self._sorted(), None, None
        for link in links:
            heap = heaps[link]
            while heap and self.waiting.get(heap[0][2]) is not heap[0]:
                heapq.heappop(heap)
            if heap and (first is None or heap[0][:2] < first):
                first, found = heap[0][:2], link
        return found

    def _sorted(self) -> list[list[Item]]:
        heaps = self._heaps = [[] for _ in range(self._n_links)]
        if self._n_links == 1:
            heaps[0] += self.waiting.values()
        else:
            for item in self.waiting.values():
                heaps[item[2].gpu].append(item)
        for heap in heaps:
            heapq.heapify(heap)
        return heaps

    def remove(self, piece: Piece) -> bool:
        """Withdraw one piece; True when it was waiting."""
        return self.waiting.pop(piece, None) is not None

    def drop(self, up_to_layer: int | None) -> None:
        """Withdraw all, or those aimed at layers up to `up_to_layer`."""
        if up_to_layer is None:
            self.waiting.clear()
            self._heaps = None
            return
        for piece in [p for p in self.waiting if p.layer <= up_to_layer]:
            del self.waiting[piece]

    def pieces(self) -> list[Piece]:
        """Waiting pieces, best first."""
        return [item[2] for item in sorted(self.waiting.values(), key=lambda item: item[:2])]
