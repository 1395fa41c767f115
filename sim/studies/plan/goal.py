"""A goal: a figure of a result that must not be above, or below, a number; what a run has for it, and a bound."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from sim.base.errors import BadInput
from sim.base.units import show_number
from sim.bounds.time_bound import ROUNDING, Bounds, LeastTimes
from sim.figures import Ends, numbers
from sim.options import RunSpec
from sim.results.expectations import Expectation, holds, parsed
from sim.results.figure import show_figure, unit_of
from sim.results.metrics import statistic
from sim.results.record import Result
from sim.results.sampling import FEWEST_FOR
from sim.workload.slo import Slo

ATTAINED, GOODPUT = "slo.attained_frac", "slo.goodput_requests_per_s"


class Goal(msgspec.Struct, frozen=True):
    """One comparison, as `Expectation` has them."""

    key: str
    sign: str
    bound: float
    written: str

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

    def met(self, value: float) -> bool:
        """Whether a figure reaches it."""
        return holds(Expectation(self.key, self.sign, self.bound, self.written), value)

    def reading(self, value: float, band: Ends = None) -> Reading:
        """A figure held to it."""
        margin = self.bound - value if self.at_most else value - self.bound
        frac = margin / abs(self.bound) if self.bound else math.copysign(math.inf, margin) if margin else 0.0
        met, (low, high) = self.met(value), band or (None, None)
        sure = all(self.met(end) == met for end in band or ())
        return Reading(self.said, self.key, value, low, high, frac, met, sure)


class Reading(msgspec.Struct, frozen=True):
    """A goal's figure of one run: its value, and its band where it has one (docs/provenance.md).

    Attributes:
        goal: in a sentence. margin_frac: how far the figure is on the right side, as a share of the goal; negative
            where it misses. beyond_the_band: whether the whole band is on the side of the goal where the value is.
    """

    goal: str
    key: str
    value: float
    low: float | None
    high: float | None
    margin_frac: float | None
    met: bool
    beyond_the_band: bool

    @property
    def margin(self) -> float:
        """`margin_frac`, in JSON null where it is endless."""
        return math.copysign(math.inf, self.met - 0.5) if self.margin_frac is None else self.margin_frac

    @property
    def shown(self) -> str:
        """Its value as people read it."""
        return shown(self.key, self.value)

    @property
    def band(self) -> str:
        """From where to where; empty without one."""
        return "" if self.low is None else f"{shown(self.key, self.low)} to {shown(self.key, self.high)}"

    @property
    def said(self) -> str:
        """`tpot_s.mean 92 ms (88 ms to 110 ms), 8 % to spare`."""
        share, band = 100 * abs(self.margin), f" ({self.band})" if self.band else ""
        side = "to spare" if self.met else "too much" if "<" in self.goal else "too little"
        return f"{self.key} {self.shown}{band}, {share:{',.0f' if share >= 99.5 else '.2g'}} % {side}"


def shown(key: str, value: float | None) -> str:
    """A figure as people read it: three digits where it has no unit."""
    return show_number(value) if isinstance(value, float) and not unit_of(key) else show_figure(key, value)


def figures(some: Iterable[Reading]) -> str:
    """`tpot_s.mean 92 ms, hit_rate 31 %`."""
    return ", ".join(f"{one.key} {show_figure(one.key, one.value)}" for one in some)


def least_margin(some: Iterable[Reading]) -> float:
    """By which runs are compared; that of a run without figures is endlessly far away."""
    return min((one.margin for one in some), default=-math.inf)


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
        if (value := known.get(goal.key)) is not None:
            found.append(goal.reading(float(value), _band(goal.key, float(value), result)))
        elif not few:
            raise BadInput(f"--goal, got {goal.key!r}: {_lacks(goal, result)}")
    return found


def _lacks(goal: Goal, result: Result) -> str:
    if goal.key.startswith("slo.") and result.slo is None:
        return "nothing is promised to any request; add --slo"
    if goal.key.startswith("energy.") and result.energy is None:
        return "nobody counts joules; add --set sim.energy=gpu"
    of = f"it takes {goal.fewest} requests, and {result.n_requests} are replayed"
    return f"{of if goal.fewest else 'no run here has one'}; ask for another figure, or give a longer --trace"


def _band(key: str, value: float, result: Result) -> Ends:
    told = result.uncertainty
    if key in ("tpot_s.mean", "ttft_s.mean"):
        return told.tpot_s if key == "tpot_s.mean" else told.ttft_s
    if told.low_factor is None or told.high_factor is None:
        return None
    if key == "energy.joules_per_token" and result.energy is not None:
        return result.energy.range_joules_per_token
    if unit_of(key) == "s":
        return value * told.low_factor, value * told.high_factor
    return (value / told.high_factor, value / told.low_factor) if key == "throughput_tokens_per_s" else None


def growing(result: Result) -> str:
    """Why the load that was asked for is more than the run serves, in which case no goal is reached; else nothing."""
    return next((label for label in result.caveats if label.startswith("unstable queue")), "")


class Limit(NamedTuple):
    """Least times of every request, in the order they complete; under load from its arrival on, with the wait for those
    before it.

    Attributes:
        alone: one after the other, so that they add up to the run's. arrivals_s: of requests under load. promised: of
            each request, where its order is known. unhurried: the same with nobody else there, so without a wait.
    """

    requests: tuple[LeastTimes, ...]
    alone: bool
    arrivals_s: tuple[float, ...] = ()
    promised: tuple[Slo | None, ...] = ()
    unhurried: tuple[LeastTimes, ...] = ()

    @property
    def of_any_replicas(self) -> Limit:
        """The same over however many machines: there a request need not wait for another, but takes no less alone."""
        return self._replace(requests=self.unhurried, alone=False)

    def readings(self, goals: Sequence[Goal]) -> list[Reading]:
        """The best that figures of goals can be, of those that a bound is known of."""
        return [goal.reading(value) for goal in goals if (value := self.value(goal)) is not None]

    def value(self, goal: Goal, n: int | None = None) -> float | None:
        """The best that the goal's figure can be, over the first n requests or all; None where no bound is known."""
        some, (name, _, which) = self.requests[:n], goal.key.partition(".")
        if goal.at_most:
            if name not in ("tpot_s", "ttft_s", "e2e_s") or which == "n":
                return None
            # The k-th of the least times is no more than the k-th of the times, so percentiles are bounds as means are.
            times = [time for one in some if (time := getattr(one, name)) is not None]
            least = dict(numbers({name: msgspec.structs.asdict(statistic(times))})).get(goal.key)
            return None if least is None else least * (1 - ROUNDING)
        span_s = self._span_s(some) * (1 - ROUNDING)
        if goal.key == "throughput_tokens_per_s":
            return sum(one.outputs for one in some) / span_s if span_s > 0 else None
        if not self.promised or goal.key not in (ATTAINED, GOODPUT):
            return None
        may = [may_keep(one, slo) for one, slo in zip(some, self.promised, strict=False) if slo is not None]
        whole = span_s if goal.key == GOODPUT else len(may)
        return sum(may) / whole if whole > 0 else None

    def _span_s(self, some: Sequence[LeastTimes]) -> float:
        """The least time from the first arrival to the last token; 0 where it is not known."""
        if self.arrivals_s:
            ends_s = (at_s + one.e2e_s for at_s, one in zip(self.arrivals_s, some, strict=False))
            return max(ends_s, default=0.0) - self.arrivals_s[0]
        return sum(one.e2e_s for one in some) if self.alone else 0.0


