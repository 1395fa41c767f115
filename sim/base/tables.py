"""Text that fits where it is read: sentences and tables fold to the terminal, and to 100 columns in a pipe."""

from __future__ import annotations

import re
import shutil
import textwrap
from typing import TYPE_CHECKING
from unicodedata import category

from sim.base.errors import escaped, one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.table import Table

IN_A_PIPE = 100
NARROWEST = 40  # nothing is readable below
GAP = 2  # between columns
NARROW = 10  # a column of words has that much, if it can use it
LONGEST_WORD = 24  # a longer one may be broken inside a table
_LEAD = re.compile(r" *(?:[^ ]+(?: [^ ]+)? {2,})?")  # the indent, and a title with its gap
_MOST_LEAD = 24


def columns() -> int:
    """The terminal's width, or what COLUMNS says; 100 where there is neither."""
    return max(NARROWEST, shutil.get_terminal_size((IN_A_PIPE, 24)).columns)


def fold(text: str, width: int | None = None) -> str:
    """Every line that is too long goes on under its own text; a word is never broken (a path is there to be copied)."""
    width = width or columns()
    return "\n".join(line if len(line) <= width else _folded(line, width) for line in shown(text).split("\n"))


def shown(text: str) -> str:
    """Without what would recolour a terminal or move its cursor: titles and names come from files of anybody's."""
    if all(line.isprintable() for line in text.split("\n")):
        return text
    return "".join(c if c.isprintable() or c in "\n\t" or category(c) == "Zs" else escaped(c) for c in text)


