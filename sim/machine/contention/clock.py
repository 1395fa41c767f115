"""Time for lanes that slow one another: a SimPy environment with exact times, and work whose rate changes under way."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappush
from typing import TYPE_CHECKING

from simpy import Environment
from simpy.events import Event, EventPriority

if TYPE_CHECKING:
    from sim.machine.protocol import Ticket

ENDS = EventPriority(0)  # within an instant: work ends and what follows it in a fixed order starts ...
STARTS = EventPriority(1)  # ... then the host speaks, then copies start (link g at STARTS + g)


class Clock(Environment):
    """SimPy's environment with events at absolute times, and the tickets that have not ended yet.

    `Environment.timeout` schedules at now + delay, and now + (t - now) need not be t in floating point. Here a time is
    a number computed once, by the same sums as in `sim.machine.lanes`, so that both agree bit for bit where nothing
    contends.
    """

    def __init__(self) -> None:
        super().__init__()
        self.n_events = 0
        self.open: dict[Ticket, list[Callable[[], None]]] = {}  # not ended: whom to call when it has

    def at(self, time_s: float, order: EventPriority, call: Callable[[Event], None]) -> Event:
        """Call back at `time_s`, which is not before now."""
        event = Event(self)
        event._ok, event._value = True, None
        assert event.callbacks is not None
        event.callbacks.append(call)
        heappush(self._queue, (time_s, order, next(self._eid), event))
        self.n_events += 1
        return event

    @property
    def n_left(self) -> int:
        """Events still to come, those that have been overtaken by a change of rate included."""
        return len(self._queue)

    def run_up_to(self, time_s: float) -> None:
        """Let happen what comes before the host speaks at `time_s`: ends at that instant have, starts of copies not."""
        queue, horizon = self._queue, (time_s, STARTS)
        while queue and queue[0][:2] < horizon:
            self.step()

    def close(self, ticket: Ticket) -> None:
        """`ticket.end_s` is final: call whoever waits for it."""
        for call in self.open.pop(ticket):
            call()


class Flow:
    """Work in progress on one lane, at the rate 1 / (1 + sum of the terms of what runs beside it).

    What is left is carried over at every change of rate. Work that never meets anything ends at start + duration,
    without rounding beyond that sum.
    """

    def __init__(self, clock: Clock, done: Callable[[], None]) -> None:
        self.busy = False
        self.start_s = 0.0
        self.end_s = 0.0  # as things stand now, while busy
        self.spent_s = 0.0  # from start to end, of the work that ended last
        self._clock = clock
        self._done = done
        self._terms: list[tuple[Flow, float]] = []  # who slows this, and by which share of its time
        self._slows: list[Flow] = []  # whom this slows
        self._duration_s = 0.0
        self._left_s = 0.0  # seconds of undisturbed work still to do at `_since_s`
        self._since_s = 0.0
        self._stretch = 1.0  # seconds per second of undisturbed work
        self._exact = True  # stretch 1 all along
        self._event: Event | None = None
        self._ticket: Ticket | None = None

    def slowed_by(self, other: Flow, share: float) -> None:
        """While `other` is busy, this takes `share` of its own time longer; 0 couples nothing."""
        if share > 0.0:
            self._terms.append((other, share))
            other._slows.append(self)

    def start(self, duration_s: float, ticket: Ticket | None = None) -> None:
        """Begin now; `ticket.end_s`, where one is given, follows the end as things stand."""
        self.busy = True
        self.start_s = self._since_s = self._clock.now
        self._duration_s = self._left_s = duration_s
        self._stretch = self._beside()
        self._exact = self._stretch == 1.0
        self._ticket = ticket
        self._aim()
        for other in self._slows:
            other._retime()

    def _beside(self) -> float:
        stretch = 1.0
        for other, share in self._terms:
            if other.busy:
                stretch += share
        return stretch

    def _aim(self) -> None:
        """Schedule the end as things stand."""
        self.end_s = self._since_s + self._left_s * self._stretch
        if self._ticket is not None:
            self._ticket.end_s = self.end_s
        self._event = self._clock.at(self.end_s, ENDS, self._finish)

    def _retime(self) -> None:
        """What runs beside this has changed: carry over what is left, at the new rate."""
        if not self.busy:
            return
        stretch = self._beside()
        if stretch == self._stretch:
            return
        now_s = self._clock.now
        if now_s > self._since_s:
            self._left_s = max(0.0, self._left_s - (now_s - self._since_s) / self._stretch)
            self._since_s = now_s
            self._exact = False
        elif now_s == self.start_s:
            self._exact = stretch == 1.0  # still to do its first second
        self._stretch = stretch
        assert self._event is not None
        assert self._event.callbacks is not None
        self._event.callbacks.clear()  # SimPy cannot withdraw an event; this one now does nothing
        self._aim()

    def _finish(self, _: Event) -> None:
        self.busy = False
        self.spent_s = self._duration_s if self._exact else self.end_s - self.start_s
        self._event = self._ticket = None
        self._done()  # may start the next work at once, so that those beside it notice no change
        for other in self._slows:
            other._retime()
