"""What a compute stream's time went into: busy, or waiting, and for whom."""

from __future__ import annotations

from sim.machine.lanes import CAUSES, GPU, HOST


class TimeLine:
    """A partition of a stream's time up to `free_s`; sums are taken in the order of launching.

    `uses` counts operations by duration until somebody asks: a sum per operation would round differently.
    """

    def __init__(self) -> None:
        self.free_s = 0.0
        self.gaps_s = [0.0] * len(CAUSES)  # waiting, by the cause named by the index
        self._uses: dict[float, int] = {}
        self._busy_s = 0.0

    def gap(self, until_s: float, cause: int) -> float:
        """The stream stood still up to here, waiting for `cause`; for how long."""
        gap_s = 0.0
        if until_s > self.free_s:
            gap_s = until_s - self.free_s
            self.gaps_s[cause] += until_s - self.free_s
            self.free_s = until_s
        return gap_s

    def work(self, spent_s: float, end_s: float, last_s: float) -> float:
        """The stream worked until `end_s`; a last kernel launched late ends at `last_s` at best: so long it starved."""
        self._uses[spent_s] = self._uses.get(spent_s, 0) + 1
        self.free_s = end_s
        return self.gap(last_s, HOST)

    @property
    def busy_s(self) -> float:
        """Seconds spent on operations."""
        self._busy_s = add_up(self._uses, self._busy_s)
        return self._busy_s

    @property
    def parts_s(self) -> list[float]:
        """Busy, or waiting for the cause named by the index; waiting for another GPU's result counts as GPU time."""
        parts_s = list(self.gaps_s)
        parts_s[GPU] += self.busy_s
        return parts_s


def add_up(uses: dict[float, int], busy_s: float) -> float:
    """`busy_s` and what has been counted since, by duration."""
    for duration_s, n in uses.items():
        busy_s += n * duration_s
    uses.clear()
    return busy_s
