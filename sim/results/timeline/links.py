"""What is asked of a copy engine and not there yet: bytes and copies, from what the host launched and what moved; and
which copy an expert's computing was the first to use: of those asked for since, what was not evicted before it."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

Expert = tuple[int, int]  # layer, expert


class Copy:
    """A copy that was asked for, and from when to when it moved."""

    __slots__ = ("asked_s", "counted", "end_s", "lane", "n_bytes", "start_s", "void")

    def __init__(self, lane: str, n_bytes: int, asked_s: float) -> None:
        self.lane = lane
        self.n_bytes = n_bytes
        self.asked_s = asked_s
        self.start_s = self.end_s = -1.0  # not known yet
        self.counted = False  # as waiting
        self.void = False  # its piece was evicted before anything used it

    @property
    def settled(self) -> bool:
        """Whether it is known when it moved."""
        return self.end_s >= 0.0


class Flight(NamedTuple):
    """What a link has before it, from a time on."""

    time_s: float
    moving_bytes: int
    waiting_bytes: int
    waiting_n: int


class Link:
    """One copy engine. Copies are told in the order in which they are settled; what it had before it, in that of time.

    One copy moves at a time, so the next begins no sooner than the last one that is settled has ended: what lies before
    that is complete.
    """

    def __init__(self, lane: str) -> None:
        self.lane = lane
        self.results_due = 0  # of experts on the CPU, which come up on this link
        self._due: dict[Expert, list[Copy]] = {}
        self._changes: list[tuple[float, int, int, int]] = []  # a heap: time, and what each count changes by
        self._now = Flight(0.0, 0, 0, 0)
        self._last_end_s = 0.0

    def asked(self, expert: Expert, n_bytes: int, time_s: float) -> Copy:
        """The host launches a copy."""
        copy = Copy(self.lane, n_bytes, time_s)
        self._due.setdefault(expert, []).append(copy)
        return copy

    def moved(self, expert: Expert, n_bytes: int, start_s: float, end_s: float) -> None:
        """A copy is settled; activations are nobody's."""
        self._last_end_s = max(self._last_end_s, end_s)
        copy = next((one for one in self._due.get(expert, ()) if one.n_bytes == n_bytes), None)
        if copy is not None:
            self._forget(expert, copy)
            copy.start_s, copy.end_s = start_s, end_s
            if not copy.counted:
                self._change(min(copy.asked_s, start_s), 0, n_bytes, 1)
            self._change(start_s, n_bytes, -n_bytes, -1)
        else:
            self._change(start_s, n_bytes, 0, 0)
        self._change(end_s, -n_bytes, 0, 0)

    def result_moved(self, n_bytes: int, start_s: float, end_s: float) -> None:
        """What an expert on the CPU has computed comes up."""
        self.results_due -= 1
        self.moved((-1, -1), n_bytes, start_s, end_s)

    def withdrawn(self, expert: Expert, n_bytes: int, time_s: float) -> None:
        """The last copy of so many bytes that was asked for an expert will not begin."""
        copy = next((one for one in reversed(self._due.get(expert, [])) if one.n_bytes == n_bytes), None)
        if copy is None:
            return
        self._forget(expert, copy)
        copy.void = True
        if not copy.counted:
            self._change(copy.asked_s, 0, n_bytes, 1)
        self._change(time_s, 0, -n_bytes, -1)

    def mistaken(self, expert: Expert) -> Copy | None:
        """The last launch for an expert was of a copy on another link, the way back."""
        due = self._due.get(expert)
        if not due:
            return None
        copy = due[-1]
        self._forget(expert, copy)
        return copy

    def known_s(self, now_s: float) -> float:
        """Up to when all that happens on this link is known at a time of the host's clock."""
        return min(now_s, self._last_end_s) if self._due or self.results_due else now_s

    def flights(self, now_s: float) -> Iterator[Flight]:
        """What it had before it, as far as that has become known."""
        known_s = self.known_s(now_s)
        for due in self._due.values():
            for copy in due:
                if not copy.counted and copy.asked_s < known_s:
                    copy.counted = True
                    self._change(copy.asked_s, 0, copy.n_bytes, 1)
        changes = self._changes
        while changes and (changes[0][0] < known_s or known_s == math.inf):
            time_s = changes[0][0]
            _, moving_bytes, waiting_bytes, waiting_n = self._now
            while changes and changes[0][0] == time_s:
                _, moving, waiting, n = heapq.heappop(changes)
                moving_bytes, waiting_bytes, waiting_n = moving_bytes + moving, waiting_bytes + waiting, waiting_n + n
            self._now = Flight(time_s, moving_bytes, waiting_bytes, waiting_n)
            yield self._now

    def _forget(self, expert: Expert, copy: Copy) -> None:
        due = self._due[expert]
        due.remove(copy)
        if not due:
            del self._due[expert]

    def _change(self, time_s: float, moving_bytes: int, waiting_bytes: int, waiting_n: int) -> None:
        heapq.heappush(self._changes, (max(time_s, self._now.time_s), moving_bytes, waiting_bytes, waiting_n))


class Uses:
    """Copies nobody has used yet, and experts that were launched and are not known to have run.

    Launches and evictions are taken in the order in which the host says them: what a launch finds is what it uses,
    whenever it then runs.

    Args:
        whole_bytes: a whole expert; its copies are over when it runs, while slices may wait for a later part.
        resident: whether anything of an expert has its room.
    """

    def __init__(self, whole_bytes: int, resident: Callable[[Expert], bool]) -> None:
        self._whole_bytes, self._resident = whole_bytes, resident
        self._unused: dict[Expert, list[Copy]] = {}
        self._launched: dict[Expert, deque[list[Copy]]] = {}

    def asked(self, expert: Expert, copy: Copy) -> None:
        """A copy has been launched."""
        self._unused.setdefault(expert, []).append(copy)

    def mistaken(self, expert: Expert, copy: Copy) -> None:
        """It was none of an expert's on its way up."""
        unused = self._unused.get(expert, [])
        if copy in unused:
            unused.remove(copy)

    def evicted(self, expert: Expert, n_bytes: int) -> None:
        """So many bytes of an expert have left: what brought them was of no use."""
        unused = self._unused.get(expert)
        if not unused:
            return
        gone = unused if not self._resident(expert) else [one for one in unused if one.n_bytes == n_bytes][:1]
        for copy in list(gone):
            copy.void = True
            unused.remove(copy)
        if not unused:
            del self._unused[expert]

    def launched(self, expert: Expert, n_bytes: int | None = None) -> None:
        """The host launches an expert, or a part of one; from a piece of so many bytes where that is known."""
        unused = self._unused.pop(expert, [])
        if n_bytes is not None and (others := [copy for copy in unused if copy.n_bytes != n_bytes]):
            self._unused[expert] = others
            unused = [copy for copy in unused if copy.n_bytes == n_bytes]
        self._launched.setdefault(expert, deque()).append(unused)

    def computed(self, expert: Expert, start_s: float) -> list[Copy]:
        """The copies that what was launched first, and began now, was the first to use."""
        launched = self._launched.get(expert)
        if launched is None:
            return []
        found: list[Copy] = []
        later: list[Copy] = []
        for copy in launched.popleft():
            used = copy.settled and (copy.end_s <= start_s or copy.n_bytes == self._whole_bytes)
            (found if used else later).append(copy)
        if launched:
            launched[0][:0] = later
        else:
            del self._launched[expert]
            if later and self._resident(expert):
                self._unused[expert] = [*later, *self._unused.get(expert, [])]
        return found
