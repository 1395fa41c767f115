"""Memory shared by lanes, as arithmetic: what is placed pays for what is known to run beside it.

The end of what was placed before has been told and stands, so its lane owes the time by which it would have been later,
and pays before it does anything else. `memory_law.py` has the law, `docs/contention.md` what a static share is.
"""

from __future__ import annotations

import math

from sim.base.flat import floats
from sim.machine.price import Operation, Price
from sim.policy.tickets import Ticket

KEPT = 64
"""Stretches of time that a lane remembers having been busy."""
_KEPT, _INF = KEPT, math.inf  # machine numbers where this is compiled


class GpuMemory:
    """What kernels take longer beside copies, which keep their rate: by the law, or by a term of 0 or more.

    Args:
        capacity_per_s: bytes. up_per_s, down_per_s: what copies draw, to the GPU and back.
    """

    def __init__(
        self, capacity_per_s: float, up_per_s: float, down_per_s: float, up_term: float, down_term: float
    ) -> None:
        self.capacity_per_s = capacity_per_s
        self.left_per_s = capacity_per_s - up_per_s
        self.least_per_s = capacity_per_s - up_per_s - down_per_s
        self.up_term = up_term
        self.down_term = down_term

    def slow(self, operation: Operation, price: Price) -> None:
        """Note what an operation takes longer beside a copy, and what more beside pieces written back."""
        duration_s = price.duration_s
        draws_per_s = 0.0
        if duration_s > 0.0:
            draws_per_s = price.n_bytes / duration_s
            if draws_per_s > self.capacity_per_s:
                draws_per_s = self.capacity_per_s
        up = down = 0.0
        if draws_per_s > self.left_per_s:
            up = draws_per_s / self.left_per_s - 1.0
        if draws_per_s > self.least_per_s:
            down = draws_per_s / self.least_per_s - 1.0 - up
        if self.up_term >= 0.0:
            up = self.up_term
        if self.down_term >= 0.0:
            down = self.down_term
        operation.slowed_s = duration_s * up
        operation.more_s = duration_s * down


class Lately:
    """When a lane was busy, as far as others may still ask: from, until, and what it drew; and the time it owes."""

    def __init__(self) -> None:
        self.start_s = floats(_KEPT)
        self.end_s = floats(_KEPT)
        self.draws_per_s = floats(_KEPT)
        self.n = 0  # ever; the last `KEPT` of them are there
        self.owed_s = 0.0
        self.owed_bytes = 0.0  # what it would have moved meanwhile
        self.last_s = 0.0  # the end of the last one

    def note(self, start_s: float, end_s: float, draws_per_s: float) -> None:
        """It is busy then."""
        if end_s <= start_s:
            return
        at = (self.n - 1) % _KEPT if self.n else 0
        if self.n and self.end_s[at] == start_s and self.draws_per_s[at] == draws_per_s:
            self.end_s[at] = end_s
        else:
            at = self.n % _KEPT
            self.start_s[at] = start_s
            self.end_s[at] = end_s
            self.draws_per_s[at] = draws_per_s
            self.n += 1
        self.last_s = end_s

    def drawn(self, time_s: float) -> float:
        """What it draws at a time; less than 0: it is idle."""
        for back in range(self.n if self.n < _KEPT else _KEPT):
            at = (self.n - 1 - back) % _KEPT
            if self.start_s[at] <= time_s < self.end_s[at]:
                return self.draws_per_s[at]
            if self.end_s[at] <= time_s:
                break
        return -1.0

    def changes_s(self, time_s: float) -> float:
        """When it starts or ends next, after a time; infinite where that is not known."""
        found_s = _INF
        for back in range(self.n if self.n < _KEPT else _KEPT):
            at = (self.n - 1 - back) % _KEPT
            if self.end_s[at] <= time_s:
                break
            found_s = self.start_s[at] if self.start_s[at] > time_s else self.end_s[at]
        return found_s


