"""Text for people, folded to the terminal; JSON, and errors of one line, go out as they are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import click

from sim.base.tables import fold, plain, render


def say(text: str = "", nl: bool = True, bold: bool = False) -> None:
    """Through click, so that output can be captured, piped and closed early."""
    folded = fold(text)
    click.echo(click.style(folded, bold=True) if bold else folded, nl=nl)


def note(text: str) -> None:
    """Beside the answer: what was asked for and cannot be had in full."""
    click.echo(text, err=True)


def say_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Rows under their titles, without a rule."""
    content = plain(*titles)
    for row in rows:
        content.add_row(*row)
    say(render(content), nl=False)


class Tabled(Protocol):
    """An answer that is told by lines and a table."""

    def to_dict(self) -> dict[str, Any]: ...

    def answer(self) -> str: ...

    def lines(self) -> list[str]: ...

    def table(self) -> str: ...


def say_answer(found: Tabled, as_json: bool) -> None:
    """An answer by its lines and its table, or as one JSON object."""
    if as_json:
        from sim.base.json import to_json

        click.echo(to_json(found.to_dict()))
        return
    say(found.answer(), bold=True)
    for line in found.lines():
        say(line)
    if text := found.table():
        say()
        say(text, nl=False)
