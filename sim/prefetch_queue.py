"""A policy's own queue of speculative copies that have not taken room yet."""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.decisions import Wanted
    from sim.machine import Ticket
    from sim.pieces import Piece

Item = tuple[float, int, "Piece", "tuple[Ticket, ...]"]  # -priority, how many were asked for before, what, after what


class PrefetchQueue:
    """Largest priority first, ties in order of asking; asking again replaces the priority."""

    def __init__(self) -> None:
        self._heap: list[Item] | None = []  # None: to be made of `waiting` when somebody asks
        self.waiting: dict[Piece, Item] = {}  # other items of the heap were withdrawn, or asked for again
        self._asked = 0

    def push(self, piece: Piece, priority: float, after: tuple[Ticket, ...]) -> None:
        self._asked += 1
        item = self.waiting[piece] = (-priority, self._asked, piece, after)
        if self._heap is not None:
            heapq.heappush(self._heap, item)
            if len(self._heap) > 64 + 2 * len(self.waiting):  # withdrawn ones sink to the bottom and would stay there
                self._heap = None

    def replace(self, wanted: Iterable[Wanted], but: Container[Piece]) -> None:
        """Drop all and push these instead, except pieces in `but`."""
        self.waiting = waiting = {}
        asked = self._asked
        for piece, priority, after in wanted:
            if piece not in but:
                asked += 1
                waiting[piece] = (-priority, asked, piece, after)
        self._asked = asked
        self._heap = None

    def pop(self) -> tuple[Piece, tuple[Ticket, ...]] | None:
        """The best waiting piece with its tickets, or None."""
        heap = self._heap
        if heap is None:
            heap = self._heap = list(self.waiting.values())
            heapq.heapify(heap)
        while heap:
            item = heapq.heappop(heap)
            piece = item[2]
            if self.waiting.get(piece) is item:
                del self.waiting[piece]
                return piece, item[3]
        return None

    def remove(self, piece: Piece) -> bool:
        """Withdraw one piece; True when it was waiting."""
        return self.waiting.pop(piece, None) is not None

    def drop(self, up_to_layer: int | None) -> None:
        """Withdraw all, or those aimed at layers up to `up_to_layer`."""
        if up_to_layer is None:
            self.waiting.clear()
            self._heap = None
            return
        for piece in [p for p in self.waiting if p.layer <= up_to_layer]:
            del self.waiting[piece]

    def pieces(self) -> list[Piece]:
        """Waiting pieces, best first."""
        return [item[2] for item in sorted(self.waiting.values(), key=lambda item: item[:2])]
