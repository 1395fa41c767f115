"""Copy engines as arithmetic: which copy is served next, and when is that settled?

The host is the only submitter, so a copy's start is settled as soon as nothing the host may still say can overtake
it. Demand copies settle at once; speculative ones settle when the host's clock has passed their start, or when
somebody has to wait for them. No event queue is needed for that; `sim/DESIGN.md` gives the argument.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.machine.copies import Copy, copy_of
from sim.machine.lanes import H2D, HOST, OWED, Spans
from sim.machine.meter import Seconds
from sim.machine.runs import Paths, Runs
from sim.machine.shared_memory import HostMemory
from sim.machine.stream import Stream, progress
from sim.policy.tickets import Ticket

if TYPE_CHECKING:
    from sim.policy.pieces import Piece

_HOST = HOST  # a machine integer where this is compiled


class CopyQueue:
    """One copy engine, one direction: serves one copy at a time, demand before speculative, then in order of asking.

    A copy in flight is never aborted. Work is settled lazily, in time order.

    Args:
        streams: compute streams, of which some may wait for what is copied. stream_lane: the number of the one that
            computed with what rooms held which are given as free from a time on.
    """

    def __init__(self, name: str, streams: list[Stream], runs: Runs | None = None, stream_lane: int = 0) -> None:
        self.name = name
        self.runs = Paths().of(H2D, 0) if runs is None else runs
        self.stream_lane = stream_lane
        self.streams = streams
        self.stream = streams[0]
        self.alone = len(streams) == 1
        self.free_s = 0.0
        self.lag_s = 0.0  # from the end of a copy on this lane until it is there; the next one begins meanwhile
        self.seconds = Seconds()
        self.n_copies = 0
        self.copied_bytes = 0
        self.queued: list[Any] = []  # the first `n_queued` in order of asking
        self.n_queued = 0
        self.n_demanded = 0  # of them
        self.finished: list[Copy] = []  # settled, not yet reported by `completions`
        self.spans: Spans | None = None
        self.start_s = 0.0  # of the copy that `_next` has found
        self.starts_demand = False  # whether that is one
        self.last_bytes = -1  # of the piece copied last, which mostly is as large as the next
        self.last_s = 0.0
        self.last_length = 0
        self.report = False  # keep `finished` (only where somebody polls)
        self.slows: list[Stream] = []  # whose operations take longer beside its copies
        self.n_slows = 0
        self.back = False  # it copies from the GPUs
        self.memory: HostMemory | None = None  # that it shares with experts on the CPU and reads, as this lane of it
        self.lane = 0
        self.slowed_s = 0.0  # what sharing added to its copies

    @property
    def busy_s(self) -> float:
        """Seconds spent on copies."""
        return self.seconds.total_s() + self.slowed_s

    def runs_s(self, start_s: float, duration_s: float, n_bytes: float) -> float:
        """A copy starts then: when it ends, beside what shares memory with it."""
        end_s = start_s + duration_s
        if self.memory is not None:
            shared_s = self.memory.place(self.lane, start_s, duration_s, n_bytes / duration_s if duration_s else 0.0)
            self.slowed_s += shared_s - end_s
            end_s = shared_s
            self.memory.delay(start_s, end_s)
        for at in range(self.n_slows):
            stream: Stream = self.slows[at]
            stream.copies(start_s, end_s, self.back)
        return end_s

    def pay(self) -> None:
        """It is free later, by what it owes to those it shared memory with."""
        if self.memory is not None:
            paid_s = self.memory.paid_s(self.lane, self.free_s)
            if paid_s > self.free_s:
                self.slowed_s += paid_s - self.free_s
                if self.spans is not None:
                    self.spans(self.name, OWED, -1, -1, 0, 0, self.free_s, paid_s)
                self.free_s = paid_s

    def _paid_s(self, start_s: float) -> float:
        """When what was to start then does: above a drive a lane pays what it owes first, since reads come unasked."""
        if self.memory is not None and self.memory.has_drive:
            self.pay()
            if start_s < self.free_s:
                return self.free_s
        return start_s

    def serve_now(self, piece: Piece, start_s: float, duration_s: float, length: int) -> None:
        """Copy a demanded piece that nothing can overtake: it starts at `start_s`, which is now unless it is busy."""
        start_s = self._paid_s(start_s)
        if start_s > self.free_s:
            self.runs.begin(start_s, _HOST)
        self.free_s = self.runs_s(start_s, duration_s, piece.n_bytes)
        self.seconds.meter.add(length, 1)
        self.n_copies += 1
        self.copied_bytes += piece.n_bytes
        if self.spans is not None:
            self.spans(self.name, "demand", piece.layer, piece.expert, 0, piece.n_bytes, start_s, self.free_s)

    def served(self, n: int, free_s: float) -> None:
        """Count `n` copies like the last one, which somebody has settled up to `free_s`."""
        self.free_s = free_s
        self.seconds.meter.add(self.last_length, n)
        self.n_copies += n
        self.copied_bytes += n * self.last_bytes

    def demand(
        self, piece: Piece, duration_s: float, length: int, now_s: float, ready_s: float, after: tuple[Ticket, ...]
    ) -> Copy | None:
        """Take a copy that somebody waits for, at host time `now_s`.

        Args:
            length: place of `duration_s` in `seconds.meter`. ready_s: no sooner than this; after: nor than these end.

        Returns: None when it is settled, and ends at `free_s`.
        """
        if self.n_queued:
            self.advance(now_s)
        if ready_s < now_s:
            ready_s = now_s
        if not after and not self.n_demanded and not self.report and (ready_s <= now_s or ready_s <= self.free_s):
            self.serve_now(piece, ready_s if ready_s > self.free_s else self.free_s, duration_s, length)
            if not self.alone:
                progress(self.streams)
            elif self.stream.n_pending:
                self.stream.progress()
            return None
        copy = copy_of(piece, "demand", duration_s, length, True, ready_s, after)
        if ready_s > now_s:
            copy.submit_lane = self.stream_lane
        self.submit(copy, now_s)
        return copy

    def submit(self, copy: Copy, now_s: float) -> None:
        """Take a copy at host time `now_s`; settle it at once when nothing can overtake it."""
        if self.n_queued:
            self.advance(now_s)
        if not copy.demanded:
            self._queue(copy)
            return
        if self.n_demanded:
            self._queue(copy)
            self._settle_demand(now_s)
            return
        ready_s = copy.ready_s()
        if ready_s < 0.0 or (ready_s > now_s and ready_s > self.free_s):
            self._queue(copy)
        else:
            self._serve(copy, ready_s if ready_s > self.free_s else self.free_s)

    def _queue(self, copy: Copy) -> None:
        if self.n_queued == len(self.queued):
            self.queued.append(copy)
        else:
            self.queued[self.n_queued] = copy
        self.n_queued += 1
        self.n_demanded += copy.demanded

    def _unqueue(self, copy: Copy) -> None:
        at = 0
        while self.queued[at] is not copy:
            at += 1
        self.n_queued -= 1
        self.n_demanded -= copy.demanded
        while at < self.n_queued:
            self.queued[at] = self.queued[at + 1]
            at += 1
        self.queued[at] = None

    def _holds(self, copy: Copy) -> bool:
        for at in range(self.n_queued):  # noqa: SIM110 - asked often, and a generator costs as much as the question
            if self.queued[at] is copy:
                return True
        return False

    def _settle_demand(self, now_s: float) -> None:
        """Settle queued demand copies in the order they will run, as far as no later demand can precede them."""
        while True:
            at_s = max(self.free_s, now_s)
            best: Copy | None = None
            for at in range(self.n_queued):
                copy: Copy = self.queued[at]
                if copy.demanded:
                    ready_s = copy.ready_s()
                    if ready_s < 0.0:
                        return  # asked earlier, and may be ready first: leave it to the order of time
                    if ready_s <= at_s:
                        best = copy
                        break
            if best is None:
                return
            self._unqueue(best)
            self._serve(best, max(self.free_s, best.ready_s()))

    def advance(self, now_s: float) -> None:
        """Settle every copy that starts before `now_s`, and demands at it: speculation can still be overtaken then."""
        while self.n_queued and self.free_s <= now_s:
            best = self._next()
            if best is None or self.start_s > now_s or (self.start_s == now_s and not best.demanded):
                return
            self._unqueue(best)
            self._serve(best, self.start_s)

    def settle_next(self) -> bool:
        """Settle the next copy whatever the host's clock (the host is blocked); False when none can start."""
        best = self._next()
        if best is None:
            return False
        self._unqueue(best)
        self._serve(best, self.start_s)
        return True

    def next_start_s(self) -> float:
        """When the next queued copy would start, given what is queued now; UNKNOWN_S when none can."""
        return -1.0 if self._next() is None else self.start_s

    def _next(self) -> Copy | None:
        """The next copy to serve, at `start_s`: at the earliest time anything is ready, the best of what is ready."""
        best: Copy | None = None
        if self.n_queued == 1:
            best = self.queued[0]
            ready_s = best.ready_s()
            if ready_s < 0.0:
                return None
            self.start_s = ready_s if ready_s > self.free_s else self.free_s
            self.starts_demand = best.demanded
            return best
        earliest_s = -1.0
        for at in range(self.n_queued):
            copy: Copy = self.queued[at]
            ready_s = copy.ready_s()
            if ready_s >= 0.0 and (earliest_s < 0.0 or ready_s < earliest_s):
                earliest_s = ready_s
        if earliest_s < 0.0:
            return None
        at_s = earliest_s if earliest_s > self.free_s else self.free_s
        for at in range(self.n_queued):
            copy = self.queued[at]
            if best is None or (copy.demanded and not best.demanded):
                ready_s = copy.ready_s()
                if 0.0 <= ready_s <= at_s:
                    best = copy
        self.start_s = at_s
        self.starts_demand = best is not None and best.demanded
        return best

    def _serve(self, copy: Copy, start_s: float) -> None:
        start_s = self._paid_s(start_s)
        if start_s > self.free_s:
            self.runs.begin(start_s, copy.waited_for())
        copy.lane = self.runs.number
        if copy.carries and start_s > self.free_s:
            ticket: Ticket = copy.after[0]
            copy.cause = ticket.cause
            copy.speculative = ticket.speculative
        copy.start_s = start_s
        self.free_s = self.runs_s(start_s, copy.duration_s, copy.n_bytes)
        copy.end_s = self.free_s + self.lag_s
        copy.after = ()  # settled: let go of what it waited for, or tickets would chain through the whole run
        self.seconds.meter.add(copy.length, 1)
        self.n_copies += 1
        self.copied_bytes += copy.n_bytes
        if self.report:
            self.finished.append(copy)
        if self.spans is not None:
            self.spans(self.name, copy.op, copy.layer, copy.expert, 0, copy.n_bytes, start_s, self.free_s)
        if not self.alone:
            progress(self.streams)
        elif self.stream.n_pending:
            self.stream.progress()

    def cancel(self, copy: Copy, now_s: float) -> bool:
        """Withdraw a speculative copy that has not started by `now_s`; a demand is a commitment."""
        self.advance(now_s)
        if copy.demanded or not self._holds(copy):
            return False
        self._unqueue(copy)
        copy.cancelled = True
        copy.end_s = now_s  # nothing that was to follow it waits any more
        copy.lane = _HOST
        copy.after = ()
        progress(self.streams)
        return True

    def promote(self, copy: Copy, now_s: float) -> None:
        """Turn a queued speculative copy into a demand copy asked for now."""
        self.advance(now_s)
        if not copy.demanded and self._holds(copy):
            self._unqueue(copy)
            copy.demanded = True
            self._queue(copy)
            self._settle_demand(now_s)

    def completions(self, now_s: float) -> list[Copy]:
        """Copies ended by `now_s`, in order of completion, each once."""
        self.advance(now_s)
        n = 0
        for copy in self.finished:
            if copy.end_s > now_s:
                break
            n += 1
        done = self.finished[:n]
        if n:
            del self.finished[:n]
        return done