def _folded(line: str, width: int) -> str:
    found = _LEAD.match(line)
    lead = found[0] if found is not None and len(found[0]) <= _MOST_LEAD else ""
    indent = " " * max(2, len(lead))
    rest = textwrap.wrap(
        line[len(lead) :],
        width,
        initial_indent=indent if lead else "",
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join([lead + rest[0].removeprefix(indent if lead else ""), *rest[1:]]) if rest else line.rstrip()


def table(*titles: str, numbers: bool = True) -> Table:
    """An empty table with a rule under its titles; columns after the first are right-aligned when they hold numbers."""
    from rich import box
    from rich.table import Table

    result = Table(box=box.SIMPLE, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    return _with(result, titles, numbers)


def plain(*titles: str, numbers: bool = True) -> Table:
    """The same without a rule; without titles there is no line of them either."""
    from rich.table import Table

    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(titles))
    return _with(result, titles, numbers)


def _with(result: Table, titles: Sequence[str], numbers: bool) -> Table:
    for index, title in enumerate(titles):
        right = numbers and index > 0
        result.add_column(title, justify="right" if right else "left", no_wrap=right, overflow="fold")
    return result


def tabled(
    titles: Sequence[str],
    rows: Iterable[Sequence[str]],
    words: Sequence[int] = (),
    spare: Sequence[str] | None = None,
    width: int | None = None,
) -> str:
    """Rows under their titles, as plain text.

    Args:
        words: columns, beside the first, that hold words; all others hold numbers, on the right. spare, width: as
            `render` has them.
    """
    content = table(*titles)
    prose(content, *words)
    for row in rows:
        content.add_row(*row)
    return render(content, width, spare)


def lines(rows: Iterable[Sequence[str]]) -> str:
    """Names and what is said of them, without titles."""
    content = plain("", "", numbers=False)
    for name, said in rows:
        content.add_row(name, one_line(said))
    return render(content)


def listed(parts: Sequence[str], most: int | None = None) -> str:
    """`a, b and c`; of more than `most` the first, and how many are left."""
    if most is not None and len(parts) > most:
        parts = [*parts[:most], f"{len(parts) - most} more"]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def prose(content: Table, *indices: int) -> None:
    """Let columns of words be on the left and fold, in a table whose others are numbers."""
    for index in indices:
        content.columns[index].justify = "left"
        content.columns[index].no_wrap = False


def render(content: Table, width: int | None = None, spare: Sequence[str] | None = None) -> str:
    """The table as plain text of at most so many columns, the terminal's unless told: words fold first; where numbers
    alone are too wide, the table goes on below with its first column repeated.

    Args:
        spare: titles of columns that a narrow terminal may go without, in the order in which they go, so that each row
            stays in one line; a line says which are left out. What does not fit without them is turned, a block of
            lines for each row.
    """
    import io

    from rich.console import Console

    width = width or columns()
    kept, left_out = list(range(len(content.columns))), ""
    if spare is not None:
        kept = _without(content, width, spare)
        if not kept:
            return _turned(content, width)
        if len(kept) < len(content.columns):
            gone = [str(one.header) for at, one in enumerate(content.columns) if at not in kept]
            wide = max(_least(content, range(len(content.columns))), width + 1)
            left_out = fold(f"left out to fit: {', '.join(gone)}; COLUMNS={wide}, or --json, shows them\n", width)
    buffer = io.StringIO()
    console = Console(file=buffer, width=width, no_color=True, highlight=False, markup=False, emoji=False)
    for index, part in enumerate(_parts(content, width, kept)):
        if index:
            console.print()
        console.print(part)
    return "".join(f"{line.rstrip()}\n" for line in buffer.getvalue().splitlines()) + left_out


def _without(content: Table, width: int, spare: Sequence[str]) -> list[int]:
    """The columns that fit when those that may go have gone, one after the other; none where all of them are not
    enough."""
    kept, going = list(range(len(content.columns))), list(spare)
    while _least(content, kept) > width:
        if not going:
            return []
        title = going.pop(0)
        kept = [at for at in kept if str(content.columns[at].header) != title]
    return kept


def _least(content: Table, kept: Sequence[int]) -> int:
    """How many characters some columns take at least, side by side."""
    return sum(_needs(content, at)[0] for at in kept) + GAP * (len(kept) - 1)


def _turned(content: Table, width: int) -> str:
    """Every row as a block of lines, a title and its cell in each."""
    titles = [str(column.header) for column in content.columns]
    wide = max(map(len, titles), default=0)
    rows = zip(*(map(str, column.cells) for column in content.columns), strict=True)
    blocks = [
        "\n".join(f"{title:<{wide}}  {cell}".rstrip() for title, cell in zip(titles, row, strict=True)) for row in rows
    ]
    return "\n\n".join(fold(block, width) for block in blocks) + "\n"


def _parts(content: Table, width: int, kept: Sequence[int]) -> list[Table]:
    """Those columns as a table where they fit, or in as many tables as it takes."""
    needs = [_needs(content, index) for index in range(len(content.columns))]
    groups: list[list[int]] = [[0]]
    room = left = width - needs[0][0]
    for index in kept[1:]:
        if (left := left - GAP - needs[index][0]) < 0 and len(groups[-1]) > 1:
            groups.append([0])
            left = room - GAP - needs[index][0]
        groups[-1].append(index)
    shares = [_shared([needs[i] for i in group], width - GAP * (len(group) - 1)) for group in groups]
    return [_of(content, group, widths, group is not groups[0]) for group, widths in zip(groups, shares, strict=True)]


def _needs(content: Table, index: int) -> tuple[int, int]:
    """(least, full) width of a column: a number stays in one piece, words may come one to a line."""
    from rich.cells import cell_len

    column = content.columns[index]
    cells = [str(cell) for cell in column.cells]
    title = str(column.header)
    full = max((cell_len(text) for text in (title, *cells)), default=0)
    words = [cell_len(word) for text in ((title,) if column.no_wrap else (title, *cells)) for word in text.split()]
    longest = max(words, default=1)  # a name in the first column is there to be typed: it stays in one piece
    least = max(longest if not index else min(LONGEST_WORD, longest), column.min_width or 1)
    if column.no_wrap:
        least = max(least, *(cell_len(cell) for cell in cells), 1) if cells else least
    else:
        least = max(least, min(full, NARROW))
    return least, max(full, least)


def _shared(needs: list[tuple[int, int]], room: int) -> list[int]:
    """What each column gets: its least, then the narrowest that lacks something takes the next of what is left."""
    widths = [least for least, _ in needs]
    while sum(widths) > room:  # one word, or one number, that is wider than all there is
        widths[widths.index(max(widths))] -= 1
    for _ in range(room - sum(widths)):
        lacking = [index for index, (_, full) in enumerate(needs) if widths[index] < full]
        if not lacking:
            break
        widths[min(lacking, key=widths.__getitem__)] += 1
    return widths


def _of(content: Table, indices: Sequence[int], widths: Sequence[int], further: bool) -> Table:
    """Some columns of a table, each of the width it was given; `further`: not its first part."""
    from rich.table import Table

    result = Table(
        box=content.box, pad_edge=False, show_edge=False, padding=content.padding, show_header=content.show_header
    )
    for index, width in zip(indices, widths, strict=True):
        old = content.columns[index]
        result.add_column(old.header, justify=old.justify, overflow="fold", width=width)
    for row in zip(*(content.columns[index].cells for index in indices), strict=True):
        if not further or any(row[1:]):  # a row that has nothing to add does not go on below
            result.add_row(*row)
    return result
