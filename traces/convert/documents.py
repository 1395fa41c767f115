"""Logs that are one JSON document with a large array, a token or a token's layer each: moe_ocs, StrataMoE and imp.

    {"meta": {...}, "routes": [{"token_pos": 0, "token_id": 151644, "phase": "prefill",
                                "layers": {"0": {"experts": [33, 9], "weights": [0.67, 0.01]}}}]}

moe_ocs: built from real files, `outputs/experiment_traces` of https://github.com/jinlong-huo/moe_ocs_learning (its mlx
backend). Weights are raw softmax scores of the chosen experts, in no fixed order.

    {"version": 2, "selections": [[[6, 8], [1, 3]], ...], ...}        (selections[token][layer][rank], no weights)

StrataMoE's RouterTrace, versions 1 and 2: built from its public description and writer, `docs/ROUTER_TRACE_SCHEMA.md`
and `tools/capture_switch_router_trace.py` of https://github.com/Labeeb2339/stratamoe-lab, and tried on the captured
trace that it publishes. `source.kind` is `captured` (a model was run) or `synthetic` (its generator; also every version
1 file), which becomes the label `synthetic`. Requests and phases are not told.

    {"top_k": 2, "trace": [[0, 7, 1], [1, 3, 7], [0, 7, 2]]}

imp's `diagnostics.moe_expert_trace`: a record, layer and experts, per decoded token and layer, in the order they were
computed. Built from the public code of https://github.com/kekzl/imp: the reader `tools/analysis/expert_cache_sim.py`,
which also takes the list alone, the names `entries` and `data`, and records written one after the other without
brackets, and the writer's description in its MoE workspace (decode only, one token at a time; prefill is not recorded).
The order of a record's experts is not told. A token is a round through the layers; where one request ends and the next
begins is not recorded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sim.base.errors import BadInput
from traces.convert.options import SHAPE, Facts, Options, Source
from traces.convert.spool import Spool
from traces.convert.text import (
    DECODE,
    MAX_LAYER,
    UNKNOWN,
    Document,
    a_list,
    bad,
    expert_ids,
    expert_of,
    expert_weights,
    field,
    has_keys,
    head_of,
    layer_of,
    shown,
    starts_object,
    text_of,
    token_layers,
    whole,
)
from traces.format.layout import MAX_EXPERTS, MAX_LAYERS

AGAIN, MEND = "record it again", "mend the file"
_BARE = re.compile(rb"\s*\[\s*(\[\s*)?\d")
_NAMED = re.compile(rb'"(trace|entries|data)"\s*:\s*\[\s*(\[\s*)?(\d|\])')


def _read_moe_ocs(path: Path, spool: Spool, options: Options) -> Facts:
    spool.at(path, ": character ")
    request = spool.request(0, options.task)
    document = Document(path, "routes", keep={"meta"})
    before = -1
    for at, route in document:
        where = spool.place(at)
        if not isinstance(route, dict):
            raise bad(where, "routes", shown(route), "an object per token", MEND)
        position = whole(where, "token_pos", field(where, route, "token_pos"))
        if position != before + 1:
            rule = "positions count up by one; the file was cut or filtered"
            raise BadInput(f"{where}: token_pos, got {position} after {before}: {rule}, {AGAIN}")
        before = position
        spool.told_token(where, {"token_id": route.get("token_id"), "phase": route.get("phase")}, request)
        spool.row(*_layers(where, field(where, route, "layers")), at)
    where, meta = str(path), document.rest.get("meta")
    if not isinstance(meta, dict):
        raise bad(where, "meta", shown(meta), "an object of facts about the run", AGAIN)
    if "num_moe_layers" in meta and spool.n_layers_read not in (0, meta["num_moe_layers"]):
        rule = f"meta num_moe_layers says {shown(meta['num_moe_layers'])}"
        raise bad(where, "layers", spool.n_layers_read, rule, AGAIN)
    n_experts = whole(where, "meta num_experts", field(f"{path}: meta", meta, "num_experts"), 1, MAX_EXPERTS)
    model = text_of(where, "meta model_id", meta.get("model_id"))
    return Facts(model=model, n_experts=n_experts, weights_kind="raw", renormalised=False)


def _layers(where: str, layers: Any) -> tuple[list[list[int]], list[list[float]]]:
    """Ids and weights by layer, in order of the layers' numbers."""
    if not isinstance(layers, dict) or not layers:
        raise bad(where, "layers", shown(layers), "an object by layer", MEND)
    ids, weights = [], []
    for layer, name in sorted((whole(where, "layers", name, 0, MAX_LAYER), name) for name in layers):
        one, what = layers[name], f"layers[{layer}]"
        if not isinstance(one, dict):
            raise bad(where, what, shown(one), "an object with experts and weights", MEND)
        ids.append(expert_ids(where, f"{what}.experts", one.get("experts")))
        weights.append(expert_weights(where, f"{what}.weights", one.get("weights"), len(ids[-1])))
    return ids, weights


