"""Figures of two results beside each other: which differ, and which way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from sim.figures import numbers
from sim.results.figure import better

if TYPE_CHECKING:
    from sim.results.record import Result

SAME, BETTER, WORSE, CHANGED, NEW = "same", "better", "worse", "changed", "new"


class Tolerance(NamedTuple):
    """How far a figure may be off: so much, or such a share of what is expected."""

    amount: float
    relative: bool
    text: str

    def of(self, expected: float) -> float:
        """In the figure's own unit."""
        return self.amount * abs(expected) if self.relative else self.amount


EXACT = Tolerance(0.0, False, "0")


class Compared(msgspec.Struct, frozen=True, omit_defaults=True):
    """A figure, or an input, of A and of B; None: that side has none of it, or nobody knows. verdict: of figures."""

    key: str
    a: Any
    b: Any
    verdict: str = ""


def facts_of(result: Result, *without: str) -> dict[str, float | None]:
    """All figures of a result by their dotted names."""
    return dict(numbers({key: value for key, value in result.to_dict().items() if key not in without}))


def differing(own: Mapping[str, Any], other: Mapping[str, Any]) -> list[Compared]:
    """What is not the same in both."""
    keys = dict.fromkeys([*own, *other])
    return [Compared(key, own.get(key), other.get(key)) for key in keys if own.get(key) != other.get(key)]


def verdict_of(key: str, a: float | None, b: float | None, tolerance: Tolerance = EXACT) -> str:
    """How a figure stands beside what it was, or was expected to be: `same`; `better` or `worse`, beyond its tolerance;
    `changed`, where neither way is better, or it is null now; `new`, where it was not known."""
    if a is None:
        return SAME if b is None else NEW
    if b is None:
        return CHANGED
    if b == a or abs(b - a) <= tolerance.of(a):
        return SAME
    way = better(key)
    if not way:
        return CHANGED
    return BETTER if (b > a) == (way > 0) else WORSE
