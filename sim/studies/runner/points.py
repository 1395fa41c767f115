"""Points -> rows: resolve every point, skip what is recorded, replay the rest, and hand over one row per point."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sim.base.errors import BadInput
from sim.options import OPTIONS
from sim.profiles.overrides import of_profile
from sim.setup.prepare import check_words
from sim.studies.rows import Row
from sim.studies.runner.pool import Answers, answers, in_order
from sim.studies.runner.runner import Progress, Runner, Work
from sim.studies.runner.work import OK, REFUSED, Resolved, resolve

if TYPE_CHECKING:
    from sim.options import RunSpec
    from sim.studies.runner.pool import Call
    from sim.studies.runner.records import Records
    from sim.studies.sweep.grid import Point

AT_ONCE = 16
"""Points resolved by one call of a worker."""


def resolved(points: Sequence[Point], workers: int, progress: Progress, pool: Answers = answers) -> list[Resolved]:
    """What every point means, in their order.

    Raises:
        BadInput: a value that nothing can be done with, wherever it stands in the sweep: it is misspelt, or wrong.
    """
    specs = [point.spec for point in points]
    calls: list[Call] = [(resolve, (tuple(specs[at : at + AT_ONCE]),)) for at in range(0, len(specs), AT_ONCE)]

    def done(n: int, _all: int) -> None:
        progress(min(n * AT_ONCE, len(specs)), len(specs), "resolving")

    rows = [row for some in in_order(calls, workers if len(calls) > 4 else 1, done, pool) for row in some]
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
    return name == "policy" or (name not in OPTIONS.by_field and not of_profile(name))


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


def run_points(
    points: Sequence[Point],
    rows: Sequence[Resolved],
    records: Records,
    workers: int | None,
    progress: Progress,
    pool: Answers = answers,
    by_layer: bool = False,
) -> tuple[list[Row], Work]:
    """Every point's row, in their order, points that are the same run being one; and how many were run.

    Args:
        rows: what the points mean (`resolved`). workers: processes; None: the cores, if it is worth it.
        pool: who answers the calls. progress: told of (calls answered, in all, what is done).
        by_layer: results have `by_layer`, too.

    Raises:
        CheckFailed: a worker process ended without an answer; what was recorded stays. BadInput: none can run.
    """
    once = each_once(points, rows)
    if all(row.asked.status != OK for row in once):
        raise BadInput(_why(once))
    runner = Runner(records, workers, progress, pool, by_layer)
    work = runner.run([row.asked for row in once], lambda n, n_all: f"{n:,} of {n_all:,} points", True)
    for row in once:
        row.status, row.reason, row.result, row.sample = runner.outcome(row.asked, True)
    return once, work


def each_once(points: Sequence[Point], rows: Sequence[Resolved]) -> list[Row]:
    """A row of each point that is not run yet, the first of those that are the same run."""
    once: dict[str, Row] = {}
    for point, asked in zip(points, rows, strict=True):
        row = Row(point.label, status=asked.status, reason=asked.reason, spec=point.spec, asked=asked)
        once.setdefault(asked.id, row)
    return list(once.values())


def _why(rows: Sequence[Row]) -> str:
    reasons = {row.reason: row.label for row in rows}
    first = next(iter(reasons))
    if len(reasons) == 1:
        return first
    return f"grid, got {len(rows)} points: none of them can run; the first: {first}"
