"""A piece of work on a lane of a real machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.base.lanes import ON_DEVICE
from sim.machine import lanes as causes
from sim.machine.protocol import DEMAND
from sim.policy.tickets import UNKNOWN_S, Ticket

if TYPE_CHECKING:
    from sim.policy.pieces import Piece
    from sim.real.devices.protocol import Call

COMPUTE, H2D, D2H, POOL = range(4)  # lanes: the compute stream, host to device, device to host, experts on the CPU
LANES = ON_DEVICE
CAUSE_OF = (causes.GPU, causes.H2D, causes.HOST, causes.CPU)


class Work(Ticket):
    """One operation on one lane.

    `submit_s` is when the host handed it over, `start_s` and `end_s` when it ran, all on the machine's clock in seconds
    (`UNKNOWN_S` until known). Its stream passes `begun` before it and `mark` behind it; `mark` is there once it is
    issued, and on a stream that is a thread as soon as it is submitted.
    """

    __slots__ = (
        "after",
        "begun",
        "call",
        "cancelled",
        "context",
        "expert",
        "gpu",
        "issued",
        "lane",
        "layer",
        "mark",
        "n_bytes",
        "n_tokens",
        "op",
        "piece",
        "priority",
        "ready_s",
        "start_s",
        "submit_s",
        "waited_for",
        "waited_for_prefetch",
    )

    def __init__(
        self,
        lane: int,
        op: str,
        call: Call,
        after: tuple[Work, ...] = (),
        *,
        layer: int = -1,
        expert: int = -1,
        n_tokens: int = 0,
        n_bytes: int = 0,
        priority: int = DEMAND,
    ) -> None:
        super().__init__(UNKNOWN_S, CAUSE_OF[lane])
        self.lane = lane
        self.op = op
        self.call = call
        self.after = after
        self.layer = layer
        self.expert = expert
        self.n_tokens = n_tokens
        self.n_bytes = n_bytes
        self.priority = priority
        self.speculative = lane == H2D and priority != DEMAND
        self.submit_s = UNKNOWN_S
        self.start_s = UNKNOWN_S
        self.ready_s = UNKNOWN_S  # the later of being handed over and the end of what it waits for
        self.waited_for = causes.HOST
        self.waited_for_prefetch = False
        self.piece: Piece | None = None
        self.cancelled = False
        self.context = 0  # positions attended to, of attention alone
        self.issued = False  # given to its stream
        self.gpu = 0  # whose compute stream or copy engine, on the lanes that each GPU has
        self.begun: Any = None
        self.mark: Any = None


class Done(Ticket):
    """Something that is over already: the time policy code took as a predictor."""

    def __init__(self, end_s: float) -> None:
        super().__init__(end_s, causes.SIDE)


def works_of(tickets: tuple[Ticket, ...]) -> tuple[Work, ...]:
    """Those that are work on a lane; the others are over already."""
    return tuple(ticket for ticket in tickets if isinstance(ticket, Work))
