"""A goal: a figure of a result that must not be above, or below, a number; and what is said of a run that has it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from sim.base.errors import BadInput
from sim.figures import numbers
from sim.results.expectations import Expectation, holds, parsed
from sim.results.figure import show_figure, unit_of
from sim.results.record import Result

FEWEST_FOR = {"p50": 2, "p90": 10, "p95": 20, "p99": 100}
"""Requests from which a percentile is given (`sim.results.metrics.statistic`)."""
TIMES = ("tpot_s", "ttft_s")


class Goal(NamedTuple):
    """One comparison; `text` is what people read."""

    expected: Expectation

    @property
    def key(self) -> str:
        """The figure it is of."""
        return self.expected.key

    @property
    def text(self) -> str:
        """As it was meant, with its unit: `tpot_s.mean <= 100 ms`."""
        return f"{self.key} {self.expected.sign} {show_figure(self.key, self.expected.bound)}"

    @property
    def at_most(self) -> bool:
        """Whether less is better."""
        return self.expected.sign in ("<=", "<")

    def to_dict(self) -> dict[str, Any]:
        """Its entry in `--json`."""
        key, sign, bound, text = self.expected
        return {"key": key, "sign": sign, "bound": bound, "written": text}

    def met(self, value: float) -> bool:
        """Whether a figure reaches it."""
        return holds(self.expected, value)

    def margin_frac(self, value: float) -> float:
        """How far a figure is on the right side, as a share of the goal; negative where it misses."""
        bound = self.expected.bound
        room = bound - value if self.at_most else value - bound
        return room / abs(bound) if bound else math.copysign(math.inf, room) if room else 0.0


class Reading(NamedTuple):
    """A goal's figure of one run: its value, and its band where it has one (docs/provenance.md).

    Attributes:
        by_requests: of the band, what is for the choice of requests alone, and of how many (batches of) requests.
    """

    goal: Goal
    value: float
    band: tuple[float, float] | None
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
        ends = self.band or (self.value, self.value)
        return all(self.goal.met(end) == self.met for end in ends)

    def to_dict(self) -> dict[str, Any]:
        """Its entry in `--json`."""
        return {
            "key": self.goal.key,
            "value": self.value,
            "low": None if self.band is None else self.band[0],
            "high": None if self.band is None else self.band[1],
            "margin_frac": self.margin_frac if math.isfinite(self.margin_frac) else None,
            "met": self.met,
            "beyond_the_band": self.sure,
        }


def goals_of(texts: Sequence[str], what: str = "--goal") -> list[Goal]:
    """Goals as they were written.

    Raises:
        BadInput: no comparison, an equation, or a figure that no result has.
    """
    found = [Goal(one) for one in parsed(tuple(texts), what)]
    for goal in found:
        if goal.expected.sign == "==":
            raise BadInput(f"{what}, got {goal.key!r} with ==: a goal is reached from one side; write <= or >=")
    return found


def reading(goal: Goal, result: Result) -> Reading | None:
    """What a run has for it; None where it has no such figure, as a percentile of too few requests."""
    value = dict(numbers(result.to_dict())).get(goal.key)
    if value is None:
        return None
    return Reading(goal, float(value), _band(goal, float(value), result), _by_requests(goal, result))


def readings(goals: Sequence[Goal], result: Result) -> list[Reading]:
    """Of every goal.

    Raises:
        BadInput: the requests do not give the figure.
    """
    found = [reading(goal, result) for goal in goals]
    for goal, one in zip(goals, found, strict=True):
        if one is None:
            n = FEWEST_FOR.get(goal.key.rpartition(".")[2])
            of = f"it takes {n} requests, and {result.n_requests} are replayed" if n else "no run here has one"
            if goal.key.startswith("slo.") and result.slo is None:
                raise BadInput(f"--goal, got {goal.key!r}: nothing is promised to any request; add --slo")
            if of_energy(goal) and result.energy is None:
                raise BadInput(f"--goal, got {goal.key!r}: nobody counts joules; add --set sim.energy=gpu")
            raise BadInput(f"--goal, got {goal.key!r}: {of}; ask for another figure, or give a longer --trace")
    return [one for one in found if one is not None]


def of_energy(goal: Goal) -> bool:
    """Whether it is on joules, which only some profiles have watts for."""
    return goal.key.startswith("energy.")


def growing(result: Result) -> str:
    """Why the load that was asked for is more than the run serves, in which case no goal is reached; else nothing."""
    return next((label for label in result.caveats if label.startswith("unstable queue")), "")


def worst(found: Sequence[Reading]) -> float:
    """The least margin of them all, by which candidates are compared."""
    return min(one.margin_frac for one in found)


def _band(goal: Goal, value: float, result: Result) -> tuple[float, float] | None:
    name, _, which = goal.key.partition(".")
    told = result.uncertainty
    if name in TIMES and which == "mean":
        return told.tpot_s if name == "tpot_s" else told.ttft_s
    if told.low_factor is None or told.high_factor is None:
        return None
    if goal.key == "energy.joules_per_token" and result.energy is not None:
        return result.energy.range_joules_per_token
    if unit_of(goal.key) == "s":
        return value * told.low_factor, value * told.high_factor
    if name == "throughput_tokens_per_s":
        return value / told.high_factor, value / told.low_factor
    return None


def _by_requests(goal: Goal, result: Result) -> tuple[tuple[float, float], int] | None:
    sampling = result.uncertainty.sampling
    told = {"tpot_s.mean": sampling.of("tpot_s"), "ttft_s.mean": sampling.of("ttft_s")}.get(goal.key)
    return None if told is None or told[0] is None else (told[0], told[1])
