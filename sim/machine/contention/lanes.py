"""The lanes of `sim.machine.lanes` under contention: the same order of service, but ends that move while work runs."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from functools import partial

from simpy.events import Event, EventPriority

from sim.machine.contention.clock import ENDS, STARTS, Clock, Flow
from sim.machine.copy_queue import Copy, CopyLane
from sim.machine.lanes import CPU, HOST, Launched, SerialLane, Stream, waited_s
from sim.machine.protocol import DEMAND, Ticket


class Work(Launched):
    """Launched work, how long its lane stood still before it, for which cause, and how late that cause alone made it.

    Its results are there at `floor_s` at the earliest: its last kernel may be launched late.
    """

    __slots__ = ("floor_s", "gap_s", "late_s", "waited_for")

    floor_s: float
    gap_s: float
    late_s: float
    waited_for: int


class InOrder:
    """Serves work one at a time in the order of launching; `queue[0]` is under way or next."""

    free_s: float

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.flow = Flow(clock, self._worked)
        self.queue: deque[Work] = deque()
        self.stretched_s = 0.0  # time beyond what the work takes alone

    def _ask(self, work: Work) -> None:
        self.clock.open[work] = []
        self.queue.append(work)
        if len(self.queue) == 1:
            self._next()

    def _next(self) -> None:
        """Start the oldest work, or have this called again once more is known."""
        work = self.queue[0]
        start_s, cause = work.first_s, HOST
        for ticket in work.after:
            waiting = self.clock.open.get(ticket)
            if waiting is not None:
                waiting.append(self._next)
                return
            if ticket.end_s > start_s:
                start_s, cause = ticket.end_s, ticket.cause
        gap_s = start_s - self.free_s
        work.late_s = waited_s(start_s, cause, self.free_s, work.first_s, work.after)
        if gap_s <= 0.0:
            start_s = self.free_s
        if start_s > self.clock.now:
            self.clock.at(start_s, ENDS, partial(self._begin, gap_s, cause))
        else:
            self._begin(gap_s, cause, None)

    def _begin(self, gap_s: float, cause: int, _: Event | None) -> None:
        work = self.queue[0]
        work.gap_s, work.waited_for = gap_s, cause
        self.flow.start(work.duration_s)

    def _worked(self) -> None:
        work, flow = self.queue[0], self.flow
        self.stretched_s += flow.spent_s - work.duration_s
        self.free_s = self._ran(work, flow)
        if self.free_s > self.clock.now:
            self.clock.at(self.free_s, ENDS, self._release)
        else:
            self._release(None)

    def _release(self, _: Event | None) -> None:
        work = self.queue.popleft()
        work.end_s = self.free_s
        work.after = ()
        self.clock.close(work)
        if self.queue:
            self._next()

    @abstractmethod
    def _ran(self, work: Work, flow: Flow) -> float:
        """The work is done; return when its results are there."""


class FluidStream(InOrder, Stream):
    """A compute stream that copies on its GPU's link may slow."""

    def __init__(self, name: str, clock: Clock) -> None:
        Stream.__init__(self, name)
        InOrder.__init__(self, clock)

    def run(
        self, op: str, layer: int, expert: int, n_tokens: int, first_s: float, last_s: float, duration_s: float,
        after: tuple[Ticket, ...],
    ) -> Ticket:  # fmt: skip
        """Launch work whose first kernel reaches the GPU at `first_s` and whose last one ends at `last_s` at best."""
        work = Work(op, layer, expert, n_tokens, first_s, last_s, duration_s, after)
        work.floor_s = last_s
        self._ask(work)
        return work

    def _ran(self, work: Work, flow: Flow) -> float:
        if work.gap_s > 0.0:
            self.gaps_s[work.waited_for] += work.gap_s
        if work.late_s > flow.spent_s:
            work.cause = work.waited_for  # whoever waits for it mostly waits for what it waited for
        self.uses[flow.spent_s] = self.uses.get(flow.spent_s, 0) + 1
        if self.spans is not None:
            self.spans(self.name, work.op, work.layer, work.expert, work.n_tokens, 0, flow.start_s, flow.end_s)
        if work.floor_s <= flow.end_s:
            return flow.end_s
        self.gaps_s[HOST] += work.floor_s - flow.end_s  # kernels shorter than their launches: it starves in between
        return work.floor_s

    def idle_until(self, time_s: float, cause: int) -> None:
        if not self.queue:
            super().idle_until(time_s, cause)


