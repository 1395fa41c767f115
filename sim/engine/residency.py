"""What sits on each GPU: the only place that knows capacity, and the one that refuses what is illegal.

State is flat: arrays by `Piece.index`, which grow when a policy makes parts of experts.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import Any

from sim.base.errors import IllegalDecision
from sim.base.flat import ints, records
from sim.base.lanes import H2D
from sim.machine.runs import lane_of
from sim.machine.turn import Turn
from sim.policy.pieces import Piece, Pieces
from sim.policy.tickets import Ticket, ends_at

DEMANDED, PREFETCHED, PLACED = 0, 1, 2  # why a piece came
ORIGINS = ("demand", "prefetch", "initial")
_H2D = H2D  # a machine integer where this is compiled
ROW = [
    *((name, "f8") for name in ("arrived_s", "busy_s")),
    *((name, "i8") for name in ("came", "left_in", "n_ran", "n_again")),
    *((name, "i4") for name in ("origin", "unused", "prev", "next")),
]


class Row:
    """What is known of a piece, in one line of a processor's cache where this is compiled.

    `origin`: why it came. `unused`: whether that was a prefetch, and it has not been computed with since. `came`: the
    how manieth of all that came it was, last. `left_in`: of a whole expert, the pass in which it, or a
    piece of it, left last. `n_ran`, `n_again`: since `ByExpert` took them, how often it was computed where it
    lay, and exchanged having left in an earlier pass. `prev`, `next`: its neighbours in a `Line`.
    """

    __slots__ = tuple(name for name, _ in ROW)

    def __init__(self) -> None:
        self.arrived_s = self.busy_s = 0.0
        self.came = self.left_in = self.n_ran = self.n_again = self.origin = self.unused = 0
        self.prev = self.next = 0


class Residency:
    """Resident pieces of all GPUs under a byte budget per GPU.

    A piece takes its room when its copy is issued: the bytes being written are occupied. Of a resident piece,

    - `arrival` is the ticket of its copy, or None where that had ended, at `arrived_s` (0 for what was there from the
      start), when it was asked for;
    - `busy` is the ticket of what reads or writes its room last (its copy at first, then its last computation), or None
      where that ends at `busy_s`;
    - `read_back`, by index, is the copy to the host that reads it, which a later computation does not wait for, but
      its room does;
    - `room_after`, by index, is what a prefetched piece's room had to wait for (a time, and tickets): a copy that is
      withdrawn gives the room back with it.
    """

    def __init__(self, pieces: Pieces, budget_bytes: Sequence[int]) -> None:
        n_gpus, n = len(budget_bytes), len(pieces.all)
        self.pieces = pieces
        self.n_gpus = n_gpus
        self.budget_bytes = ints(n_gpus)
        self.used_bytes = ints(n_gpus)
        self.peak_bytes = ints(n_gpus)
        for gpu in range(n_gpus):
            self.budget_bytes[gpu] = budget_bytes[gpu]
        self.divided = False
        self.layer_budget = ints(0)  # bytes by GPU and layer, where a policy divides its cache
        self.layer_used = ints(0)
        self.n_known = n
        self._flags = bytearray(n)
        self.here = self._flags
        self._rows = records(n, Row, ROW)
        self.rows = self._rows
        self.arrival: list[Ticket | None] = [None] * n
        self.busy: list[Ticket | None] = [None] * n
        self.ticketed = False  # whether there has been any ticket among these
        self._told: list[Ticket | None] = [None] * n  # what `arrival_of` gave for copies without a ticket
        self.tells = False  # whether it ever has
        self.read_back: dict[int, Ticket] = {}
        self.room_after: dict[int, tuple[float, tuple[Ticket, ...]]] = {}
        self.n_parts = 0  # resident pieces that are no whole experts in the serving precision
        # Those, by the `Piece.index` of their expert; None where there has never been one.
        self._parts: list[list[Piece] | None] = [None] * (pieces.n_layers * pieces.n_experts)
        self.n_came = 0  # ever
        self.counts = ints(0)  # of `ByExpert`

    def count_in(self, counts: MutableSequence[int]) -> None:
        """Where to count what comes in turns."""
        self.counts = counts

    # -- looking ----------------------------------------------------------------------------------------------------

    def known(self, piece: Any) -> Piece:
        """The same piece. Raises TypeError for what is none, IllegalDecision for one of another run."""
        if not isinstance(piece, Piece):
            raise TypeError(f"got {piece!r}: a Piece")
        one: Piece = piece
        index = one.index
        if index < 0 or index >= len(self.pieces.all) or self.pieces.all[index] is not one:
            raise IllegalDecision(f"{piece}: it belongs to another run; take pieces from view.piece and view.part")
        return one

    def holds(self, piece: Piece) -> bool:
        """True when a piece has its room."""
        return piece.index < self.n_known and self.here[piece.index] != 0

    def flags(self) -> bytearray:
        """Whether each piece has its room, by index; a live buffer, until parts are made anew."""
        return self._flags

    def budget(self, gpu: int) -> int:
        """Bytes that experts may take on a GPU."""
        return self.budget_bytes[gpu]

    def free_bytes(self, gpu: int) -> int:
        """Bytes of a GPU's budget that nothing takes."""
        return self.budget_bytes[gpu] - self.used_bytes[gpu]

    def room_of(self, layer: int) -> int:
        """Bytes of the only GPU's budget, or of its layer's, that nothing takes."""
        if self.divided:
            return self.layer_budget[layer] - self.layer_used[layer]
        return self.budget_bytes[0] - self.used_bytes[0]

    def resident_pieces(self) -> list[Piece]:
        """Resident pieces, oldest first."""
        found = [(self.rows[index].came, index) for index in range(self.n_known) if self.here[index]]
        found.sort()
        return [self.pieces.all[index] for _, index in found]

    def arrival_of(self, index: int) -> Ticket | None:
        """The ticket of a resident piece's copy; None for what was there from the start."""
        ticket: Ticket | None = self.arrival[index]
        if ticket is None and self.rows[index].origin != 2:  # not placed
            ticket = self.told_of(index)
            if ticket is None:
                ticket = self._told[index] = self.copied_at(index)
                self.tells = True
        return ticket

    def copied_at(self, index: int) -> Ticket:
        """A ticket of its own for a piece's copy that has none."""
        piece: Piece = self.pieces.all[index]
        return ends_at(self.rows[index].arrived_s, _H2D, lane_of(_H2D, piece.gpu))

    def told_of(self, index: int) -> Ticket | None:
        """The ticket that a policy was given of a resident piece's copy which has none: others may wait for it, too."""
        ticket: Ticket | None = self._told[index]
        if ticket is not None and ticket.end_s == self.rows[index].arrived_s:  # else it is of an earlier copy
            return ticket
        return None

    def parts(self, whole: Piece, precision: str | None = None) -> list[Piece]:
        """Resident pieces of `whole`'s expert, other than itself, in its precision or in `precision`."""
        if not self.n_parts:
            return []
        mine = self._parts[whole.index]
        found: list[Piece] = []
        if mine is None:
            return found
        for part in mine:
            if part.precision == whole.precision or part.precision == precision:
                found.append(part)  # noqa: PERF401 - a loop is what compiles well
        return found

    def sufficient(self, whole: Piece, precision: str | None = None, done: Sequence[Piece] = ()) -> list[Piece] | None:
        """Pieces that together let the expert be computed (the whole, or parts that make it up); None if none do.

        Parts in the serving precision always count; those in another one only when `precision` names it. No column
        is in two of them.

        Args:
            done: pieces computed already; the answer makes up the rest.
        """
        if not done and self.here[whole.index]:
            return [whole]
        parts = self.parts(whole, precision)
        if not parts:
            return None
        if not done:
            if _in_a_row(parts, whole):
                return parts
            parts = _by_start(parts)
            if _in_a_row(parts, whole):
                return parts
            if _leaves_a_gap(parts):
                return None
        ordered = [
            (part.start_frac, part.precision != whole.precision, -part.stop_frac, at) for at, part in enumerate(parts)
        ]
        ordered.sort()
        return tiling([parts[one[3]] for one in ordered], done)

    # -- changing ---------------------------------------------------------------------------------------------------

    def divide(self, layer_budget_bytes: list[list[int]]) -> None:
        """Give every layer of every GPU a budget of its own (per-layer caches).

        Raises:
            IllegalDecision: the layers together exceed a GPU's budget.
        """
        n_layers = self.pieces.n_layers
        check_division(layer_budget_bytes, n_layers, self.budget_bytes)
        self.layer_budget = ints(self.n_gpus * n_layers)
        self.layer_used = ints(self.n_gpus * n_layers)
        for gpu, layers in enumerate(layer_budget_bytes):
            for layer, n_bytes in enumerate(layers):
                self.layer_budget[gpu * n_layers + layer] = n_bytes
        self.divided = True

    def fits(self, piece: Piece) -> bool:
        """True when the piece can be added without evicting."""
        gpu = piece.gpu
        if self.divided:
            at = gpu * self.pieces.n_layers + piece.layer
            if self.layer_used[at] + piece.n_bytes > self.layer_budget[at]:
                return False
        return self.used_bytes[gpu] + piece.n_bytes <= self.budget_bytes[gpu]

    def add(self, piece: Piece, arrival: Ticket | None, arrived_s: float, origin: int) -> None:
        """Take room for a piece. Raises IllegalDecision when it is there already or does not fit."""
        index = piece.index
        gpu = piece.gpu
        if index >= self.n_known:
            self._grow()
        used_bytes = self.used_bytes[gpu] + piece.n_bytes
        if self.here[index] or used_bytes > self.budget_bytes[gpu] or (self.divided and not self.fits(piece)):
            self._refuse(piece, origin)
        if self.divided:
            self.layer_used[gpu * self.pieces.n_layers + piece.layer] += piece.n_bytes
        self.used_bytes[gpu] = used_bytes
        if used_bytes > self.peak_bytes[gpu]:
            self.peak_bytes[gpu] = used_bytes
        self.here[index] = 1
        self.rows[index].origin = origin
        self.rows[index].unused = origin == 1
        if arrival is not None:
            self.ticketed = True
        if self.ticketed:
            self.arrival[index] = arrival
            self.busy[index] = arrival
        self.rows[index].arrived_s = arrived_s
        self.rows[index].busy_s = arrived_s
        self.rows[index].came = self.n_came
        self.n_came += 1
        if not piece.serving:
            self.n_parts += 1
            whole = piece.layer * self.pieces.n_experts + piece.expert
            mine = self._parts[whole]
            if mine is None:
                mine = self._parts[whole] = []
            mine.append(piece)

    def _refuse(self, piece: Piece, origin: int) -> None:
        if self.here[piece.index]:
            raise IllegalDecision(f"{ORIGINS[origin]} of {piece}: it is resident; run it, or evict it first")
        raise IllegalDecision(
            f"{ORIGINS[origin]} of {piece}: {self.used_bytes[piece.gpu] + piece.n_bytes} bytes would exceed the expert "
            f"budget of {self.budget_bytes[piece.gpu]} on GPU {piece.gpu} or its layer's share; evict first, or answer "
            "`victim`"
        )

    def remove(self, piece: Piece) -> None:
        """Free a piece's room. Raises IllegalDecision when it is not there."""
        index = piece.index
        if index >= self.n_known or not self.here[index]:
            raise IllegalDecision(f"Evict of {piece}: it is not resident; evict a resident piece")
        gpu = piece.gpu
        self.here[index] = 0
        self.used_bytes[gpu] -= piece.n_bytes
        if self.divided:
            self.layer_used[gpu * self.pieces.n_layers + piece.layer] -= piece.n_bytes
        if not piece.serving:
            self.n_parts -= 1
            mine = self._parts[piece.layer * self.pieces.n_experts + piece.expert]
            assert mine is not None
            at = 0
            while mine[at] is not piece:
                at += 1
            del mine[at]

    def gone(self, piece: Piece, pass_n: int) -> None:
        """A piece that was removed in a pass had been there, or its copy had begun."""
        self.rows[piece.layer * self.pieces.n_experts + piece.expert].left_in = pass_n

    def come(self, turn: Turn, start: int, stop: int, ran: bool, column: int, further: int, pass_n: int) -> None:
        """`add` of experts of a turn that have been demanded, into room that is there on the only GPU.

        Who never left is counted in `column`; who left in a pass before this one, `pass_n`, by its row; who left in it
        `further` on. In a pass of 0 all are counted together.

        Args:
            ran: they have been computed, too.
        """
        n_came = self.n_came
        for at in range(start, stop):
            index = turn.first + turn.experts[at]
            self.here[index] = 1
            self.rows[index].origin = 0  # demanded
            self.rows[index].unused = 0
            self.rows[index].came = n_came
            n_came += 1
            if self.ticketed:
                self.arrival[index] = None
                self.busy[index] = None
            self.rows[index].arrived_s = turn.arrived_s[at]
            self.rows[index].busy_s = turn.ends_s[at] if ran else turn.arrived_s[at]
            left = self.rows[index].left_in if pass_n else 0
            if left == 0:
                self.counts[column + index] += 1
            elif left < pass_n:
                self.rows[index].n_again += 1
            else:
                self.counts[column + further + index] += 1
        self.n_came = n_came
        self.used_bytes[0] += (stop - start) * turn.n_bytes
        if self.divided:
            self.layer_used[turn.layer] += (stop - start) * turn.n_bytes
        if self.used_bytes[0] > self.peak_bytes[0]:
            self.peak_bytes[0] = self.used_bytes[0]

    def leave(self, turn: Turn, start: int, stop: int, pass_n: int) -> None:
        """`remove` of whole experts that make room for a turn's, on the only GPU."""
        for at in range(start, stop):
            index = turn.leaving[at]
            self.here[index] = 0
            self.rows[index].left_in = pass_n
        self.used_bytes[0] -= (stop - start) * turn.n_bytes
        if self.divided:  # a layer's experts make room for each other
            self.layer_used[turn.layer] -= (stop - start) * turn.n_bytes

    def _grow(self) -> None:
        """Take in pieces that have been made since."""
        n = max(len(self.pieces.all), 2 * self.n_known)
        more = n - self.n_known
        self._flags = self._flags + bytearray(more)
        self.here = self._flags
        rows = records(n, Row, ROW)
        rows[: self.n_known] = self._rows
        self._rows = rows
        self.rows = rows
        self.arrival.extend([None] * more)
        self.busy.extend([None] * more)
        self._told.extend([None] * more)
        self.n_known = n


