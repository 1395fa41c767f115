"""Searches: questions whose next runs depend on what came of the last ones. Many go on side by side over one runner."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from sim.base.units import show_count
from sim.studies.runner.pool import n_cores
from sim.studies.runner.processes import standing
from sim.studies.runner.records import LIMITS
from sim.studies.runner.runner import Outcome, recorded
from sim.studies.runner.work import ERRORS, Resolved, resolve
from sim.studies.sweep.grid import key_of

if TYPE_CHECKING:
    from sim.options import RunSpec
    from sim.results.sampling import Sample
    from sim.studies.plan.goal import Limit
    from sim.studies.runner.pool import Call
    from sim.studies.runner.runner import Runner

FEWEST = 2
"""Requests of a look at few: fewer are mostly the filling of an empty cache."""
ENOUGH = 4
"""Lower bounds from which starting processes pays."""
NEAR_FRAC = 0.02
"""How near a search comes to where something begins to hold."""


class Bounded(NamedTuple):
    """Asks for the lower bound of a run, in place of the run."""

    spec: RunSpec


T = TypeVar("T")
Search = Generator[Sequence[Any], list[Any], T]
"""Yields runs (`RunSpec`), or bounds of runs (`Bounded`), is sent a `Result` of each, or why there is none (a `Limit`,
or None), and returns what it was to find."""


class Replays:
    """What was replayed: points as a sweep has them, so that machines which differ in hardware alone share decisions.

    Args:
        n_requests: of a whole run. loaded: requests come at times of their own: the first few find an empty queue, and
            say nothing of the others. strict: a run without a result ends the study.

    Attributes:
        n_runs: replays, of few requests or all, recorded before or not. n_whole: of all. n_bounds: lower bounds.
    """

    def __init__(self, runner: Runner, n_requests: int, loaded: bool = False, strict: bool = False) -> None:
        self.n_requests, self.loaded = n_requests, loaded
        self.n_runs = self.n_whole = self.n_bounds = self._n_replayed = 0
        self._runner, self._strict = runner, strict
        self._known: dict[Any, Outcome] = {}

    def few(self, one_in: int) -> int | None:
        """One in so many requests, where these are enough to look at and less than half of all; else None."""
        n = max(FEWEST, self.n_requests // one_in)
        return None if self.loaded or 2 * n > self.n_requests else n

    @property
    def share(self) -> float:
        """Whole runs that took as many requests."""
        return self._n_replayed / self.n_requests

    @property
    def said(self) -> str:
        """In a sentence."""
        return f"{show_count(self.n_runs, 'replay')}, as much as {self.share:.3g} of all requests"

    def together(self, searches: Sequence[Search[T]], title: str) -> list[T]:
        """What each finds. Whatever they ask for at a time goes to the runner as one list."""
        found: dict[int, T] = {}
        told: dict[int, Any] = dict.fromkeys(range(len(searches)))
        with standing():
            while told:
                asked: dict[int, Sequence[Any]] = {}
                for at, answers in told.items():
                    try:
                        asked[at] = searches[at].send(answers)
                    except StopIteration as end:
                        found[at] = end.value
                every = iter(self._of([one for some in asked.values() for one in some], title))
                told = {at: [next(every) for _ in some] for at, some in asked.items()}
        return [found[at] for at in range(len(searches))]

    def one(self, search: Search[T], title: str) -> T:
        """What it finds."""
        return self.together([search], title)[0]

    def sample(self, spec: RunSpec) -> Sample:
        """Of a run that has a result: what it took each request, to be paired with another's."""
        sample = self._known[key_of(spec)].sample
        assert sample is not None
        return sample

    def limits(self, rows: Sequence[Resolved]) -> list[Limit | None]:
        """What no lossless policy can beat in these runs; None where nobody knows. Runs share bounds."""
        from sim.studies.plan.goal import Limit, limit_record

        runner = self._runner
        calls: dict[str, Call] = {row.bound: (limit_record, (row.spec, row.cpu)) for row in rows if row.bound}
        workers = (runner.workers or n_cores()) if len(calls) >= ENOUGH else 1

        def done(n: int, n_all: int) -> None:
            runner.progress(n, n_all, "lower bounds")

        found = recorded(runner.records, LIMITS, calls, workers, done, runner.pool) if calls else {}
        self.n_bounds += len(calls)
        return [msgspec.convert(found[row.bound]["limit"], Limit | None) if row.bound else None for row in rows]

    def _of(self, asked: Sequence[Any], title: str) -> list[Any]:
        """Of every run its result, or the reason why there is none; of every bound the limit."""
        limits = iter(self.limits(resolve(tuple(one.spec for one in asked if isinstance(one, Bounded)))))
        specs = [one for one in asked if not isinstance(one, Bounded)]
        new = {key: spec for spec in specs if (key := key_of(spec)) not in self._known}
        rows = resolve(tuple(new.values()))
        self._runner.run(rows, lambda _n, _all: title, alone=True)
        for (key, spec), row in zip(new.items(), rows, strict=True):
            self._known[key] = outcome = self._runner.outcome(row)  # a fault of one policy is no fault of the study
            if self._strict and outcome.result is None:
                raise ERRORS[outcome.status](outcome.reason)
            n = min(spec.requests or self.n_requests, self.n_requests)
            self.n_runs += 1
            self.n_whole += n == self.n_requests
            self._n_replayed += n
        return [next(limits) if isinstance(one, Bounded) else self._told(one) for one in asked]

    def _told(self, spec: RunSpec) -> Any:
        outcome = self._known[key_of(spec)]
        return outcome.reason if outcome.result is None else outcome.result


def narrowed(
    holds: Callable[[float], Search[Any]], near: float, far: float, whole: bool = False, near_frac: float = NEAR_FRAC
) -> Search[tuple[float, float]]:
    """The last value at which something does not hold yet and the first at which it does, to a share or to the whole
    number; at `near` it does not, at `far` it does, and in between it begins to once."""
    while abs(far - near) > 1 if whole else max(far, near) / min(far, near) > 1 + near_frac:
        middle = (near + far) // 2 if whole else math.sqrt(near * far)
        if (yield from holds(middle)):
            far = middle
        else:
            near = middle
    return near, far
