"""Text that fits where it is read: sentences and tables fold to the terminal, and to 100 columns in a pipe."""

from __future__ import annotations

import os
import re
import sys
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
LEAD = r" *(?:[^ ]+(?: [^ ]+)? {2,})?"  # the indent, and a title with its gap
MOST_LEAD = 24


def columns() -> int:
    """The terminal's width, or what COLUMNS says; 100 where there is neither."""
    told = os.environ.get("COLUMNS", "")
    n = int(told) if told.isdecimal() else 0
    if not n:
        try:
            n = os.get_terminal_size(sys.__stdout__.fileno()).columns  # type: ignore[union-attr]
        except (AttributeError, ValueError, OSError):  # no stream, a closed one, or no terminal
            n = 0
    return max(NARROWEST, n or IN_A_PIPE)


def fold(text: str, width: int | None = None) -> str:
    """Every line that is too long goes on under its own text; a word is never broken (a path is there to be copied)."""
    width = width or columns()
    return "\n".join(line if len(line) <= width else _folded(line, width) for line in shown(text).split("\n"))


def shown(text: str) -> str:
    """Without what would recolour a terminal or move its cursor: titles and names come from files of anybody's."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" or category(c) == "Zs" else escaped(c) for c in text)


def _folded(line: str, width: int) -> str:
    found = re.match(LEAD, line)
    lead = found[0] if found is not None and len(found[0]) <= MOST_LEAD else ""
    indent = max(2, len(lead))
    rest = _wrapped(line[len(lead) :], width - indent if lead else width, width - indent, whole=True)
    return (lead + ("\n" + " " * indent).join(rest)).rstrip()


class Table:
    """Rows of text under their titles, where it has any. Columns of numbers are on the right, each number in one piece;
    `words`, the first column among them, are on the left and fold.

    Args:
        numbers: whether columns after the first hold them. ruled: whether a line parts titles and rows. least:
            characters of the first column, at least.
    """

    def __init__(self, titles: Sequence[str], numbers: bool = True, ruled: bool = False, least: int = 1) -> None:
        self.titles = [shown(title) for title in titles]
        self.words = {0} if numbers else set(range(len(titles)))
        self.ruled, self.least = ruled, least
        self.rows: list[list[str]] = []

    def add_row(self, *cells: str) -> None:
        """A cell for each column; the last ones may be left out."""
        self.rows.append([*map(shown, cells), *[""] * (len(self.titles) - len(cells))])


def table(*titles: str, numbers: bool = True) -> Table:
    """An empty table with a rule under its titles; columns after the first are right-aligned when they hold numbers."""
    return Table(titles, numbers, ruled=True)


def plain(*titles: str, numbers: bool = True) -> Table:
    """The same without a rule; without titles there is no line of them either."""
    return Table(titles, numbers)


def pairs(rows: Iterable[Sequence[str]] = (), least: int = 1) -> Table:
    """Labels, of so many characters at least, and what they are of."""
    made = Table(("", ""), numbers=False, least=least)
    for label, text in rows:
        made.add_row(label, text)
    return made


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
    return render(pairs((name, one_line(said)) for name, said in rows))


def listed(parts: Sequence[str], most: int | None = None) -> str:
    """`a, b and c`; of more than `most` the first, and how many are left."""
    if most is not None and len(parts) > most:
        parts = [*parts[:most], f"{len(parts) - most} more"]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def prose(content: Table, *indices: int) -> None:
    """Let columns of words be on the left and fold, in a table whose others are numbers."""
    content.words |= {index % len(content.titles) for index in indices}


def render(content: Table, width: int | None = None, spare: Sequence[str] | None = None) -> str:
    """The table as plain text of at most so many columns, the terminal's unless told: words fold first; where numbers
    alone are too wide, the table goes on below with its first column repeated.

    Args:
        spare: titles of columns that a narrow terminal may go without, in the order in which they go, so that each row
            stays in one line; a line says which are left out. What does not fit without them is turned, a block of
            lines for each row.
    """
    width, titles, left_out = width or columns(), content.titles, ""
    texts = zip(titles, *content.rows, strict=True)
    needs = [_needs(content, index, column) for index, column in enumerate(texts)]
    kept, going = list(range(len(titles))), list(spare or ())
    whole = least = sum(needs[at][0] for at in kept) + GAP * (len(kept) - 1)
    while spare is not None and (not kept or least > width):
        if not going:
            return _turned(content, width)
        title = going.pop(0)
        kept = [at for at in kept if titles[at] != title]
        least = sum(needs[at][0] for at in kept) + GAP * (len(kept) - 1)
    if len(kept) < len(titles):
        gone = ", ".join(title for at, title in enumerate(titles) if at not in kept)
        left_out = fold(f"left out to fit: {gone}; COLUMNS={max(whole, width + 1)}, or --json, shows them\n", width)
    groups = [[0]]
    room = left = width - needs[0][0]
    for at in kept[1:]:
        left -= GAP + needs[at][0]
        if left < 0 and len(groups[-1]) > 1:
            groups.append([0])
            left = room - GAP - needs[at][0]
        groups[-1].append(at)
    drawn = (_drawn(content, group, [needs[at] for at in group], width, group is groups[0]) for group in groups)
    return "\n".join("".join(f"{line}\n" for line in lines) for lines in drawn) + left_out


def _turned(content: Table, width: int) -> str:
    """Every row as a block of lines, a title and its cell in each."""
    wide = max(map(len, content.titles), default=0)
    blocks = [
        "\n".join(f"{title:<{wide}}  {cell}".rstrip() for title, cell in zip(content.titles, row, strict=True))
        for row in content.rows
    ]
    return "\n\n".join(fold(block, width) for block in blocks) + "\n"


def _needs(content: Table, index: int, texts: Sequence[str]) -> tuple[int, int]:
    """(least, full) width of a column: a number stays in one piece, words may come one to a line."""
    widths = [_wide(text) for text in texts]
    full, numbers = max(widths), index not in content.words
    words = [_wide(word) for text in (texts[:1] if numbers else texts) for word in text.split()]
    longest = max(words, default=1)  # a name in the first column is there to be typed: it stays in one piece
    least = max(min(LONGEST_WORD, longest) if index else max(longest, content.least), 1)
    least = max(least, *widths[1:], 1) if numbers else max(least, min(full, NARROW))
    return least, max(full, least)


def _drawn(
    content: Table, group: Sequence[int], needs: Sequence[tuple[int, int]], width: int, first: bool
) -> Iterator[str]:
    """Lines of some columns. Each gets its least, then the narrowest that lacks something the next of what is left."""
    widths = [least for least, _ in needs]
    room = width - GAP * (len(group) - 1)
    while sum(widths) > room:  # one word, or one number, that is wider than all there is
        widths[widths.index(max(widths))] -= 1
    for _ in range(room - sum(widths)):
        lacking = [at for at, (_, full) in enumerate(needs) if widths[at] < full]
        if not lacking:
            break
        widths[min(lacking, key=widths.__getitem__)] += 1
    headed = any(content.titles)
    for at, row in enumerate([content.titles, *content.rows] if headed else content.rows):
        texts = [row[index] for index in group]
        is_title = headed and not at
        if not (first or is_title or any(texts[1:])):
            continue  # a row that has nothing to add does not go on below
        cells = [_wrapped(text, width) for text, width in zip(texts, widths, strict=True)]
        most = max(map(len, cells))
        for line in range(most):
            parts = []
            for index, cell, wide in zip(group, cells, widths, strict=True):
                place = line - (most - len(cell) if is_title else 0)
                text = cell[place] if 0 <= place < len(cell) else ""
                blank = " " * (wide - _wide(text))
                parts.append(text + blank if index in content.words else blank + text)
            yield (" " * GAP).join(parts).rstrip()
        if is_title and content.ruled:
            yield "─" * (sum(widths) + GAP * (len(widths) - 1))


def _wrapped(text: str, width: int, further: int | None = None, whole: bool = False) -> list[str]:
    """Lines of so many characters, all but the first of `further`; a word that is wider is broken unless they are to
    stay `whole`."""
    if len(text) <= width and text.isascii() and "\n" not in text and "\t" not in text:
        return [text.rstrip()]
    lines: list[str] = []
    for line in text.split("\n"):
        begun = ""
        for word in re.findall(r"\s*\S+\s*", line.expandtabs(8)):
            if _wide(begun) + _wide(word.rstrip()) <= width:
                begun += word
                continue
            if begun:
                lines.append(begun.rstrip())
                width = further or width
            begun = word.lstrip() if whole else word
            while not whole and _wide(begun.rstrip()) > width:
                n = 1  # as much as fits, a character at least
                while n < len(begun) and _wide(begun[: n + 1]) <= width:
                    n += 1
                lines.append(begun[:n].rstrip())
                begun = begun[n:]
        lines.append(begun.rstrip())
    return lines


def _wide(text: str) -> int:
    """Characters of the terminal that a text takes."""
    if text.isascii():
        return len(text)
    return sum(0 if category(c) in ("Mn", "Me", "Cf") else 1 + (east_asian_width(c) in "WF") for c in text)
