"""An answer: one record that `--json` prints; its tables are columns of it, which text and pages show alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec

from sim.base.json import finite
from sim.base.tables import tabled
from sim.base.units import show_value
from sim.figures import SCHEMA
from sim.results.record import plain


def null() -> Any:
    """Of a key that is null where nobody fills it in, rather than left out."""
    return msgspec.field(default_factory=lambda: None)


def hidden(name: str) -> Any:
    """Of a field that is no key: what the record was made of. It is None in one that was read from JSON."""
    return msgspec.field(name=f"_{name}", default=None)


class Column(NamedTuple):
    """A column of a table: `of` finds a row's cell. `unit`: as pages have them; none for words."""

    title: str
    of: Callable[[Any], Any]
    unit: str = ""


class Shown(NamedTuple):
    """A table under its title, on a page with a sentence. notes: lines below it. spare: as `sim.base.tables.render`."""

    name: str
    title: str
    sentence: str
    columns: Sequence[Column]
    rows: Sequence[Any]
    notes: Sequence[str] = ()
    spare: Sequence[str] | None = None

    @property
    def text(self) -> str:
        """For people."""
        words = [at for at, one in enumerate(self.columns) if not one.unit]
        cells = ([_cell(one.of(row), one.unit) for one in self.columns] for row in self.rows)
        table = tabled([one.title for one in self.columns], cells, words, self.spare) if self.rows else ""
        return table + "".join(f"{line}\n" for line in self.notes)


def _cell(value: Any, unit: str) -> str:
    return value if isinstance(value, str) else show_value(value, unit)


class Answer(msgspec.Struct, kw_only=True, eq=False):
    """What a study answers.

    Attributes:
        first_line: in JSON `answer`. trace: what figures rest on. hosts: where machines come with unlike hosts, a line
            that says so. ROWS: the list that a frame shows.
    """

    ROWS: ClassVar[str]
    schema: int = SCHEMA
    first_line: str = msgspec.field(name="answer")
    trace: str | None = null()
    hosts: str | None = null()
    _lines: list[str] = []

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        found: dict[str, Any] = finite(plain(self))
        return found

    def rows(self) -> list[dict[str, Any]]:
        """Those of a frame."""
        found: list[dict[str, Any]] = self.to_dict()[self.ROWS]
        return found

    def answer(self) -> str:
        """The first line."""
        return self.first_line

    def lines(self) -> list[str]:
        """How it was found."""
        return self._lines

    def tables(self) -> list[Shown]:
        """What text shows below the lines, and a page in sections."""
        return []

    def table(self) -> str:
        """The tables as text."""
        return "\n".join(text for one in self.tables() if (text := one.text))
