"""JSONL, a token per line: this project's own interchange form, and Warp's.

    {"meta": {"model": "my-model", "n_experts": 8, "gate_score": "softmax", "gate_renormalised": true}}
    {"request": "a", "phase": "prefill", "token_id": 17, "experts": [[3, 1], [0, 5]], "weights": [[0.7, 0.3], [0.6,
    0.4]]}

Only `experts` (ids by layer) is needed, after an optional line of facts. Requests may be interleaved; without `request`
all lines are one. `task` labels the request, `arrival_s` says when it arrived; both are taken from its first line.

    {"tok": 1, "layers": [[6, 8, 15, 23, 31, 37, 53, 63], ...]}

Warp's are decoded tokens, ids sorted ascending, no weights. `tok` counts up within a request; a line whose `tok` does
not begins another request.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sim.base.errors import BadInput
from traces.convert.options import SHAPE, Facts, Options, Source
from traces.convert.spool import Spool
from traces.convert.text import (
    DECODE,
    bad,
    field,
    finite,
    has_keys,
    records,
    shown,
    starts_object,
    text_of,
    token_layers,
    whole,
)
from traces.format.layout import MAX_EXPERTS

FIELDS = {"request", "phase", "token_id", "experts", "weights", "task", "arrival_s", "iteration"}


def read(path: Path, spool: Spool, options: Options) -> Facts:
    """Put every token into the spool. Raises BadInput with file and line."""
    spool.at(path)
    facts = Facts(expert_order="router")
    for number, data in records(path):
        where = spool.place(number)
        if "meta" in data:
            facts = facts_of(where, data["meta"])
            continue
        if unknown := sorted(set(data) - FIELDS):
            raise BadInput(f"{where}: {shown(unknown[0])}: no such field; {', '.join(sorted(FIELDS))}; mend the record")
        ids, weights = token_layers(where, "experts", field(where, data, "experts"), data.get("weights"))
        arrival_s = None if data.get("arrival_s") is None else finite(where, "arrival_s", data["arrival_s"])
        spool.told_token(where, data, spool.told_request(where, data, options.task, arrival_s))
        spool.row(ids, weights, number)
    return facts


def facts_of(where: str, meta: Any) -> Facts:
    """The line of facts. Raises BadInput naming the field."""
    way = "mend the line"
    if not isinstance(meta, dict):
        raise bad(where, "meta", shown(meta), "an object of facts", way)
    known = {"model", "model_source", "n_experts", "gate_score", "gate_renormalised", "weights_kind", "expert_order"}
    if unknown := sorted(set(meta) - known):
        raise BadInput(f"{where}: meta {shown(unknown[0])}: no such fact; {', '.join(sorted(known))}; {way}")

    def choice(name: str, *allowed: Any) -> Any:
        value = meta.get(name, allowed[0])
        if value not in allowed or (isinstance(value, int) and not isinstance(value, bool)):
            raise bad(where, f"meta {name}", shown(value), f"one of {', '.join(map(str, allowed))}", way)
        return value

    told = "n_experts" in meta
    return Facts(
        model=text_of(where, "meta model", meta.get("model")),
        model_source=text_of(where, "meta model_source", meta.get("model_source"), 10_000),
        n_experts=whole(where, "meta n_experts", meta["n_experts"], 1, MAX_EXPERTS) if told else None,
        gate=choice("gate_score", "softmax", "sigmoid"),
        renormalised=choice("gate_renormalised", None, True, False),
        weights_kind=choice("weights_kind", "applied", "raw"),
        expert_order=choice("expert_order", "router", "unranked"),
    )


def _read_warp(path: Path, spool: Spool, options: Options) -> Facts:
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


SOURCE = Source(
    "jsonl",
    "plain JSONL, one token per line",
    "docs/convert.md",
    lambda _path, head: starts_object(head) and has_keys(head, "experts") and not has_keys(head, "routes"),
    read,
    first_line={"model": "model", "n_experts": "n_experts"},
)
WARP = Source(
    "warp",
    "warp routing trace (JSONL)",
    "a real file",  # `tests/trace_olmoe_299.jsonl` of https://github.com/sqliteai/warp
    lambda _path, head: starts_object(head) and has_keys(head, "tok", "layers"),
    _read_warp,
    silent=SHAPE,
    phased=True,
)
