"""Time for the machine on SimPy events: an environment with exact times, and a fixed order within an instant."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from heapq import heappush
from typing import Any

from simpy import Environment
from simpy.events import Event, EventPriority

from sim.policy.tickets import UNKNOWN_S, Ticket

Steps = Generator[Event, Any, None]
"""What a process is made of: it yields the event it waits for."""

# The order within an instant. SimPy's own events (what `succeed`, `Store.put` and `Store.get` trigger) have priority 1.
ENDS = EventPriority(0)  # work ends; then what waited for that goes on
RATES = EventPriority(2)  # what still runs notices what no longer runs beside it
DEMANDS = EventPriority(3)  # demand copies start (link g at DEMANDS + g): nothing the host may say can precede them
STARTS = EventPriority(1000)  # the host has spoken; speculative copies start (link g at STARTS + g)


class Pending(Ticket):
    """Something under way on a lane. `end_s` is unknown until it is settled; `over` says that it has happened."""

    __slots__ = ("_ended", "over")

    def __init__(self, cause: int) -> None:
        super().__init__(UNKNOWN_S, cause)
        self.over = False
        self._ended: Event | None = None

    def ended(self, clock: Clock) -> Event:
        """The event of its end, for a process to wait for while it is not over."""
        if self._ended is None:
            self._ended = clock.event()
        return self._ended

    def end(self, end_s: float) -> None:
        """It is over: let those who wait for it go on."""
        self.end_s, self.over = end_s, True
        if self._ended is not None:
            self._ended.succeed()


class Clock(Environment):
    """SimPy's environment with events at absolute times.

    `Environment.timeout` schedules at now + delay, and now + (t - now) need not be t in floating point. Here a time is
    a number computed once, by the same sums as in the arithmetic lanes, so that both agree bit for bit where nothing
    contends.
    """

    def __init__(self) -> None:
        super().__init__(0.0)
        self.n_events = 0  # at absolute times

    def at(self, time_s: float, order: EventPriority = ENDS) -> Event:
        """The event that it is `time_s`, which is not before now."""
        event = Event(self)
        event._ok, event._value = True, None
        heappush(self._queue, (time_s, order, next(self._eid), event))
        self.n_events += 1
        return event

    def until(self, time_s: float) -> Steps:
        """Wait until then, or not at all where that is past."""
        if time_s > self.now:
            yield self.at(time_s)

    def ends_of(self, tickets: Iterable[Ticket]) -> Steps:
        """Wait until the last of these has ended (one whose end is known beforehand is waited for by its time)."""
        for ticket in tickets:
            if isinstance(ticket, Pending) and not ticket.over:
                yield ticket.ended(self)

    def run_up_to(self, time_s: float) -> None:
        """Let happen what comes before the host speaks at `time_s`: of that instant all but speculative starts."""
        queue, horizon = self._queue, (time_s, STARTS)
        while queue and queue[0][:2] < horizon:
            self.step()

    def run_until_over(self, ticket: Ticket) -> None:
        """The host waits, and says nothing until this has ended."""
        while isinstance(ticket, Pending) and not ticket.over:
            if not self._queue:
                raise RuntimeError("deadlock: the host waits for work that waits for nothing (a bug in the engine)")
            self.step()
