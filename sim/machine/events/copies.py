"""A copy engine as a SimPy process: it chooses what to copy next, demand before speculative."""

from __future__ import annotations

import math
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from simpy.events import Event, EventPriority

from sim.machine.events.clock import DEMANDS, STARTS, Clock, Pending, Steps
from sim.machine.events.flow import Flow
from sim.machine.events.timeline import add_up
from sim.machine.lanes import H2D, HOST
from sim.machine.protocol import DEMAND
from sim.machine.runs import Runs
from sim.policy.tickets import Ticket

if TYPE_CHECKING:
    from sim.machine.lanes import Spans
    from sim.policy.pieces import Piece

NOTHING: tuple[Ticket, ...] = ()
NEVER = math.inf, STARTS


class Copy(Pending):
    """A copy: what it moves and when it may start. While it is in flight `end_s` is its end as things stand."""

    __slots__ = (
        "after",
        "cancelled",
        "carries",
        "duration_s",
        "expert",
        "layer",
        "n_bytes",
        "n_copies",
        "op",
        "piece",
        "priority",
        "submit_lane",
        "submit_s",
    )

    def __init__(
        self,
        op: str,
        layer: int,
        expert: int,
        n_bytes: int,
        duration_s: float,
        priority: int,
        submit_s: float,
        after: tuple[Ticket, ...],
        cause: int = H2D,
        piece: Piece | None = None,
        carries: bool = False,
        n_copies: int = 1,
    ) -> None:
        super().__init__(cause)
        self.op = op
        self.layer = layer
        self.expert = expert
        self.n_bytes = n_bytes
        self.n_copies = n_copies  # one after the other, which nothing comes between
        self.duration_s = duration_s
        self.priority = priority
        self.speculative = priority != DEMAND
        self.submit_s = submit_s
        self.submit_lane = HOST
        self.after = after
        self.cancelled = False
        self.carries = carries  # a result: who waits for it waits for what that was late for
        self.piece = piece  # None: activations, or what goes down

    def ready_s(self) -> float:
        """Earliest possible start; infinite while something before it has not ended."""
        ready_s = self.submit_s
        for ticket in self.after:
            if isinstance(ticket, Pending) and not ticket.over:
                return math.inf
            if ticket.end_s > ready_s:
                ready_s = ticket.end_s
        return ready_s

    def waited_for(self) -> int:
        """The lane of what was ready last."""
        ready_s, lane = self.submit_s, self.submit_lane
        for ticket in self.after:
            if ticket.end_s > ready_s:
                ready_s, lane = ticket.end_s, ticket.lane
        return lane


