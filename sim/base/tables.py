"""Text that fits where it is read: sentences and tables fold to the terminal, and to 100 columns in a pipe."""

from __future__ import annotations

import re
import shutil
import textwrap
from typing import TYPE_CHECKING
from unicodedata import category, east_asian_width

from sim.base.errors import escaped, one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

IN_A_PIPE = 100
NARROWEST = 40  # nothing is readable below
GAP = 2  # between columns
NARROW = 10  # a column of words has that much, if it can use it
LONGEST_WORD = 24  # a longer one may be broken inside a table
_LEAD = re.compile(r" *(?:[^ ]+(?: [^ ]+)? {2,})?")  # the indent, and a title with its gap
_MOST_LEAD = 24
_WORD = re.compile(r"\s*\S+\s*")


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


class Column:
    """A title and its cells. Numbers are in one piece and on the right, words fold and are on the left."""

    def __init__(self, title: str, numbers: bool) -> None:
        self.title, self.numbers = shown(title), numbers
        self.least = 1  # characters
        self.cells: list[str] = []


class Table:
    """Columns of text, and whether a line of titles, and a rule below that, are above them."""

    def __init__(self, titles: Sequence[str], numbers: bool, headed: bool, ruled: bool) -> None:
        self.columns = [Column(title, numbers and index > 0) for index, title in enumerate(titles)]
        self.headed, self.ruled = headed, ruled

    @property
    def row_count(self) -> int:
        """Rows below the titles."""
        return len(self.columns[0].cells)

    def add_row(self, *cells: str) -> None:
        """A cell for each column; the last ones may be left out."""
        for column, cell in zip(self.columns, (*cells, *[""] * (len(self.columns) - len(cells))), strict=True):
            column.cells.append(shown(cell))


def table(*titles: str, numbers: bool = True) -> Table:
    """An empty table with a rule under its titles; columns after the first are right-aligned when they hold numbers."""
    return Table(titles, numbers, headed=True, ruled=True)


def plain(*titles: str, numbers: bool = True) -> Table:
    """The same without a rule; without titles there is no line of them either."""
    return Table(titles, numbers, headed=any(titles), ruled=False)


def pairs(least: int = 1) -> Table:
    """Labels, of so many characters at least, and what they are of."""
    rows = plain("", "", numbers=False)
    rows.columns[0].least = least
    return rows


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
    content = pairs()
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
        content.columns[index].numbers = False


def render(content: Table, width: int | None = None, spare: Sequence[str] | None = None) -> str:
    """The table as plain text of at most so many columns, the terminal's unless told: words fold first; where numbers
    alone are too wide, the table goes on below with its first column repeated.

    Args:
        spare: titles of columns that a narrow terminal may go without, in the order in which they go, so that each row
            stays in one line; a line says which are left out. What does not fit without them is turned, a block of
            lines for each row.
    """
    width = width or columns()
    kept, left_out = list(range(len(content.columns))), ""
    if spare is not None:
        kept = _without(content, width, spare)
        if not kept:
            return _turned(content, width)
        if len(kept) < len(content.columns):
            gone = [one.title for at, one in enumerate(content.columns) if at not in kept]
            wide = max(_least(content, range(len(content.columns))), width + 1)
            left_out = fold(f"left out to fit: {', '.join(gone)}; COLUMNS={wide}, or --json, shows them\n", width)
    parts = enumerate(_parts(content, width, kept))
    drawn = (_drawn(content, indices, widths, at > 0) for at, (indices, widths) in parts)
    return "\n".join("".join(f"{line}\n" for line in lines) for lines in drawn) + left_out


def _without(content: Table, width: int, spare: Sequence[str]) -> list[int]:
    """The columns that fit when those that may go have gone, one after the other; none where all of them are not
    enough."""
    kept, going = list(range(len(content.columns))), list(spare)
    while _least(content, kept) > width:
        if not going:
            return []
        title = going.pop(0)
        kept = [at for at in kept if content.columns[at].title != title]
    return kept


def _least(content: Table, kept: Sequence[int]) -> int:
    """How many characters some columns take at least, side by side."""
    return sum(_needs(content, at)[0] for at in kept) + GAP * (len(kept) - 1)


