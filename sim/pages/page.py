"""A page as plain data: sentences, tables and plots, with every figure as a number and its unit beside it.

The same object is what `--json` prints, what the HTML is made from and what the plots in it are drawn from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from sim import __version__
from sim.base.units import show_bytes, show_frac, show_seconds

if TYPE_CHECKING:
    from sim.studies.answer import Shown as Tabled

Cell = str | int | float | bool | None
SCHEMA = 1


class Column(msgspec.Struct, frozen=True):
    """A column of a table. `unit`: `s`, `bytes`, `frac`, `n` (a count), `x` (another number) or nothing for text."""

    title: str
    unit: str = ""


class Shown(msgspec.Struct, tag_field="kind", tag=str.lower):
    """What a section shows; `kind` in JSON says which."""


class Table(Shown):
    """Rows of figures under a caption, which says what they are."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    folded: bool = False  # behind a line that opens it: the figures of a plot


def filled(answer: Tabled) -> Table:
    """The table of an answer, by its own columns."""
    rows = [[column.of(row) for column in answer.columns] for row in answer.rows]
    return Table(f"{answer.title}.", [Column(column.title, column.unit) for column in answer.columns], rows)


class Plot(Shown):
    """A plot: traces and layout as plotly.js takes them, without colours, which the page gives by `hue`.

    Attributes:
        name: its id in the page, and what `--plot` calls it. says: what a reader who does not see it is told.
        height: in CSS pixels.
    """

    name: str
    says: str
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any] = {}
    height: int = 360


class Facts(Shown):
    """A few figures, large."""

    items: Sequence[Any]  # title, value, unit, what it is

    def __post_init__(self) -> None:
        self.items = [dict(zip(("title", "value", "unit", "note"), one, strict=True)) for one in self.items]


class Note(Shown):
    """A sentence, or lines of them."""

    lines: Sequence[str]


class Explorer(Shown):
    """Rows that a reader chooses from: a selector for every axis, what to draw against what, and a goal.

    Attributes:
        columns: of the rows, first those that `axes` names. axes: columns with a selector each.
        measures: columns that may be drawn. x, y: which at first. label: the column that tells the lines apart.
        goal: the measure of which less is asked for, and the measure of what it may cost. capacities: axes that say how
            much of that there is, so that their values make one line where it is drawn across.
    """

    name: str
    columns: Sequence[Any]  # name, title, unit
    rows: Sequence[Sequence[Cell]]
    axes: Sequence[str]
    measures: Sequence[str]
    x: str
    y: str
    label: str
    goal: tuple[str, str]
    capacities: Sequence[str]

    def __post_init__(self) -> None:
        self.columns = [dict(zip(("name", "title", "unit"), one, strict=True)) for one in self.columns]


Block = Table | Plot | Facts | Note | Explorer


class Section(msgspec.Struct):
    """One question. `sentence` says what is to be seen."""

    name: str
    title: str
    sentence: str
    blocks: list[Block] = []


class Page(msgspec.Struct):
    """A report. `kind`: run, comparison, sweep, hits, plan, saturation, validation or calibration.

    Attributes:
        title: of the browser's tab. verdict: the first line. lines: what belongs right under it.
    """

    kind: str
    title: str
    verdict: str
    lines: Sequence[str] = ()
    sections: list[Section] = []

    def to_dict(self) -> dict[str, Any]:
        """What `moesim report --json` prints."""
        found: dict[str, Any] = msgspec.to_builtins(self, enc_hook=lambda number: number.item())  # of numpy
        return {"schema": SCHEMA, "version": __version__, **found}

    def plots(self) -> Iterable[Plot]:
        """Every plot, in order."""
        for section in self.sections:
            for block in section.blocks:
                if isinstance(block, Plot):
                    yield block


def show(value: Cell, unit: str) -> str:
    """A cell as people read it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if unit == "s":
        return show_seconds(value)
    if unit == "bytes":
        return show_bytes(value)
    if unit == "frac":
        return show_frac(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
