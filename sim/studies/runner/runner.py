"""Points -> outcomes: one loop that looks up what is recorded, runs the rest and records it. Every study asks it.

Points are what names mean here and now (`sim.studies.runner.work.Resolved`); an outcome is a record of plain data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from sim.bounds.time_bound import LowerBound
from sim.figures import SCHEMA
from sim.results.record import Result
from sim.results.sampling import Sample, samples
from sim.studies.runner.pool import Answers, answers, n_cores
from sim.studies.runner.records import BOUNDS, LAYERED, POINTS, Records
from sim.studies.runner.work import OK, Answer, Resolved, bound_record, carried_out, only_bound

if TYPE_CHECKING:
    from sim.studies.runner.pool import Call

FEW_LAYERS = 200_000
"""Layers of output tokens in all points, below which starting processes takes longer than the work."""

Progress = Callable[[int, int, str], None]


class Work(NamedTuple):
    """What became of the points that can be set up: recorded by an earlier command, run by decisions of their own, or
    timed by those of another point ."""

    there: int
    replayed: int
    timed_by_recording: int


def recorded(
    records: Records,
    kind: str,
    calls: Mapping[str, Call],
    workers: int,
    done: Callable[[int, int], None],
    pool: Answers = answers,
) -> dict[str, dict[str, Any]]:
    """Id -> record of calls that are no points: those that are recorded are not called again.

    Args:
        kind: of record. calls: by the id of all that decides the answer, in the order in which they begin; each answers
            what its record says. done: told of (calls answered, in all).
    """
    found = {id_: records.get(kind, id_) for id_ in calls}
    missing = [id_ for id_, record in found.items() if record is None]
    done(len(calls) - len(missing), len(calls))
    with closing(pool([calls[id_] for id_ in missing], workers)) as stream:
        for n_done, (index, answer) in enumerate(stream, len(calls) - len(missing) + 1):
            id_ = missing[index]
            found[id_] = record = {"schema": SCHEMA, "id": id_, **answer}
            records.put(kind, id_, record)
            done(n_done, len(calls))
    return {id_: record for id_, record in found.items() if record is not None}


class Outcome(NamedTuple):
    """What became of a point.

    Attributes:
        status, reason: `ok`, or why there is no result. Its `wall_s` is 0 where it was recorded before.
        sample: of what is ranked of its requests, to be paired with another's: time per output token, or to the first
            where no request has another.
    """

    status: str
    reason: str
    result: Result | None = None
    sample: Sample | None = None


class Runner:
    """Runs points on several processes, or by a cluster, where that pays.

    Args:
        records: what is known from before, and where each outcome is kept. workers: None for the cores, where it pays.
        progress: told of (calls answered, in all, what is done). pool: who answers the calls.
        by_layer: results have `by_layer`, too.
    """

    def __init__(
        self,
        records: Records,
        workers: int | None,
        progress: Progress,
        pool: Answers = answers,
        by_layer: bool = False,
    ) -> None:
        self.records, self.workers, self.progress, self.pool = records, workers, progress, pool
        self._by_layer = by_layer
        self._kind = LAYERED if by_layer else POINTS
        self._walls_s: dict[str, float] = {}

    def run(
        self, rows: Sequence[Resolved], title: Callable[[int, int], str], bounds: bool = False, alone: bool = False
    ) -> Work:
        """Carry out and record what is not recorded yet, of points that can be set up.

        Args:
            title: of (points done, points in all). bounds: of lower bounds, too.
            alone: of a family of which only one is here others may follow later.

        Raises:
            CheckFailed: a worker process ended without an answer; what was recorded stays.
        """
        ready = list({row.id: row for row in rows if row.status == OK}.values())
        missing = [row for row in ready if self.records.get(self._kind, row.id) is None]
        workers = self.workers or (n_cores() if sum(row.n_layers for row in missing) >= FEW_LAYERS else 1)
        tells = self.pool is not answers or workers > 1  # what a recording is, to other processes
        families: dict[str, list[Resolved]] = {}
        for row in missing:
            families.setdefault(row.family or row.id, []).append(row)
        work: list[tuple[Resolved, Call]] = []
        waiting: dict[int, list[tuple[Resolved, Call]]] = defaultdict(list)  # for the answer of the call of that index
        begun: set[str] = set()

        def lacking(row: Resolved) -> str:
            """The bound that nobody has worked out yet, or begun to."""
            known = not bounds or row.bound in begun or self.records.get(BOUNDS, row.bound) is not None
            begun.add(row.bound)
            return "" if known else row.bound

        # Those of a family one after the other, while their recording is at hand; the first tells the others. A bound
        # is worked out with the first point that needs it and is to run anyway.
        for some in families.values():
            shared = tells and len(some) > 1
            for row in some:
                family = row.family if alone or len(some) > 1 else ""
                given = (row.spec, row.id, row.cpu, lacking(row), family, shared, self._by_layer)
                later = shared and row is not some[0]
                (waiting[len(work) - 1] if later else work).append((row, (carried_out, given)))
        work += [(row, (only_bound, (row.spec, row.cpu, bound))) for row in ready if (bound := lacking(row))]
        n_all = len(work) + sum(map(len, waiting.values()))

        def after(index: int, answer: Answer) -> list[tuple[int, Call]]:
            more = [(row, (run, (*given, answer.recorded))) for row, (run, given) in waiting.pop(index, ())]
            work.extend(more)
            return [(at, work[at][1]) for at in range(len(work) - len(more), len(work))]

        there = len(ready) - len(missing)
        n_timed = 0
        calls = [call for _, call in work]
        with closing(self.pool(calls, min(workers, n_all), after if waiting else None)) as stream:
            for n_done, (index, answer) in enumerate(stream, 1):
                row, _ = work[index]
                if answer.bound is not None:
                    self.records.put(BOUNDS, row.bound, answer.bound)
                if answer.point is not None:
                    self.records.put(self._kind, row.id, answer.point)
                    self._walls_s[row.id] = answer.wall_s
                n_timed += answer.by_recording
                self.progress(n_done, n_all, title(min(there + n_done, len(ready)), len(ready)))
        return Work(there, len(missing) - n_timed, n_timed)

    def outcome(self, row: Resolved, bounds: bool = False) -> Outcome:
        """Of a point that has been run, or of one that cannot be. `bounds`: beside its lower bound."""
        if row.status != OK:
            return Outcome(row.status, row.reason)
        record = self.records.get(self._kind, row.id)
        assert record is not None
        if record["status"] != OK:
            return Outcome(record["status"], record["reason"])
        result = msgspec.convert(record["result"] | {"wall_s": self._walls_s.get(row.id, 0.0)}, Result)
        if bounds:
            least = None
            if row.bound:  # the point that it came with may have ended before it
                least = (self.records.get(BOUNDS, row.bound) or bound_record(row.spec, row.cpu, row.bound))["bound"]
            result.set_beside(None if least is None else LowerBound(**least))
        found = samples(record["requests"], row.spec.together)
        return Outcome(OK, "", result, found["tpot_s"] if found["tpot_s"].n else found["ttft_s"])