def _turned(content: Table, width: int) -> str:
    """Every row as a block of lines, a title and its cell in each."""
    titles = [column.title for column in content.columns]
    wide = max(map(len, titles), default=0)
    rows = zip(*(column.cells for column in content.columns), strict=True)
    blocks = [
        "\n".join(f"{title:<{wide}}  {cell}".rstrip() for title, cell in zip(titles, row, strict=True)) for row in rows
    ]
    return "\n\n".join(fold(block, width) for block in blocks) + "\n"


def _parts(content: Table, width: int, kept: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Those columns, and what each of them gets, together where they fit, or in as many tables as it takes."""
    needs = [_needs(content, index) for index in range(len(content.columns))]
    groups: list[list[int]] = [[0]]
    room = left = width - needs[0][0]
    for index in kept[1:]:
        if (left := left - GAP - needs[index][0]) < 0 and len(groups[-1]) > 1:
            groups.append([0])
            left = room - GAP - needs[index][0]
        groups[-1].append(index)
    return [(group, _shared([needs[i] for i in group], width - GAP * (len(group) - 1))) for group in groups]


def _needs(content: Table, index: int) -> tuple[int, int]:
    """(least, full) width of a column: a number stays in one piece, words may come one to a line."""
    column = content.columns[index]
    texts = [column.title, *column.cells]
    full = max(map(_wide, texts))
    words = [_wide(word) for text in (texts[:1] if column.numbers else texts) for word in text.split()]
    longest = max(words, default=1)  # a name in the first column is there to be typed: it stays in one piece
    least = max(longest if not index else min(LONGEST_WORD, longest), column.least)
    least = max(least, *map(_wide, column.cells), 1) if column.numbers else max(least, min(full, NARROW))
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


def _drawn(content: Table, indices: Sequence[int], widths: Sequence[int], further: bool) -> Iterator[str]:
    """Lines of some columns, each of the width it was given; `further`: not the first part of their table."""
    columns = [content.columns[index] for index in indices]

    def lines(texts: Iterable[str], low: bool = False) -> Iterator[str]:
        cells = [_wrapped(text, width) for text, width in zip(texts, widths, strict=True)]
        most = max(map(len, cells))
        for at in range(most):
            shown = (_at(cell, at - (most - len(cell) if low else 0)) for cell in cells)
            placed = (
                (" " * (width - _wide(text)) + text if column.numbers else text + " " * (width - _wide(text)))
                for text, width, column in zip(shown, widths, columns, strict=True)
            )
            yield (" " * GAP).join(placed).rstrip()

    if content.headed:
        yield from lines((column.title for column in columns), low=True)
    if content.ruled:
        yield "─" * (sum(widths) + GAP * (len(widths) - 1))
    for row in zip(*(column.cells for column in columns), strict=True):
        if not further or any(row[1:]):  # a row that has nothing to add does not go on below
            yield from lines(row)


def _at(cell: Sequence[str], line: int) -> str:
    return cell[line] if 0 <= line < len(cell) else ""


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of a cell; a word that is wider than its column is broken."""
    if len(text) <= width and text.isascii() and "\n" not in text and "\t" not in text:
        return [text.rstrip()]
    lines: list[str] = []
    for line in text.split("\n"):
        begun = ""
        for word in _WORD.findall(line.expandtabs(8)):
            if _wide(begun) + _wide(word.rstrip()) <= width:
                begun += word
                continue
            if begun:
                lines.append(begun.rstrip())
            begun = word
            while _wide(begun.rstrip()) > width:
                piece = _first(begun, width)
                lines.append(piece.rstrip())
                begun = begun[len(piece) :]
        lines.append(begun.rstrip())
    return lines


def _first(text: str, width: int) -> str:
    """As much of a text as fits, a character at least."""
    n = 1
    while n < len(text) and _wide(text[: n + 1]) <= width:
        n += 1
    return text[:n]


def _wide(text: str) -> int:
    """Characters of the terminal that a text takes."""
    if text.isascii():
        return len(text)
    return sum(0 if category(c) in ("Mn", "Me", "Cf") else 1 + (east_asian_width(c) in "WF") for c in text)
