"""Counters of equal things: sums of many operations are one product for each kind, in the order kinds were first met.

Counting is cheaper than adding, and gives the same bits however a run is cut into parts.
"""

from __future__ import annotations

from sim.base.flat import floats, ints, longer_floats, longer_ints


class Meter:
    """How often each of a set of durations has been met since it was last read, by the quantity they rest on.

    A duration has a place, `at(duration_s)`; `order` holds places in the order in which they were first met.
    """

    def __init__(self) -> None:
        self.duration_s = floats(1024)
        self.attributed_to = ints(1024)
        self.n = ints(1024)
        self.order = ints(1024)
        self.n_known = 0
        self.n_met = 0
        self._at: dict[int, dict[float, int]] = {}  # by quantity

    def at(self, duration_s: float, attributed_to: int = 0) -> int:
        """The place of a duration that rests on a quantity."""
        known = self._at.get(attributed_to)
        if known is None:
            known = self._at[attributed_to] = {}
        found = known.get(duration_s)
        if found is not None:
            return found
        at = self.n_known
        known[duration_s] = at
        if at == len(self.n):
            self.duration_s = longer_floats(self.duration_s, 2 * at)
            self.attributed_to = longer_ints(self.attributed_to, 2 * at)
            self.n = longer_ints(self.n, 2 * at)
            self.order = longer_ints(self.order, 2 * at)
        self.duration_s[at] = duration_s
        self.attributed_to[at] = attributed_to
        self.n_known = at + 1
        return at

    def add(self, at: int, n: int) -> None:
        """Count `n` more of the duration at this place."""
        if self.n[at] == 0:
            self.order[self.n_met] = at
            self.n_met += 1
        self.n[at] += n

    def spend(self, spent_s: list[float]) -> None:
        """Add what was met to the seconds of each quantity; counts begin anew."""
        for index in range(self.n_met):
            at = self.order[index]
            spent_s[self.attributed_to[at]] += self.n[at] * self.duration_s[at]
            self.n[at] = 0
        self.n_met = 0

    def forget(self) -> None:
        """Give all places away anew; only where nothing is counted."""
        self.n_known = 0
        self._at.clear()


class Seconds:
    """Seconds spent, counted by duration."""

    def __init__(self) -> None:
        self.meter = Meter()
        self.spent_s = 0.0

    def total_s(self) -> float:
        """All seconds until now."""
        meter = self.meter
        for index in range(meter.n_met):
            at = meter.order[index]
            self.spent_s += meter.n[at] * meter.duration_s[at]
            meter.n[at] = 0
        meter.n_met = 0
        return self.spent_s