class CopyEngine:
    """One copy engine, one direction: demand before speculative, then in order of asking; none in flight is aborted.

    Whenever it is idle it takes the best of what is ready: a demand at once, a speculative copy only when the host has
    spoken at that instant, for it may ask for a demand.
    """

    def __init__(self, name: str, clock: Clock, index: int, spans: Spans | None, report: bool, runs: Runs) -> None:
        self.name = name
        self.runs = runs
        self.clock = clock
        self.spans = spans
        self.report = report  # keep `finished`, because somebody polls
        self.flow = Flow(clock)
        self.queue: list[Copy] = []  # in order of asking
        self.finished: deque[Copy] = deque()  # over, and not reported yet
        self.free_s = 0.0
        self.lag_s = 0.0  # from the end of a copy on this lane until it is there; the next one begins meanwhile
        self.n_copies = 0
        self.copied_bytes = 0
        self.stretched_s = 0.0  # what contention added
        self._uses: dict[float, int] = {}
        self._busy_s = 0.0
        self._index = index
        self._chance: Event | None = None  # what the idle engine waits for
        self._chance_at = NEVER  # when within which instant that is, as far as is known
        clock.process(self._serve())

    @property
    def busy_s(self) -> float:
        """Seconds spent on copies."""
        self._busy_s = add_up(self._uses, self._busy_s)
        return self._busy_s

    def submit(self, copy: Copy) -> None:
        """Queue a copy."""
        self.queue.append(copy)
        for ticket in copy.after:
            if isinstance(ticket, Pending) and not ticket.over:
                ended = ticket.ended(self.clock)
                assert ended.callbacks is not None
                ended.callbacks.append(self._look_ahead)
        self._look_ahead()

    def _serve(self) -> Steps:
        flow = self.flow
        while True:
            priority: int = yield self._next_chance()
            copy = self._best(priority)
            if copy is None:  # withdrawn
                continue
            self.queue.remove(copy)
            lane = copy.waited_for()
            if self.clock.now > self.free_s and lane != self.runs.number:
                self.runs.begin(self.clock.now, lane)
            copy.lane = self.runs.number
            if copy.carries and self.clock.now > self.free_s:
                copy.cause, copy.speculative = copy.after[0].cause, copy.after[0].speculative
            copy.after = NOTHING  # let go of what it waited for, or tickets would chain through the whole run
            self.n_copies += copy.n_copies
            self.copied_bytes += copy.n_bytes
            yield flow.work(copy.duration_s, copy, copy.n_bytes)
            self.free_s = flow.end_s
            self.stretched_s += flow.spent_s - copy.duration_s
            self._uses[flow.spent_s] = self._uses.get(flow.spent_s, 0) + 1
            if self.report:
                self.finished.append(copy)
            if self.spans is not None:
                self.spans(self.name, copy.op, copy.layer, copy.expert, 0, copy.n_bytes, flow.start_s, flow.end_s)
            if self.lag_s:
                there = self.clock.at(flow.end_s + self.lag_s)
                assert there.callbacks is not None
                there.callbacks.append(partial(self._is_there, copy))
            else:
                copy.end(flow.end_s)

    def _is_there(self, copy: Copy, _: Event) -> None:
        copy.end(self.clock.now)

    def _best(self, priority: int) -> Copy | None:
        """The first of the highest priority, this one or higher, among what is ready now."""
        ready = [copy for copy in self.queue if copy.priority <= priority and copy.ready_s() <= self.clock.now]
        return min(ready, key=lambda copy: copy.priority, default=None)

    def _next_chance(self) -> Event:
        """The event that something queued may start; its value is the priority of what may."""
        self._chance, self._chance_at = self.clock.event(), NEVER
        self._look_ahead()
        return self._chance

    def _look_ahead(self, _: Event | None = None) -> None:
        """See to it that the idle engine gets its chance when something in the queue can start."""
        if self._chance is None or not self.queue:
            return
        now_s = self.clock.now
        at_s, priority = min((max(now_s, copy.ready_s()), copy.priority) for copy in self.queue)
        order = EventPriority((DEMANDS if priority == DEMAND else STARTS) + self._index)
        if (at_s, order) < self._chance_at:
            self._chance_at = at_s, order
            due = self.clock.at(at_s, order)
            assert due.callbacks is not None
            due.callbacks.append(partial(self._give, priority))

    def _give(self, priority: int, _: Event) -> None:
        if self._chance is not None:
            chance, self._chance = self._chance, None
            chance.succeed(priority)

    def cancel(self, copy: Copy, now_s: float) -> bool:
        """Withdraw a speculative copy that has not started; a demand is a commitment."""
        if copy.priority == DEMAND or copy not in self.queue:
            return False
        self.queue.remove(copy)
        copy.cancelled = True
        copy.after = NOTHING
        copy.lane = HOST
        copy.end(now_s)  # nothing that was to follow it waits any more
        return True

    def promote(self, copy: Copy) -> None:
        """Turn a queued speculative copy into a demand copy asked for now."""
        if copy.priority != DEMAND and copy in self.queue:
            self.queue.remove(copy)
            copy.priority = DEMAND
            self.queue.append(copy)
            self._look_ahead()

    def completions(self) -> list[Copy]:
        """Copies that have ended, in order of completion, each once."""
        done = list(self.finished)
        self.finished.clear()
        return done
