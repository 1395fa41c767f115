"""Room that was given back, and from when on it may be overwritten."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from sim.base.flat import ints
from sim.machine.protocol import NO_TICKETS
from sim.policy.tickets import Ticket

Freed = tuple[int, float, tuple[Ticket, ...]]  # bytes; clean no sooner than this time, nor than these have ended


class Rooms:
    """Bytes of each GPU's budget that nobody holds: clean, or still read by a computation or a copy.

    A newcomer takes what has been freed longest, as much as it needs, and waits for whatever still reads it: `take`
    leaves in `ready_s` and `waits` when its copy may start.
    """

    def __init__(self, budget_bytes: Sequence[int]) -> None:
        self.clean_bytes = ints(len(budget_bytes))
        for gpu, n_bytes in enumerate(budget_bytes):
            self.clean_bytes[gpu] = n_bytes
        self.freed: list[deque[Freed]] = [deque() for _ in budget_bytes]
        self.n_freed = ints(len(budget_bytes))
        self.ready_s = 0.0
        self.waits: tuple[Ticket, ...] = NO_TICKETS

    def give(self, gpu: int, n_bytes: int, ready_s: float, readers: tuple[Ticket, ...], now_s: float) -> None:
        """Room is free again from `ready_s` on, and once its readers have ended."""
        waits = NO_TICKETS
        for reader in readers:
            if reader.end_s < 0.0:
                waits = (*waits, reader)
            elif reader.end_s > ready_s:
                ready_s = reader.end_s
        if waits or ready_s > now_s:
            self.freed[gpu].append((n_bytes, ready_s, waits))
            self.n_freed[gpu] += 1
        else:
            self.clean_bytes[gpu] += n_bytes

    def take(self, gpu: int, n_bytes: int, now_s: float) -> None:
        """Take so many bytes; `ready_s` and `waits` say what must be over before they can be overwritten."""
        self.ready_s = 0.0
        self.waits = NO_TICKETS
        if self.n_freed[gpu]:
            self._take_freed(gpu, n_bytes, now_s)
        self.clean_bytes[gpu] -= n_bytes

    def _take_freed(self, gpu: int, n_bytes: int, now_s: float) -> None:
        freed: deque[Freed] = self.freed[gpu]
        clean_bytes = self.clean_bytes[gpu]
        while freed and _over(freed[0], now_s):
            clean_bytes += freed.popleft()[0]
        lacks_bytes = n_bytes
        while clean_bytes < n_bytes and freed:
            more_bytes, ready_s, readers = freed.popleft()
            clean_bytes += more_bytes
            if ready_s > self.ready_s:
                self.ready_s = ready_s
            self.waits = (*self.waits, *readers)
            if more_bytes > lacks_bytes:
                # What a smaller piece leaves of a room that is still read: whoever takes it waits for the same.
                freed.appendleft((more_bytes - lacks_bytes, ready_s, readers))
                clean_bytes -= more_bytes - lacks_bytes
            else:
                lacks_bytes -= more_bytes
        self.clean_bytes[gpu] = clean_bytes
        self.n_freed[gpu] = len(freed)


def _over(room: Freed, now_s: float) -> bool:
    """Whether nothing reads it any more."""
    _, ready_s, readers = room
    if ready_s > now_s:
        return False
    for reader in readers:  # noqa: SIM110 - a loop is what compiles well
        if reader.end_s < 0.0 or reader.end_s > now_s:
            return False
    return True
