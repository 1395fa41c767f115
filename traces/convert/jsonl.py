"""Plain JSONL, this project's own interchange form: one token per line, after an optional line of facts.

    {"meta": {"model": "my-model", "n_experts": 8, "gate_score": "softmax", "gate_renormalised": true}}
    {"request": "a", "phase": "prefill", "token_id": 17, "experts": [[3, 1], [0, 5]], "weights": [[0.7, 0.3], [0.6,
    0.4]]}

Only `experts` (ids by layer) is needed. Requests may be interleaved; without `request` all lines are one. `task` labels
the request, `arrival_s` says when it arrived; both are taken from its first line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sim.base.errors import BadInput
from traces.convert.fields import has_keys, phase_of, request_key, starts_object, text_of, token_layers
from traces.convert.options import Facts, Options
from traces.convert.spool import Spool
from traces.convert.text import field, finite, records, shown, whole
from traces.format.layout import MAX_EXPERTS

NAME, TITLE, ORIGIN = "jsonl", "plain JSONL, one token per line", "docs/convert.md"
FIELDS = {"request", "phase", "token_id", "experts", "weights", "task", "arrival_s", "iteration"}


def sniff(_path: Path, head: bytes) -> bool:
    """Whether the head of a file looks like this source."""
    return starts_object(head) and has_keys(head, "experts") and not has_keys(head, "routes")


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
        request = spool.request(
            request_key(where, data.get("request")), text_of(where, "task", data.get("task")) or options.task, arrival_s
        )
        token_id = -1 if data.get("token_id") is None else whole(where, "token_id", data["token_id"])
        iteration = -1 if data.get("iteration") is None else whole(where, "iteration", data["iteration"])
        spool.token(request, phase_of(where, data.get("phase")), token_id, iteration)
        spool.row(ids, weights, number)
    return facts


def facts_of(where: str, meta: Any) -> Facts:
    """The line of facts. Raises BadInput naming the field."""
    if not isinstance(meta, dict):
        raise BadInput(f"{where}: meta, got {shown(meta)}: an object of facts; mend the line")
    known = {"model", "model_source", "n_experts", "gate_score", "gate_renormalised", "weights_kind", "expert_order"}
    if unknown := sorted(set(meta) - known):
        raise BadInput(f"{where}: meta {shown(unknown[0])}: no such fact; {', '.join(sorted(known))}; mend the line")

    def choice(name: str, allowed: tuple[Any, ...], default: Any) -> Any:
        value = meta.get(name, default)
        if value not in allowed or (isinstance(value, int) and not isinstance(value, bool)):
            raise BadInput(
                f"{where}: meta {name}, got {shown(value)}: one of {', '.join(map(str, allowed))}; mend the line"
            )
        return value

    return Facts(
        model=text_of(where, "meta model", meta.get("model")),
        model_source=text_of(where, "meta model_source", meta.get("model_source"), 10_000),
        n_experts=None
        if "n_experts" not in meta
        else whole(where, "meta n_experts", meta["n_experts"], 1, MAX_EXPERTS),
        gate=choice("gate_score", ("softmax", "sigmoid"), "softmax"),
        renormalised=choice("gate_renormalised", (True, False, None), None),
        weights_kind=choice("weights_kind", ("applied", "raw"), "applied"),
        expert_order=choice("expert_order", ("router", "unranked"), "router"),
    )
