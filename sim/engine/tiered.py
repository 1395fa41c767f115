"""A machine whose host memory does not hold all experts: before a copy or the CPU reads one, it is read from the drive.

It stands before a simulated machine and hands every verb on. A policy of the GPU notices nothing but time: copies wait
for their reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.engine.host_tier import COPY, CPU, PREFETCH, HostTier
from sim.machine.protocol import DEMAND, Machine
from sim.policy.tickets import Ticket

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from sim.base.quantities import Basis
    from sim.machine.turn import Turn
    from sim.policy.pieces import Piece
    from sim.workload.iterations import Iteration


class Tiered(Machine):
    """Hands on what an engine asks of `machine`, with the reads that it takes by `tier`."""

    def __init__(self, machine: Machine, tier: HostTier) -> None:
        super().__init__()
        self.machine = machine
        self.tier = tier
        self.keeps_pieces = machine.keeps_pieces
        self.gathers = machine.gathers
        self._iteration: Iteration | None = None

    # -- what reads from host memory --------------------------------------------------------------------------------

    def copy(self, piece: Piece, priority: int, ready_s: float, after: tuple[Ticket, ...]) -> Ticket | None:
        tier, machine = self.tier, self.machine
        own = tier.own(piece)
        read = tier.ask(own, COPY if priority == DEMAND else PREFETCH)
        ticket = machine.copy(piece, priority, ready_s, after if read is None else (read, *after))
        self._settled()
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

    # -- what the drive has no part in ------------------------------------------------------------------------------

    def _settled(self) -> None:
        self.ends_s = self.machine.ends_s
        self.cause = self.machine.cause

    def now(self) -> float:
        return self.machine.now()

    def gate(self, layer: int) -> Ticket:
        return self.machine.gate(layer)

    def shared(self, layer: int) -> None:
        self.machine.shared(layer)

    def sync(self, ticket: Ticket) -> None:
        self.machine.sync(ticket)

    def dispatch(self, layer: int, n_tokens: list[int]) -> None:
        self.machine.dispatch(layer, n_tokens)

    def expert(
        self, piece: Piece, n_tokens: int, arrived_s: float, after: tuple[Ticket, ...], parts: Sequence[Piece]
    ) -> Ticket | None:
        ticket = self.machine.expert(piece, n_tokens, arrived_s, after, parts)
        self._settled()
        return ticket

    def run_turn(self, turn: Turn) -> bool:
        return self.machine.run_turn(turn)

    def join(self, ticket: Ticket) -> None:
        self.machine.join(ticket)

    def read(self, layer: int, expert: int, n_bytes: int, priority: int) -> Ticket:
        return self.machine.read(layer, expert, n_bytes, priority)

    def move_kv(self, n_pages: int, page_bytes: int, down: bool) -> None:
        self.machine.move_kv(n_pages, page_bytes, down)

    def place(self, piece: Piece) -> None:
        self.machine.place(piece)

    def release(self, piece: Piece) -> None:
        self.machine.release(piece)

    def route(self, layer: int, ids: np.ndarray, weights: np.ndarray) -> None:
        self.machine.route(layer, ids, weights)

    def predict(self, duration_s: float, lane: str, blocking: bool, basis: Basis) -> Ticket:
        return self.machine.predict(duration_s, lane, blocking, basis)

    def poll(self) -> list[Piece]:
        return self.machine.poll()

    def ended(self, ticket: Ticket) -> bool:
        return self.machine.ended(ticket)

    def ends_after_s(self, ticket: Ticket) -> float:
        return self.machine.ends_after_s(ticket)

    def wait_until(self, time_s: float) -> None:
        self.machine.wait_until(time_s)

    def parts_s(self) -> list[float]:
        return self.machine.parts_s()

    def drain(self) -> None:
        self.machine.drain()
