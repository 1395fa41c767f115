"""Write the keys of a result into docs/figures.md, from the table of figures: `python tools/figures_page.py [--check]`.

A test holds the page current.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec

from sim import figures

PAGE = Path(__file__).resolve().parents[1] / "docs" / "figures.md"
BEGIN = "<!-- figures: python tools/figures_page.py -->\n"
END = "<!-- end of figures -->\n"
UNITS = {"s": "s", "bytes": "bytes", "j": "J", "w": "W", "frac": "ratio", "share": "share", "per_s": "per s"}
KINDS = {"text": "text", "bool": "true, false", "list": "list", "open": "names of its own"}
HEAD = "| key | | better | meaning |\n|---|---|---|---|\n"


def record_of(hint: Any) -> tuple[type[msgspec.Struct] | None, str]:
    """The record that a type holds, alone, in a list or under names of its own; and which of these."""
    for one in get_args(hint) or (hint,):
        if isinstance(one, type) and issubclass(one, msgspec.Struct):
            how = {list: "each: ", dict: "by name: "}.get(get_origin(hint), "")
            return one, how
        if get_origin(one) in (list, dict):
            return record_of(one)
    return None, ""


def uses(kind: type[msgspec.Struct]) -> Counter[type[msgspec.Struct]]:
    """How often each record is a part of this one, or of its parts, each part counted once."""
    found: Counter[type[msgspec.Struct]] = Counter()
    todo, seen = [kind], {kind}
    while todo:
        kind = todo.pop()
        for _, name, _ in figures.names_of(kind):
            part, _ = record_of(figures.field_of(kind, name)[0])
            if part is not None:
                found[part] += 1
                if part not in seen:
                    seen.add(part)
                    todo.append(part)
    return found


def page() -> str:
    """The generated part."""
    top = figures.RECORD
    found = uses(top)
    shared = [kind for kind, n in found.items() if n > 1]
    text = HEAD + "".join(_rows(top, "", shared))
    for kind in shared:
        said = " ".join((kind.__doc__ or "").split())
        text += f"\n### {kind.__name__}\n\n{said}\n\n{HEAD}{''.join(_rows(kind, '', shared))}"
    return text


def _rows(kind: type[msgspec.Struct], above: str, shared: list[type[msgspec.Struct]]) -> Iterator[str]:
    every = figures.rows_of(figures.RECORD) if kind not in shared else {}
    own = figures.rows_of(kind)
    for name, attribute, _ in figures.names_of(kind):
        hint, figure = figures.field_of(kind, attribute)
        key = f"{above}{name}"
        part, how = record_of(hint)
        if part is None:
            row = every.get(key) or own[name]
            what = UNITS.get(row.unit, "") if row.number else KINDS.get(row.kind, "")
            first = " ●" if row.shown == "first" else ""
            yield _cells(f"`{key}`{first}", what, row.better, figure.about)
        elif part in shared:
            unit = f"{UNITS[figure.unit]}, " if figure.unit in UNITS else ""
            also = f"; {' and '.join(f'`{one}` ●' for one in figure.first)}" if figure.first else ""
            link = f"{how}{unit}[{part.__name__}](#{part.__name__.lower()})"
            yield _cells(f"`{key}`", link, figure.better, f"{figure.about}{also}")
        else:
            said = " ".join((part.__doc__ or "").split())
            yield _cells(f"`{key}`", f"{how}object", figure.better, f"{figure.about}: {said}")
            mark = {"each: ": "[].", "by name: ": ".*."}.get(how, ".")
            yield from _rows(part, f"{key}{mark}", shared)


def _cells(key: str, what: str, way: int, about: str) -> str:
    better = {1: "more", -1: "less"}.get(way, "")
    return f"|{'|'.join(cell and f' {cell} ' for cell in (key, what, better, about))}|\n"


def written(text: str) -> str:
    """A page with its generated part as it is to be."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{PAGE}: it lacks {BEGIN.strip()} or {END.strip()}; put both back")
    return f"{before}{BEGIN}{page()}{END}{after}"


if __name__ == "__main__":
    now = PAGE.read_text(encoding="utf-8")
    if "--check" in sys.argv[1:]:
        sys.exit(0 if written(now) == now else f"{PAGE}: run python tools/figures_page.py")
    PAGE.write_text(written(now), encoding="utf-8", newline="\n")
