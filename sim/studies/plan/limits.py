"""What no lossless policy can beat in a candidate's setting, request by request, and which goals that rules out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import structs

from sim.figures import SCHEMA, numbers
from sim.results.metrics import statistic
from sim.studies.plan.goal import Goal, Reading
from sim.studies.sweep.grid import key_of
from sim.studies.sweep.point_store import LIMITS

if TYPE_CHECKING:
    from sim.bounds.time_bound import LeastTimes
    from sim.options import RunSpec
    from sim.studies.plan.candidate import Candidate
    from sim.studies.pool import Call
    from sim.studies.runner import Answers, Progress
    from sim.studies.sweep.point_store import Records
    from sim.workload.slo import Slo

ATTAINED = ("slo.attained_frac", "slo.goodput_requests_per_s")
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

    def told(self) -> dict[str, Any]:
        """As plain data, for a record."""
        return self._asdict() | {"promised": [None if slo is None else structs.asdict(slo) for slo in self.promised]}

    def value(self, goal: Goal, n: int | None = None) -> float | None:
        """The best that the goal's figure can be, over the first n requests or all; None where no bound is known."""
        from sim.bounds.time_bound import ROUNDING

        some = self.requests[:n]
        span_s = self._span_s(some) * (1 - ROUNDING)
        if not goal.at_most and span_s > 0 and goal.key == "throughput_tokens_per_s":
            return sum(one.outputs for one in some) / span_s
        if not goal.at_most and self.promised and goal.key in ATTAINED:
            may = [may_keep(one, slo) for one, slo in zip(some, self.promised, strict=False) if slo is not None]
            if goal.key == ATTAINED[0]:
                return sum(may) / len(may) if may else None
            return sum(may) / span_s if span_s > 0 else None
        name, _, which = goal.key.partition(".")
        if not goal.at_most or name not in ("tpot_s", "ttft_s", "e2e_s") or which == "n":
            return None
        times = [getattr(one, name) for one in some]
        # The k-th of the least times is no more than the k-th of the times, so percentiles are bounds as means are.
        told = dict(numbers({name: _fields(statistic(time for time in times if time is not None))}))
        least = told.get(goal.key)
        return None if least is None else least * (1 - ROUNDING)

    def _span_s(self, some: Sequence[LeastTimes]) -> float:
        """The least time from the first arrival to the last token; 0 where it is not known."""
        if self.arrivals_s:
            ends_s = (at_s + one.e2e_s for at_s, one in zip(self.arrivals_s, some, strict=False))
            return max(ends_s, default=0.0) - self.arrivals_s[0]
        return sum(one.e2e_s for one in some) if self.alone else 0.0


def may_keep(least: LeastTimes, slo: Slo) -> bool:
    """Whether a request that takes no less may keep its SLO."""
    from sim.bounds.time_bound import ROUNDING

    pairs = ((least.ttft_s, slo.ttft_s), (least.tpot_s, slo.tpot_s), (least.e2e_s, slo.e2e_s))
    return all(most is None or at_least is None or at_least * (1 - ROUNDING) <= most for at_least, most in pairs)


def _fields(value: object) -> dict[str, float | None]:
    names: tuple[str, ...] = getattr(value, "__struct_fields__", ())
    return {name: getattr(value, name) for name in names}


def limit_of(spec: RunSpec, cpu: bool) -> Limit | None:
    """The limit of one run; None where arrivals and batches leave no future to know."""
    from sim.bounds.time_bound import Bounds
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


def _read(data: dict[str, Any] | None) -> Limit | None:
    """What `Limit.told` says."""
    from sim.bounds.time_bound import LeastTimes
    from sim.workload.slo import Slo

    if data is None:
        return None
    times = {name: tuple(LeastTimes(*row) for row in data[name]) for name in ("requests", "unhurried")}
    promised = tuple(None if slo is None else Slo(**slo) for slo in data["promised"])
    return Limit(**{**data, **times, "promised": promised, "arrivals_s": tuple(data["arrivals_s"])})


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
    from sim.studies.plan.candidate import EXCLUDED

    once: dict[str, Candidate] = {}
    bounded = [one for one in candidates if one.ready and not one.lossy and one.asked.bound]
    for one in bounded:
        once.setdefault(one.asked.bound, one)
    known = {id_: record for id_ in once if (record := records.get(LIMITS, id_)) is not None}
    found = {id_: _read(record["limit"]) for id_, record in known.items()}
    missing = [one for id_, one in once.items() if id_ not in known]
    calls: list[Call] = [(limit_of, (one.spec, one.asked.cpu)) for one in missing]
    with closing(pool(calls, workers if len(calls) >= ENOUGH else 1)) as stream:
        for index, limit in stream:
            id_ = missing[index].asked.bound
            found[id_] = limit
            records.put(LIMITS, id_, {"schema": SCHEMA, "id": id_, "limit": None if limit is None else limit.told()})
            progress(len(found), len(once), "lower bounds")
    own = {key_of(one.spec): found[one.asked.bound] for one in bounded}
    for one in candidates:
        if not one.ready or one.lossy:
            continue
        limit = own.get(key_of(one.spec))
        if limit is None and one.machine.n_replicas > 1:  # of the same on one machine
            of_one = own.get(key_of(structs.replace(one.spec, replicas=1)))
            limit = None if of_one is None else of_one.of_any_replicas
        if limit is None:
            continue
        one.limit = limit
        values = [(goal, limit.value(goal)) for goal in goals]
        one.bounds = [Reading(goal, value, None) for goal, value in values if value is not None]
        if not all(told.met for told in one.bounds):
            one.state = EXCLUDED
    return len(once)
