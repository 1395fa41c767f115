"""Speculative copies that have been handed to the copy engines and are not known to have ended."""

from __future__ import annotations

from typing import Any

from sim.base.flat import ints, longer_ints
from sim.engine.victims import Ring
from sim.policy.tickets import Ticket


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
