"""Plain CSV: one row per chosen expert, columns by name in any order.

    request,phase,token,layer,rank,expert,weight,token_id
    a,prefill,0,0,0,3,0.7,17
    a,prefill,0,0,1,1,0.3,17

`token`, `layer` and `expert` are needed. The rows of one (request, token, layer) stand together, in order of `rank` or,
without that column, of the file. A token is a (request, token) pair; requests and layers may be interleaved.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from sim.base.errors import BadInput
from traces.convert.options import SHAPE, Facts, Options, Source
from traces.convert.spool import Spool
from traces.convert.text import LARGEST_WEIGHT, bad, finite, layer_of, lines, shown, whole

NEEDED = ("token", "layer", "expert")
COLUMNS = (*NEEDED, "request", "phase", "rank", "weight", "token_id", "task")


def columns(head: bytes) -> set[str]:
    """Names in the first line of a file."""
    first = head.removeprefix(b"\xef\xbb\xbf").split(b"\n", 1)[0].decode("utf-8", "replace")
    return {name.strip() for name in first.split(",")}


def rows(path: Path, needed: tuple[str, ...], comments: bool = False) -> Iterator[tuple[int, dict[str, str]]]:
    """(line number, row by column name). Raises BadInput where a row has another number of columns than the header."""
    names: list[str] = []
    for number, text in lines(path):
        if comments and text.startswith("#"):
            continue
        where = f"{path}:{number}"
        try:
            (values,) = csv.reader([text])
        except (csv.Error, ValueError):
            raise BadInput(f"{where}: not a row of CSV; drop or mend it") from None
        if not names:
            names = [name.strip() for name in values]
            if missing := [name for name in needed if name not in names]:
                rule = f"{missing[0]!r} is missing; the first row names the columns"
                raise BadInput(f"{where}: columns, got {shown(', '.join(names))}: {rule}, add it")
            if len(set(names)) != len(names):
                raise bad(where, "columns", "one name twice", "names are distinct", "rename it")
            continue
        if len(values) != len(names):
            rule = f"the header has {len(names)}; the line was cut"
            raise BadInput(f"{where}: row, got {len(values)} columns: {rule}, drop or mend it")
        yield number, dict(zip(names, values, strict=True))


def read(path: Path, spool: Spool, options: Options) -> Facts:
    """Put every cell into the spool. Raises BadInput with file and line."""
    spool.at(path)
    tokens: dict[tuple[int, int], int] = {}
    for number, row in rows(path, NEEDED):
        where, told = spool.place(number), {name: value or None for name, value in row.items()}
        if unknown := sorted(set(row) - set(COLUMNS)):
            way = f"no such column; {', '.join(COLUMNS)}; rename or drop it"
            raise BadInput(f"{where}: column {shown(unknown[0])}: {way}")
        request = spool.told_request(where, row, options.task)
        position = whole(where, "token", row["token"], 0, 2**62)
        token = tokens.get((request, position))
        if token is None:
            token = tokens[request, position] = spool.told_token(where, told, request)
        weight = finite(where, "weight", row["weight"], LARGEST_WEIGHT) if told.get("weight") else None
        spool.entry(
            where, (token, layer_of(where, row["layer"])), number, row["expert"], weight, ("rank", told.get("rank"))
        )
    spool.end_cell()
    return Facts(expert_order="router")


SOURCE = Source(
    "csv",
    "plain CSV, one chosen expert per row",
    "docs/convert.md",
    lambda _path, head: set(NEEDED) <= columns(head),
    read,
    silent=SHAPE,
)
