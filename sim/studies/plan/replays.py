"""The replays of a plan: each run once, on several cores where it pays, and counted against trying everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from sim.base.units import show_count
from sim.results.record import Result
from sim.results.sampling import Sample
from sim.studies.runner.pool import Answers, answers
from sim.studies.runner.records import Records
from sim.studies.runner.runner import Runner
from sim.studies.runner.work import Resolved, resolve
from sim.studies.sweep.grid import key_of

if TYPE_CHECKING:
    from sim.options import RunSpec
    from sim.studies.runner.runner import Progress

FEWEST = 2
"""Requests of a look at few: fewer are mostly the filling of an empty cache."""


class Replays:
    """What was replayed: points as a sweep has them, so that machines which differ in hardware alone share decisions.

    Args:
        n_requests: of a whole run. workers: None for the cores, where it pays. pool: who answers the calls.
        loaded: requests come at times of their own: the first few find an empty queue, and say nothing of the others.
        records: where each is kept, and looked for first. by_layer: results have `by_layer`, too.

    Attributes:
        n_runs: replays, of few requests or all, recorded before or not. share: what they add up to, in whole runs.
    """

    def __init__(
        self,
        n_requests: int,
        workers: int | None,
        progress: Progress,
        pool: Answers = answers,
        loaded: bool = False,
        records: Records | None = None,
        by_layer: bool = False,
    ) -> None:
        self.n_requests, self.loaded = n_requests, loaded
        self.n_runs, self.n_whole, self.n_replayed = 0, 0, 0
        self._runner = Runner(Records() if records is None else records, workers, progress, pool, by_layer)
        self._known: dict[Any, Result | str] = {}
        self._rows: dict[Any, Resolved] = {}

    def few(self, one_in: int) -> int | None:
        """One in so many requests, where these are enough to look at and less than half of all; else None."""
        n = max(FEWEST, self.n_requests // one_in)
        return None if self.loaded or 2 * n > self.n_requests else n

    @property
    def share(self) -> float:
        """Whole runs that took as many requests."""
        return self.n_replayed / self.n_requests

    @property
    def said(self) -> str:
        """In a sentence."""
        return f"{show_count(self.n_runs, 'replay')}, as much as {self.share:.3g} of all requests"

    def of(self, specs: Sequence[RunSpec], title: str, n: int | None = None) -> list[Result | str]:
        """The results of these runs, over the first n requests or all; of one that cannot be carried out, why."""
        asked = [spec if n is None else msgspec.structs.replace(spec, requests=n) for spec in specs]
        new = {key_of(spec): spec for spec in asked if key_of(spec) not in self._known}
        means = dict(zip(new, resolve(tuple(new.values())), strict=True))
        self._runner.run(list(means.values()), lambda _n, _all: title, alone=True)
        self._rows |= means
        for key, row in means.items():
            outcome = self._runner.outcome(row)  # a fault of one policy is no fault of the plan
            self._known[key] = outcome.reason if outcome.result is None else outcome.result
            self.add(1, n is None, self.n_requests if n is None else n)
        return [self._known[key_of(spec)] for spec in asked]

    def sample(self, spec: RunSpec) -> Sample:
        """Of a run that `of` has answered with a result: what it took each request, to be paired with another's."""
        sample = self._runner.outcome(self._rows[key_of(spec)]).sample
        assert sample is not None
        return sample

    def add(self, runs: int, whole: int, requests: int) -> None:
        """Count so many runs, of them so many of all requests, over so many requests together."""
        self.n_runs += runs
        self.n_whole += whole
        self.n_replayed += requests
