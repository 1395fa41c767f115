"""A machine whose host memory does not hold all experts: before a copy or the CPU reads one, it is read from the drive.

It stands before a simulated machine. A policy of the GPU notices nothing but time: copies wait
for their reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.engine.host_tier import COPY, CPU, PREFETCH, HostTier
from sim.machine.forwarding import ForwardingMachine
from sim.machine.protocol import DEMAND
from sim.policy.tickets import Ticket

if TYPE_CHECKING:
    from sim.machine.protocol import Machine
    from sim.machine.turn import Turn
    from sim.policy.pieces import Piece
    from sim.workload.iterations import Iteration


class Tiered(ForwardingMachine):
    """Hands on what an engine asks of `machine`, with the reads that it takes by `tier`."""

    def __init__(self, machine: Machine, tier: HostTier) -> None:
        super().__init__(machine)
        self.tier = tier
        self._iteration: Iteration | None = None

    # -- what reads from host memory --------------------------------------------------------------------------------

    def demand(self, piece: Piece, ready_s: float) -> bool:
        return False  # when it ends depends on its read: it is asked for by `copy`

    def demand_turn(self, turn: Turn) -> bool:
        return False

    def copy(self, piece: Piece, priority: int, ready_s: float, after: tuple[Ticket, ...]) -> Ticket | None:
        tier, machine = self.tier, self.machine
        own = tier.own(piece)
        read = tier.ask(own, COPY if priority == DEMAND else PREFETCH)
        ticket = machine.copy(piece, priority, ready_s, after if read is None else (read, *after))
        self.settled()
        tier.hold(own, Ticket(self.ends_s, self.cause) if ticket is None else ticket)
        return ticket

    def cpu_expert(self, layer: int, expert: int, n_tokens: int, after: tuple[Ticket, ...] = ()) -> Ticket:
        tier = self.tier
        own: Piece = tier.pieces.whole[layer][expert]
        read = tier.ask(own, CPU)
        ticket = self.machine.cpu_expert(layer, expert, n_tokens, after if read is None else (read, *after))
        tier.hold(own, ticket)
        return ticket

    def copy_back(self, piece: Piece, ready_s: float, after: tuple[Ticket, ...]) -> Ticket:
        ticket = self.machine.copy_back(piece, ready_s, after)
        if piece.serving:
            own = self.tier.own(piece)
            self.tier.came_back(own)
            self.tier.hold(own, ticket)
        return ticket

    def promote(self, ticket: Ticket) -> bool:
        piece: Piece | None = getattr(ticket, "piece", None)
        if piece is not None and not self.machine.ended(ticket):
            self.tier.wanted(self.tier.own(piece))
        return self.machine.promote(ticket)

    def cancel(self, ticket: Ticket) -> bool:
        withdrawn = self.machine.cancel(ticket)
        piece: Piece | None = getattr(ticket, "piece", None)
        if withdrawn and piece is not None:
            self.tier.withdrawn(self.tier.own(piece))
        return withdrawn

    # -- where the pass is ------------------------------------------------------------------------------------------

    def begin(self, iteration: Iteration) -> None:
        self._iteration = iteration
        self.tier.begin(iteration)
        self.machine.begin(iteration)

    def attention(self, layer: int) -> None:
        self.tier.enter(layer)
        self.machine.attention(layer)

    def to_gate(self, layer: int) -> float:
        self.tier.enter(layer)
        return self.machine.to_gate(layer)

    def end(self) -> None:
        self.machine.end()
        self.tier.end(self._iteration)
