"""What no lossless policy can beat in a candidate's setting, request by request, and which goals that rules out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from sim.bounds.time_bound import ROUNDING, Bounds, LeastTimes
from sim.figures import numbers
from sim.results.metrics import statistic
from sim.studies.plan.candidate import EXCLUDED, Candidate
from sim.studies.plan.goal import Goal, Reading
from sim.studies.runner.records import LIMITS
from sim.studies.runner.runner import recorded
from sim.studies.sweep.grid import key_of
from sim.workload.slo import Slo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.options import RunSpec
    from sim.studies.runner.pool import Answers, Call
    from sim.studies.runner.records import Records
    from sim.studies.runner.runner import Progress

ATTAINED, GOODPUT = "slo.attained_frac", "slo.goodput_requests_per_s"
ENOUGH = 4
"""Bounds from which starting processes pays."""


class Limit(NamedTuple):
    """Least times of every request, in the order they complete; under load from its arrival on, with the wait for those
    before it.

    Attributes:
        alone: one after the other, so that they add up to the run's. arrivals_s: of requests under load. promised: of
            each request, where its order is known. unhurried: the same with nobody else there, so without a wait.
    """

    requests: tuple[LeastTimes, ...]
    lanes: str
    alone: bool
    arrivals_s: tuple[float, ...] = ()
    promised: tuple[Slo | None, ...] = ()
    unhurried: tuple[LeastTimes, ...] = ()

    @property
    def of_any_replicas(self) -> Limit:
        """The same over however many machines: there a request need not wait for another, but takes no less alone."""
        return self._replace(requests=self.unhurried, alone=False)

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

    setup = prepare(spec)
    try:
        if not setup.timeless:
            return None
        lanes = "copy + cpu" if cpu else "copy"
        single = setup.spec.batch == 1
        least = tuple(Bounds(setup, cpu).requests())
        promised = tuple(setup.slos.of(request.task) for request in setup.requests) if single else ()
        if not setup.open_loop:
            return Limit(least, lanes, single, (), promised, least)
        arrivals_s = [request.arrival_s for request in setup.requests]
        known = tuple(at_s for at_s in arrivals_s if at_s is not None)
        unhurried = tuple(Bounds(replace(setup, open_loop=False), cpu).requests())
        return Limit(least, lanes, False, known if len(known) == len(arrivals_s) else (), promised, unhurried)
    finally:
        setup.close()


def limit_record(spec: RunSpec, cpu: bool) -> dict[str, Any]:
    """The limit of one run as plain data."""
    return {"limit": msgspec.to_builtins(limit_of(spec, cpu))}


def rule_out(
    goals: Sequence[Goal],
    candidates: Sequence[Candidate],
    workers: int,
    progress: Progress,
    pool: Answers,
    records: Records,
) -> int:
    """Work out the bounds that candidates share, those that are not recorded, and say what each leaves of the goals.

    Returns:
        How many there were.
    """
    bounded = [one for one in candidates if one.ready and not one.lossy and one.asked.bound]
    once: dict[str, Candidate] = {}
    for one in bounded:
        once.setdefault(one.asked.bound, one)
    calls: dict[str, Call] = {id_: (limit_record, (one.spec, one.asked.cpu)) for id_, one in once.items()}

    def done(n: int, n_all: int) -> None:
        progress(n, n_all, "lower bounds")

    known = recorded(records, LIMITS, calls, workers if len(calls) >= ENOUGH else 1, done, pool)
    found = {id_: msgspec.convert(record["limit"], Limit | None) for id_, record in known.items()}
    own = {key_of(one.spec): found[one.asked.bound] for one in bounded}
    for one in candidates:
        if not one.ready or one.lossy:
            continue
        limit = own.get(key_of(one.spec))
        if limit is None and one.machine.n_replicas > 1:  # of the same on one machine
            of_one = own.get(key_of(msgspec.structs.replace(one.spec, replicas=1)))
            limit = None if of_one is None else of_one.of_any_replicas
        if limit is None:
            continue
        one.limit = limit
        one.bounds = [Reading(goal, value) for goal in goals if (value := limit.value(goal)) is not None]
        if not all(told.met for told in one.bounds):
            one.state = EXCLUDED
    return len(once)