class HostMemory:
    """What the CPU's experts and copies draw from together, and a drive's reads write to.

    Lane 0 is the CPU, then a link per GPU, then the way back, then the drive.

    Args:
        cpu_term, link_term: extra time of the one beside the other where it was measured or set; less than 0: by the
            law. has_drive: there is one; its reads are slowed by the law alone.
    """

    def __init__(
        self, capacity_per_s: float, n_links: int, cpu_term: float, link_term: float, has_drive: bool = False
    ) -> None:
        self.capacity_per_s = capacity_per_s
        self.n_links = n_links
        self.cpu_term = cpu_term
        self.link_term = link_term
        self.has_drive = has_drive
        self.n_lanes = n_links + 2 + has_drive
        self.lanes = [Lately() for _ in range(self.n_lanes)]
        self._draws = floats(self.n_lanes)  # at the time that is looked at
        self._done: list[Ticket] = []  # ends of experts on the CPU that nobody has been told,
        self._back: list[Ticket] = []  # as long as their results have not started to go up

    def place(self, lane: int, start_s: float, duration_s: float, draws_per_s: float) -> float:
        """Give a lane work that takes so long alone; when it ends."""
        own: Lately = self.lanes[lane]
        now_s = start_s
        left_s = duration_s
        slowed = False
        while left_s > 0.0:
            until_s = self._look(lane, now_s)
            stretch = self._stretch(lane, lane, draws_per_s)
            stop_s = now_s + left_s * stretch
            ends = stop_s <= until_s
            if not ends:
                stop_s = until_s
            if stretch > 1.0:
                slowed = True
            self._charge(lane, draws_per_s, stop_s - now_s)
            left_s = 0.0 if ends else left_s - (stop_s - now_s) / stretch
            now_s = stop_s
        if not slowed:
            now_s = start_s + duration_s
        own.note(start_s, now_s, draws_per_s)
        return now_s

    def awaits(self, done: Ticket, back: Ticket) -> None:
        """An expert on the CPU has been placed, and its result is asked for: until that starts, it may end later."""
        for at in range(len(self._done) - 1, -1, -1):
            told: Ticket = self._back[at]
            if told.end_s >= 0.0:
                del self._done[at], self._back[at]
        self._done.append(done)
        self._back.append(back)

    def delay(self, start_s: float, end_s: float) -> None:
        """A copy has been placed: experts on the CPU that it runs beside end later, those that can."""
        own: Lately = self.lanes[0]
        if own.owed_s <= 0.0 or not self._done:
            return
        free_s = own.last_s
        added_s = self.paid_s(0, free_s) - free_s
        beside_s = (end_s if end_s < free_s else free_s) - start_s
        for at in range(len(self._done)):
            done: Ticket = self._done[at]
            told: Ticket = self._back[at]
            if told.end_s < 0.0 and done.end_s > start_s:
                share = (done.end_s - start_s) / beside_s if beside_s > 0.0 else 1.0
                done.end_s += added_s * (share if share < 1.0 else 1.0)

    def paid_s(self, lane: int, free_s: float) -> float:
        """When a lane is free that was to be at `free_s`, once it has paid what it owes."""
        own: Lately = self.lanes[lane]
        owed_s = own.owed_s
        if owed_s <= 0.0:
            return free_s
        draws_per_s = own.owed_bytes / owed_s
        own.owed_s = own.owed_bytes = 0.0
        return self.place(lane, free_s, owed_s, draws_per_s)

    def _look(self, lane: int, now_s: float) -> float:
        """Note what every other lane draws at a time; until when that stays so."""
        until_s = _INF
        for at in range(self.n_lanes):
            other: Lately = self.lanes[at]
            self._draws[at] = -1.0
            if at != lane and other.last_s > now_s:
                self._draws[at] = other.drawn(now_s)
                changes_s = other.changes_s(now_s)
                if changes_s < until_s:
                    until_s = changes_s
        return until_s

    def _stretch(self, lane: int, new: int, draws_per_s: float) -> float:
        """By how much a lane's work takes longer beside what `_look` saw; `new` draws, too, where it is a lane."""
        term = self.cpu_term if lane == 0 else self.link_term
        if term >= 0.0 and lane < self.n_links + 2:
            if lane:
                beside = lane <= self.n_links and (self._draws[0] >= 0.0 or new == 0)
                return 1.0 + term if beside else 1.0
            n = 0
            for at in range(1, self.n_links + 1):
                n += self._draws[at] >= 0.0 or new == at
            return 1.0 + term * n
        asked_per_s = draws_per_s if new >= 0 else 0.0
        for at in range(self.n_lanes):
            if self._draws[at] > 0.0:
                asked_per_s += self._draws[at]
        return asked_per_s / self.capacity_per_s if asked_per_s > self.capacity_per_s else 1.0

    def _charge(self, lane: int, draws_per_s: float, seconds: float) -> None:
        """The others owe what they would have done without the new one beside them."""
        for at in range(self.n_lanes):
            if at != lane and self._draws[at] >= 0.0:
                before = self._stretch(at, -1, 0.0)
                after = self._stretch(at, lane, draws_per_s)
                if after > before:
                    other: Lately = self.lanes[at]
                    owed_s = seconds * (1.0 / before - 1.0 / after)
                    other.owed_s += owed_s
                    other.owed_bytes += owed_s * self._draws[at]
