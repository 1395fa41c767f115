"""Plain tables as text: fixed width, no colour, no markup, the same in a terminal, a pipe and a log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


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


def plain(titles: tuple[str, ...], rows: list[Any]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for i, name in enumerate(titles):
        table.add_column(name, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    return table
