"""A sweep from what was asked to its table and summary: the same for the command line and for Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sim.base.units import show_count
from sim.figures import SCHEMA
from sim.run import seldom_collected
from sim.studies.hosts import of_specs
from sim.studies.rows import Row, realism_of
from sim.studies.runner.points import each_once, resolved, run_points
from sim.studies.runner.pool import Answers, answers, n_cores
from sim.studies.runner.records import SWEEP, TABLE, Records
from sim.studies.runner.runner import Progress, Work
from sim.studies.runner.work import OK, closing_ready
from sim.studies.sweep.break_even import break_even, said
from sim.studies.sweep.grid import MOST_POINTS, Block, Point, points_of
from sim.studies.sweep.summary import Summary, settings_of, summarise
from sim.studies.sweep.text import SweepText, list_of

if TYPE_CHECKING:
    import pyarrow as pa

    from sim.studies.rows import Group

Note = Callable[[str], None]
MOST_NOTES = 3


@dataclass
class Asked:
    """What a sweep was asked for.

    Attributes:
        given: the axes of options. grid: a file of further ones, over which they stand.
        out: where records and table go. resume: go on with what is there. workers: None for the cores.
        by: what a group has in common. most: points. pool: who answers the calls. columns: of the rows that are shown.
    """

    given: Block
    grid: Path | None = None
    out: Path | None = None
    resume: bool = False
    workers: int | None = None
    by: list[str] | None = None
    most: int = MOST_POINTS
    pool: Answers = answers
    columns: Sequence[str] | None = None

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
    """A sweep that is over.

    Attributes:
        columns: of the table, where it is printed or given to Python (`sim.studies.sweep.table.chosen`).
    """

    rows: list[Row]
    summary: Summary
    n_twice: int
    work: Work
    columns: Sequence[str] | None = None

    @cached_property
    def realism(self) -> list[str]:
        """What is known of each trace, a line each."""
        return realism_of(row for row in self.rows if row.status == OK)

    @cached_property
    def hosts(self) -> str:
        """Where cards come with unlike hosts, a line that says so."""
        return of_specs(row.spec for row in self.rows if row.result is not None)

    @cached_property
    def whole(self) -> pa.Table:
        """Everything, a row per point; made when asked for, since what makes it takes long to load."""
        from sim.studies.sweep.table import arrow, columns_of

        return arrow(columns_of(self.rows, self.summary))

    @cached_property
    def words(self) -> SweepText:
        """What text says of it."""
        return SweepText(self.rows, self.summary)

    def answer(self) -> str:
        """The first line."""
        return self.words.answer()

    def lines(self) -> list[str]:
        """What holds for all of it: hosts, points, drafts, traces and drives."""
        from sim.profiles.drives import compared

        drives = dict.fromkeys(f"drives: {row.asked.drive}" for row in self.rows if row.asked.drive)
        lines = [self.hosts, self.words.counts(self.n_twice, self.work), *said(self.rows), *self.realism]
        return [line for line in (*lines, compared(row.asked.spec.drive or "" for row in self.rows), *drives) if line]

    def table(self) -> str:
        """Points or groups, the front, and what did not run."""
        return self.words.tables()

    @property
    def n_ran(self) -> int:
        """Points with a result."""
        return sum(row.result is not None for row in self.rows)

    def shown(self) -> pa.Table:
        """Some columns of the table. Raises BadInput."""
        from sim.studies.sweep.table import chosen

        return chosen(self.whole, self.summary, self.columns)

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints. Raises BadInput."""
        found = self.summary
        drafts = msgspec.to_builtins(break_even(self.rows))
        return {
            "schema": SCHEMA,
            "answer": self.answer(),
            "realism": self.realism,
            "hosts": self.hosts or None,
            "points": len(self.rows),
            "ran": self.n_ran,
            "work": self.work._asdict(),
            "varied": found.varied,
            **({"break_even": drafts} if drafts else {}),
            "group_by": found.by,
            "groups": [_facts_of(group) for group in found.groups],
            "pareto": [_ids(front) for front in found.fronts],
            "not_run": [{"label": r.label, "status": r.status, "reason": r.reason} for r in found.failed],
            "rows": self.shown().to_pylist(),
        }

    def write(self, folder: Path) -> None:
        """Keep the whole table, which says of itself what the answer is."""
        from sim.studies.sweep.table import write

        about = {"answer": self.answer(), "realism": self.realism, "varied": list(self.summary.varied)}
        write(folder / TABLE, self.whole, about | ({"hosts": self.hosts} if self.hosts else {}))


def _ids(rows: Sequence[Row]) -> list[str]:
    return [row.asked.id for row in rows]


def _facts_of(group: Group) -> dict[str, Any]:
    best, keeps = group.best, group.keeps
    return {
        "settings": group.by,
        "best": None if best is None else best.asked.id,
        **({} if keeps is None else {"keeps_slo_most": keeps.asked.id}),
        "tied_with": None if best is None or not group.ranks else _ids(group.tied(best)),
        "fastest_first": _ids(group.systems),
        "bounds": _ids(group.bounds),
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
    swept = Swept(rows, summarise(rows, asked.by), n_twice + len(points) - len(rows), work, asked.columns)
    if asked.out is not None:
        swept.write(asked.out)
    return swept


@closing_ready()
def listed(asked: Asked, progress: Progress, as_json: bool) -> str:
    """The points, what varies in them and what each would be, for `--dry-run`. Raises BadInput as `sweep` does."""
    points, n_twice = asked.points()
    means = resolved(points, asked.workers or n_cores(), progress, asked.pool)
    rows = each_once(points, means)
    names = summarise(rows, asked.by).axes
    if as_json:
        from sim.base.json import to_json

        facts = []
        for row in rows:
            own = settings_of(row)
            told = {"id": row.asked.id, "label": row.label, "status": row.status, "reason": row.reason or None}
            facts.append(told | {name: own.get(name) for name in names})
        return to_json({"schema": SCHEMA, "points": len(rows), "list": facts}) + "\n"
    return list_of(rows, names, n_twice + len(points) - len(rows))
