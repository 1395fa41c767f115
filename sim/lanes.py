"""Lanes as arithmetic: when does each piece of work start and end, given order, readiness and priorities?

The host is the only submitter, so a copy's start is settled as soon as nothing the host may still say can overtake
it. Demand copies settle at once; speculative ones settle when the host's clock has passed their start, or when
somebody has to wait for them. No event queue is needed for that; `sim/DESIGN.md` gives the argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from sim.machine import DEMAND, UNKNOWN_S, Ticket

if TYPE_CHECKING:
    from sim.pieces import Piece

# Causes: what a waiting compute stream waits for. Indices into `Composition.parts_s`.
GPU, H2D, HOST, CPU, SIDE, IDLE = range(6)
CAUSES = ("gpu", "h2d", "host", "cpu", "predictor", "idle")

Spans = Callable[[str, str, int, int, int, int, float, float], None]


class Copy(Ticket):
    """A copy on a lane: what it moves and when it may start."""

    __slots__ = ("after", "cancelled", "duration_s", "expert", "layer", "n_bytes", "op", "piece", "priority",
                 "start_s", "submit_s")  # fmt: skip

    def __init__(
        self, op: str, layer: int, expert: int, n_bytes: int, duration_s: float, priority: int, submit_s: float,
        after: tuple[Ticket, ...],
    ) -> None:  # fmt: skip
        super().__init__(UNKNOWN_S, H2D)
        self.op = op
        self.layer = layer
        self.expert = expert
        self.n_bytes = n_bytes
        self.duration_s = duration_s
        self.priority = priority
        self.submit_s = submit_s
        self.after = after
        self.start_s = UNKNOWN_S
        self.cancelled = False
        self.piece: Piece | None = None  # None: activations

    def ready_s(self) -> float:
        """Earliest possible start, or UNKNOWN_S while something before it is unsettled."""
        ready_s = self.submit_s
        for ticket in self.after:
            if ticket.end_s == UNKNOWN_S:
                return UNKNOWN_S
            if ticket.end_s > ready_s:
                ready_s = ticket.end_s
        return ready_s


def add_up(uses: dict[float, int], busy_s: float) -> float:
    """`busy_s` and what has been counted since by duration; counts are cheaper than a sum per operation."""
    for duration_s, n in uses.items():
        busy_s += n * duration_s
    uses.clear()
    return busy_s


class CopyLane:
    """One copy engine, one direction: serves one copy at a time, demand before speculative, then in order of asking.

    A copy in flight is never aborted. Work is settled lazily, in time order.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.free_s = 0.0
        self.uses: dict[float, int] = {}  # copies not added up yet, by duration
        self._busy_s = 0.0
        self.n_copies = 0
        self.copied_bytes = 0
        self.queue: list[Copy] = []  # in order of asking
        self.finished: deque[Copy] = deque()  # settled, not yet reported by `completions`
        self.spans: Spans | None = None
        self.report = False  # keep `finished` (only where somebody polls)
        self.on_served: Callable[[], None] | None = None  # set while a compute stream waits for an unsettled copy

    @property
    def busy_s(self) -> float:
        """Seconds spent on copies."""
        self._busy_s = add_up(self.uses, self._busy_s)
        return self._busy_s

    def submit(self, copy: Copy, now_s: float) -> None:
        """Take a copy at host time `now_s`; settle it at once when nothing can overtake it."""
        queue = self.queue
        if queue:
            self.advance(now_s)
        if copy.priority == DEMAND and not queue:
            ready_s = copy.submit_s if not copy.after else copy.ready_s()
            if ready_s != UNKNOWN_S and (ready_s <= now_s or ready_s <= self.free_s):
                self._serve(copy, ready_s)
                return
        queue.append(copy)
        if copy.priority == DEMAND:
            self._settle_demand(now_s)

    def _settle_demand(self, now_s: float) -> None:
        """Settle queued demand copies in the order they will run, as far as no later demand can precede them."""
        while True:
            at_s = max(self.free_s, now_s)
            best: Copy | None = None
            for copy in self.queue:
                if copy.priority == DEMAND:
                    ready_s = copy.ready_s()
                    if ready_s == UNKNOWN_S:
                        return  # asked earlier, and may be ready first: leave it to the order of time
                    if ready_s <= at_s:
                        best = copy
                        break
            if best is None:
                return
            self.queue.remove(best)
            self._serve(best, best.ready_s())

    def advance(self, now_s: float) -> None:
        """Settle every copy that starts before `now_s`; one starting exactly then can still be overtaken."""
        while self.queue and self.free_s < now_s:
            start = self._next_start()
            if start is None or start[0] >= now_s:
                return
            self.queue.remove(start[1])
            self._serve(start[1], start[1].ready_s())

    def settle_next(self) -> bool:
        """Settle the next copy whatever the host's clock (the host is blocked); False when none can start."""
        start = self._next_start()
        if start is None:
            return False
        self.queue.remove(start[1])
        self._serve(start[1], start[1].ready_s())
        return True

    def next_start_s(self) -> float | None:
        """When the next queued copy would start, given what is queued now; None when none can."""
        start = self._next_start()
        return None if start is None else start[0]

    def _next_start(self) -> tuple[float, Copy] | None:
        """(start, copy) of the next service: at the earliest time anything is ready, the best of what is ready."""
        earliest_s = UNKNOWN_S
        ready: list[tuple[float, Copy]] = []
        for copy in self.queue:
            ready_s = copy.ready_s()
            if ready_s == UNKNOWN_S:
                continue
            ready.append((ready_s, copy))
            if earliest_s == UNKNOWN_S or ready_s < earliest_s:
                earliest_s = ready_s
        if not ready:
            return None
        at_s = max(self.free_s, earliest_s)
        best: Copy | None = None
        for ready_s, copy in ready:
            if ready_s <= at_s and (best is None or copy.priority < best.priority):
                best = copy
        assert best is not None
        return at_s, best

    def _serve(self, copy: Copy, ready_s: float) -> None:
        start_s = ready_s if ready_s > self.free_s else self.free_s
        copy.start_s = start_s
        copy.end_s = self.free_s = start_s + copy.duration_s
        copy.after = ()  # settled: let go of what it waited for, or tickets would chain through the whole run
        self.uses[copy.duration_s] = self.uses.get(copy.duration_s, 0) + 1
        self.n_copies += 1
        self.copied_bytes += copy.n_bytes
        if self.report:
            self.finished.append(copy)
        if self.spans is not None:
            self.spans(self.name, copy.op, copy.layer, copy.expert, 0, copy.n_bytes, start_s, copy.end_s)
        if self.on_served is not None:
            self.on_served()

    def cancel(self, copy: Copy, now_s: float) -> bool:
        """Withdraw a speculative copy that has not started by `now_s`; a demand is a commitment."""
        self.advance(now_s)
        if copy.priority == DEMAND or copy not in self.queue:
            return False
        self.queue.remove(copy)
        copy.cancelled = True
        copy.end_s = now_s  # nothing that was to follow it waits any more
        copy.after = ()
        return True

    def promote(self, copy: Copy, now_s: float) -> None:
        """Turn a queued speculative copy into a demand copy asked for now."""
        self.advance(now_s)
        if copy in self.queue and copy.priority != DEMAND:
            self.queue.remove(copy)
            copy.priority = DEMAND
            self.queue.append(copy)
            self._settle_demand(now_s)

    def completions(self, now_s: float) -> list[Copy]:
        """Copies ended by `now_s`, in order of completion, each once."""
        self.advance(now_s)
        done = []
        while self.finished and self.finished[0].end_s <= now_s:
            done.append(self.finished.popleft())
        return done


