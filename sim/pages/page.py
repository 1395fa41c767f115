"""A page as plain data: sentences, tables and plots, with every figure as a number and its unit beside it.

The same object is what `--json` prints, what the HTML is made from and what the plots in it are drawn from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sim import __version__
from sim.base.units import show_bytes, show_frac, show_seconds

Cell = str | int | float | bool | None
SCHEMA = 1


@dataclass(frozen=True)
class Column:
    """A column of a table. `unit`: `s`, `bytes`, `frac`, `n` (a count), `x` (another number) or nothing for text."""

    title: str
    unit: str = ""


@dataclass
class Table:
    """Rows of figures under a caption, which says what they are."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    folded: bool = False  # behind a line that opens it: the figures of a plot

    def to_dict(self) -> dict[str, Any]:
        columns = [{"title": c.title, "unit": c.unit} for c in self.columns]
        rows = [list(row) for row in self.rows]
        return {"kind": "table", "caption": self.caption, "columns": columns, "rows": rows, "folded": self.folded}


@dataclass
class Plot:
    """A plot: traces and layout as plotly.js takes them, without colours, which the page gives by `hue`.

    Attributes:
        name: its id in the page, and what `--plot` calls it. says: what a reader who does not see it is told.
        height: in CSS pixels.
    """

    name: str
    says: str
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any] = field(default_factory=dict)
    height: int = 360

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "plot",
            "name": self.name,
            "says": self.says,
            "height": self.height,
            "traces": [dict(trace) for trace in self.traces],
            "layout": dict(self.layout),
        }


@dataclass
class Facts:
    """A few figures, large."""

    items: Sequence[tuple[str, Cell, str, str]]  # title, value, unit, what it is

    def to_dict(self) -> dict[str, Any]:
        items = [{"title": t, "value": v, "unit": u, "note": n} for t, v, u, n in self.items]
        return {"kind": "facts", "items": items}


@dataclass
class Note:
    """A sentence, or lines of them."""

    lines: Sequence[str]

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "note", "lines": list(self.lines)}


@dataclass
class Explorer:
    """Rows that a reader chooses from: a selector for every axis, what to draw against what, and a goal.

    Attributes:
        columns: of the rows, first those that `axes` names. axes: columns with a selector each.
        measures: columns that may be drawn. x, y: which at first. label: the column that tells the lines apart.
        goal: the measure of which less is asked for, and the measure of what it may cost. capacities: axes that say how
            much of that there is, so that their values make one line where it is drawn across.
    """

    name: str
    columns: Sequence[tuple[str, str, str]]  # name, title, unit
    rows: Sequence[Sequence[Cell]]
    axes: Sequence[str]
    measures: Sequence[str]
    x: str
    y: str
    label: str
    goal: tuple[str, str]
    capacities: Sequence[str]

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "explorer",
            "name": self.name,
            "columns": [{"name": n, "title": t, "unit": u} for n, t, u in self.columns],
            "rows": [list(row) for row in self.rows],
            "axes": list(self.axes),
            "measures": list(self.measures),
            "x": self.x,
            "y": self.y,
            "label": self.label,
            "goal": list(self.goal),
            "capacities": list(self.capacities),
        }


Block = Table | Plot | Facts | Note | Explorer


@dataclass
class Section:
    """One question. `sentence` says what is to be seen."""

    name: str
    title: str
    sentence: str
    blocks: list[Block] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        blocks = [block.to_dict() for block in self.blocks]
        return {"name": self.name, "title": self.title, "sentence": self.sentence, "blocks": blocks}


@dataclass
class Page:
    """A report. `kind`: run, comparison, sweep, hits, plan, saturation, validation or calibration.

    Attributes:
        title: of the browser's tab. verdict: the first line. lines: what belongs right under it.
    """

    kind: str
    title: str
    verdict: str
    lines: Sequence[str] = ()
    sections: list[Section] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """What `moesim report --json` prints."""
        return {
            "schema": SCHEMA,
            "version": __version__,
            "kind": self.kind,
            "title": self.title,
            "verdict": self.verdict,
            "lines": list(self.lines),
            "sections": [section.to_dict() for section in self.sections],
        }

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
