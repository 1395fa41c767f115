"""Room that was given back, and from when on it may be overwritten."""

from __future__ import annotations

from collections.abc import Sequence

from sim.base.flat import floats, ints
from sim.machine.protocol import NO_TICKETS
from sim.machine.runs import is_stream
from sim.policy.tickets import Ticket


class Freed:
    """Rooms of one GPU that something still reads, longest freed first.

    A ring of `n` rooms from place `first` on: their bytes, and when they are clean: no sooner than `ready_s`, nor than
    the tickets of `readers` (by place, only where there are any) have ended.
    """

    def __init__(self) -> None:
        self.size = 16
        self.first = 0
        self.n = 0
        self.n_bytes = ints(self.size)
        self.ready_s = floats(self.size)
        self.readers: dict[int, tuple[Ticket, ...]] = {}

    def append(self, n_bytes: int, ready_s: float, readers: tuple[Ticket, ...]) -> None:
        """One room more."""
        if self.n == self.size:
            self._grow()
        at = (self.first + self.n) & (self.size - 1)
        self.n_bytes[at] = n_bytes
        self.ready_s[at] = ready_s
        if readers:
            self.readers[at] = readers
        self.n += 1

    def drop(self) -> None:
        """The first room is taken, or clean."""
        if self.readers:
            self.readers.pop(self.first, None)
        self.first = (self.first + 1) & (self.size - 1)
        self.n -= 1

    def over(self, now_s: float) -> bool:
        """Whether nothing reads the first room any more."""
        if self.ready_s[self.first] > now_s:
            return False
        if self.readers:
            for reader in self.readers.get(self.first, NO_TICKETS):
                if reader.end_s < 0.0 or reader.end_s > now_s:
                    return False
        return True

    def _grow(self) -> None:
        """Twice as many places, the rooms from place 0 on."""
        n_bytes, ready_s, readers = ints(2 * self.size), floats(2 * self.size), {}
        for i in range(self.n):
            at = (self.first + i) & (self.size - 1)
            n_bytes[i] = self.n_bytes[at]
            ready_s[i] = self.ready_s[at]
            if at in self.readers:
                readers[i] = self.readers[at]
        self.n_bytes, self.ready_s, self.readers = n_bytes, ready_s, readers
        self.first = 0
        self.size *= 2


class Rooms:
    """Bytes of each GPU's budget that nobody holds: clean, or still read by a computation or a copy.

    A newcomer takes what has been freed longest, as much as it needs, and waits for whatever still reads it: `take`
    leaves in `ready_s` and `waits` when its copy may start.
    """

    def __init__(self, budget_bytes: Sequence[int]) -> None:
        self.clean_bytes = ints(len(budget_bytes))
        for gpu, n_bytes in enumerate(budget_bytes):
            self.clean_bytes[gpu] = n_bytes
        self.freed = [Freed() for _ in budget_bytes]
        self.n_freed = 0  # rooms that something still reads, over all GPUs
        self.ready_s = 0.0
        self.waits: tuple[Ticket, ...] = NO_TICKETS

    def give(self, gpu: int, n_bytes: int, ready_s: float, readers: tuple[Ticket, ...], now_s: float) -> None:
        """Room is free again from `ready_s` on, when a computation on its GPU ends, and once its readers have ended."""
        waits = NO_TICKETS
        if readers:
            for reader in readers:
                if reader.end_s < 0.0 or (reader.end_s > now_s and not is_stream(reader.lane)):
                    waits = (*waits, reader)  # who waits for it has to know on which lane it ends
                elif reader.end_s > ready_s:
                    ready_s = reader.end_s
        if waits or ready_s > now_s:
            freed: Freed = self.freed[gpu]
            freed.append(n_bytes, ready_s, waits)
            self.n_freed += 1
        else:
            self.clean_bytes[gpu] += n_bytes

    def take(self, gpu: int, n_bytes: int, now_s: float) -> None:
        """Take so many bytes; `ready_s` and `waits` say what must be over before they can be overwritten."""
        self.ready_s = 0.0
        if self.waits:
            self.waits = NO_TICKETS
        if self.n_freed:
            self._take_freed(gpu, n_bytes, now_s)
        self.clean_bytes[gpu] -= n_bytes

    def _take_freed(self, gpu: int, n_bytes: int, now_s: float) -> None:
        freed: Freed = self.freed[gpu]
        n_before = freed.n
        while freed.n and freed.over(now_s):
            self.clean_bytes[gpu] += freed.n_bytes[freed.first]
            freed.drop()
        lacks_bytes = n_bytes
        while self.clean_bytes[gpu] < n_bytes and freed.n:
            more_bytes = freed.n_bytes[freed.first]
            if freed.ready_s[freed.first] > self.ready_s:
                self.ready_s = freed.ready_s[freed.first]
            if freed.readers:
                self.waits = (*self.waits, *freed.readers.get(freed.first, NO_TICKETS))
            if more_bytes > lacks_bytes:
                # What a smaller piece leaves of a room that is still read: whoever takes it waits for the same.
                freed.n_bytes[freed.first] = more_bytes - lacks_bytes
                more_bytes = lacks_bytes
            else:
                freed.drop()
                lacks_bytes -= more_bytes
            self.clean_bytes[gpu] += more_bytes
        self.n_freed -= n_before - freed.n
