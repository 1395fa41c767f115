"""Random replacement: the floor under every cache that looks at something.

Source: MoEpic (arXiv 2509.08342, Table 1) compares with RND; under even routing its hit rate is the share cached.
"""

from __future__ import annotations

from collections import defaultdict
from random import Random as Draws

from policies._cache import ScopedCache
from sim.api import Param
from sim.pieces import Piece
from sim.view import View


class Random(ScopedCache):
    """Evict any resident expert with equal chance; what the running layer needs is safe."""

    name = "random"
    title = "Random replacement"
    source = "arXiv 2509.08342 Table 1 (RND)"
    params = (
        *ScopedCache.params,
        Param("seed", 0, "seed of the draws; --seed sets it too", low=0, high=2**63 - 1),
    )
    seed: int

    def bind(self, view: View) -> None:
        super().bind(view)
        # Only `Random.random` is promised to stay the same from one Python to the next.
        self._draw = Draws(self.seed).random  # noqa: S311 - a simulation, not a secret
        self._held: defaultdict[int, list[Piece]] = defaultdict(list)
        self._at: dict[Piece, int] = {}  # where each one stands in its list

    def accessed(self, piece: Piece, hit: bool, view: View) -> None:
        if not hit:
            held = self._held[self.group(piece)]
            self._at[piece] = len(held)
            held.append(piece)

    def evicted(self, piece: Piece, view: View) -> None:
        held = self._held[self.group(piece)]
        last = held.pop()
        at = self._at.pop(piece)
        if last is not piece:
            held[at], self._at[last] = last, at

    def victim(self, piece: Piece, speculative: bool, view: View) -> Piece | None:
        held = self._held[self.group(piece)]
        for left in range(len(held), 0, -1):  # what is drawn and cannot leave goes behind what can still be drawn
            at = int(self._draw() * left)
            candidate = held[at]
            if view.evictable(candidate):
                return candidate
            held[at] = other = held[left - 1]
            held[left - 1] = candidate
            self._at[other], self._at[candidate] = at, left - 1
        return None