def check_division(layer_budget_bytes: list[list[int]], n_layers: int, budget_bytes: Sequence[int]) -> None:
    """Raises IllegalDecision for budgets of layers that are none, or exceed those of their GPUs."""
    if [len(layers) for layers in layer_budget_bytes] != [n_layers] * len(budget_bytes):
        raise IllegalDecision(f"layer_budgets, got {layer_budget_bytes!r}: it answers with bytes by GPU and layer")
    for gpu, layers in enumerate(layer_budget_bytes):
        if sum(layers) > budget_bytes[gpu]:
            raise IllegalDecision(
                f"layer_budgets, got {sum(layers)} bytes on GPU {gpu}: its expert budget is "
                f"{budget_bytes[gpu]}; divide no more than that"
            )


def _in_a_row(parts: Sequence[Piece], whole: Piece) -> bool:
    """Whether parts follow one another from end to end, in the serving precision: then there is no choice to make."""
    at = 0.0
    for part in parts:
        if part.start_frac != at or part.precision != whole.precision:
            return False
        at = part.stop_frac
    return at >= 1.0


def _by_start(parts: Sequence[Piece]) -> list[Piece]:
    """Parts by where they begin; of equals the first stays first."""
    found = list(parts)
    for last in range(1, len(found)):
        part, at = found[last], last
        while at > 0:
            before = found[at - 1]
            if before.start_frac <= part.start_frac:
                break
            found[at] = before
            at -= 1
        found[at] = part
    return found


def _leaves_a_gap(parts: Sequence[Piece]) -> bool:
    """Whether some column is in none of these, in order of their starts: then they make up nothing."""
    at = 0.0
    for part in parts:
        if part.start_frac > at:
            return True
        if part.stop_frac > at:
            at = part.stop_frac
    return at < 1.0


def tiling(parts: Sequence[Piece], done: Sequence[Piece], at: float = 0.0) -> list[Piece] | None:
    """Of `parts`, in order of preference, pieces that with those `done` make up [at, 1) exactly; None if none do."""
    for piece in done:
        if piece.start_frac == at:
            return tiling(parts, done, piece.stop_frac)
    if at >= 1.0:
        return []
    for piece in parts:
        if piece.start_frac == at and not any([at < other.start_frac < piece.stop_frac for other in done]):  # noqa: C419 - no closures here
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
        same = one.layer == whole.layer and one.expert == whole.expert and one.gpu == whole.gpu
        if not same or one.precision != whole.precision or one.kernels_frac < 1.0 or one.start_frac != at:
            return False
        at = one.stop_frac
    return at == whole.stop_frac