def may_keep(least: LeastTimes, slo: Slo) -> bool:
    """Whether a request that takes no less may keep its SLO."""
    pairs = ((least.ttft_s, slo.ttft_s), (least.tpot_s, slo.tpot_s), (least.e2e_s, slo.e2e_s))
    return all(most is None or at_least is None or at_least * (1 - ROUNDING) <= most for at_least, most in pairs)


def limit_of(spec: RunSpec, cpu: bool) -> Limit | None:
    """The limit of one run; None where arrivals and batches leave no future to know."""
    from sim.run import prepare

    with closing(prepare(spec)) as setup:
        if not setup.timeless:
            return None
        single = setup.spec.batch == 1
        least = tuple(Bounds(setup, cpu).requests())
        promised = tuple(setup.slos.of(request.task) for request in setup.requests) if single else ()
        if not setup.open_loop:
            return Limit(least, single, (), promised, least)
        arrivals_s = [request.arrival_s for request in setup.requests]
        known = tuple(at_s for at_s in arrivals_s if at_s is not None)
        unhurried = tuple(Bounds(replace(setup, open_loop=False), cpu).requests())
        return Limit(least, False, known if len(known) == len(arrivals_s) else (), promised, unhurried)


def limit_record(spec: RunSpec, cpu: bool) -> dict[str, Any]:
    """The limit of one run as plain data."""
    return {"limit": msgspec.to_builtins(limit_of(spec, cpu))}
