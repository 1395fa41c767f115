"""Up to how many requests per second the machine that a plan found would go on reaching its goals."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from sim.studies.plan.goal import growing, readings
from sim.workload.load import NONE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.results.record import Result
    from sim.setup.spec import RunSpec
    from sim.studies.plan.candidate import Candidate
    from sim.studies.plan.goal import Goal
    from sim.studies.plan.replays import Replays

MOST = 16.0
"""Times the rate that was asked for."""
NEAR_FRAC = 0.05


class Headroom(NamedTuple):
    """Found by bisection, which takes for granted that more requests make nothing better.

    Attributes:
        times: of the rate that was asked for; per_s: what came then. lost_at: times of it at which a goal is missed,
            None where none was found up to `MOST`.
    """

    times: float
    per_s: float
    lost_at: float | None

    @property
    def text(self) -> str:
        """In a sentence."""
        far = f"{self.times:.3g} times the rate asked for, when {self.per_s:.3g} requests/s came"
        if self.lost_at is None:
            return f"the same reaches it up to {far}, and was not tried with more"
        return f"the same reaches it up to {far}; at {self.lost_at:.3g} times it does not"


def headroom(goals: Sequence[Goal], best: Candidate, replays: Replays) -> Headroom | None:
    """Of the answer; None where its requests have no rate of their own."""
    spec, result = best.spec, best.result
    closed = spec.arrivals is None or spec.arrivals == NONE or spec.arrivals.startswith("closed:")
    if closed or result is None or result.load is None or result.load.arrivals_per_s is None:
        return None
    low, high, at_low = 1.0, 2.0, result
    while (found := _reaching(goals, spec, high, best, replays)) is not None:
        low, at_low = high, found
        if high >= MOST:
            return _told(low, at_low, None)
        high *= 2
    while high / low > 1 + NEAR_FRAC:
        middle = math.sqrt(low * high)
        found = _reaching(goals, spec, middle, best, replays)
        if found is None:
            high = middle
        else:
            low, at_low = middle, found
    return _told(low, at_low, high)


def _told(times: float, result: Result, lost_at: float | None) -> Headroom:
    assert result.load is not None
    return Headroom(times, result.load.arrivals_per_s or 0.0, lost_at)


def _reaching(goals: Sequence[Goal], spec: RunSpec, times: float, best: Candidate, replays: Replays) -> Result | None:
    """The result with so many times the rate, where it reaches every goal."""
    faster = msgspec.structs.replace(spec, rate_scale=spec.rate_scale * times)
    (answer,) = replays.of([faster], best.asked.n_layers, "up to which rate")
    if isinstance(answer, str) or growing(answer):
        return None
    return answer if all(one.met for one in readings(goals, answer)) else None
