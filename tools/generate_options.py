"""Write what is said of options outside `sim.options`: keywords of Python for editors, and docs/options.md.

python -m tools.generate_options
"""

from __future__ import annotations

from pathlib import Path
from textwrap import fill, indent

from sim.base.kinds import CACHE, NUMBER, RAM_SIZE, SIZE, SWITCH, WHOLE
from sim.options import LIMITS, OPTIONS, OUTPUTS, SETTINGS, Option, Table

TOP = Path(__file__).resolve().parents[1]
TYPES = Path("sim/studies/option_types.py")
PAGE = Path("docs/options.md")

_OF_KIND = {
    WHOLE: "int",
    NUMBER: "float",
    SWITCH: "bool",
    SIZE: "int | str",
    RAM_SIZE: "int | str",
    CACHE: "float | str",
}
_HEAD = '''"""Keywords of `moesim.simulate` and `moesim.sweep`, as type checkers and editors read them.

Written by `python -m tools.generate_options` from the table in `sim/options.py`: edit that.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TypedDict

Name = str | os.PathLike[str]
Value = bool | int | float | str | None
Several = Value | os.PathLike[str] | Iterable[Value | os.PathLike[str]]
Limits = str | Mapping[str, Mapping[str, float | str]]


class Options(TypedDict, total=False):
    """What decides a run beside policy and hardware. Sizes are bytes, or `8GB`."""

'''
_AXES = '''

class Axes(TypedDict, total=False):
    """What may vary beside policy and hardware: one value, several, or a range as text (`"20%:80%:20%"`). What each
    means stands in `Options`."""

'''
QUOTES = '"""'
GIVEN = ("policy", "hw")


def type_of(row: Option) -> str:
    """The type of a keyword."""
    if row.kind is SETTINGS:
        return "Mapping[str, Value]"
    if row.kind is LIMITS:
        return "Limits | None"
    said = _OF_KIND.get(row.kind, "Name" if "FILE" in row.metavar else "str")
    return f"{said} | None" if row.default is None else said


def types_text(table: Table = OPTIONS) -> str:
    """The module of typed keywords."""
    rows = [row for row in table.rows if row.field not in GIVEN]
    options = [f"{row.field}: {type_of(row)}\n{fill(f'{QUOTES}{row.help}.{QUOTES}', 114)}\n" for row in rows]
    several = {row.field: "Mapping[str, Several]" if row.kind is SETTINGS else type_of(row) for row in rows}
    several |= {row.field: "Several" for row in rows if row.axis}
    axes = [f"{field}: {type_}\n" for field, type_ in several.items()]
    return _HEAD + indent("".join(options), "    ") + _AXES + indent("".join(axes), "    ")


def page_text(tables: tuple[Table, ...] = (OPTIONS, OUTPUTS)) -> str:
    """The reference page."""
    rows = [row for table in tables for row in table.rows]
    groups = dict.fromkeys(row.group for row in rows)
    text = [
        "# Options of a run\n",
        "Every option has a dotted name; `run.batch` may be written `batch`. All of them can be given by "
        "`--set NAME=VALUE`, those with an option of their own in that way, too. The same names are keys of a "
        "configuration (`--config`), a grid (`moesim sweep --grid`) and a baseline (`moesim check`), and axes of a "
        "sweep; in Python a name's dots are underscores (`gpus_map=...`). An option `x.y` may also be a term of the "
        "value of an option `x` that is text: `--drive gen4x4:depth=8`.\n",
        "In `--set`, a bare name is a parameter of the policy (`moesim policies NAME`), and `hw.*`, `model.*` and "
        "`engine.*` are fields of profiles ([profiles.md](profiles.md)). Names that are no more are in "
        "[renamed.md](renamed.md).\n",
        "This page is written by `python -m tools.generate_options` from `sim/options.py`.\n",
    ]
    for group in groups:
        text += [f"## {group}\n", "| name | option | value | default | what it says |", "|---|---|---|---|---|"]
        text += [_cells(row) for row in rows if row.group == group]
        text.append("")
    return "\n".join(text).rstrip() + "\n"


def _cells(row: Option) -> str:
    value = ", ".join(row.choices) if row.choices else row.metavar.strip("'")
    flags = ", ".join(f"`{flag}`" for flag in row.flags)
    axis = "" if row.axis else " (no axis)"
    cells = (f"`{row.key}`{axis}", flags, value, row.shown_default, row.help)
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def main() -> None:
    """Write both files."""
    (TOP / TYPES).write_text(types_text(), encoding="utf-8", newline="\n")
    (TOP / PAGE).write_text(page_text(), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
