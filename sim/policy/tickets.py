"""Something under way, and when it ends."""

from __future__ import annotations

from typing import Any

UNKNOWN_S = -1.0


class Ticket:
    """Something under way. `end_s` is when it ends, or `UNKNOWN_S` while that still depends on what comes.

    `cause` names the lane a waiter would be waiting for; `speculative` is true of a prefetch, and of what rests on one.
    `lane` is the number of the lane on which it ends (`sim.machine.runs`).
    """

    __slots__ = ("cause", "end_s", "lane", "speculative")

    def __init__(self, end_s: float, cause: int) -> None:
        self.end_s = end_s
        self.cause = cause
        self.lane = cause
        self.speculative = False


def ends_at(end_s: float, cause: int, lane: int) -> Ticket:
    """A ticket as `Ticket` makes it, of a lane; compiled, in a fraction of the time."""
    ticket = Ticket.__new__(Ticket)
    ticket.end_s = end_s
    ticket.cause = cause
    ticket.lane = lane
    ticket.speculative = False
    return ticket


def all_tickets(after: Any) -> tuple[Ticket, ...]:
    """The same tuple. Raises TypeError for what is no tuple of tickets."""
    if type(after) is not tuple:
        raise TypeError(f"got {after!r}: a tuple of tickets")
    for one in after:
        if not isinstance(one, Ticket):
            raise TypeError(f"got {one!r}: a ticket")
    return after
