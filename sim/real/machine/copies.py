"""The copying part of the real machine: pieces up and down, and the host's account of what it has launched."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from sim.machine.protocol import DEMAND, Machine
from sim.policy.tickets import Ticket
from sim.real.devices.work import DOWN, UP, Work, works_of
from sim.real.machine.store import DeviceStore, copy_runs

if TYPE_CHECKING:
    from sim.policy.pieces import Piece
    from sim.real.devices.work import Lanes
    from sim.real.machine.ledger import Ledger
    from sim.real.weights.weights import Weights


class RealLinks(Machine):
    """Copies on a device's lanes; `RealExperts` adds experts, `RealMachine` the rest of an iteration."""

    def __init__(self, lanes: Lanes, weights: Weights, arena_bytes: Sequence[int], ledger: Ledger) -> None:
        super().__init__()
        self.lanes, self.weights, self.ledger = lanes, weights, ledger
        self.torch = lanes.torch
        self.store = DeviceStore(weights, lanes, arena_bytes)
        self.d2h_bytes = self.h2d_bytes = self.written_back_bytes = 0

    @property
    def now_s(self) -> float:
        return self.lanes.now_s()

    def now(self) -> float:
        return self.lanes.now_s()

    def place(self, piece: Piece) -> None:
        """Put a piece in place before the run, outside its time."""
        block = self.store.room(piece)
        copy_runs(self.store.ends(piece, block))
        self.store.blocks[piece] = (block, None)

    def release(self, piece: Piece) -> None:
        """The cache has let go of a piece."""
        self.store.release(piece)

    def copy(self, piece: Piece, priority: int, ready_s: float, after: tuple[Ticket, ...]) -> Ticket:
        began_s = self.now_s
        block = self.store.room(piece)
        op, hazards = "demand" if priority == DEMAND else "prefetch", self.store.hazards(piece, block)
        work = Work(UP, op, partial(copy_runs, self.store.ends(piece, block)), (*works_of(after), *hazards),
                    layer=piece.layer, expert=piece.expert, n_bytes=piece.n_bytes, priority=priority)  # fmt: skip
        work.piece, work.gpu = piece, piece.gpu
        self.store.blocks[piece] = (block, work)
        self.h2d_bytes += piece.n_bytes
        self.lanes.submit(work)
        self._said("launch copy", piece.layer, piece.expert, 0, piece.n_bytes, began_s)
        return work

    def copy_back(self, piece: Piece, ready_s: float, after: tuple[Ticket, ...]) -> Ticket:
        began_s = self.now_s
        block, _ = self.store.blocks[piece]
        back = [(place, home) for home, place in self.store.ends(piece, block)]
        work = Work(DOWN, "write_back", partial(copy_runs, back), works_of(after),
                    layer=piece.layer, expert=piece.expert, n_bytes=piece.n_bytes)  # fmt: skip
        self.d2h_bytes += piece.n_bytes
        self.written_back_bytes += piece.n_bytes
        self.store.copying_down(piece, work)
        self.lanes.submit(work)
        self._said("launch copy", piece.layer, piece.expert, 0, piece.n_bytes, began_s)
        return work

    def promote(self, ticket: Ticket) -> None:
        assert isinstance(ticket, Work)
        self.lanes.promote(ticket)

    def cancel(self, ticket: Ticket) -> bool:
        assert isinstance(ticket, Work)
        if not self.lanes.cancel(ticket):
            return False
        self.h2d_bytes -= ticket.n_bytes
        return True

    def poll(self) -> list[Piece]:
        self.ledger.take(self.lanes.finished)
        arrived, self.ledger.arrived = self.ledger.arrived, []
        return arrived

    def ended(self, ticket: Ticket) -> bool:
        return not isinstance(ticket, Work) or self.lanes.over(ticket)

    def drain(self) -> None:
        self.lanes.settle()
        self.ledger.take(self.lanes.finished)

    def broken_copies(self) -> list[Piece]:
        """Resident pieces whose bytes on the device differ from those on the host: none, unless a copy went wrong."""
        self.drain()
        return self.store.broken()

    def _said(self, op: str, layer: int, expert: int, n_tokens: int, n_bytes: int, began_s: float) -> None:
        self.ledger.host(op, layer, expert, n_tokens, n_bytes, began_s, self.lanes.now_s())
