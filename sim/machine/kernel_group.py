"""Experts of one layer that share a set of kernels: who is in the group, and what of their floor is left to fill.

An engine that groups launches one product over all experts that are there. So a group is made of experts that the host
launches on one GPU without waiting or working in between, in one precision, whose copies had arrived when the first was
launched, or are among those that the first was told to wait for (all that a layer gathers, say). Kernels that have been
launched wait for nothing else: an expert that comes later begins a group anew.
"""

from __future__ import annotations

from sim.machine.price import Operation
from sim.policy.tickets import Ticket


class Group:
    """The group launched last on a GPU: `open` while others may join it.

    `launched_s`: when the host launched it. `last`: the expert that joined last, as long as each is whole, in the
    serving precision, and serves one token: it knows what the next one costs. None once that no longer says all;
    `slack_s` is the floor left to fill. The first expert pays floor and launches; see `Cost.leader` and `Cost.member`.
    `waits`: what the first was told to wait for; None where it was nothing.
    """

    __slots__ = ("last", "launched_s", "open", "precision", "slack_s", "waits")

    last: Operation | None
    waits: tuple[Ticket, ...] | None

    def __init__(self) -> None:
        self.open = False
        self.launched_s = 0.0
        self.precision = ""
        self.slack_s = 0.0
        self.last = None
        self.waits = None

    def awaits(self, ticket: Ticket) -> bool:
        """Whether its kernels begin only once this has ended, since the first waits for it."""
        if self.waits is not None:
            for one in self.waits:
                if one is ticket:
                    return True
        return False


def beyond_s(work_s: float, slack_s: float) -> float:
    """What an expert takes that joins a group whose others have left `slack_s` of their kernels' floor to fill."""
    return work_s - slack_s if work_s > slack_s else 0.0


def left_s(work_s: float, slack_s: float) -> float:
    """What it leaves of that to the next one."""
    return slack_s - work_s if slack_s > work_s else 0.0
