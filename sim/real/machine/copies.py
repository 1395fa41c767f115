"""Pieces on their way: up into blocks of device memory, and back to where they came from."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from sim.machine.protocol import DEMAND
from sim.real.devices.work import D2H, H2D, Work
from sim.real.machine.store import DeviceStore, copy_runs

if TYPE_CHECKING:
    from sim.policy.pieces import Piece
    from sim.real.devices.lanes import Lanes


class Copies:
    """Copies of pieces on a device's lanes, and the bytes that they and experts on the CPU have moved."""

    def __init__(self, lanes: Lanes, store: DeviceStore) -> None:
        self._lanes, self._store = lanes, store
        self.d2h_bytes = self.h2d_bytes = self.written_back_bytes = 0

    def place(self, piece: Piece) -> None:
        """Put a piece in place at once: before the run, outside its time."""
        block = self._store.room(piece)
        copy_runs(self._store.ends(piece, block))
        self._store.blocks[piece] = (block, None)

    def up(self, piece: Piece, priority: int, after: tuple[Work, ...]) -> Work:
        """Queue a copy to the device, into room that nothing reads any more when it is written."""
        store = self._store
        block = store.room(piece)
        op, waits = "demand" if priority == DEMAND else "prefetch", (*after, *store.hazards(piece, block))
        work = Work(
            H2D,
            op,
            partial(copy_runs, store.ends(piece, block)),
            waits,
            layer=piece.layer,
            expert=piece.expert,
            n_bytes=piece.n_bytes,
            priority=priority,
        )
        work.piece, work.gpu = piece, piece.gpu
        store.blocks[piece] = (block, work)
        self.h2d_bytes += piece.n_bytes
        self._lanes.submit(work)
        return work

    def back(self, piece: Piece, after: tuple[Work, ...]) -> Work:
        """Queue a copy of a piece on the device over the one on the host."""
        block, _ = self._store.blocks[piece]
        ends = [(place, home) for home, place in self._store.ends(piece, block)]
        work = Work(
            D2H,
            "write_back",
            partial(copy_runs, ends),
            after,
            layer=piece.layer,
            expert=piece.expert,
            n_bytes=piece.n_bytes,
        )
        self.d2h_bytes += piece.n_bytes
        self.written_back_bytes += piece.n_bytes
        self._store.copying_down(piece, work)
        self._lanes.submit(work)
        return work

    def withdraw(self, work: Work) -> bool:
        """Cancel a speculative copy that has not started; its bytes do not count."""
        if not self._lanes.cancel(work):
            return False
        self.h2d_bytes -= work.n_bytes
        return True

    def count_activations(self, n_bytes: int) -> None:
        """Rows of an expert on the CPU go down, its results come up."""
        self.d2h_bytes += n_bytes
        self.h2d_bytes += n_bytes
