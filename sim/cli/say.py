"""Text for people, folded to the terminal; JSON, and errors of one line, go out as they are."""

from __future__ import annotations

import click

from sim.base.tables import fold


def say(text: str = "", nl: bool = True, bold: bool = False) -> None:
    """Through click, so that output can be captured, piped and closed early."""
    folded = fold(text)
    click.echo(click.style(folded, bold=True) if bold else folded, nl=nl)
