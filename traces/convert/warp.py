"""Warp's routing trace: JSONL, one decoded token per line, ids sorted ascending, no weights.

    {"tok": 1, "layers": [[6, 8, 15, 23, 31, 37, 53, 63], ...]}

Built from a real file, `tests/trace_olmoe_299.jsonl` of https://github.com/sqliteai/warp. `tok` counts up within a
request; a line whose `tok` does not begins another request.
"""

from __future__ import annotations

from pathlib import Path

from traces.convert.fields import has_keys, starts_object, token_layers
from traces.convert.options import Facts, Options
from traces.convert.spool import DECODE, Spool
from traces.convert.text import field, records, whole

NAME, TITLE, ORIGIN = "warp", "warp routing trace (JSONL)", "a real file"


def sniff(_path: Path, head: bytes) -> bool:
    """Whether the head of a file looks like this source."""
    return starts_object(head) and has_keys(head, "tok", "layers")


def read(path: Path, spool: Spool, options: Options) -> Facts:
    """Put every token into the spool. Raises BadInput with file and line."""
    spool.at(path)
    request, before = -1, None
    for number, data in records(path):
        where = spool.place(number)
        position = whole(where, "tok", field(where, data, "tok"))
        if before is None or position <= before:
            request = spool.request(number, options.task)
        before = position
        ids, _ = token_layers(where, "layers", field(where, data, "layers"))
        spool.token(request, DECODE)
        spool.row(ids, [], number)
    return Facts(notes=("The source has decode rows only.",))
