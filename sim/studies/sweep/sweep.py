"""A sweep from what was asked to its table and summary: the same for the command line and for Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.base.units import show_count
from sim.figures import SCHEMA
from sim.run import seldom_collected
from sim.studies.hosts import of_specs
from sim.studies.runner.pool import Answers, answers, n_cores
from sim.studies.runner.records import SWEEP, TABLE, Records
from sim.studies.runner.runner import Progress, Work
from sim.studies.runner.work import BROKE_A_RULE, FAILED, OK, closing_ready
from sim.studies.sweep.grid import MOST_POINTS, Block, Point, points_of
from sim.studies.sweep.run import PointRow, each_once, resolved, run_points
from sim.studies.sweep.summary import Summary, settings_of, summarise

if TYPE_CHECKING:
    import pyarrow as pa

    from sim.studies.sweep.summary import Group

Note = Callable[[str], None]
MOST_NOTES = 3
MOST_JUDGED = 8
"""Traces whose realism is told, one line each."""


@dataclass
class Asked:
    """What a sweep was asked for.

    Attributes:
        given: the axes of options. grid: a file of further ones, over which they stand.
        out: where records and table go. resume: go on with what is there. workers: None for the cores.
        by: what a group has in common. most: points. pool: who answers the calls.
    """

    given: Block
    grid: Path | None = None
    out: Path | None = None
    resume: bool = False
    workers: int | None = None
    by: list[str] | None = None
    most: int = MOST_POINTS
    pool: Answers = answers

    def points(self) -> tuple[list[Point], int]:
        """What its blocks come to, and how many points were said twice. Raises BadInput."""
        blocks = [self.given]
        if self.grid is not None:
            from sim.studies.sweep.grid_file import read_grid

            blocks = [block.over(self.given) for block in read_grid(self.grid)]
        for block in blocks:
            block.check("sweep" if self.grid is None else str(self.grid))
        return points_of(blocks, self.most)


@dataclass
class Swept:
    """A sweep that is over."""

    rows: list[PointRow]
    summary: Summary
    n_twice: int
    work: Work
    realism: list[str] = field(default_factory=list)
    table_path: Path | None = None

    @cached_property
    def hosts(self) -> str:
        """Where cards come with unlike hosts, a line that says so."""
        return of_specs(row.point.spec for row in self.rows if row.result is not None)

    @cached_property
    def table(self) -> pa.Table:
        """Everything, a row per point; made when asked for, since what makes it takes long to load."""
        from sim.studies.sweep.table import arrow, columns_of

        return arrow(columns_of(self.rows, self.summary))

    @cached_property
    def answer(self) -> str:
        """The first line."""
        from sim.studies.sweep.text import answer

        return answer(self.rows, self.summary)

    @property
    def broken(self) -> bool:
        """Whether a policy broke a rule somewhere."""
        return any(row.status in (BROKE_A_RULE, FAILED) for row in self.rows)

    @property
    def n_ran(self) -> int:
        """Points with a result."""
        return sum(row.result is not None for row in self.rows)

    def shown(self, columns: str | Sequence[str] | None) -> pa.Table:
        """Some columns of it (`sim.studies.sweep.table.chosen`). Raises BadInput."""
        from sim.studies.sweep.table import chosen

        return chosen(self.table, self.summary, columns)

    def to_dict(self, columns: str | Sequence[str] | None = None) -> dict[str, Any]:
        """What `--json` prints, with these columns of the table. Raises BadInput."""
        from sim.studies.sweep.break_even import facts

        found = self.summary
        drafts = facts(self.rows)
        return {
            "schema": SCHEMA,
            "answer": self.answer,
            "realism": self.realism,
            "hosts": self.hosts or None,
            "points": len(self.rows),
            "ran": self.n_ran,
            "work": self.work._asdict(),
            "varied": found.varied,
            **({"break_even": drafts} if drafts else {}),
            "group_by": found.by,
            "groups": [self._group(group) for group in found.groups],
            "pareto": [[row.asked.id for row in front] for front in found.fronts],
            "not_run": [{"label": r.label, "status": r.status, "reason": r.reason} for r in found.failed],
            "rows": self.shown(columns).to_pylist(),
        }

    def about(self) -> dict[str, Any]:
        """What the table's file says of itself."""
        said = {"answer": self.answer, "realism": self.realism, "varied": list(self.summary.varied)}
        return said | ({"hosts": self.hosts} if self.hosts else {})

    def _group(self, group: Group) -> dict[str, Any]:
        best = group.best
        return {
            "settings": group.by,
            "best": None if best is None else best.asked.id,
            **({} if (keeps := group.keeps) is None else {"keeps_slo_most": keeps.asked.id}),
            "tied_with": None if best is None or not group.ranks else [row.asked.id for row in group.tied(best)],
            "fastest_first": [row.asked.id for row in group.systems],
            "bounds": [row.asked.id for row in group.bounds],
        }


@seldom_collected()
@closing_ready()
def sweep(asked: Asked, note: Note, progress: Progress) -> Swept:
    """Run it.

    Args:
        note: told what was asked for and cannot be had in full. progress: told of (done, in all, what is done).

    Raises:
        BadInput: the grid, the folder, or a value that is wrong wherever it stands.
    """
    records = Records(asked.out)
    records.check_place()
    points, n_twice = asked.points()
    means = resolved(points, asked.workers or n_cores(), progress, asked.pool)
    told = list(dict.fromkeys(text for row in means for text in row.notes))
    for text in told[:MOST_NOTES]:
        note(text)
    if len(told) > MOST_NOTES:
        note(f"note: {show_count(len(told) - MOST_NOTES, 'note')} more of the kind")
    ids = list(dict.fromkeys(row.id for row in means))
    records.begin(SWEEP, asked.resume, ids)
    rows, work = run_points(points, means, records, asked.workers, progress, asked.pool)
    found = summarise(rows, asked.by)
    swept = Swept(rows, found, n_twice + len(points) - len(rows), work, _realism(rows))
    if asked.out is not None:
        from sim.studies.sweep.table import write

        swept.table_path = asked.out / TABLE
        write(swept.table_path, swept.table, swept.about())
    return swept


def _realism(rows: list[PointRow]) -> list[str]:
    """What is known of each trace, a line each."""
    from traces.format.catalogue import open_trace
    from traces.stats.realism import judge

    names = list(dict.fromkeys(row.asked.spec.trace for row in rows if row.status == OK))
    lines = []
    for name in names[:MOST_JUDGED]:
        assert name is not None
        with open_trace(name) as trace:
            lines.append(judge(trace, quick=True).line)
    return lines


@closing_ready()
def listed(asked: Asked, progress: Progress, as_json: bool) -> str:
    """The points, what varies in them and what each would be, for `--dry-run`. Raises BadInput as `sweep` does."""
    points, n_twice = asked.points()
    means = resolved(points, asked.workers or n_cores(), progress, asked.pool)
    rows = [PointRow(point, row, row.status, row.reason) for point, row in each_once(points, means)]
    names = summarise(rows, asked.by).axes
    if as_json:
        from sim.base.json import to_json

        facts = []
        for row in rows:
            own = settings_of(row)
            told = {"id": row.asked.id, "label": row.label, "status": row.status, "reason": row.reason or None}
            facts.append(told | {name: own.get(name) for name in names})
        return to_json({"schema": SCHEMA, "points": len(rows), "list": facts}) + "\n"
    from sim.studies.sweep.text import list_of

    return list_of(rows, names, n_twice + len(points) - len(rows))