class Launched(Ticket):
    """Work launched on a compute stream whose start is not settled yet."""

    __slots__ = ("after", "duration_s", "expert", "first_s", "last_s", "layer", "n_tokens", "op")

    def __init__(
        self, op: str, layer: int, expert: int, n_tokens: int, first_s: float, last_s: float, duration_s: float,
        after: tuple[Ticket, ...],
    ) -> None:  # fmt: skip
        super().__init__(UNKNOWN_S, GPU)
        self.op = op
        self.layer = layer
        self.expert = expert
        self.n_tokens = n_tokens
        self.first_s = first_s
        self.last_s = last_s
        self.duration_s = duration_s
        self.after = after


class Stream:
    """A GPU's compute stream: serves in launch order; an operation waits for its host launch and its tickets.

    The gap before an operation is charged to whatever it waited for last.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.free_s = 0.0
        self.gaps_s = [0.0] * len(CAUSES)  # waiting, by the cause named by the index
        self.uses: dict[float, int] = {}  # operations not added up yet, by duration
        self._busy_s = 0.0
        self.blame = GPU  # what a stream that waits for the operation placed last is really waiting for
        self.pending: deque[Launched] = deque()
        self.spans: Spans | None = None

    @property
    def busy_s(self) -> float:
        """Seconds spent on operations."""
        self._busy_s = add_up(self.uses, self._busy_s)
        return self._busy_s

    @property
    def parts_s(self) -> list[float]:
        """A partition of the stream's whole timeline: busy, or waiting for the cause named by the index."""
        parts_s = list(self.gaps_s)
        parts_s[GPU] += self.busy_s  # waiting for another GPU's result counts as GPU time too
        return parts_s

    def run(
        self, op: str, layer: int, expert: int, n_tokens: int, first_s: float, last_s: float, duration_s: float,
        after: tuple[Ticket, ...],
    ) -> Ticket:  # fmt: skip
        """Launch work whose first kernel reaches the GPU at `first_s` and whose last one ends at `last_s` at best."""
        if self.pending:
            work = Launched(op, layer, expert, n_tokens, first_s, last_s, duration_s, after)
            self.pending.append(work)
            return work
        start_s, cause = first_s, HOST
        for ticket in after:
            end_s = ticket.end_s
            if end_s == UNKNOWN_S:
                work = Launched(op, layer, expert, n_tokens, first_s, last_s, duration_s, after)
                self.pending.append(work)
                return work
            if end_s > start_s:
                start_s, cause = end_s, ticket.cause
        end_s = self._place(op, layer, expert, n_tokens, start_s, cause, last_s, duration_s)
        return Ticket(end_s, self.blame)

    def _place(
        self, op: str, layer: int, expert: int, n_tokens: int, start_s: float, cause: int, last_s: float,
        duration_s: float,
    ) -> float:  # fmt: skip
        free_s = self.free_s
        self.blame = GPU
        if start_s > free_s:
            self.gaps_s[cause] += start_s - free_s
            if start_s - free_s > duration_s:
                # An expert on another GPU that mostly waited for its copy: whoever waits for it waits for the link.
                self.blame = cause
        else:
            start_s = free_s
        end_s = start_s + duration_s
        self.uses[duration_s] = self.uses.get(duration_s, 0) + 1
        if self.spans is not None:
            self.spans(self.name, op, layer, expert, n_tokens, 0, start_s, end_s)
        if last_s > end_s:
            # Kernels shorter than their launches: the stream starves between them.
            self.gaps_s[HOST] += last_s - end_s
            end_s = last_s
        self.free_s = end_s
        return end_s

    def progress(self) -> bool:
        """Settle pending work whose tickets have settled; True when none is left pending."""
        pending = self.pending
        while pending:
            work = pending[0]
            start_s, cause = work.first_s, HOST
            for ticket in work.after:
                if ticket.end_s == UNKNOWN_S:
                    return False
                if ticket.end_s > start_s:
                    start_s, cause = ticket.end_s, ticket.cause
            pending.popleft()
            work.end_s = self._place(
                work.op, work.layer, work.expert, work.n_tokens, start_s, cause, work.last_s, work.duration_s
            )
            work.cause = self.blame
            work.after = ()
        return True

    def idle_until(self, time_s: float, cause: int) -> None:
        """Charge the time up to `time_s` to `cause` (the host's last read, or waiting for an arrival)."""
        if time_s > self.free_s:
            self.gaps_s[cause] += time_s - self.free_s
            self.free_s = time_s


class SerialLane:
    """A lane that serves in order of asking: the CPU pool, the predictor's side lane."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.free_s = 0.0
        self.busy_s = 0.0
        self.spans: Spans | None = None

    def use(self, op: str, layer: int, expert: int, n_tokens: int, ready_s: float, duration_s: float) -> float:
        """Serve next; return the end."""
        start_s = ready_s if ready_s > self.free_s else self.free_s
        self.free_s = start_s + duration_s
        self.busy_s += duration_s
        if self.spans is not None:
            self.spans(self.name, op, layer, expert, n_tokens, 0, start_s, self.free_s)
        return self.free_s
