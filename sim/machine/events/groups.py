"""Experts that share a set of kernels: who is in the group, and what of their floor is left to fill.

A group is made of experts launched on one GPU while the host neither waits nor works, in one precision, whose copies
had arrived when the first was launched, or are among those that the first was told to wait for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sim.policy.tickets import UNKNOWN_S, Ticket

if TYPE_CHECKING:
    from sim.machine.cost import Cost
    from sim.machine.price import Launch, Price
    from sim.policy.pieces import Piece


@dataclass(slots=True)
class Group:
    """Since when, in which precision, the floor its experts have not filled, and what the first waits for."""

    launched_s: float
    precision: str
    slack_s: float
    waits: tuple[Ticket, ...]


class Groups:
    """What experts cost, one by one or (where the stack says so) in groups; one per GPU may still be joined."""

    def __init__(self, cost: Cost) -> None:
        self.cost = cost
        self._open: dict[int, Group] = {}

    def end(self) -> None:
        """The host waits or works: what comes next begins anew."""
        self._open.clear()

    def priced(self, piece: Piece, n_tokens: int, after: tuple[Ticket, ...], now_s: float) -> tuple[Price, Launch]:
        """Price and launch of an expert, or of a part of it: in a group, what it adds to those before it."""
        cost, frac, kernels_frac = self.cost, piece.stop_frac - piece.start_frac, piece.kernels_frac
        if not cost.launches.grouped or kernels_frac != 1.0:
            self._open.pop(piece.gpu, None)
            whole, first = kernels_frac == 1.0, piece.start_frac == 0.0
            launch = cost.launches.expert if whole else cost.launches.part(kernels_frac, first)
            return cost.expert(n_tokens, piece.precision, frac, kernels_frac), launch
        group = self._open.get(piece.gpu)
        if (
            group is not None
            and group.precision == piece.precision
            and all(
                UNKNOWN_S < ticket.end_s <= group.launched_s or any(one is ticket for one in group.waits)
                for ticket in after
            )
        ):
            price, group.slack_s = cost.member(group.slack_s, n_tokens, piece.precision, frac)
            return price, cost.launches.member
        price, slack_s = cost.leader(n_tokens, piece.precision, frac)
        self._open[piece.gpu] = Group(now_s, piece.precision, slack_s, after)
        return price, cost.launches.expert
