"""What no lossless policy can beat in a candidate's setting, request by request, and which goals that rules out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from sim.results.figure import figures
from sim.results.metrics import statistic
from sim.studies.plan.goal import Goal, Reading

if TYPE_CHECKING:
    from sim.bounds.time_bound import LeastTimes
    from sim.setup.spec import RunSpec
    from sim.studies.plan.candidate import Candidate
    from sim.studies.pool import Call
    from sim.studies.sweep.run import Answers, Progress

ENOUGH = 4
"""Bounds from which starting processes pays."""


class Limit(NamedTuple):
    """Least times of every request. `alone`: one after the other, so that they add up to the run's."""

    requests: tuple[LeastTimes, ...]
    lanes: str
    alone: bool

    def value(self, goal: Goal, n: int | None = None) -> float | None:
        """The best that the goal's figure can be, over the first n requests or all; None where no bound is known."""
        from sim.bounds.time_bound import ROUNDING

        some = self.requests[:n]
        if goal.key == "throughput_tokens_per_s" and self.alone and not goal.at_most:
            return sum(one.outputs for one in some) / (sum(one.e2e_s for one in some) * (1 - ROUNDING))
        name, _, which = goal.key.partition(".")
        if not goal.at_most or name not in ("tpot_s", "ttft_s", "e2e_s") or which == "n":
            return None
        times = [getattr(one, name) for one in some]
        # The k-th of the least times is no more than the k-th of the times, so percentiles are bounds as means are.
        told = dict(figures({name: _fields(statistic(time for time in times if time is not None))}))
        least = told.get(goal.key)
        return None if least is None else least * (1 - ROUNDING)


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
        alone = setup.spec.batch == 1 and not setup.open_loop
        return Limit(tuple(Bounds(setup, cpu).requests()), lanes, alone)
    finally:
        setup.close()


def rule_out(
    goals: Sequence[Goal], candidates: Sequence[Candidate], workers: int, progress: Progress, pool: Answers
) -> int:
    """Work out the bounds that candidates share, and say what each leaves of the goals.

    Returns:
        How many there were.
    """
    from sim.studies.plan.candidate import EXCLUDED

    once: dict[str, Candidate] = {}
    bounded = [one for one in candidates if one.ready and not one.lossy and one.asked.bound]
    for one in bounded:
        once.setdefault(one.asked.bound, one)
    shared = list(once.values())
    calls: list[Call] = [(limit_of, (one.spec, one.asked.cpu)) for one in shared]
    found: dict[str, Limit | None] = {}
    with closing(pool(calls, workers if len(calls) >= ENOUGH else 1)) as stream:
        for index, limit in stream:
            found[shared[index].asked.bound] = limit
            progress(len(found), len(calls), "lower bounds")
    for one in bounded:
        limit = found[one.asked.bound]
        if limit is None:
            continue
        one.limit = limit
        values = [(goal, limit.value(goal)) for goal in goals]
        one.bounds = [Reading(goal, value, None) for goal, value in values if value is not None]
        if not all(told.met for told in one.bounds):
            one.state = EXCLUDED
    return len(shared)
