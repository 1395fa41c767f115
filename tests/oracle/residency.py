"""What sits on each GPU: the only place that knows capacity, and the one that refuses what is illegal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from sim.base.errors import IllegalDecision

if TYPE_CHECKING:
    from oracle.pieces import Piece
    from oracle.protocol import Ticket

DEMANDED, PREFETCHED, PLACED = "demand", "prefetch", "initial"


class Entry:
    """A resident piece: the ticket of its arrival, of its last use, and why it came.

    `copied_down`: the copy to the host that reads it, which a later computation does not wait for, but its room does.
    `room_after`: computations on what lay in its room before; a copy that is withdrawn gives the room back with them.
    """

    __slots__ = ("arrival", "copied_down", "last_use", "origin", "piece", "room_after", "used")

    def __init__(self, piece: Piece, arrival: Ticket | None, origin: str) -> None:
        self.piece = piece
        self.arrival = arrival  # None: there from the start
        self.last_use: Ticket | None = None
        self.copied_down: Ticket | None = None
        self.room_after: tuple[Ticket, ...] = ()
        self.origin = origin
        self.used = False


class Cache:
    """Resident pieces of all GPUs under a byte budget per GPU.

    `entries` keeps insertion order, so iterating it is deterministic. A piece takes its room when its copy is
    issued: the bytes being written are occupied.
    """

    def __init__(self, budget_bytes: list[int], n_whole: int) -> None:
        self.budget_bytes = budget_bytes
        self.flags = np.zeros(n_whole, dtype=np.uint8)  # whole experts that are here, by index
        self.used_bytes = [0] * len(budget_bytes)
        self.peak_bytes = [0] * len(budget_bytes)
        self.entries: dict[Piece, Entry] = {}
        self.layer_used: list[list[int]] = []
        self._parts: dict[tuple[int, int], list[Piece]] = {}  # expert -> resident pieces that are not whole
        self.layer_budget: list[list[int]] | None = None  # bytes by GPU and layer, where a policy divides its cache

    def __contains__(self, piece: Piece) -> bool:
        return piece in self.entries

    def divide(self, layer_budget_bytes: list[list[int]]) -> None:
        """Give every layer of every GPU a budget of its own (per-layer caches).

        Raises:
            IllegalDecision: the layers together exceed a GPU's budget.
        """
        for gpu, layers in enumerate(layer_budget_bytes):
            if sum(layers) > self.budget_bytes[gpu]:
                raise IllegalDecision(
                    f"layer_budgets, got {sum(layers)} bytes on GPU {gpu}: its expert budget is "
                    f"{self.budget_bytes[gpu]}; divide no more than that"
                )
        self.layer_budget = [list(layers) for layers in layer_budget_bytes]
        self.layer_used = [[0] * len(layers) for layers in layer_budget_bytes]

    @property
    def divided(self) -> bool:
        """True when layers have budgets of their own."""
        return self.layer_budget is not None

    def fits(self, piece: Piece) -> bool:
        """True when the piece can be added without evicting."""
        gpu = piece.gpu
        divided, layer = self.layer_budget, piece.layer
        if divided is not None and self.layer_used[gpu][layer] + piece.n_bytes > divided[gpu][layer]:
            return False
        return self.used_bytes[gpu] + piece.n_bytes <= self.budget_bytes[gpu]

    def add(self, piece: Piece, arrival: Ticket | None, origin: str) -> Entry:
        """Take room for a piece. Raises IllegalDecision when it is there already or does not fit."""
        if piece in self.entries:
            raise IllegalDecision(f"{origin} of {piece}: it is resident; run it, or evict it first")
        gpu = piece.gpu
        used_bytes = self.used_bytes[gpu] + piece.n_bytes
        if used_bytes > self.budget_bytes[gpu] or (self.layer_budget is not None and not self.fits(piece)):
            raise IllegalDecision(
                f"{origin} of {piece}: {used_bytes} bytes would exceed the expert budget of "
                f"{self.budget_bytes[gpu]} on GPU {gpu} or its layer's share; evict first, or answer `victim`"
            )
        if self.layer_budget is not None:
            self.layer_used[gpu][piece.layer] += piece.n_bytes
        self.used_bytes[gpu] = used_bytes
        if used_bytes > self.peak_bytes[gpu]:
            self.peak_bytes[gpu] = used_bytes
        entry = self.entries[piece] = Entry(piece, arrival, origin)
        if piece.serving:
            self.flags[piece.index] = 1
        if not piece.serving:
            self._parts.setdefault((piece.layer, piece.expert), []).append(piece)
        return entry

    def remove(self, piece: Piece) -> Entry:
        """Free a piece's room. Raises IllegalDecision when it is not there."""
        entry = self.entries.pop(piece, None)
        if entry is None:
            raise IllegalDecision(f"Evict of {piece}: it is not resident; evict a resident piece")
        self.used_bytes[piece.gpu] -= piece.n_bytes
        if piece.serving:
            self.flags[piece.index] = 0
        if self.layer_budget is not None:
            self.layer_used[piece.gpu][piece.layer] -= piece.n_bytes
        if not piece.serving:
            self._parts[(piece.layer, piece.expert)].remove(piece)
        return entry

    def parts(self, whole: Piece, precision: str | None = None) -> list[Piece]:
        """Resident pieces of `whole`'s expert, other than itself, in its precision or in `precision`."""
        parts = self._parts.get((whole.layer, whole.expert), ())
        return [part for part in parts if part.precision in (whole.precision, precision)]

    def sufficient(self, whole: Piece, precision: str | None = None, done: Sequence[Piece] = ()) -> list[Entry] | None:
        """Entries that together let the expert be computed (the whole, or parts that make it up); None if none do.

        Parts in the serving precision always count; those in another one only when `precision` names it. No column
        is in two of them.

        Args:
            done: pieces computed already; the answer makes up the rest.
        """
        if not done:
            entry = self.entries.get(whole)
            if entry is not None:
                return [entry]
        parts = self.parts(whole, precision)
        parts.sort(key=lambda part: (part.start_frac, part.precision != whole.precision, -part.stop_frac))
        chosen = tiling(parts, done)
        return None if chosen is None else [self.entries[piece] for piece in chosen]


def tiling(parts: Sequence[Piece], done: Sequence[Piece], at: float = 0.0) -> list[Piece] | None:
    """Of `parts`, in order of preference, pieces that with those `done` make up [at, 1) exactly; None if none do."""
    for piece in done:
        if piece.start_frac == at:
            return tiling(parts, done, piece.stop_frac)
    if at >= 1.0:
        return []
    for piece in parts:
        if piece.start_frac == at and not any(at < other.start_frac < piece.stop_frac for other in done):
            rest = tiling(parts, done, piece.stop_frac)
            if rest is not None:
                return [piece, *rest]
    return None


def side_by_side(slices: Sequence[Piece], whole: Piece) -> bool:
    """Whether slices of columns, in order, make up a piece of columns exactly, in its precision and on its GPU."""
    if whole.kernels_frac < 1.0:
        return False
    at = whole.start_frac
    for one in slices:
        same = (one.layer, one.expert, one.gpu) == (whole.layer, whole.expert, whole.gpu)
        if not same or one.precision != whole.precision or one.kernels_frac < 1.0 or one.start_frac != at:
            return False
        at = one.stop_frac
    return at == whole.stop_frac
