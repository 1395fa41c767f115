"""Work whose rate changes while it runs: what lanes do to one another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.machine.events.clock import ENDS, RATES, Clock

if TYPE_CHECKING:
    from simpy.events import Event

    from sim.policy.tickets import Ticket


class Pool:
    """A memory that several flows draw from: who ask for more than there is all get the same share of it."""

    def __init__(self, capacity_per_s: float) -> None:
        self.capacity_per_s = capacity_per_s
        self.members: list[tuple[Flow, float | None]] = []  # and what each draws; None: what its work says

    def add(self, flow: Flow, draws_per_s: float | None = None, slowed: bool = True) -> None:
        """One more that draws from it; `slowed` where the others ask for too much."""
        for other, _ in self.members:
            flow.beside(other)
            other.beside(flow)
        self.members.append((flow, draws_per_s))
        if slowed:
            flow.pools.append(self)

    def stretch(self, asking: Flow) -> float:
        """By how much everybody's time is longer than alone, if this one draws from it too."""
        asked_per_s = 0.0
        for flow, draws_per_s in self.members:
            if flow.busy or flow is asking:
                asked_per_s += flow.draws_per_s if draws_per_s is None else draws_per_s
        return asked_per_s / self.capacity_per_s if asked_per_s > self.capacity_per_s else 1.0


class Rest:
    """What `first` leave of a memory to the one that draws from it besides: they get all that they ask for."""

    def __init__(self, capacity_per_s: float, first: list[Flow], one: Flow) -> None:
        self.capacity_per_s = capacity_per_s
        self.first = first
        for flow in first:
            one.beside(flow)
        one.pools.append(self)

    def stretch(self, asking: Flow) -> float:
        """By how much its time is longer than alone."""
        left_per_s = self.capacity_per_s
        for flow in self.first:
            if flow.busy:
                left_per_s -= flow.draws_per_s
        draws_per_s = min(asking.draws_per_s, self.capacity_per_s)
        return draws_per_s / left_per_s if draws_per_s > left_per_s else 1.0


class Flow:
    """Work in progress on one lane, at the rate 1 / (1 + sum of the terms of what runs beside it), or less from memory.

    Of several memories the one that has least for it counts.

    What is left is carried over at every change of rate. Work that never meets anything ends at start + duration,
    without rounding beyond that sum.
    """

    def __init__(self, clock: Clock) -> None:
        self.busy = False
        self.start_s = 0.0
        self.end_s = 0.0  # as things stand now, while busy
        self.spent_s = 0.0  # from start to end, of the work that ended last
        self.draws_per_s = 0.0  # bytes, of the work that is done, at its own rate
        self.pools: list[Pool | Rest] = []
        self._clock = clock
        self._terms: list[tuple[Flow, float]] = []  # who slows this, and by which share of its time
        self._slows: list[Flow] = []  # whom this slows
        self._duration_s = 0.0
        self._left_s = 0.0  # seconds of undisturbed work still to do at `_since_s`
        self._since_s = 0.0
        self._stretch = 1.0  # seconds per second of undisturbed work
        self._exact = True  # stretch 1 all along
        self._over: Event | None = None
        self._ticket: Ticket | None = None

    def slowed_by(self, other: Flow, share: float) -> None:
        """While `other` is busy, this takes `share` of its own time longer; 0 couples nothing."""
        if share > 0.0:
            self._terms.append((other, share))
            self.beside(other)

    def beside(self, other: Flow) -> None:
        """Take notice when `other` starts or ends."""
        if self not in other._slows:
            other._slows.append(self)

    def work(self, duration_s: float, ticket: Ticket | None = None, n_bytes: float = 0.0) -> Event:
        """Begin now; the event of its end. `ticket.end_s`, where one is given, follows the end as things stand.

        Args:
            n_bytes: what it moves through memory meanwhile.
        """
        self.busy = True
        self.draws_per_s = n_bytes / duration_s if duration_s > 0.0 else 0.0
        self.start_s = self._since_s = self._clock.now
        self._duration_s = self._left_s = duration_s
        self._stretch = self._beside()
        self._exact = self._stretch == 1.0
        self._ticket = ticket
        over = self._aim()
        assert over.callbacks is not None
        over.callbacks.append(self._finish)
        self._tell(over)
        return over

    def _beside(self) -> float:
        stretch = 1.0
        for other, share in self._terms:
            if other.busy:
                stretch += share
        if self.pools:
            stretch *= max([pool.stretch(self) for pool in self.pools])
        return stretch

    def _aim(self) -> Event:
        """The event of its end as things stand."""
        self.end_s = self._since_s + self._left_s * self._stretch
        if self._ticket is not None:
            self._ticket.end_s = self.end_s
        self._over = self._clock.at(self.end_s, ENDS)
        return self._over

    def _tell(self, _: Event) -> None:
        """Something starts or has ended here: those beside it may change their pace."""
        for other in self._slows:
            other._retime()

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
        before = self._over
        assert before is not None
        waiting, before.callbacks = before.callbacks, []  # SimPy cannot withdraw an event: this one now does nothing,
        self._aim().callbacks = waiting  # and whoever waited for it waits for another

    def _finish(self, _: Event) -> None:
        self.busy = False
        self.spent_s = self._duration_s if self._exact else self.end_s - self.start_s
        self._over = self._ticket = None
        if self._slows:  # once its lane has had the chance to go on at once, so that nobody notices a pause of nothing
            told = self._clock.at(self._clock.now, RATES)
            assert told.callbacks is not None
            told.callbacks.append(self._tell)
