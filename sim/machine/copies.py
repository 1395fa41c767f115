"""Copies: what a lane is asked to move, and when it may start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.machine.lanes import CPU, H2D, HOST
from sim.policy.tickets import UNKNOWN_S, Ticket

if TYPE_CHECKING:
    from sim.policy.pieces import Piece

_CPU, _H2D, _HOST = CPU, H2D, HOST  # machine integers where this is compiled


class Copy(Ticket):
    """A copy on a lane: what it moves and when it may start, no sooner than `submit_s` and after `after`."""

    __slots__ = (
        "after",
        "cancelled",
        "carries",
        "demanded",
        "duration_s",
        "expert",
        "layer",
        "length",
        "n_bytes",
        "op",
        "piece",
        "start_s",
        "submit_lane",
        "submit_s",
    )

    def __init__(
        self,
        op: str,
        layer: int,
        expert: int,
        n_bytes: int,
        duration_s: float,
        length: int,
        demanded: bool,
        submit_s: float,
        after: tuple[Ticket, ...],
        piece: Piece | None,
        cause: int,
        carries: bool = False,
    ) -> None:
        self.end_s = UNKNOWN_S
        self.cause = cause
        self.op = op
        self.layer = layer
        self.expert = expert
        self.n_bytes = n_bytes
        self.duration_s = duration_s
        self.length = length
        self.demanded = demanded
        self.speculative = not demanded
        self.lane = cause  # its own, once it is served
        self.submit_s = submit_s
        self.submit_lane = HOST
        self.after = after
        self.start_s = UNKNOWN_S
        self.cancelled = False
        self.carries = carries  # a result: who waits for it waits for what that was late for
        self.piece = piece  # None: activations

    def ready_s(self) -> float:
        """Earliest possible start, or UNKNOWN_S while something before it is unsettled."""
        ready_s = self.submit_s
        for ticket in self.after:
            if ticket.end_s < 0.0:
                return -1.0
            if ticket.end_s > ready_s:
                ready_s = ticket.end_s
        return ready_s

    def waited_for(self) -> int:
        """The lane of what was ready last."""
        ready_s, lane = self.submit_s, self.submit_lane
        for ticket in self.after:
            if ticket.end_s > ready_s:
                ready_s, lane = ticket.end_s, ticket.lane
        return lane


def copy_of(
    piece: Piece, op: str, duration_s: float, length: int, demanded: bool, submit_s: float, after: tuple[Ticket, ...]
) -> Copy:
    """The copy of a piece, as `Copy` makes it; compiled, in a fraction of the time."""
    copy = Copy.__new__(Copy)
    copy.end_s = -1.0
    copy.cause = _H2D
    copy.op = op
    copy.layer = piece.layer
    copy.expert = piece.expert
    copy.n_bytes = piece.n_bytes
    copy.duration_s = duration_s
    copy.length = length
    copy.demanded = demanded
    copy.speculative = not demanded
    copy.submit_s = submit_s
    copy.submit_lane = _HOST
    copy.after = after
    copy.start_s = -1.0
    copy.cancelled = False
    copy.carries = False
    copy.piece = piece
    return copy


def result_of(
    layer: int, expert: int, n_bytes: int, duration_s: float, length: int, submit_s: float, done: Ticket
) -> Copy:
    """The copy of what the CPU has computed, once that is done."""
    copy = Copy.__new__(Copy)
    copy.end_s = -1.0
    copy.cause = _CPU
    copy.op = "activations"
    copy.layer = layer
    copy.expert = expert
    copy.n_bytes = n_bytes
    copy.duration_s = duration_s
    copy.length = length
    copy.demanded = True
    copy.speculative = False
    copy.submit_s = submit_s
    copy.submit_lane = _HOST
    copy.after = (done,)
    copy.start_s = -1.0
    copy.cancelled = False
    copy.carries = False
    copy.piece = None
    return copy
