"""A machine before a machine: every verb is handed on, and whoever stands in between overrides the verbs it acts on.

An engine holds its machine by type, compiled, so who stands before one has to be a `Machine` with all its verbs: that
is why this is a class to begin from and not an attribute. A new verb of the protocol is handed on here, once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.machine.protocol import NO_TICKETS, Machine

if TYPE_CHECKING:
    from collections.abc import MutableSequence, Sequence

    import numpy as np

    from sim.base.quantities import Basis
    from sim.machine.turn import Turn
    from sim.policy.pieces import Piece
    from sim.policy.tickets import Ticket
    from sim.workload.iterations import Iteration


class ForwardingMachine(Machine):
    """Hands on to `machine` what an engine asks; `settled` takes over what that says where it answers None."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine
        self.keeps_pieces = machine.keeps_pieces
        self.gathers = machine.gathers

    def settled(self) -> None:
        self.ends_s = self.machine.ends_s
        self.cause = self.machine.cause

    def now(self) -> float:
        return self.machine.now()

    def begin(self, iteration: Iteration) -> None:
        self.machine.begin(iteration)

    def attention(self, layer: int) -> None:
        self.machine.attention(layer)

    def gate(self, layer: int) -> Ticket:
        return self.machine.gate(layer)

    def shared(self, layer: int) -> None:
        self.machine.shared(layer)

    def sync(self, ticket: Ticket) -> None:
        self.machine.sync(ticket)

    def to_gate(self, layer: int) -> float:
        return self.machine.to_gate(layer)

    def leave_unread(self, layers: frozenset[int]) -> None:
        self.machine.leave_unread(layers)

    def dispatch(self, layer: int, n_tokens: list[int]) -> None:
        self.machine.dispatch(layer, n_tokens)

    def expert(
        self, piece: Piece, n_tokens: int, arrived_s: float, after: tuple[Ticket, ...], parts: Sequence[Piece]
    ) -> Ticket | None:
        ticket = self.machine.expert(piece, n_tokens, arrived_s, after, parts)
        self.settled()
        return ticket

    def run_turn(self, turn: Turn) -> bool:
        return self.machine.run_turn(turn)

    def cpu_expert(self, layer: int, expert: int, n_tokens: int, after: tuple[Ticket, ...] = NO_TICKETS) -> Ticket:
        return self.machine.cpu_expert(layer, expert, n_tokens, after)

    def join(self, ticket: Ticket) -> None:
        self.machine.join(ticket)

    def demand(self, piece: Piece, ready_s: float) -> bool:
        known = self.machine.demand(piece, ready_s)
        self.settled()
        return known

    def demand_turn(self, turn: Turn) -> bool:
        return self.machine.demand_turn(turn)

    def copy(self, piece: Piece, priority: int, ready_s: float, after: tuple[Ticket, ...]) -> Ticket | None:
        ticket = self.machine.copy(piece, priority, ready_s, after)
        self.settled()
        return ticket

    def read(self, layer: int, expert: int, n_bytes: int, priority: int) -> Ticket:
        return self.machine.read(layer, expert, n_bytes, priority)

    def copy_back(self, piece: Piece, ready_s: float, after: tuple[Ticket, ...]) -> Ticket:
        return self.machine.copy_back(piece, ready_s, after)

    def move_kv(self, n_pages: int, page_bytes: int, down: bool) -> None:
        self.machine.move_kv(n_pages, page_bytes, down)

    def promote(self, ticket: Ticket) -> bool:
        return self.machine.promote(ticket)

    def cancel(self, ticket: Ticket) -> bool:
        return self.machine.cancel(ticket)

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

    def end(self) -> None:
        self.machine.end()

    def wait_until(self, time_s: float) -> None:
        self.machine.wait_until(time_s)

    def parts_s(self) -> list[float]:
        return self.machine.parts_s()

    def path_s(self) -> MutableSequence[float]:
        return self.machine.path_s()

    def drain(self) -> None:
        self.machine.drain()
