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
from traces.convert.fields import LARGEST_WEIGHT, phase_of, request_key, text_of
from traces.convert.options import Facts, Options
from traces.convert.spool import Spool
from traces.convert.text import finite, lines, shown, whole
from traces.format.layout import MAX_EXPERTS

NAME, TITLE, ORIGIN = "csv", "plain CSV, one chosen expert per row", "docs/convert.md"
NEEDED = ("token", "layer", "expert")
COLUMNS = (*NEEDED, "request", "phase", "rank", "weight", "token_id", "task")


def sniff(_path: Path, head: bytes) -> bool:
    """Whether the head of a file looks like this source."""
    first = head.removeprefix(b"\xef\xbb\xbf").split(b"\n", 1)[0].decode("utf-8", "replace")
    return set(NEEDED) <= {name.strip() for name in first.split(",")}


def rows(path: Path, needed: tuple[str, ...], comments: bool = False) -> Iterator[tuple[int, dict[str, str]]]:
    """(line number, row by column name). Raises BadInput where a row has another number of columns than the header."""
    names: list[str] = []
    for number, text in lines(path):
        if comments and text.startswith("#"):
            continue
        try:
            (values,) = csv.reader([text])
        except (csv.Error, ValueError):
            raise BadInput(f"{path}:{number}: not a row of CSV; drop or mend it") from None
        if not names:
            names = [name.strip() for name in values]
            if missing := [name for name in needed if name not in names]:
                raise BadInput(
                    f"{path}:{number}: columns, got {shown(', '.join(names))}: {missing[0]!r} is missing; the "
                    f"first row names the columns, add it"
                )
            if len(set(names)) != len(names):
                raise BadInput(f"{path}:{number}: columns, got one name twice: names are distinct; rename it")
            continue
        if len(values) != len(names):
            raise BadInput(
                f"{path}:{number}: row, got {len(values)} columns: the header has {len(names)}; the line was cut, "
                f"drop or mend it"
            )
        yield number, dict(zip(names, values, strict=True))


def read(path: Path, spool: Spool, options: Options) -> Facts:
    """Put every cell into the spool. Raises BadInput with file and line."""
    spool.at(path)
    tokens: dict[tuple[int, int], int] = {}
    cell: tuple[int, int, int] | None = None  # token, layer, first line
    ids: list[int] = []
    weights: list[float] = []
    for number, row in rows(path, NEEDED):
        where = spool.place(number)
        if unknown := sorted(set(row) - set(COLUMNS)):
            raise BadInput(
                f"{where}: column {shown(unknown[0])}: no such column; {', '.join(COLUMNS)}; rename or drop it"
            )
        request = spool.request(
            request_key(where, row.get("request")), text_of(where, "task", row.get("task")) or options.task
        )
        position = whole(where, "token", row["token"], 0, 2**62)
        token = tokens.get((request, position))
        if token is None:
            token_id = whole(where, "token_id", row["token_id"]) if row.get("token_id") else -1
            token = tokens[request, position] = spool.token(request, phase_of(where, row.get("phase")), token_id)
        layer = whole(where, "layer", row["layer"])
        if cell is None or (token, layer) != cell[:2]:
            if cell is not None:
                spool.cell(cell[0], cell[1], ids, weights, cell[2])
            cell, ids, weights = (token, layer, number), [], []
        if row.get("rank") and whole(where, "rank", row["rank"]) != len(ids):
            raise BadInput(
                f"{where}: rank, got {shown(row['rank'])}: {len(ids)} is next; sort the rows of a token and layer by "
                f"rank"
            )
        ids.append(whole(where, "expert", row["expert"], 0, MAX_EXPERTS - 1))
        if row.get("weight"):
            weights.append(finite(where, "weight", row["weight"], LARGEST_WEIGHT))
    if cell is not None:
        spool.cell(cell[0], cell[1], ids, weights, cell[2])
    return Facts(expert_order="router")
