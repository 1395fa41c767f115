"""Belady's MIN for layers: the fewest copies that serve every expert a trace asks for. A bound, not a system.

Source: Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966;
Read-ME (NeurIPS 2024) uses it for experts whose router is known in advance.

A layer needs a set of experts, in any order, and only the one that runs must be there. So what is there runs first;
what is missing passes through the room of experts that have run, the one wanted again soonest last, because the last
one keeps its room for nothing. Evicted is who is wanted again farthest away. Of two experts wanted next by the same
layer, one will be missing there and take that last room, so their roles swap: every second use counts the other way.
`tests/test_laws.py` holds this equal to exhaustive search.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from policies.common.cache import ScopedCache, scope_param
from sim.policy import Fetch, Gate, Piece, RunGpu, Steps, View


class Order:
    """Sorts experts by who leaves first; `uses[at:]` are the iterations that will ask for it."""

    __slots__ = ("at", "index", "step", "uses")

    def __init__(self, piece: Piece, view: View) -> None:
        self.index = piece.index
        self.step = view.future.next_use(piece.layer, piece.expert)
        self.uses: Sequence[int]
        self.uses, self.at = view.future.uses(piece.layer, piece.expert)

    def __lt__(self, other: Order) -> bool:
        if self.step != other.step:
            return self.step > other.step
        if self.step == math.inf:
            return self.index < other.index
        # A step belongs to one layer, so iterations compare from here on.
        mine, theirs, i, j, swapped = self.uses, other.uses, self.at + 1, other.at + 1, True
        while i < len(mine) and j < len(theirs):
            if mine[i] != theirs[j]:
                return (mine[i] > theirs[j]) != swapped
            i, j, swapped = i + 1, j + 1, not swapped
        if (i < len(mine)) != (j < len(theirs)):
            return (i == len(mine)) != swapped
        return self.index < other.index


class Belady(ScopedCache):
    """Reads the future: the fewest demand copies any lossless policy of whole experts on the GPU can make."""

    name = "belady"
    title = "Belady's MIN (oracle)"
    source = "Belady 1966, IBM Systems Journal 5(2)"
    one_size = (
        "which missing expert keeps the last room depends on what is there; `lru`, `lfu`, `lcp`, `mrs` have a curve"
    )
    traits = frozenset({"oracle", "bound"})
    scope: str = scope_param("global")  # a bound: no division of the room may cost it a hit

    def bind(self, view: View) -> None:
        super().bind(view)
        self._heaps: dict[int, list[tuple[Order, Piece]]] = {}

    def gate_done(self, gate: Gate, view: View) -> Steps:
        missing = []
        for expert in gate.needs:
            piece = view.piece(gate.layer, expert)
            if view.holds(piece):
                self._note(piece, view)
                yield RunGpu(expert)
            else:
                missing.append((Order(piece, view), piece))
        for order, piece in sorted(missing):
            yield Fetch(piece)
            heapq.heappush(self._heaps.setdefault(self.group(piece), []), (order, piece))
            yield RunGpu(piece.expert)

    def _note(self, piece: Piece, view: View) -> None:
        heapq.heappush(self._heaps.setdefault(self.group(piece), []), (Order(piece, view), piece))

    def victim(self, piece: Piece, speculative: bool, view: View) -> Piece | None:
        heap = self._heaps.get(self.group(piece), [])
        while heap:
            order, candidate = heapq.heappop(heap)
            # An entry is out of date when its piece has left the cache or was used since.
            if view.holds(candidate) and order.step == view.future.next_use(candidate.layer, candidate.expert):
                return candidate
        return None
