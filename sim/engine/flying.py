"""Speculative copies that have been handed to the copy engines and are not known to have ended."""

from __future__ import annotations

from typing import Any

from sim.base.flat import ints, longer_ints, longer_places, places
from sim.policy.tickets import Ticket


class Ring:
    """Pieces between their neighbours, in rings that each begin and end at a place of their own, before all pieces'."""

    def __init__(self, n_rings: int) -> None:
        self.n_rings = n_rings
        self.next = places(n_rings)
        self.prev = places(n_rings)
        for ring in range(n_rings):
            self.next[ring] = self.prev[ring] = ring

    def grow(self, n: int) -> None:
        """Make places for `n` pieces."""
        self.next = longer_places(self.next, self.n_rings + n)
        self.prev = longer_places(self.prev, self.n_rings + n)

    def append(self, index: int, ring: int) -> None:
        """A piece comes last."""
        at = index + self.n_rings
        last = self.prev[ring]
        self.next[last] = at
        self.prev[at] = last
        self.next[at] = ring
        self.prev[ring] = at

    def unlink(self, index: int) -> None:
        """A piece leaves its ring."""
        at = index + self.n_rings
        before = self.prev[at]
        after = self.next[at]
        self.next[before] = after
        self.prev[after] = before


class Flying:
    """By link in the order in which they were handed over, named by `Piece.index`.

    `n`: how many on each link. `tickets`: of each piece, by index.
    """

    def __init__(self, n_links: int) -> None:
        self.n_links = n_links
        self.n = ints(n_links)
        self.ring = Ring(n_links)
        self.n_known = 0
        self.there = ints(0)  # whether a piece is among them
        self.tickets: list[Any] = []

    def add(self, index: int, link: int, ticket: Ticket) -> None:
        """A copy has been handed over; one of the same piece that nobody has forgotten keeps its place."""
        if index >= self.n_known:
            self._grow(index + 1)
        self.tickets[index] = ticket
        if not self.there[index]:
            self.there[index] = 1
            self.ring.append(index, link)
            self.n[link] += 1

    def drop(self, index: int, link: int) -> None:
        """A copy has ended, was withdrawn, or is a demand by now; one that is not there is left out."""
        if index < self.n_known and self.there[index]:
            self.there[index] = 0
            self.tickets[index] = None
            self.ring.unlink(index)
            self.n[link] -= 1

    def holds(self, index: int) -> bool:
        """Whether a piece is among them."""
        return index < self.n_known and self.there[index] != 0

    def after(self, link: int, index: int = -1) -> int:
        """The piece behind this one on a link, the first of all behind -1; -1 where none is left."""
        at: int = self.ring.next[link if index < 0 else index + self.n_links]
        return at - self.n_links if at >= self.n_links else -1

    def _grow(self, n: int) -> None:
        n = max(n, 2 * self.n_known)
        self.ring.grow(n)
        self.there = longer_ints(self.there, n)
        self.tickets.extend([None] * (n - self.n_known))
        self.n_known = n
