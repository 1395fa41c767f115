"""Which copy an expert's computing was the first to use: of those asked for since, what was not evicted before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from sim.results.timeline.links import Copy, Expert


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
