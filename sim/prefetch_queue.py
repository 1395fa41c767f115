"""A policy's own queue of speculative copies that have not taken room yet."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.machine import Ticket
    from sim.pieces import Piece


class PrefetchQueue:
    """Largest priority first, ties in order of asking; asking again replaces the priority."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Piece]] = []
        self._waiting: dict[Piece, tuple[int, tuple[Ticket, ...]]] = {}
        self._asked = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, piece: Piece, priority: float, after: tuple[Ticket, ...]) -> None:
        self._asked += 1
        self._waiting[piece] = (self._asked, after)
        heapq.heappush(self._heap, (-priority, self._asked, piece))
        if len(self._heap) > 64 + 2 * len(self._waiting):  # withdrawn ones sink to the bottom and would stay there
            self._heap = [item for item in self._heap if self._waiting.get(item[2], (0,))[0] == item[1]]
            heapq.heapify(self._heap)

    def pop(self) -> tuple[Piece, tuple[Ticket, ...]] | None:
        """The best waiting piece with its tickets, or None."""
        while self._heap:
            _, asked, piece = heapq.heappop(self._heap)
            waiting = self._waiting.get(piece)
            if waiting is not None and waiting[0] == asked:
                del self._waiting[piece]
                return piece, waiting[1]
        return None

    def remove(self, piece: Piece) -> bool:
        """Withdraw one piece; True when it was waiting."""
        return self._waiting.pop(piece, None) is not None

    def drop(self, up_to_layer: int | None) -> None:
        """Withdraw all, or those aimed at layers up to `up_to_layer`."""
        if up_to_layer is None:
            self._waiting.clear()
            self._heap.clear()
            return
        for piece in [p for p in self._waiting if p.layer <= up_to_layer]:
            del self._waiting[piece]

    def pieces(self) -> list[Piece]:
        """Waiting pieces, best first."""
        return [
            piece
            for _, asked, piece in sorted(self._heap, key=lambda item: item[:2])
            if piece in self._waiting and self._waiting[piece][0] == asked
        ]
