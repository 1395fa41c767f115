"""A goal: a figure of a result that must not be above, or below, a number; and what a run has for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from sim.base.errors import BadInput
from sim.base.units import show_number
from sim.figures import Ends, numbers
from sim.results.expectations import Expectation, holds, parsed
from sim.results.figure import show_figure, unit_of
from sim.results.record import Result

FEWEST_FOR = {"p50": 2, "p90": 10, "p95": 20, "p99": 100}
"""Requests from which a percentile is given (`sim.results.metrics.statistic`)."""


class Goal(Expectation):
    """One comparison."""

    __slots__ = ()

    @property
    def said(self) -> str:
        """With its unit: `tpot_s.mean <= 100 ms`."""
        return f"{self.key} {self.sign} {show_figure(self.key, self.bound)}"

    @property
    def at_most(self) -> bool:
        """Whether less is better."""
        return self.sign in ("<=", "<")

    @property
    def fewest(self) -> int:
        """Requests that its figure takes; 0 for any number."""
        return FEWEST_FOR.get(self.key.rpartition(".")[2], 0)

    @property
    def of_energy(self) -> bool:
        """Whether it is on joules, which only some profiles have watts for."""
        return self.key.startswith("energy.")

    def to_dict(self) -> dict[str, Any]:
        """Its entry in `--json`."""
        return {"key": self.key, "sign": self.sign, "bound": self.bound, "written": self.text}

    def met(self, value: float) -> bool:
        """Whether a figure reaches it."""
        return holds(self, value)

    def margin_frac(self, value: float) -> float:
        """How far a figure is on the right side, as a share of the goal; negative where it misses."""
        room = self.bound - value if self.at_most else value - self.bound
        return room / abs(self.bound) if self.bound else math.copysign(math.inf, room) if room else 0.0


class Reading(NamedTuple):
    """A goal's figure of one run: its value, and its band where it has one (docs/provenance.md).

    Attributes:
        by_requests: of the band, what is for the choice of requests alone, and of how many (batches of) requests.
    """

    goal: Goal
    value: float
    band: Ends = None
    by_requests: tuple[tuple[float, float], int] | None = None

    @property
    def met(self) -> bool:
        """Whether the value reaches the goal."""
        return self.goal.met(self.value)

    @property
    def margin_frac(self) -> float:
        """See `Goal.margin_frac`."""
        return self.goal.margin_frac(self.value)

    @property
    def sure(self) -> bool:
        """Whether the whole band is on the side of the goal where the value is."""
        return all(self.goal.met(end) == self.met for end in self.band or (self.value,))

    @property
    def said(self) -> str:
        """`tpot_s.mean 92 ms (88 ms to 110 ms), 8 % to spare`."""
        key, share = self.goal.key, 100 * abs(self.margin_frac)
        band = "" if self.band is None else " ({} to {})".format(*(shown(key, end) for end in self.band))
        side = "to spare" if self.met else "too much" if self.goal.at_most else "too little"
        return f"{key} {shown(key, self.value)}{band}, {share:{',.0f' if share >= 99.5 else '.2g'}} % {side}"

    def to_dict(self) -> dict[str, Any]:
        """Its entry in `--json`."""
        low, high = self.band or (None, None)
        return {
            "key": self.goal.key,
            "value": self.value,
            "low": low,
            "high": high,
            "margin_frac": self.margin_frac if math.isfinite(self.margin_frac) else None,
            "met": self.met,
            "beyond_the_band": self.sure,
        }


def shown(key: str, value: float | None) -> str:
    """A figure as people read it: three digits where it has no unit."""
    return show_number(value) if isinstance(value, float) and not unit_of(key) else show_figure(key, value)


def goals_of(texts: Sequence[str], what: str = "--goal") -> list[Goal]:
    """Goals as they were written.

    Raises:
        BadInput: no comparison, an equation, or a figure that no result has.
    """
    found = [Goal(*one) for one in parsed(tuple(texts), what)]
    for goal in found:
        if goal.sign == "==":
            raise BadInput(f"{what}, got {goal.key!r} with ==: a goal is reached from one side; write <= or >=")
    return found


def readings(goals: Sequence[Goal], result: Result, few: bool = False) -> list[Reading]:
    """What a run has for every goal; of a few requests, for those goals whose figures they give.

    Raises:
        BadInput: the requests do not give the figure.
    """
    found, known = [], dict(numbers(result.to_dict()))
    for goal in goals:
        value = known.get(goal.key)
        if value is not None:
            found.append(_reading(goal, float(value), result))
        elif not few:
            of = f"it takes {goal.fewest} requests, and {result.n_requests} are replayed"
            if goal.key.startswith("slo.") and result.slo is None:
                raise BadInput(f"--goal, got {goal.key!r}: nothing is promised to any request; add --slo")
            if goal.of_energy and result.energy is None:
                raise BadInput(f"--goal, got {goal.key!r}: nobody counts joules; add --set sim.energy=gpu")
            of = of if goal.fewest else "no run here has one"
            raise BadInput(f"--goal, got {goal.key!r}: {of}; ask for another figure, or give a longer --trace")
    return found


def _reading(goal: Goal, value: float, result: Result) -> Reading:
    told, band = result.uncertainty, None
    if goal.key in ("tpot_s.mean", "ttft_s.mean"):
        ends, n = told.sampling.of("tpot_s" if goal.key == "tpot_s.mean" else "ttft_s")
        band = told.tpot_s if goal.key == "tpot_s.mean" else told.ttft_s
        return Reading(goal, value, band, None if ends is None else (ends, n))
    if told.low_factor is not None and told.high_factor is not None:
        if goal.key == "energy.joules_per_token" and result.energy is not None:
            band = result.energy.range_joules_per_token
        elif unit_of(goal.key) == "s":
            band = value * told.low_factor, value * told.high_factor
        elif goal.key == "throughput_tokens_per_s":
            band = value / told.high_factor, value / told.low_factor
    return Reading(goal, value, band)


def growing(result: Result) -> str:
    """Why the load that was asked for is more than the run serves, in which case no goal is reached; else nothing."""
    return next((label for label in result.caveats if label.startswith("unstable queue")), "")
