"""Lanes as SimPy processes: get the next work, wait for what it waits for, hold the lane, let go on who waits for it.

`Serial` is a lane that serves in order of asking: the CPU pool, the way down to it, the predictor's side lane. `Stream`
does too, and accounts for its time: a GPU's compute stream. `sim.machine.events.copies` has the lane that chooses.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from simpy import Store

from sim.machine.events.clock import Clock, Pending, Steps
from sim.machine.events.flow import Flow
from sim.machine.events.timeline import TimeLine
from sim.machine.lanes import H2D, HOST, cause_of
from sim.machine.runs import Runs
from sim.machine.waiting import Waiting
from sim.policy.tickets import Ticket

if TYPE_CHECKING:
    from sim.machine.lanes import Spans

NOTHING: tuple[Ticket, ...] = ()


class Work(Pending):
    """Work for a lane: what it is, how long it takes alone, and what it waits for.

    It starts at `first_s` at the earliest. Its results are there at `last_s` at the earliest: where an operation is
    several kernels, the last one may be launched late.
    """

    __slots__ = (
        *("after", "booked", "duration_s", "expert", "first_s", "last_s", "layer", "n_bytes", "n_tokens", "op"),
        *("row", "tail_s"),
    )

    def __init__(
        self,
        cause: int,
        op: str,
        layer: int,
        expert: int,
        n_tokens: int,
        first_s: float,
        duration_s: float,
        after: tuple[Ticket, ...] = NOTHING,
        last_s: float = 0.0,
        n_bytes: float = 0.0,
        tail_s: float = 0.0,
    ) -> None:
        super().__init__(cause)
        self.tail_s = tail_s  # of its last kernel
        self.n_bytes = n_bytes  # moved through the memory that its lane draws from
        self.op = op
        self.layer = layer
        self.expert = expert
        self.n_tokens = n_tokens
        self.first_s = first_s
        self.last_s = last_s
        self.duration_s = duration_s
        self.after = after
        self.row = 0  # of `Waiting`, when it was launched
        self.booked = False  # its time is in the stream's `TimeLine`

    def ready(self) -> tuple[float, int]:
        """When the last thing it waits for was there, and what that was; to be asked once all of them have ended."""
        ready_s, cause = self.first_s, HOST
        for ticket in self.after:
            if ticket.end_s > ready_s:
                ready_s, cause = ticket.end_s, ticket.cause
        return ready_s, cause

    def waited_for(self) -> int:
        """The lane of what was there last."""
        ready_s, lane = self.first_s, HOST
        for ticket in self.after:
            if ticket.end_s > ready_s:
                ready_s, lane = ticket.end_s, ticket.lane
        return lane

    def waits_for_a_prefetch(self) -> bool:
        """Whether the copy that it waits for last is speculative."""
        ready_s = self.ready()[0]
        return next((ticket.speculative for ticket in self.after if ticket.end_s == ready_s), False)

    def late_s(self, cause: int, free_s: float) -> float:
        """How much later it is ready than had `cause`, what it waited for last, not been in its way."""
        for ticket in self.after:
            if ticket.cause != cause and ticket.end_s > free_s:
                free_s = ticket.end_s
        return self.ready()[0] - (free_s if cause == HOST else max(free_s, self.first_s))


class Serial:
    """A lane that serves one at a time, in order of asking."""

    def __init__(self, name: str, clock: Clock, spans: Spans | None, runs: Runs) -> None:
        self.name = name
        self.runs = runs
        self.clock = clock
        self.spans = spans
        self.asked = Store(clock)
        self.flow = Flow(clock)
        self.free_s = 0.0
        self.busy_s = 0.0
        self.stretched_s = 0.0  # of it, what contention added
        clock.process(self._serve())

    def ask(self, work: Work) -> Work:
        """Serve it after all that was asked before."""
        self.asked.put(work)
        return work

    def _serve(self) -> Steps:
        clock, flow = self.clock, self.flow
        while True:
            work: Work = yield self.asked.get()
            yield from clock.ends_of(work.after)
            ready_s, _ = work.ready()
            yield from clock.until(ready_s)
            lane = work.waited_for()
            if ready_s > self.free_s and lane != self.runs.number:
                self.runs.begin(ready_s, lane)
            work.lane = self.runs.number
            yield flow.work(work.duration_s, n_bytes=work.n_bytes)
            self.free_s = flow.end_s
            self.busy_s += flow.spent_s
            self.stretched_s += flow.spent_s - work.duration_s
            if self.spans is not None:
                self.spans(self.name, work.op, work.layer, work.expert, work.n_tokens, 0, flow.start_s, flow.end_s)
            work.after = NOTHING  # let go of what it waited for, or tickets would chain through the whole run
            work.end(flow.end_s)


class Stream:
    """A GPU's compute stream: serves in launch order; the gap before an operation is charged to what it waited for."""

    def __init__(self, name: str, clock: Clock, spans: Spans | None, n_layers: int, runs: Runs) -> None:
        self.name = name
        self.runs = runs
        self.clock = clock
        self.spans = spans
        self.waiting = Waiting(n_layers)
        self.launched = Store(clock)
        self.under_way: deque[Work] = deque()  # launched and not over
        self.flow = Flow(clock)
        self.time = TimeLine()
        self.stretched_s = 0.0
        self.looks_down = False  # what it waits for may have waited for a drive
        clock.process(self._serve())

    def launch(self, work: Work) -> Work:
        """Run it after all that was launched before."""
        work.row = self.waiting.row
        work.lane = self.runs.number
        self.under_way.append(work)
        self.launched.put(work)
        return work

    def _serve(self) -> Steps:
        clock, flow = self.clock, self.flow
        while True:
            work: Work = yield self.launched.get()
            yield from clock.ends_of(work.after)
            yield from clock.until(work.ready()[0])
            yield flow.work(work.duration_s, n_bytes=work.n_bytes)
            self.stretched_s += flow.spent_s - work.duration_s
            if not work.booked:
                self._book(work, flow.spent_s, flow.end_s)
            if self.spans is not None:
                self.spans(self.name, work.op, work.layer, work.expert, work.n_tokens, 0, flow.start_s, flow.end_s)
            end_s = max(flow.end_s, work.last_s)
            yield from clock.until(end_s)
            self.under_way.popleft()
            work.after = NOTHING
            work.end(end_s)

    def _book(self, work: Work, spent_s: float, end_s: float) -> None:
        """Account for the gap before it and for its own time."""
        cause = work.ready()[1]
        speculative = cause == H2D and work.waits_for_a_prefetch()
        if work.late_s(cause, self.time.free_s) > spent_s:
            # An expert on another GPU that mostly waited for its copy: whoever waits for it waits for the link.
            # How long that GPU had been idle says nothing: it may just have had nothing to do.
            work.cause, work.speculative = cause, speculative
        ready_s, free_s, lane = work.ready()[0], self.time.free_s, work.waited_for()
        if ready_s > free_s:
            self.runs.begin(ready_s, lane)
        if ready_s > free_s and self.looks_down:
            at = work.row if work.layer < 0 else self.waiting.row_of(work.layer, work.expert, cause)
            self._wait_down(at, cause, speculative, ready_s, lane)
        else:
            self._waited(work, cause, speculative, self.time.gap(ready_s, cause))
        starved_s = self.time.work(spent_s, end_s, work.last_s)
        if starved_s > 0.0:
            self.runs.begin(work.last_s - work.tail_s, HOST)
        self._waited(work, HOST, False, starved_s)
        work.booked = True

    def _waited(self, work: Work, cause: int, speculative: bool, gap_s: float) -> None:
        """Count a wait before it, or in it; what names no layer counts for the one in which it was launched."""
        waiting = self.waiting
        at = work.row if work.layer < 0 else waiting.row_of(work.layer, work.expert, cause)
        waiting.charge(at, cause, speculative, gap_s)

    def book_ahead(self) -> None:
        """Account for what has been launched and waits for nothing that is open, as nothing can slow it any more."""
        for work in self.under_way:
            if any(isinstance(ticket, Pending) and not ticket.over for ticket in work.after):
                return
            if not work.booked:
                start_s = max(work.ready()[0], self.time.free_s)
                self._book(work, work.duration_s, start_s + work.duration_s)

    def _wait_down(self, at: int, cause: int, speculative: bool, time_s: float, lane: int) -> None:
        """It stood still up to then for what ended on a lane: each lane that led to it is charged its own time."""
        charged_s = self.runs.paths.charge(lane, time_s, self.time.free_s)
        for resource, spent_s in enumerate(charged_s):
            if spent_s > 0.0:
                own = cause_of(resource, cause)
                self.time.gaps_s[own] += spent_s
                self.waiting.charge(at, own, speculative, spent_s)
        self.time.free_s = time_s

    def idle_until(self, time_s: float, cause: int, speculative: bool = False, lane: int = -1) -> None:
        """Charge the time up to `time_s` to `cause` (the host's last read, or an arrival), where nothing is left.

        Args:
            lane: on which what was waited for has ended.
        """
        if self.under_way or time_s <= self.time.free_s:
            return
        self.runs.begin(time_s, HOST)  # the host goes on now
        if self.looks_down and lane >= 0:
            self._wait_down(self.waiting.row, cause, speculative, time_s, lane)
        else:
            self.waiting.wait(-1, -1, cause, speculative, self.time.gap(time_s, cause))
