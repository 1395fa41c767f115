"""Who leaves, for policies that name a native order (`sim.policy.order`) instead of answering `victim`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from sim.base.errors import IllegalDecision
from sim.base.flat import COMPILED, ints, places
from sim.engine.pending_experts import PendingExperts
from sim.engine.residency import Residency
from sim.machine.turn import Turn
from sim.policy.order import EXPERT, FREE, LAST, NOT_FOR_PREFETCH, Order, Rank, Recency
from sim.policy.pieces import Piece, Pieces

if TYPE_CHECKING:  # C, and only where this is compiled
    from cython.cimports.sim.policy.wide import next_at_most

_ENDLESS = math.inf


class Victims:
    """Base: what the engine tells an order, and asks of it. Pieces are named by `Piece.index`.

    `touches`: whether `touched` says anything.
    """

    touches: bool

    def placed(self, index: int) -> None:
        """A piece has taken its room."""

    def touched(self, index: int) -> None:
        """A piece is computed with."""

    def left(self, index: int) -> None:
        """A piece has given its room up."""

    def touch(self, turn: Turn, start: int, stop: int) -> None:
        """Experts of a turn, on the only GPU, are computed with."""

    def victim(self, piece: Piece, speculative: bool) -> int:
        """The index of the piece that makes room for `piece`; -1 when none may."""
        return -1


class Line:
    """Pieces in the order in which they are to leave, a line for each cache; each knows its neighbours (`Row`).

    `first` and `last`, by line; -1 - i is no piece, but where line i begins and ends.
    """

    def __init__(self, residency: Residency, n_lines: int) -> None:
        self.residency = residency
        self.first = places(n_lines)
        self.last = places(n_lines)
        for line in range(n_lines):
            self.first[line] = self.last[line] = -1 - line

    def append(self, index: int, line: int) -> None:
        """A piece comes last."""
        residency = self.residency
        last = self.last[line]
        residency.rows[index].prev = last
        residency.rows[index].next = -1 - line
        self.last[line] = index
        if last >= 0:
            residency.rows[last].next = index
        else:
            self.first[line] = index

    def extend(self, turn: Turn, start: int, stop: int, line: int) -> None:
        """Experts of a turn come last, one after the other."""
        residency, last = self.residency, self.last[line]
        for at in range(start, stop):
            index = turn.first + turn.experts[at]
            residency.rows[index].prev = last
            if last >= 0:
                residency.rows[last].next = index
            else:
                self.first[line] = index
            last = index
        self.last[line] = last
        if last >= 0:
            residency.rows[last].next = -1 - line

    def unlink(self, index: int) -> None:
        """A piece leaves its line."""
        residency = self.residency
        before = residency.rows[index].prev
        after = residency.rows[index].next
        if before >= 0:
            residency.rows[before].next = after
        else:
            self.first[-1 - before] = after
        if after >= 0:
            residency.rows[after].prev = before
        else:
            self.last[-1 - after] = before

    def cut(self, line: int, stays: int) -> None:
        """All before a place leave their line."""
        self.first[line] = stays
        if stays >= 0:
            self.residency.rows[stays].prev = -1 - line
        else:
            self.last[line] = stays


class InTurn(Victims):
    """Pieces in the order in which they came or were used last: the first that may leave does."""

    def __init__(self, residency: Residency, pending: PendingExperts, per_layer: bool, touches: bool) -> None:
        self.residency = residency
        self.pending = pending
        self.per_layer = per_layer
        self.touches = touches
        pieces = residency.pieces
        self.n_whole = pieces.n_layers * pieces.n_experts
        self.n_experts = pieces.n_experts
        self.n_lines = pieces.n_gpus * (pieces.n_layers if per_layer else 1)  # one per cache
        self.line = Line(residency, self.n_lines)

    def _cache(self, index: int) -> int:
        """The line of a piece: all of its GPU, or its layer of it."""
        if self.n_lines == 1:
            return 0
        piece: Piece = self.residency.pieces.all[index]
        return piece.gpu * self.residency.pieces.n_layers + piece.layer if self.per_layer else piece.gpu

    def placed(self, index: int) -> None:
        self.line.append(index, self._cache(index))

    def touched(self, index: int) -> None:
        self.line.unlink(index)
        self.line.append(index, self._cache(index))

    def left(self, index: int) -> None:
        self.line.unlink(index)

    def touch(self, turn: Turn, start: int, stop: int) -> None:
        if start == stop:
            return
        line, first = self.line, turn.first
        for at in range(start, stop):
            line.unlink(first + turn.experts[at])
        line.extend(turn, start, stop, self._cache(first + turn.experts[start]))  # all of them live on one GPU

    def come(self, turn: Turn, start: int, stop: int) -> None:
        """Experts of a turn, on the only GPU, have taken their room."""
        self.line.extend(turn, start, stop, turn.layer if self.per_layer else 0)

    def leave(self, turn: Turn, start: int, stop: int) -> None:
        """Pieces that make room for a turn's have given it up."""
        for at in range(start, stop):
            self.line.unlink(turn.leaving[at])

    def exchange(self, turn: Turn, in_a_row: bool, stays: int) -> None:
        """`leave`, `touch` of who was here, where it says anything, and `come`, all of a turn.

        Args:
            in_a_row: all who leave are the first in the line. stays: who is there behind them.
        """
        line, first = self.line, turn.first
        cache = turn.layer if self.per_layer else 0
        if in_a_row:
            line.cut(cache, stays)
        else:
            self.leave(turn, 0, turn.n_leaving)
        start = turn.n_here
        if self.touches:
            for at in range(start):
                line.unlink(first + turn.experts[at])
            start = 0
        line.extend(turn, start, turn.n, cache)

    def victim(self, piece: Piece, speculative: bool) -> int:
        index = self.line.first[self._cache(piece.index)]
        first = self.pending.layer * self.n_experts  # of the layer whose experts are pending
        while index >= 0:
            if not self.pending.n_left:
                return index
            whole = index if index < self.n_whole else self._whole(index)
            if not (first <= whole < first + self.n_experts and self.pending.tokens[whole - first]):
                return index
            index = self.residency.rows[index].next
        return -1

    def _whole(self, index: int) -> int:
        """The index of the expert of which a piece is a part."""
        piece: Piece = self.residency.pieces.all[index]
        return piece.layer * self.n_experts + piece.expert


