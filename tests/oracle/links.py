"""The copying half of the simulated machine: engines that move pieces up and down, settled in order of time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from oracle.copy_queue import Copy, CopyLane
from oracle.lanes import Spans, Stream
from oracle.protocol import DEMAND, UNKNOWN_S, Ticket

if TYPE_CHECKING:
    from oracle.cost import Cost
    from oracle.pieces import Piece


class SimLinks:
    """Copy engines, and the compute streams that wait for them; `SimMachine` adds the verbs that compute.

    Args:
        cost: prices. n_gpus: compute streams and copy engines. spans: called with every span, or None.
        report_copies: keep completions for `poll`.
    """

    def __init__(self, cost: Cost, n_gpus: int, spans: Spans | None, report_copies: bool) -> None:
        self.cost = cost
        self.now_s = 0.0  # the host's clock
        self.spans = spans
        self.n_gpus = n_gpus
        self.streams = [Stream("gpu" if n_gpus == 1 else f"gpu{g}") for g in range(n_gpus)]
        self.up = [CopyLane("h2d" if n_gpus == 1 else f"h2d{g}") for g in range(n_gpus)]
        self.back = CopyLane("d2h")  # pieces written back; the same engine as `SimMachine.down`, never both in one run
        self.links = list(self.up)  # lanes whose copies are settled together, in order of time
        for stream in self.streams:
            stream.spans = spans
        for up in (*self.up, self.back):
            up.spans = spans
            up.report = report_copies and up is not self.back
            up.on_served = self._progress if n_gpus > 1 else self.streams[0].progress
        self.d2h_bytes = 0
        self.written_back_bytes = 0
        self.n_copy_launches = 0
        self.experts_launched = 0.0  # copies of experts, a part counting as its share

    def copy(self, piece: Piece, priority: int, after: tuple[Ticket, ...]) -> Ticket:
        cost, begun_s = self.cost, self.now_s
        now_s = self._enqueue(piece)
        if self.spans is not None:
            self.spans("host", "launch copy", piece.layer, piece.expert, 0, piece.n_bytes, begun_s, now_s)
        op = "demand" if priority == DEMAND else "prefetch"
        n_bytes = piece.n_bytes
        copy = Copy(op, piece.layer, piece.expert, n_bytes, cost.copy_s(n_bytes), priority, now_s, after)
        copy.piece = piece
        if len(self.links) > 1:
            self._advance()
        self.links[piece.gpu].submit(copy, now_s)
        return copy

    def _enqueue(self, piece: Piece) -> float:
        """The host launches a copy; when it has."""
        frac = piece.stop_frac - piece.start_frac
        self.now_s += self.cost.copy_launch_s if frac == 1.0 else self.cost.part_launch_s(frac)
        self.n_copy_launches += 1
        self.experts_launched += frac
        return self.now_s

    def copy_back(self, piece: Piece, after: tuple[Ticket, ...]) -> Ticket:
        if self.back not in self.links:
            self.links.append(self.back)
        begun_s = self.now_s
        now_s = self._enqueue(piece)
        if self.spans is not None:
            self.spans("host", "launch copy", piece.layer, piece.expert, 0, piece.n_bytes, begun_s, now_s)
        duration_s = self.cost.back_s(piece.n_bytes)
        copy = Copy("write_back", piece.layer, piece.expert, piece.n_bytes, duration_s, DEMAND, now_s, after)
        self.d2h_bytes += piece.n_bytes
        self.written_back_bytes += piece.n_bytes
        self._submit(self.links.index(self.back), copy)
        return copy

    def promote(self, ticket: Ticket) -> bool:
        assert isinstance(ticket, Copy)
        self._advance()
        if ticket.end_s != UNKNOWN_S:
            return False
        for lane in self.up:
            lane.promote(ticket, self.now_s)
        return True

    def cancel(self, ticket: Ticket) -> bool:
        assert isinstance(ticket, Copy)
        if ticket.end_s != UNKNOWN_S:
            return False
        self._advance()
        for lane in self.up:  # noqa: SIM110 - asked often, and a generator costs as much as the question
            if lane.cancel(ticket, self.now_s):
                return True
        return False

    def poll(self) -> list[Piece]:
        done: list[Copy] = []
        self._advance()
        for lane in self.up:
            done += lane.completions(self.now_s)
        if self.n_gpus > 1:
            done.sort(key=lambda copy: copy.end_s)
        return [copy.piece for copy in done if copy.piece is not None]

    def ended(self, ticket: Ticket) -> bool:
        """True when a copy has completed by the host's clock."""
        end_s = ticket.end_s
        if end_s == UNKNOWN_S:
            if len(self.links) == 1 and self.up[0].free_s > self.now_s:  # Correction: not where it is free just now
                return False  # busy until now with what started before
            self._advance()
            end_s = ticket.end_s
        return UNKNOWN_S < end_s <= self.now_s

    def quiet_s(self, tickets: Iterable[Ticket]) -> float:
        """Until when none of these copies can end, whatever is asked meanwhile."""
        until_s = math.inf
        for ticket in tickets:
            end_s = ticket.end_s
            if end_s == UNKNOWN_S:
                if len(self.links) > 1:
                    return 0.0
                end_s = self.up[0].free_s  # it will start after what has been started
            if end_s < until_s:
                until_s = end_s
        return until_s

    def drain(self) -> None:
        while self._settle_next():
            pass

    @property
    def h2d_bytes(self) -> int:
        """Bytes copied to the GPUs."""
        return sum(up.copied_bytes for up in self.up)

    def _submit(self, link: int, copy: Copy) -> None:
        if len(self.links) > 1:
            self._advance()
        self.links[link].submit(copy, self.now_s)

    def _advance(self) -> None:
        """Settle every copy that starts before the host's clock; over several links in the order of their starts."""
        if len(self.links) == 1:
            self.up[0].advance(self.now_s)
            return
        while (start := self._next_start()) is not None and start[:2] <= (self.now_s, DEMAND):
            self.links[start[2]].settle_next()

    def _next_start(self) -> tuple[float, int, int] | None:
        """(when, with which priority, on which link) the next copy starts."""
        starts = [(lane.next_start(), index) for index, lane in enumerate(self.links)]
        # Correction: of several that start together a demand is first, on whatever link.
        return min(((*start, index) for start, index in starts if start is not None), default=None)

    def _settle_next(self) -> bool:
        start = self._next_start()
        return start is not None and self.links[start[2]].settle_next()

    def _progress(self) -> None:
        """Work on any stream may wait for work on any other, so go round until nothing more can be placed."""
        waiting, before = sum(len(stream.pending) for stream in self.streams), -1
        while waiting and waiting != before:
            for stream in reversed(self.streams):  # GPU 0's mostly waits for the others'
                if stream.pending:
                    stream.progress()
            before, waiting = waiting, sum(len(stream.pending) for stream in self.streams)

    def _settle(self, ticket: Ticket) -> None:
        """The host is blocked: let copies start, in time order, until the ticket's end is known."""
        while ticket.end_s == UNKNOWN_S:
            if not self._settle_next():
                raise RuntimeError("deadlock: the host waits for work that waits for no copy (a bug in the engine)")
