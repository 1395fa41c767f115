"""Least frequently used: evict the resident expert with the fewest uses.

Source: MoE-Infinity's head counts uses per expert (EfficientMoE/MoE-Infinity@d617801, expert cache: minimum visit
count among residents, ties to the lowest expert id, then the lowest layer); FineMoE (arXiv 2502.05370, section 4.5)
and MoEpic (arXiv 2509.08342, Table 1) compare with LFU.
"""

from __future__ import annotations

from collections import defaultdict
from heapq import heappop, heappush, heapreplace

from policies.common.cache import ScopedCache
from sim.policy import Param, Piece, View


class Lfu(ScopedCache):
    """Counts every use; `reset_on_evict` forgets them when an expert leaves (MoE-Infinity 2024, FineMoE release 1)."""

    name = "lfu"
    title = "Least frequently used"
    source = "arXiv 2502.05370 section 4.5; EfficientMoE/MoE-Infinity@d617801"
    params = (
        *ScopedCache.params,
        Param("reset_on_evict", False, "an evicted expert starts again from zero uses"),
        Param("counts", "iterations", "what one use is: iterations: an expert served, however many tokens of a prompt "
              "or batch ask for it; tokens: each of them (activations, as `lcp` and MoEpic's Table 1 count)",
              choices=("iterations", "tokens")),
    )
    reset_on_evict: bool
    counts: str

    def bind(self, view: View) -> None:
        super().bind(view)
        self._uses: dict[Piece, int] = {}
        # Per cache a heap of (uses, expert, layer, piece); a resident's entry is corrected when it surfaces, since
        # uses only grow. An expert that left and came back may have two: both say the same once corrected.
        self._heaps: defaultdict[int, list[tuple[int, int, int, Piece]]] = defaultdict(list)
        self._entered: set[Piece] = set()

    def accessed(self, piece: Piece, hit: bool, view: View) -> None:
        n = view.owes(piece) if self.counts == "tokens" else 1
        uses = self._uses[piece] = self._uses.get(piece, 0) + n
        if not hit and piece not in self._entered:
            self._entered.add(piece)
            heappush(self._heaps[self.group(piece)], (uses, piece.expert, piece.layer, piece))

    def evicted(self, piece: Piece, view: View) -> None:
        if self.reset_on_evict:
            self._uses[piece] = 0
            self._entered.discard(piece)  # its entry says too much by now: the next one is a new entry

    def victim(self, piece: Piece, speculative: bool, view: View) -> Piece | None:
        heap, safe, found = self._heaps[self.group(piece)], [], None
        while heap:
            uses, expert, layer, candidate = heap[0]
            now = self._uses[candidate]
            if not view.holds(candidate):
                self._entered.discard(heappop(heap)[3])
            elif now != uses:
                heapreplace(heap, (now, expert, layer, candidate))
            elif not view.evictable(candidate):
                safe.append(heappop(heap))
            else:
                found = candidate
                break
        for entry in safe:
            heappush(heap, entry)
        return found
