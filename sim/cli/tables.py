"""Put a table on the screen, as wide as the terminal, or into a pipe or a log."""

from __future__ import annotations

import os
from typing import Any

import click

SHOW_WIDTH = 118  # without a terminal


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
