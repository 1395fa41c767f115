"""The replays of a plan: each run once, on several cores where it pays, and counted against trying everything."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import msgspec

from sim.base.errors import MoesimError, one_line
from sim.studies.pool import answers, replay
from sim.studies.sweep.grid import key_of

if TYPE_CHECKING:
    from sim.results.record import Result
    from sim.setup.spec import RunSpec
    from sim.studies.pool import Call
    from sim.studies.sweep.run import Answers, Progress

FEWEST = 2
"""Requests of a look at few: fewer are mostly the filling of an empty cache."""
FEW_LAYERS = 200_000
"""Layers of output tokens below which starting processes takes longer than the replays."""


def replayed(spec: RunSpec) -> Result | str:
    """The result of a run, or why there is none, in a line: a fault of one policy is no fault of the plan."""
    try:
        found = replay(spec)
    except Exception as error:  # a mistake of a policy's own
        return one_line(f"{type(error).__name__}: {error}")
    return str(found) if isinstance(found, MoesimError) else found[0]


class Replays:
    """What was replayed.

    Args:
        n_requests: of a whole run. workers: None for the cores, where it pays. pool: who answers the calls.
        loaded: requests come at times of their own: the first few find an empty queue, and say nothing of the others.

    Attributes:
        n_runs: replays, of few requests or all. share: what they add up to, in whole runs.
    """

    def __init__(
        self,
        n_requests: int,
        workers: int | None,
        progress: Progress,
        pool: Answers = answers,
        loaded: bool = False,
    ) -> None:
        self.n_requests, self.workers, self.loaded = n_requests, workers, loaded
        self.n_runs, self.n_whole, self.n_replayed = 0, 0, 0
        self._progress, self._pool = progress, pool
        self._known: dict[Any, Result | str] = {}

    def few(self, one_in: int) -> int | None:
        """One in so many requests, where these are enough to look at and less than half of all; else None."""
        n = max(FEWEST, self.n_requests // one_in)
        return None if self.loaded or 2 * n > self.n_requests else n

    @property
    def share(self) -> float:
        """Whole runs that took as many requests."""
        return self.n_replayed / self.n_requests

    def of(self, specs: Sequence[RunSpec], n_layers: int, title: str, n: int | None = None) -> list[Result | str]:
        """The results of these runs, over the first n requests or all."""
        from sim.studies.pool import n_cores

        asked = [spec if n is None else msgspec.structs.replace(spec, requests=n) for spec in specs]
        new = {key_of(spec): spec for spec in asked if key_of(spec) not in self._known}
        workers = self.workers or (n_cores() if n_layers * len(new) >= FEW_LAYERS else 1)
        calls: list[Call] = [(replayed, (spec,)) for spec in new.values()]
        keys = list(new)
        with closing(self._pool(calls, workers)) as stream:
            for done, (index, answer) in enumerate(stream):
                self._known[keys[index]] = answer
                self.add(1, n is None, self.n_requests if n is None else n)
                self._progress(done + 1, len(calls), title)
        return [self._known[key_of(spec)] for spec in asked]

    def add(self, runs: int, whole: int, requests: int) -> None:
        """Count so many runs, of them so many of all requests, over so many requests together."""
        self.n_runs += runs
        self.n_whole += whole
        self.n_replayed += requests
