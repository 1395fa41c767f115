"""StrataMoE's RouterTrace, versions 1 and 2: one JSON document with `selections[token][layer][rank]`, no weights.

Built from its public description and writer, `docs/ROUTER_TRACE_SCHEMA.md` and `tools/capture_switch_router_trace.py`
of https://github.com/Labeeb2339/stratamoe-lab, and tried on the captured trace that it publishes. `source.kind` is
`captured` (a model was run) or `synthetic` (its generator; also every version 1 file), which becomes the label
`synthetic`. Requests and phases are not told.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sim.base.errors import BadInput
from traces.convert.fields import has_keys, starts_object, text_of, token_layers
from traces.convert.options import Facts, Options
from traces.convert.spool import UNKNOWN, Spool
from traces.convert.text import Document, field, shown, whole
from traces.format.layout import MAX_EXPERTS, MAX_LAYERS

NAME, TITLE = "strata", "StrataMoE RouterTrace JSON"
ORIGIN = "its public description and writer; its published trace tried"


def sniff(_path: Path, head: bytes) -> bool:
    """Whether the head of a file looks like this source."""
    return starts_object(head) and (has_keys(head, "expertsPerLayer") or has_keys(head, "selections"))


def read(path: Path, spool: Spool, options: Options) -> Facts:
    """Put every token into the spool. Raises BadInput with file and position."""
    spool.at(path, ": character ")
    request = spool.request(0, options.task)
    kept = {"version", "tokens", "layers", "expertsPerLayer", "topK", "source"}
    document = Document(path, "selections", kept)
    n_tokens = 0
    for at, layers in document:
        ids, _ = token_layers(spool.place(at), "selections", layers)
        spool.token(request, UNKNOWN)
        spool.row(ids, [], at)
        n_tokens += 1
    where, rest = str(path), document.rest
    version = whole(where, "version", field(where, rest, "version"), 1, 2)
    told = {
        name: whole(where, name, field(where, rest, name), 1, most)
        for name, most in (
            ("tokens", 2**31),
            ("layers", MAX_LAYERS),
            ("expertsPerLayer", MAX_EXPERTS),
            ("topK", MAX_EXPERTS),
        )
    }
    for name, got in (("tokens", n_tokens), ("layers", spool.n_layers_read), ("topK", spool.top_k)):
        if told[name] != got:
            raise BadInput(
                f"{where}: {name}, got {got} in selections: the file says {told[name]}; it was cut or edited, "
                f"record it again"
            )
    source = rest.get("source") if version == 2 else {"kind": "synthetic"}
    return _facts(where, source, told["expertsPerLayer"])


def _facts(where: str, source: Any, n_experts: int) -> Facts:
    if not isinstance(source, dict) or source.get("kind") not in ("captured", "synthetic"):
        raise BadInput(
            f"{where}: source, got {shown(source)}: an object whose kind is captured or synthetic; mend the file"
        )
    if source["kind"] == "synthetic":
        return Facts(model="synthetic", n_experts=n_experts, expert_order="router", labels=("synthetic",))
    model = source.get("model")
    if not isinstance(model, dict):
        raise BadInput(f"{where}: source model, got {shown(model)}: an object with id and revision; mend the file")
    name, revision = (text_of(where, f"source model {key}", model.get(key)) for key in ("id", "revision"))
    return Facts(model=name, model_source=f"{name} at {revision}", n_experts=n_experts, expert_order="router")
