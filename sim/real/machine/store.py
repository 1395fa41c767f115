"""Where pieces of experts lie: in which bytes on the host, in which block on the device, when that may be written."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.real.machine.arena import Arena, Block, aligned

if TYPE_CHECKING:
    from sim.policy.pieces import Piece
    from sim.real.devices.lanes import Lanes
    from sim.real.devices.work import Work
    from sim.real.weights.weights import Weights


class Extent(NamedTuple):
    """What of an expert a piece holds.

    By matrix: rows of the matrices laid end to end, [3 x intermediate, hidden]. Else: columns of the expert, which are
    rows of each of its matrices. The bounds of a piece are rounded to whole ones.
    """

    start: int
    stop: int
    by_matrix: bool

    @property
    def n_rows(self) -> int:
        """Rows of matrices."""
        return (self.stop - self.start) * (1 if self.by_matrix else 3)


def extent(piece: Piece, rows: int) -> Extent:
    """The part of an expert of `rows` columns that `piece` holds."""
    by_matrix = piece.kernels_frac < 1.0
    n = 3 * rows if by_matrix else rows
    return Extent(round(piece.start_frac * n), round(piece.stop_frac * n), by_matrix)


class DeviceStore:
    """Device memory for pieces, an arena per GPU, and what lies there."""

    def __init__(self, weights: Weights, lanes: Lanes, arena_bytes: Sequence[int]) -> None:
        self.weights, self.lanes = weights, lanes
        size = int(weights.experts[0][0].numel())
        self.arenas = []
        for n_bytes in arena_bytes:
            room = n_bytes + (n_bytes // size + 1) * aligned(1)
            self.arenas.append(Arena(lanes.device.on_device(room), room, lanes.device.on_device))
        self.blocks: dict[Piece, tuple[Block, Work | None]] = {}
        self.last_use: dict[Piece, Work] = {}
        self.copied_down: dict[Piece, Work] = {}  # reads a piece too, whatever computes it meanwhile
        self._going_home: dict[tuple[str, int], Work] = {}  # the last write-back into each host buffer

    @property
    def spilt_bytes(self) -> int:
        """Most bytes that found no block although the budget had room."""
        return sum(arena.spilt_bytes for arena in self.arenas)

    def runs(self, piece: Piece) -> list[tuple[int, int]]:
        """The bytes of the expert on the host that a piece holds, as runs; on the device they follow one another."""
        weights = self.weights
        if piece.whole:
            return [(0, int(weights.form(piece.precision, self.lanes.device).buffers[0].numel()))]
        part, row_bytes = extent(piece, weights.rows), weights.form(piece.precision, self.lanes.device).row_bytes
        firsts = (0,) if part.by_matrix else (0, weights.rows, 2 * weights.rows)
        return [((first + part.start) * row_bytes, (first + part.stop) * row_bytes) for first in firsts]

    def room(self, piece: Piece) -> Block:
        """A block for a piece; it may be written once its hazards are over."""
        block = self.arenas[piece.gpu].take(sum(stop - start for start, stop in self.runs(piece)))
        block.hazards = [work for work in block.hazards if not self.lanes.over(work)]
        return block

    def copying_down(self, piece: Piece, work: Work) -> None:
        """`work` writes a piece back to the host."""
        self.copied_down[piece] = work
        self._going_home[self._home(piece)] = work

    def _home(self, piece: Piece) -> tuple[str, int]:
        return piece.precision, self.weights.index(piece.layer, piece.expert)

    def hazards(self, piece: Piece, block: Block) -> list[Work]:
        """What must end before a copy fills `block`: its readers, and whatever still fills the copy's source."""
        home = self._going_home.get(self._home(piece))
        return block.hazards if home is None or self.lanes.over(home) else [*block.hazards, home]

    def ends(self, piece: Piece, block: Block) -> list[tuple[Any, Any]]:
        """Where a piece lies on the host, and its place on the device, run by run."""
        form = self.weights.form(piece.precision, self.lanes.device)
        home, found, at = form.buffers[self.weights.index(piece.layer, piece.expert)], [], 0
        for start, stop in self.runs(piece):
            found.append((home[start:stop], block.buffer[block.start + at : block.start + at + stop - start]))
            at += stop - start
        return found

    def release(self, piece: Piece) -> None:
        """The cache has let go of a piece: its room may be written once what reads or writes it is over."""
        block, copy = self.blocks.pop(piece)
        last, down = self.last_use.pop(piece, None), self.copied_down.pop(piece, None)
        hazards = [*block.hazards, *(work for work in (copy, last, down) if work is not None)]
        self.arenas[piece.gpu].give(block, [work for work in hazards if not self.lanes.over(work)])

    def values(self, piece: Piece) -> Callable[[], Any]:
        """Call it on the lane that computes: the piece's rows [rows of matrices, hidden] in the serving type."""
        weights, block = self.weights, self.blocks[piece][0]
        form, part = weights.form(piece.precision, self.lanes.device), extent(piece, weights.rows)
        if piece.precision == weights.precision:
            if block.views is None or len(block.views) != part.n_rows:
                raw = block.bytes(part.n_rows * form.row_bytes).view(weights.dtype)
                block.views = raw.view(part.n_rows, form.hidden_size)
            values = block.views
            return lambda: values
        raw, index = block.bytes(part.n_rows * form.row_bytes), weights.index(piece.layer, piece.expert)
        if part.by_matrix or piece.whole:
            first = part.start if part.by_matrix else 0
            return lambda: form.unpack(raw, index, first, first + part.n_rows)
        n = part.stop - part.start
        cuts = [(matrix * n * form.row_bytes, matrix * weights.rows + part.start) for matrix in range(3)]
        torch = self.lanes.torch
        return lambda: torch.cat(
            [form.unpack(raw[at : at + n * form.row_bytes], index, first, first + n) for at, first in cuts]
        )

    def side_by_side(self, parts: Sequence[Piece]) -> Callable[[], Any]:
        """Call it on the lane that computes: slices of columns in their order, as if they lay there as one."""
        found = [(self.values(piece), extent(piece, self.weights.rows)) for piece in parts]
        cat = self.lanes.torch.cat
        return lambda: cat(
            [
                rows.view(3, part.stop - part.start, rows.shape[-1])
                for rows, part in ((values(), part) for values, part in found)
            ],
            1,
        )

    def broken(self) -> list[Piece]:
        """Pieces whose bytes on the device differ from those on the host; every lane must be idle."""
        return [
            piece
            for piece, (block, _) in self.blocks.items()
            if any(_crc(source) != _crc(target) for source, target in self.ends(piece, block))
        ]


def _crc(raw: Any) -> int:
    return zlib.crc32(raw.to("cpu").numpy())


def copy_runs(ends: list[tuple[Any, Any]]) -> None:
    """Copy run by run; runs are contiguous at both ends, so that each is one asynchronous copy."""
    for source, target in ends:
        target.copy_(source, non_blocking=True)