class FluidPool(InOrder, SerialLane):
    """The CPU pool, which copies on every link may slow."""

    def __init__(self, name: str, clock: Clock) -> None:
        SerialLane.__init__(self, name)
        InOrder.__init__(self, clock)

    def ask(self, op: str, layer: int, expert: int, n_tokens: int, ready_s: float, duration_s: float) -> Ticket:
        """Serve after all that was asked before, not before `ready_s`."""
        work = Work(op, layer, expert, n_tokens, ready_s, 0.0, duration_s, ())
        work.cause = CPU
        self._ask(work)
        return work

    def use(self, op: str, layer: int, expert: int, n_tokens: int, ready_s: float, duration_s: float) -> float:
        raise TypeError("the end is not known beforehand: ask for a ticket instead")

    def _ran(self, work: Work, flow: Flow) -> float:
        self.busy_s += flow.spent_s
        if self.spans is not None:
            self.spans(self.name, work.op, work.layer, work.expert, work.n_tokens, 0, flow.start_s, flow.end_s)
        return flow.end_s


class FluidLink(CopyLane):
    """A copy engine that its GPU's kernels and the CPU pool may slow.

    Whenever it is idle it takes, once the host has spoken at that instant, the best of what is ready.
    """

    def __init__(self, name: str, clock: Clock, index: int) -> None:
        super().__init__(name)
        self.clock = clock
        self.flow = Flow(clock, self._copied)
        self._order = EventPriority(STARTS + index)
        self._current: Copy | None = None
        self._looks_s = math.inf  # when it will look at its queue next

    def submit(self, copy: Copy, now_s: float) -> None:
        self.clock.run_up_to(now_s)
        waiting = self.clock.open
        waiting[copy] = []
        for ticket in copy.after:
            if ticket in waiting:
                waiting[ticket].append(self._look_ahead)
        self.queue.append(copy)
        self._look_ahead()

    def _ready_s(self, copy: Copy) -> float:
        """Earliest possible start; infinite while something before it has not ended."""
        ready_s = copy.submit_s
        for ticket in copy.after:
            if ticket in self.clock.open:
                return math.inf
            if ticket.end_s > ready_s:
                ready_s = ticket.end_s
        return ready_s

    def _look_ahead(self) -> None:
        """See to it that the queue is looked at when something in it can start."""
        if self._current is not None or not self.queue:
            return
        at_s = max(self.clock.now, min(self._ready_s(copy) for copy in self.queue))
        if at_s < self._looks_s:
            self._looks_s = at_s
            self.clock.at(at_s, self._order, self._look)

    def _look(self, _: Event) -> None:
        now_s = self.clock.now
        if now_s >= self._looks_s:
            self._looks_s = math.inf
        if self._current is not None:
            return
        best: Copy | None = None
        for copy in self.queue:
            if (best is None or copy.priority < best.priority) and self._ready_s(copy) <= now_s:
                best = copy
        if best is None:
            self._look_ahead()
            return
        self.queue.remove(best)
        self._current = best
        best.start_s = now_s
        best.after = ()
        self.n_copies += 1
        self.copied_bytes += best.n_bytes
        self.flow.start(best.duration_s, best)

    def _copied(self) -> None:
        copy, flow = self._current, self.flow
        assert copy is not None
        self._current = None
        self.free_s = flow.end_s
        self.uses[flow.spent_s] = self.uses.get(flow.spent_s, 0) + 1
        if self.report:
            self.finished.append(copy)
        if self.spans is not None:
            self.spans(self.name, copy.op, copy.layer, copy.expert, 0, copy.n_bytes, flow.start_s, flow.end_s)
        self.clock.close(copy)
        self._look_ahead()

    def cancel(self, copy: Copy, now_s: float) -> bool:
        if copy.priority == DEMAND or copy not in self.queue:
            return False
        self.queue.remove(copy)
        copy.cancelled = True
        copy.end_s = now_s
        copy.after = ()
        self.clock.close(copy)
        return True

    def promote(self, copy: Copy, now_s: float) -> None:
        if copy in self.queue and copy.priority != DEMAND:
            self.queue.remove(copy)
            copy.priority = DEMAND
            self.queue.append(copy)

    def advance(self, now_s: float) -> None:
        """Events do that."""
