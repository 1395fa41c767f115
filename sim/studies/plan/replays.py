"""The replays of a plan: each run once, on several cores where it pays, and counted against trying everything."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import msgspec

from sim.results.record import Result
from sim.results.sampling import Sample, samples
from sim.studies.pool import answers, n_cores
from sim.studies.sweep.grid import key_of
from sim.studies.sweep.point_store import LAYERED, POINTS, Records
from sim.studies.sweep.run import Families
from sim.studies.sweep.work import OK, Resolved, resolve

if TYPE_CHECKING:
    from sim.options import RunSpec
    from sim.studies.sweep.run import Answers, Progress

FEWEST = 2
"""Requests of a look at few: fewer are mostly the filling of an empty cache."""
FEW_LAYERS = 200_000
"""Layers of output tokens below which starting processes takes longer than the replays."""


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
        self.n_requests, self.workers, self.loaded = n_requests, workers, loaded
        self.n_runs, self.n_whole, self.n_replayed = 0, 0, 0
        self._progress, self._pool, self._by_layer = progress, pool, by_layer
        self._records = Records() if records is None else records
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

    def of(self, specs: Sequence[RunSpec], n_layers: int, title: str, n: int | None = None) -> list[Result | str]:
        """The results of these runs, over the first n requests or all; of one that cannot be carried out, why."""
        asked = [spec if n is None else msgspec.structs.replace(spec, requests=n) for spec in specs]
        new = {key_of(spec): spec for spec in asked if key_of(spec) not in self._known}
        means = dict(zip(new, resolve(tuple(new.values())), strict=True))
        self._run([row for row in means.values() if row.status == OK], n_layers, title)
        self._rows |= means
        for key, row in means.items():
            self._known[key] = self._answer(row)
            self.add(1, n is None, self.n_requests if n is None else n)
        return [self._known[key_of(spec)] for spec in asked]

    def sample(self, spec: RunSpec) -> Sample:
        """Of a run that `of` has answered with a result: what it took each request, to be paired with another's."""
        row = self._rows[key_of(spec)]
        record = self._record(row)
        assert record is not None
        found = samples(record["requests"], row.spec.together)
        return found["tpot_s"] if found["tpot_s"].n else found["ttft_s"]

    def _run(self, rows: Sequence[Resolved], n_layers: int, title: str) -> None:
        """Carry out and record what is not recorded yet."""
        once = {row.id: row for row in rows if self._record(row) is None}
        workers = self.workers or (n_cores() if n_layers * len(once) >= FEW_LAYERS else 1)
        families = Families(list(once.values()), self._pool is not answers or workers > 1, alone=True)
        order = families.in_turn()
        calls = [families.call(row, index, by_layer=self._by_layer) for index, row in enumerate(order)]
        with closing(self._pool(calls, workers)) as stream:
            for done, (index, answer) in enumerate(stream):
                self._records.put(self._kind, order[index].id, answer.point)
                self._progress(done + 1, len(calls), title)

    @property
    def _kind(self) -> str:
        return LAYERED if self._by_layer else POINTS

    def _record(self, row: Resolved) -> dict[str, Any] | None:
        return self._records.get(self._kind, row.id)

    def _answer(self, row: Resolved) -> Result | str:
        if row.status != OK:
            return row.reason
        record = self._record(row)
        assert record is not None
        if record["status"] != OK:  # a fault of one policy is no fault of the plan
            reason: str = record["reason"]
            return reason
        return msgspec.convert(record["result"], Result)

    def add(self, runs: int, whole: int, requests: int) -> None:
        """Count so many runs, of them so many of all requests, over so many requests together."""
        self.n_runs += runs
        self.n_whole += whole
        self.n_replayed += requests
