"""imp's `diagnostics.moe_expert_trace`: JSON, a record per decoded token and layer, in the order they were computed.

    {"top_k": 2, "trace": [[0, 7, 1], [1, 3, 7], [0, 7, 2]]}

A record is the layer and its experts. Built from the public code of https://github.com/kekzl/imp: the reader
`tools/analysis/expert_cache_sim.py`, which also takes the list alone, the names `entries` and `data`, and records
written one after the other without brackets, and the writer's description in its MoE workspace (decode only, one token
at a time; prefill is not recorded). The order of a record's experts is not told.

A token is a round through the layers. Where one request ends and the next begins is not recorded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sim.base.errors import BadInput
from traces.convert.options import Facts, Options
from traces.convert.spool import DECODE, Spool
from traces.convert.text import Document, a_list, head_of, shown, whole
from traces.format.layout import MAX_EXPERTS

NAME, TITLE, ORIGIN = "imp", "imp's moe_expert_trace (JSON)", "its public code"
_BARE = re.compile(rb"\s*\[\s*(\[\s*)?\d")
_NAMED = re.compile(rb'"(trace|entries|data)"\s*:\s*\[\s*(\[\s*)?(\d|\])')


def sniff(_path: Path, head: bytes) -> bool:
    """Whether the head of a file looks like this source."""
    head = head.removeprefix(b"\xef\xbb\xbf")
    return _BARE.match(head) is not None or (head.lstrip()[:1] == b"{" and _NAMED.search(head) is not None)


def read(path: Path, spool: Spool, options: Options) -> Facts:
    """Put every cell into the spool. Raises BadInput with file and position."""
    spool.at(path, ": character ")
    request = spool.request(0, options.task)
    token, layer_before = -1, -1
    for at, layer, ids in _records(path, options.top_k):
        if layer <= layer_before or token < 0:
            token = spool.token(request, DECODE)
        layer_before = layer
        spool.cell(token, layer, ids, [], at)
    return Facts(notes=("The source has decode rows only, and does not tell requests apart.",))


def _records(path: Path, top_k: int | None) -> Iterator[tuple[int, int, list[int]]]:
    """(position, layer, experts). Raises BadInput."""
    named = _NAMED.search(head_of(path))
    document = Document(path, named[1].decode() if named else "trace", {"top_k"}, bare=True)
    flat: list[int] = []
    for at, record in document:
        where = f"{path}: character {at}"
        if isinstance(record, int) and not isinstance(record, bool):
            stride = 1 + (top_k or _told(path, document))
            flat.append(whole(where, "record", record, 0, max(65_535, MAX_EXPERTS - 1)))
            if len(flat) < stride:
                continue
            record, flat = flat, []
        elif flat:
            raise BadInput(f"{where}: record, got {shown(record)} among plain numbers: one kind; record it again")
        values = a_list(where, "record", record)
        layer = whole(where, "layer", values[0], 0, 65_535)
        yield at, layer, [_expert(where, value) for value in values[1:]]
    if flat:
        raise BadInput(f"{path}: record, got {len(flat)} numbers at the end: a layer and its experts; it was cut")
    told = document.rest.get("top_k")
    if told is not None and top_k is not None and told != top_k:
        raise BadInput(f"--top-k, got {top_k}: {path} says {shown(told)}; leave it out, or correct the file")


def _expert(where: str, value: Any) -> int:
    return whole(where, "expert", value, 0, MAX_EXPERTS - 1)


def _told(path: Path, document: Document) -> int:
    """What the file says of k in front of plain numbers. Raises BadInput where it does not."""
    if "top_k" not in document.rest:
        raise BadInput(f"--top-k, got none: {path} has plain numbers and no top_k before them; give --top-k K")
    return whole(str(path), "top_k", document.rest["top_k"], 1, MAX_EXPERTS)