def _read_strata(path: Path, spool: Spool, options: Options) -> Facts:
    spool.at(path, ": character ")
    request = spool.request(0, options.task)
    most = {"tokens": 2**31, "layers": MAX_LAYERS, "expertsPerLayer": MAX_EXPERTS, "topK": MAX_EXPERTS}
    document = Document(path, "selections", {*most, "version", "source"})
    n_tokens = 0
    for at, layers in document:
        ids, _ = token_layers(spool.place(at), "selections", layers)
        spool.token(request, UNKNOWN)
        spool.row(ids, [], at)
        n_tokens += 1
    where, rest = str(path), document.rest
    version = whole(where, "version", field(where, rest, "version"), 1, 2)
    told = {name: whole(where, name, field(where, rest, name), 1, limit) for name, limit in most.items()}
    for name, got in (("tokens", n_tokens), ("layers", spool.n_layers_read), ("topK", spool.top_k)):
        if told[name] != got:
            rule = f"the file says {told[name]}; it was cut or edited"
            raise BadInput(f"{where}: {name}, got {got} in selections: {rule}, {AGAIN}")
    source = rest.get("source") if version == 2 else {"kind": "synthetic"}
    if not isinstance(source, dict) or source.get("kind") not in ("captured", "synthetic"):
        raise bad(where, "source", shown(source), "an object whose kind is captured or synthetic", MEND)
    facts = Facts(model="synthetic", n_experts=told["expertsPerLayer"], expert_order="router", labels=("synthetic",))
    if source["kind"] == "synthetic":
        return facts
    model = source.get("model")
    if not isinstance(model, dict):
        raise bad(where, "source model", shown(model), "an object with id and revision", MEND)
    name, revision = (text_of(where, f"source model {key}", model.get(key)) for key in ("id", "revision"))
    return Facts(name, f"{name} at {revision}", facts.n_experts, expert_order="router")


def _read_imp(path: Path, spool: Spool, options: Options) -> Facts:
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
            flat.append(whole(where, "record", record, 0, max(MAX_LAYER, MAX_EXPERTS - 1)))
            if len(flat) < stride:
                continue
            record, flat = flat, []
        elif flat:
            raise bad(where, "record", f"{shown(record)} among plain numbers", "one kind", AGAIN)
        values = a_list(where, "record", record)
        yield at, layer_of(where, values[0]), [expert_of(where, value) for value in values[1:]]
    if flat:
        raise BadInput(f"{path}: record, got {len(flat)} numbers at the end: a layer and its experts; it was cut")
    told = document.rest.get("top_k")
    if told is not None and top_k is not None and told != top_k:
        raise BadInput(f"--top-k, got {top_k}: {path} says {shown(told)}; leave it out, or correct the file")


def _told(path: Path, document: Document) -> int:
    """What the file says of k in front of plain numbers. Raises BadInput where it does not."""
    if "top_k" not in document.rest:
        raise BadInput(f"--top-k, got none: {path} has plain numbers and no top_k before them; give --top-k K")
    return whole(str(path), "top_k", document.rest["top_k"], 1, MAX_EXPERTS)


def _is_moe_ocs(_path: Path, head: bytes) -> bool:
    return starts_object(head) and (has_keys(head, "meta", "routes") or has_keys(head, "meta", "num_moe_layers"))


def _is_strata(_path: Path, head: bytes) -> bool:
    return starts_object(head) and (has_keys(head, "expertsPerLayer") or has_keys(head, "selections"))


def _is_imp(_path: Path, head: bytes) -> bool:
    head = head.removeprefix(b"\xef\xbb\xbf")
    return _BARE.match(head) is not None or (head.lstrip()[:1] == b"{" and _NAMED.search(head) is not None)


MOE_OCS = Source("moe_ocs", "moe_ocs routing JSON", "real files", _is_moe_ocs, _read_moe_ocs)
STRATA = Source(
    "strata",
    "StrataMoE RouterTrace JSON",
    "its public description and writer; its published trace tried",
    _is_strata,
    _read_strata,
)
IMP = Source("imp", "imp's moe_expert_trace (JSON)", "its public code", _is_imp, _read_imp, silent=SHAPE, phased=True)
