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
from sim.studies.pool import answers, n_cores
from sim.studies.runner import Answers, Progress, Work
from sim.studies.sweep.grid import MOST_POINTS, Block, Point, points_of
from sim.studies.sweep.point_store import TABLE, Records
from sim.studies.sweep.run import PointRow, resolved, run_points
from sim.studies.sweep.summary import Summary, settings_of, summarise
from sim.studies.sweep.work import BROKE_A_RULE, FAILED, OK, Resolved, closing_ready

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

    def blocks(self, usual: Block | None = None) -> list[Block]:
        """Its blocks, checked; `usual` has what holds where neither options nor file say otherwise. Raises BadInput."""
        usual = Block() if usual is None else usual
        if self.grid is None:
            block = usual.over(self.given)
            block.check("sweep")
            return [block]
        from sim.studies.sweep.grid_file import read_grid

        blocks = [usual.over(block).over(self.given) for block in read_grid(self.grid)]
        for block in blocks:
            block.check(str(self.grid))
        return blocks


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
        from sim.studies.sweep.table import table_of

        return table_of(self.rows, self.summary)

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
        from sim.studies.sweep.text import answer

        found = self.summary
        drafts = facts(self.rows)
        return {
            "schema": SCHEMA,
            "answer": answer(self.rows, found),
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
        from sim.studies.sweep.text import answer

        varied = list(self.summary.varied)
        said = {"answer": answer(self.rows, self.summary), "realism": self.realism, "varied": varied}
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
    points, n_twice = points_of(asked.blocks(), asked.most)
    means = resolved(points, asked.workers or n_cores(), progress, asked.pool)
    told = list(dict.fromkeys(text for row in means for text in row.notes))
    for text in told[:MOST_NOTES]:
        note(text)
    if len(told) > MOST_NOTES:
        note(f"note: {show_count(len(told) - MOST_NOTES, 'note')} more of the kind")
    ids = list(dict.fromkeys(row.id for row in means))
    records.begin(ids, asked.resume)
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
        trace = open_trace(name)
        try:
            lines.append(judge(trace, quick=True).line)
        finally:
            trace.close()
    return lines


@closing_ready()
def listed(asked: Asked, progress: Progress, as_json: bool) -> str:
    """The points, what varies in them and what each would be, for `--dry-run`. Raises BadInput as `sweep` does."""
    points, n_twice = points_of(asked.blocks(), asked.most)
    means = resolved(points, asked.workers or n_cores(), progress, asked.pool)
    shown: dict[str, tuple[Point, Resolved]] = {}
    for point, row in zip(points, means, strict=True):
        shown.setdefault(row.id, (point, row))
    rows = [PointRow(point, row, row.status, row.reason) for point, row in shown.values()]
    found = summarise(rows, asked.by)
    names = [name for name in found.varied if name != "policy"]
    if as_json:
        from sim.base.json import to_json

        own = [(row, settings_of(row)) for row in rows]
        facts = [
            {"id": row.asked.id, "label": row.label, "status": row.status, "reason": row.reason or None}
            | {name: settings.get(name) for name in names}
            for row, settings in own
        ]
        return to_json({"schema": SCHEMA, "points": len(rows), "list": facts}) + "\n"
    from sim.studies.sweep.text import list_of

    return list_of(rows, names, n_twice + len(points) - len(rows))
