"""A policy's own queue of speculative copies that have not taken room yet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sim.base.errors import IllegalDecision
from sim.base.flat import COMPILED, floats, ints, longer_floats, longer_ints, places
from sim.engine.by_expert import ByExpert
from sim.engine.flying import Flying
from sim.engine.residency import Residency
from sim.policy.decisions import Prefetch
from sim.policy.pieces import Piece
from sim.policy.tickets import Ticket, all_tickets
from sim.policy.wishes import Wishes

if TYPE_CHECKING:
    from sim.policy.decisions import Wanted


class PrefetchQueue:
    """Largest priority first, ties in order of asking; asking again replaces the priority.

    Every link has a line of its own, so that what waits for a busy link holds up nothing that another could carry. A
    line is a stretch of one array of indices of pieces, the next one to go last.
    """

    def __init__(self, residency: Residency, by_expert: ByExpert | None = None) -> None:
        n = residency.n_known
        pieces = residency.pieces
        self.by_expert = ByExpert(pieces.n_layers, pieces.n_experts) if by_expert is None else by_expert
        self.residency = residency
        self.n_waiting = 0
        self.n_links = residency.n_gpus
        self.n_known = n  # pieces, and room in each line
        self.lines = places(self.n_links * n)
        self.n_in = ints(self.n_links)  # each line
        self.waits = bytearray(n)
        self.priority = floats(n)
        self.asked = ints(n)  # how many were asked for before
        self.after: list[tuple[Ticket, ...]] = [()] * n
        self.n_asked = 0

    def push(self, piece: Piece, priority: float, after: tuple[Ticket, ...]) -> None:
        if self._awaits(piece):
            self._leave(piece)
        self._note(piece, priority, after)
        self._insert(piece)

    def replace(self, wanted: Iterable[Wanted]) -> None:
        """Drop all and push these instead, except what is resident."""
        self.clear()
        for one in wanted:
            if type(one) is Prefetch:
                ask: Prefetch = one
                named, priority, after = ask.piece, ask.priority, ask.after
            else:
                named, priority, after = one
            piece = self.residency.known(named)
            if after:
                all_tickets(after)
            self.by_expert.predicted(piece)
            if not self.residency.holds(piece):
                if self._awaits(piece):
                    self._sort()
                    self._leave(piece)
                self._join(piece, priority, after)
        self._sort()

    def take(self, wishes: Wishes, start: int, stop: int, fresh: int, after: tuple[Ticket, ...], most: int) -> None:
        """The same with wishes `start` to `stop`, at most so many; from `fresh` on they wait for `after`."""
        self.clear()
        n_pieces = len(self.residency.pieces.all)
        for at in range(start, stop):
            index = wishes.indices[at]
            if index < 0 or index >= n_pieces:
                raise IllegalDecision(f"RequeueFrom, got piece index {index}: there are {n_pieces}; name a Piece.index")
            piece: Piece = self.residency.pieces.all[index]
            self.by_expert.predicted(piece)
            if not (self.residency.holds(piece) or self._awaits(piece)):
                self._join(piece, wishes.priorities[at], after if at >= fresh else ())
                if self.n_waiting == most:
                    break
        self._sort()

    def _join(self, piece: Piece, priority: float, after: tuple[Ticket, ...]) -> None:
        """Compiled, every newcomer is put in its place; else all of them together, by `_sort`."""
        self._note(piece, priority, after)
        if COMPILED:
            self._insert(piece)
        else:
            self.lines[piece.gpu * self.n_known + self.n_in[piece.gpu]] = piece.index
            self.n_in[piece.gpu] += 1

    def _sort(self) -> None:
        if not COMPILED:
            for link in range(self.n_links):
                here = slice(link * self.n_known, link * self.n_known + self.n_in[link])
                line = list(self.lines[here])
                line.sort(key=self.asked.__getitem__, reverse=True)
                line.sort(key=self.priority.__getitem__)  # stable: of equals, who was asked for last stands first
                self.lines[here] = line

    def _note(self, piece: Piece, priority: float, after: tuple[Ticket, ...]) -> None:
        """Write down a piece that is to wait."""
        index = piece.index
        value = float(priority)
        if value != value:
            raise IllegalDecision(f"Prefetch of {piece}, got priority {priority!r}: must be a number")
        if index >= self.n_known:
            self._grow()
        self.n_asked += 1
        self.n_waiting += 1
        self.waits[index] = 1
        self.priority[index] = value
        self.asked[index] = self.n_asked
        self.after[index] = after

    def _insert(self, piece: Piece) -> None:
        """Put a piece in its place in its line."""
        lines = self.lines
        place = self._place(piece)
        at = piece.gpu * self.n_known + self.n_in[piece.gpu]
        self.n_in[piece.gpu] += 1
        while at > place:
            lines[at] = lines[at - 1]
            at -= 1
        lines[at] = piece.index

    def _place(self, piece: Piece) -> int:
        """Where in its line a piece stands, or belongs: behind lower priorities, and equal ones asked for later."""
        lines, index = self.lines, piece.index
        priority = self.priority[index]
        asked = self.asked[index]
        low = piece.gpu * self.n_known
        high = low + self.n_in[piece.gpu]
        while low < high:
            middle = (low + high) // 2
            other = lines[middle]
            if self.priority[other] < priority or (self.priority[other] == priority and self.asked[other] > asked):
                low = middle + 1
            else:
                high = middle
        return low

    def pop(self, link: int = 0) -> Piece:
        """The best piece that waits for a link, of which one does. `after` says what it waits for."""
        self.n_in[link] -= 1
        index = self.lines[link * self.n_known + self.n_in[link]]
        self.waits[index] = 0
        self.n_waiting -= 1
        piece: Piece = self.residency.pieces.all[index]
        return piece

    def best(self, flying: Flying, depth: int) -> int:
        """Of the links on which fewer copies fly the one that the best waiting piece is for; -1 where nothing waits."""
        found = -1
        first = -1
        for link in range(flying.n_links):
            if self.n_in[link] and flying.n[link] < depth:
                index = self.lines[link * self.n_known + self.n_in[link] - 1]
                if (
                    first < 0
                    or self.priority[index] > self.priority[first]
                    or (self.priority[index] == self.priority[first] and self.asked[index] < self.asked[first])
                ):
                    found = link
                    first = index
        return found

    def remove(self, piece: Piece) -> bool:
        """Withdraw one piece; True when it was waiting."""
        if not self._awaits(piece):
            return False
        self._leave(piece)
        return True

    def _awaits(self, piece: Piece) -> bool:
        return piece.index < self.n_known and self.waits[piece.index] != 0

    def _leave(self, piece: Piece) -> None:
        lines = self.lines
        place = self._place(piece)
        self.n_in[piece.gpu] -= 1
        stop = piece.gpu * self.n_known + self.n_in[piece.gpu]
        for at in range(place, stop):
            lines[at] = lines[at + 1]
        self.waits[piece.index] = 0
        self.n_waiting -= 1

    def clear(self) -> None:
        """Withdraw all."""
        if self.n_waiting:
            for link in range(self.n_links):
                first = link * self.n_known
                for at in range(first, first + self.n_in[link]):
                    self.waits[self.lines[at]] = 0
                self.n_in[link] = 0
            self.n_waiting = 0

    def drop(self, up_to_layer: int) -> None:
        """Withdraw those aimed at layers up to `up_to_layer`."""
        for piece in self.pieces():
            if piece.layer <= up_to_layer:
                self._leave(piece)

    def pieces(self) -> list[Piece]:
        """Waiting pieces, best first."""
        waiting = []
        for link in range(self.n_links):
            for at in range(link * self.n_known, link * self.n_known + self.n_in[link]):
                index = self.lines[at]
                waiting.append((-self.priority[index], self.asked[index], index))
        waiting.sort()
        return [self.residency.pieces.all[one[2]] for one in waiting]

    def _grow(self) -> None:
        """Take in pieces that have been made since."""
        n = max(len(self.residency.pieces.all), 2 * self.n_known)
        more = n - self.n_known
        self.waits = bytearray(self.waits) + bytearray(more)
        self.priority = longer_floats(self.priority, n)
        self.asked = longer_ints(self.asked, n)
        self.after.extend([()] * more)
        lines = places(self.n_links * n)
        for link in range(self.n_links):
            for at in range(self.n_in[link]):
                lines[link * n + at] = self.lines[link * self.n_known + at]
        self.lines = lines
        self.n_known = n
