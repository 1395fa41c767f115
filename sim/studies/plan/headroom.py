"""Up to how many requests per second the machine that a plan found would go on reaching its goals."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from sim.studies.plan.goal import growing, readings
from sim.studies.saturate.search import n_clients
from sim.workload.load import NONE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.options import RunSpec
    from sim.results.record import Result
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


def has_rate(spec: RunSpec) -> bool:
    """Whether its requests come at a rate of their own."""
    return spec.arrivals is not None and spec.arrivals != NONE and not spec.arrivals.startswith("closed:")


def serves_at_most(spec: RunSpec, replays: Replays) -> float | None:
    """Requests per second where somebody always waits, as `moesim saturate` finds it; None where no run says so, or
    requests have no rate of their own. A short run at a higher rate may be over before its queue has grown beyond a
    goal.
    """
    if not has_rate(spec):
        return None
    closed = msgspec.structs.replace(spec, arrivals=f"closed:{n_clients(spec)}", arrivals_scale=1.0)
    (answer,) = replays.of([closed], "how much it serves")
    return None if isinstance(answer, str) or answer.load is None else answer.load.capacity_per_s


def too_many(result: Result, most_per_s: float | None) -> str:
    """Why more come than are served at most; else nothing."""
    come_per_s = None if result.load is None else result.load.arrivals_per_s
    if come_per_s is None or most_per_s is None or come_per_s < most_per_s:
        return ""
    return f"unstable queue: arrives {come_per_s:.3g}/s, serves {most_per_s:.3g}/s at most"


def headroom(goals: Sequence[Goal], best: Candidate, replays: Replays) -> Headroom | None:
    """Of the answer; None where its requests have no rate of their own."""
    spec, result = best.spec, best.result
    if not has_rate(spec) or result is None or result.load is None or result.load.arrivals_per_s is None:
        return None
    most_per_s = serves_at_most(spec, replays)

    def reaching(times: float) -> Result | None:
        """The result with so many times the rate, where it reaches every goal and goes on doing so."""
        faster = msgspec.structs.replace(spec, arrivals_scale=spec.arrivals_scale * times)
        (answer,) = replays.of([faster], "up to which rate")
        if isinstance(answer, str) or growing(answer) or too_many(answer, most_per_s):
            return None
        return answer if all(one.met for one in readings(goals, answer)) else None

    low, high, at_low = 1.0, 2.0, result
    while (found := reaching(high)) is not None:
        low, at_low = high, found
        if high >= MOST:
            return _told(low, at_low, None)
        high *= 2
    while high / low > 1 + NEAR_FRAC:
        middle = math.sqrt(low * high)
        found = reaching(middle)
        if found is None:
            high = middle
        else:
            low, at_low = middle, found
    return _told(low, at_low, high)


def _told(times: float, result: Result, lost_at: float | None) -> Headroom:
    assert result.load is not None
    return Headroom(times, result.load.arrivals_per_s or 0.0, lost_at)