class Ranked(Victims):
    """The least rank leaves: looked for among all whole experts each time, since a policy may write at any time."""

    def __init__(self, residency: Residency, pending: PendingExperts, order: Rank) -> None:
        self.residency = residency
        self.pending = pending
        self.order = order
        self.ranks = order.rank
        self.bars = order.bar
        self.per_layer = order.per_layer
        self.by_expert = order.ties == EXPERT
        self.guarded = order.guarded
        self.spares_unused = order.spares_unused
        self.n_whole = len(order.rank)
        self.touches = False
        # Resident whole experts in any order, and where each stands among them.
        self.n_here = 0
        self.homes = np.array([whole.gpu for whole in residency.pieces.all[: self.n_whole]])
        self.resident = ints(self.n_whole)
        self.stands = ints(self.n_whole)

    def placed(self, index: int) -> None:
        if index < self.n_whole:
            self.resident[self.n_here] = index
            self.stands[index] = self.n_here
            self.n_here += 1

    def left(self, index: int) -> None:
        if index < self.n_whole:
            self.n_here -= 1
            last = self.resident[self.n_here]
            self.resident[self.stands[index]] = last
            self.stands[last] = self.stands[index]

    def victim(self, piece: Piece, speculative: bool) -> int:
        best = self._find(piece, speculative) if COMPILED else self._look_up(piece, speculative)
        guarded = speculative and self.guarded and piece.index < self.n_whole  # a part has no rank of its own
        if best >= 0 and guarded and not self.ranks[best] < self.ranks[piece.index]:
            return -1
        return best

    def _find(self, piece: Piece, speculative: bool) -> int:
        """One pass over residents, or over a layer's experts."""
        residency = self.residency
        n_experts = residency.pieces.n_experts
        n_gpus = residency.pieces.n_gpus
        first = piece.layer * n_experts
        pending_from = self.pending.layer * n_experts if self.pending.n_left else -n_experts * 2
        ranks, resident, per_layer = self.ranks, self.resident, self.per_layer
        best = -1
        best_bar = 1
        best_rank = 0.0
        most = _ENDLESS  # above it none is better than the best so far
        n = n_experts if per_layer else self.n_here
        at = -1
        while True:
            at += 1
            if not per_layer:
                at = next_at_most(resident, ranks, at, n, most)  # past nearly all of them
            if at >= n:
                break
            index = first + at if per_layer else resident[at]
            rank = ranks[index]
            if rank > most:
                continue
            if not residency.here[index]:
                continue
            if n_gpus > 1:
                other: Piece = residency.pieces.all[index]
                if other.gpu != piece.gpu:
                    continue
            expert = index - pending_from
            if 0 <= expert < n_experts and self.pending.tokens[expert]:
                continue
            bar = self._bar(index)
            if bar == 1 and not speculative:
                bar = 0
            if bar == 3 or (bar and speculative):
                continue
            if best >= 0:
                if bar > best_bar or (bar == best_bar and rank > best_rank):
                    continue
                if bar == best_bar and rank == best_rank and not self._before(index, best):
                    continue
            best = index
            best_bar = bar
            best_rank = rank
            if bar == 0:
                most = rank
        return best

    def _before(self, index: int, other: int) -> bool:
        """Which of two equal ranks leaves first."""
        if self.by_expert:
            n_experts = self.residency.pieces.n_experts
            if index % n_experts != other % n_experts:
                return index % n_experts < other % n_experts
        return index < other

    def _bar(self, index: int) -> int:
        bar: int = self.bars[index]
        if bar == 0 and self.spares_unused and self.residency.rows[index].unused:
            return 1
        return bar

    def _look_up(self, piece: Piece, speculative: bool) -> int:
        """The same with whole arrays at a time, where a pass in Python would be slow."""
        residency, n_experts, n_gpus = self.residency, self.residency.pieces.n_experts, self.residency.pieces.n_gpus
        there = np.frombuffer(residency.flags(), dtype=np.uint8)[: self.n_whole] != 0
        if self.per_layer:
            inside = np.zeros(self.n_whole, dtype=bool)
            inside[piece.layer * n_experts : (piece.layer + 1) * n_experts] = True
            there &= inside
        if n_gpus > 1:
            there &= self.homes == piece.gpu
        if self.pending.n_left:
            there[[self.pending.layer * n_experts + expert for expert in self.pending.experts()]] = False
        found = np.flatnonzero(there)
        bars = np.asarray(self.bars)[found]
        if self.spares_unused:
            unused = [residency.rows[at].unused != 0 for at in found.tolist()]
            bars = np.maximum(bars, np.where(unused, NOT_FOR_PREFETCH, FREE))
        for allowed in (bars == FREE,) if speculative else (bars <= NOT_FOR_PREFETCH, bars == LAST):
            among = found[allowed]
            if len(among):
                ranks = np.asarray(self.ranks)[among]
                least = among[ranks == ranks.min()]
                return int(least[np.argmin(least % n_experts)]) if self.by_expert else int(least[0])
        return -1


def check_order(order: Order, pieces: Pieces) -> None:
    """Raises IllegalDecision for what is no order of a policy."""
    if not isinstance(order, Order):
        raise IllegalDecision(f"order, got {order!r}: must be a Recency, Insertion or Rank of sim.policy, or None")
    if isinstance(order, Rank):
        n = pieces.n_layers * pieces.n_experts
        for what, numbers, kind in (("rank", order.rank, np.float64), ("bar", order.bar, np.uint8)):
            if not isinstance(numbers, np.ndarray) or numbers.shape != (n,) or numbers.dtype != kind:
                raise IllegalDecision(
                    f"order, got another {what} than {n} of {kind.__name__}: make a Rank({n}), write into its arrays"
                )


def victims_of(order: Order, residency: Residency, pending: PendingExperts) -> Victims:
    """The engine's side of a policy's order. Raises IllegalDecision for what is none."""
    check_order(order, residency.pieces)
    if isinstance(order, Rank):
        return Ranked(residency, pending, order)
    return InTurn(residency, pending, order.per_layer, isinstance(order, Recency))
