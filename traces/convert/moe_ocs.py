"""moe_ocs's routing record: one JSON document per run, `{"meta": {...}, "routes": [{...}, ...]}`.

    {"token_pos": 0, "token_id": 151644, "phase": "prefill", "layers": {"0": {"experts": [33, 9], "weights": [0.67,
    0.01]}}}

Built from real files, `outputs/experiment_traces` of https://github.com/jinlong-huo/moe_ocs_learning (its mlx backend).
Weights are raw softmax scores of the chosen experts, in no fixed order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sim.base.errors import BadInput
from traces.convert.fields import expert_ids, expert_weights, has_keys, phase_of, starts_object, text_of
from traces.convert.options import Facts, Options
from traces.convert.spool import Spool
from traces.convert.text import Document, field, shown, whole
from traces.format.layout import MAX_EXPERTS

NAME, TITLE, ORIGIN = "moe_ocs", "moe_ocs routing JSON", "real files"


def sniff(_path: Path, head: bytes) -> bool:
    """Whether the head of a file looks like this source."""
    return starts_object(head) and (has_keys(head, "meta", "routes") or has_keys(head, "meta", "num_moe_layers"))


def read(path: Path, spool: Spool, options: Options) -> Facts:
    """Put every token into the spool. Raises BadInput with file and position."""
    spool.at(path, ": character ")
    request = spool.request(0, options.task)
    document = Document(path, "routes", keep={"meta"})
    before = -1
    for at, route in document:
        where = spool.place(at)
        if not isinstance(route, dict):
            raise BadInput(f"{where}: routes, got {shown(route)}: an object per token; mend the file")
        position = whole(where, "token_pos", field(where, route, "token_pos"))
        if position != before + 1:
            raise BadInput(
                f"{where}: token_pos, got {position} after {before}: positions count up by one; the file was cut or "
                f"filtered, record it again"
            )
        before = position
        token_id = -1 if route.get("token_id") is None else whole(where, "token_id", route["token_id"])
        spool.token(request, phase_of(where, route.get("phase")), token_id)
        spool.row(*_layers(where, field(where, route, "layers")), at)
    meta = document.rest.get("meta")
    if not isinstance(meta, dict):
        raise BadInput(f"{path}: meta, got {shown(meta)}: an object of facts about the run; record it again")
    if "num_moe_layers" in meta and spool.n_layers_read not in (0, meta["num_moe_layers"]):
        raise BadInput(
            f"{path}: layers, got {spool.n_layers_read}: meta num_moe_layers says {shown(meta['num_moe_layers'])}; "
            f"record it again"
        )
    n_experts = whole(str(path), "meta num_experts", field(f"{path}: meta", meta, "num_experts"), 1, MAX_EXPERTS)
    model = text_of(str(path), "meta model_id", meta.get("model_id"))
    return Facts(model=model, n_experts=n_experts, weights_kind="raw", renormalised=False)


def _layers(where: str, layers: Any) -> tuple[list[list[int]], list[list[float]]]:
    """Ids and weights by layer, in order of the layers' numbers."""
    if not isinstance(layers, dict) or not layers:
        raise BadInput(f"{where}: layers, got {shown(layers)}: an object by layer; mend the file")
    numbers = sorted((whole(where, "layers", name, 0, 65_535), name) for name in layers)
    ids, weights = [], []
    for layer, name in numbers:
        one = layers[name]
        if not isinstance(one, dict):
            raise BadInput(
                f"{where}: layers[{layer}], got {shown(one)}: an object with experts and weights; mend the file"
            )
        ids.append(expert_ids(where, f"layers[{layer}].experts", one.get("experts")))
        weights.append(expert_weights(where, f"layers[{layer}].weights", one.get("weights"), len(ids[-1])))
    return ids, weights
