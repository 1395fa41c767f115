"""Plain tables for verbs: fixed width, no colour, no markup, the same in a terminal, a pipe and a log."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.table import Table

SHOW_WIDTH = 118  # without a terminal


def table(*headers: str, numbers: bool = True) -> Table:
    """An empty table; columns after the first are right-aligned when they hold numbers."""
    from rich import box
    from rich.table import Table

    result = Table(box=box.SIMPLE, pad_edge=False, show_edge=False)
    for index, header in enumerate(headers):
        justify: str = "right" if index and numbers else "left"
        result.add_column(header, justify=justify, overflow="fold", no_wrap=not index)  # type: ignore[arg-type]
    return result


def render(content: Table, width: int = 140) -> str:
    """The table as text, lines stripped on the right, with a newline at the end."""
    import io

    from rich.console import Console

    buffer = io.StringIO()
    Console(file=buffer, width=width, no_color=True, highlight=False, markup=False).print(content)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def put(table: Any, width: int | None = None) -> None:
    """Through click, so that output can be captured, piped and closed early like all other output.

    width: as wide as this whatever the terminal, for tables that are useless when folded.
    """
    from rich.console import Console

    # A file's text is shown, not interpreted.
    console = Console(markup=False, emoji=False, highlight=False, width=width)
    if width is None and not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = SHOW_WIDTH
    with console.capture() as capture:
        console.print(table)
    click.echo("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()), nl=False)


def plain(titles: tuple[str, ...], rows: list[Any]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for i, name in enumerate(titles):
        table.add_column(name, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    return table
