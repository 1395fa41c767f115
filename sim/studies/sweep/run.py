"""Run a sweep: resolve every point, skip what is recorded, replay the rest, and hand over one row per point."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from sim.base.errors import BadInput
from sim.bounds.time_bound import LowerBound
from sim.options import OPTIONS
from sim.profiles.overrides import GROUPS
from sim.results.record import Result
from sim.results.sampling import Sample, samples
from sim.setup.prepare import check_words
from sim.studies.pool import Awaited, answers, n_cores
from sim.studies.sweep.point_store import BOUNDS, POINTS
from sim.studies.sweep.work import (
    OK,
    RECORDED,
    REFUSED,
    Family,
    Resolved,
    bound_record,
    carried_out,
    only_bound,
    resolve,
)

if TYPE_CHECKING:
    from sim.options import RunSpec
    from sim.studies.pool import Call
    from sim.studies.sweep.grid import Point
    from sim.studies.sweep.point_store import Records

FEW_LAYERS = 20_000
"""Layers of output tokens in all points, below which starting processes takes longer than the work."""
AT_ONCE = 16
"""Points resolved by one call of a worker."""

Answers = Callable[[Sequence["Call"], int], Generator[tuple[int, Any], None, None]]
Progress = Callable[[int, int, str], None]


@dataclass
class PointRow:
    """One point of a sweep, and what became of it."""

    point: Point
    asked: Resolved
    status: str
    reason: str
    result: Result | None = None
    ttft: Sample | None = None
    tpot: Sample | None = None

    @property
    def label(self) -> str:
        """The policy as it was called, with its parameters."""
        return self.point.label

    @property
    def sample(self) -> Sample | None:
        """Of what is ranked: time per output token, or to the first where no request has another."""
        return self.tpot if self.tpot is not None and self.tpot.n else self.ttft


def resolved(points: Sequence[Point], workers: int, progress: Progress, pool: Answers = answers) -> list[Resolved]:
    """What every point means, in their order.

    Raises:
        BadInput: a value that nothing can be done with, wherever it stands in the sweep: it is misspelt, or wrong.
    """
    specs = [point.spec for point in points]
    calls: list[Call] = [(resolve, (tuple(specs[at : at + AT_ONCE]),)) for at in range(0, len(specs), AT_ONCE)]
    found: dict[int, list[Resolved]] = {}
    with closing(pool(calls, workers if len(calls) > 4 else 1)) as stream:
        for index, answer in stream:
            found[index] = answer
            progress(min(len(found) * AT_ONCE, len(specs)), len(specs), "resolving")
    rows = [row for index in range(len(calls)) for row in found[index]]
    _refuse_mistakes(points, rows)
    return rows


def _refuse_mistakes(points: Sequence[Point], rows: Sequence[Resolved]) -> None:
    """Raises BadInput where every point with some value is refused, which tells a mistake from a combination that
    cannot be; what does not fit is no mistake. A policy and its parameters are one only where they are wrong wherever
    it would run. Policies that `all` stands for were not named by anybody."""
    by_value: dict[tuple[str, Any], list[Resolved]] = defaultdict(list)
    for point, row in zip(points, rows, strict=True):
        if point.named:
            for value in _values(point):
                by_value[value].append(row)
    for (name, value), found in by_value.items():
        if all(row.status == REFUSED for row in found):
            if _of_policy(name) and not any(_mistaken(row.spec) for row in found):
                continue
            alone = any(row.status != REFUSED for row in rows)
            where = f" (so for every point with {name} {value})" if alone else ""
            raise BadInput(f"{found[0].reason}{where}")


def _of_policy(name: str) -> bool:
    """Whether it is a policy or a parameter of one."""
    return name == "policy" or (name not in OPTIONS.by_field and name.partition(".")[0] not in GROUPS)


def _mistaken(spec: RunSpec) -> bool:
    try:
        check_words(spec)
    except BadInput:
        return True
    return False


def _values(point: Point) -> list[tuple[str, Any]]:
    fields = [(name, getattr(point.spec, name)) for name in (row.field for row in OPTIONS.axes)]
    found = [("policy", point.label), *fields, *point.spec.set.items()]
    return [(name, value) for name, value in found if value is not None]


class Work(NamedTuple):
    """What became of the points that can be set up: recorded by an earlier command, run by decisions of their own, or
    timed by those of another point (`sim.studies.sweep.shared_recording`)."""

    there: int
    replayed: int
    timed_by_recording: int


class Ran(NamedTuple):
    """All points, and how many of them were run."""

    rows: list[PointRow]
    work: Work


class Families:
    """Points by what their decisions rest on: the first of each family is run, and tells the others.

    Args:
        shared: it tells other processes, too. alone: of a family of which only one is here others may follow later.
    """

    def __init__(self, rows: Sequence[Resolved], shared: bool, alone: bool = False) -> None:
        self._rows: dict[str, list[Resolved]] = {}
        for row in rows:
            self._rows.setdefault(row.family or row.id, []).append(row)
        self._shared, self._alone = shared, alone
        self._first: dict[str, int] = {}  # family -> the call of its first point

    def in_turn(self) -> list[Resolved]:
        """All of them, those of a family one after the other, while their recording is at hand."""
        return [row for some in self._rows.values() for row in some]

    def call(self, row: Resolved, index: int, bound: str = "", by_layer: bool = False) -> Call:
        """What carries a point out as the call of that index. Points come as `in_turn` has them."""
        several = len(self._rows[row.family or row.id]) > 1
        family = row.family if several or self._alone else ""
        first = self._first.setdefault(family, index) if family else index
        recorded = Awaited(first, RECORDED) if self._shared and first != index else None
        of = Family(family, several and self._shared)
        return carried_out, (row.spec, row.id, row.cpu, bound, of, recorded, by_layer)


def run_points(
    points: Sequence[Point],
    rows: Sequence[Resolved],
    records: Records,
    workers: int | None,
    progress: Progress,
    pool: Answers = answers,
) -> Ran:
    """Every point's row, in their order; points that are the same run are one.

    Args:
        rows: what the points mean (`resolved`). workers: processes; None: the cores, if it is worth it.
        pool: who answers the calls. progress: told of (calls answered, in all, what is done).

    Raises:
        CheckFailed: a worker process ended without an answer; what was recorded stays. BadInput: none can run.
    """
    once: dict[str, tuple[Point, Resolved]] = {}
    for point, row in zip(points, rows, strict=True):
        once.setdefault(row.id, (point, row))
    if all(row.status != OK for _, row in once.values()):
        raise BadInput(_why(list(once.values())))
    ready = [row for _, row in once.values() if row.status == OK]
    missing = [row for row in ready if records.get(POINTS, row.id) is None]
    work: list[tuple[Resolved, Call]] = []
    bounds: set[str] = set()
    if workers is None:
        workers = n_cores() if sum(row.n_layers for row in missing) >= FEW_LAYERS else 1
    calls = Families(missing, pool is not answers or workers > 1)
    # A bound is worked out with the first point that needs it and is to run anyway.
    for row in [*calls.in_turn(), *ready]:
        bound = row.bound if row.bound not in bounds and row.bound and records.get(BOUNDS, row.bound) is None else ""
        if len(work) < len(missing):
            work.append((row, calls.call(row, len(work), bound)))
        elif bound:
            work.append((row, (only_bound, (row.spec, row.cpu, bound))))
        bounds.add(bound)
    there = len(ready) - len(missing)
    n_done = n_timed = 0
    with closing(pool([call for _, call in work], workers)) as stream:
        for index, answer in stream:
            row, _ = work[index]
            if answer.bound is not None:
                records.put(BOUNDS, row.bound, answer.bound)
            if answer.point is not None:
                records.put(POINTS, row.id, answer.point)
            n_done += 1
            n_timed += answer.by_recording
            progress(n_done, len(work), f"sweep: {min(there + n_done, len(ready)):,} of {len(ready):,} points")
    found = [_row(point, row, records) for point, row in once.values()]
    return Ran(found, Work(there, len(missing) - n_timed, n_timed))


def _why(found: Sequence[tuple[Point, Resolved]]) -> str:
    reasons = {row.reason: point.label for point, row in found}
    first = next(iter(reasons))
    if len(reasons) == 1:
        return first
    return f"grid, got {len(found)} points: none of them can run; the first: {first}"


def _row(point: Point, row: Resolved, records: Records) -> PointRow:
    if row.status != OK:
        return PointRow(point, row, row.status, row.reason)
    record = records.get(POINTS, row.id)
    assert record is not None
    if record["status"] != OK:
        return PointRow(point, row, record["status"], record["reason"])
    result = msgspec.convert(record["result"], Result)
    bound = None
    if row.bound:  # the point that it came with may have ended before it
        bound = (records.get(BOUNDS, row.bound) or bound_record(row.spec, row.cpu, row.bound))["bound"]
    result.set_beside(None if bound is None else LowerBound(**bound))
    found = samples(record["requests"], row.spec.together)
    return PointRow(point, row, OK, "", result, found["ttft_s"], found["tpot_s"])
