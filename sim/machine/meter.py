"""Counters of equal things: sums of many operations are one product for each kind, in the order kinds were first met.

Counting is cheaper than adding, and gives the same bits however a run is cut into parts.
"""

from __future__ import annotations

from typing import Any

from sim.base.flat import ints, longer_ints


class Meter:
    """How often each of a set of keys (durations, prices) has been met since it was last read.

    A key has a place, `at(key)`; `order` holds places in the order in which they were first met.
    """

    def __init__(self) -> None:
        self.keys: list[Any] = []
        self.n = ints(64)
        self.order = ints(64)
        self.n_met = 0
        self._at: dict[Any, int] = {}

    def at(self, key: Any) -> int:
        """The place of a key."""
        at = self._at.get(key)
        if at is None:
            at = self._at[key] = len(self.keys)
            self.keys.append(key)
            if at == len(self.n):
                self.n = longer_ints(self.n, 2 * at)
                self.order = longer_ints(self.order, 2 * at)
            return at
        return at

    def add(self, at: int, n: int) -> None:
        """Count `n` more of the key at this place."""
        if self.n[at] == 0:
            self.order[self.n_met] = at
            self.n_met += 1
        self.n[at] += n

    def read(self) -> list[tuple[Any, int]]:
        """(key, how often) in the order of first meeting; counts begin anew."""
        found = []
        for index in range(self.n_met):
            at = self.order[index]
            found.append((self.keys[at], self.n[at]))
            self.n[at] = 0
        self.n_met = 0
        return found

    def forget(self) -> None:
        """Give all places away anew; only where nothing is counted."""
        self.keys.clear()
        self._at.clear()


class Seconds:
    """Seconds spent, counted by duration."""

    def __init__(self) -> None:
        self.meter = Meter()
        self.spent_s = 0.0

    def total_s(self) -> float:
        """All seconds until now."""
        if self.meter.n_met:
            for duration_s, n in self.meter.read():
                self.spent_s += n * duration_s
        return self.spent_s
