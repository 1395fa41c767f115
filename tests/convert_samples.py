"""A small valid input of every source of `moesim traces convert`, what must come of it, and how tests ask; by hand."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sim.base.errors import BadInput
from traces.convert import Options, convert
from traces.format.reader import Trace

# Two layers, four experts, two per token: what most samples say. Heaviest first.
EXPERTS = [[[3, 1], [0, 2]], [[1, 0], [2, 3]], [[3, 0], [0, 1]], [[2, 1], [3, 0]]]
WEIGHTS = [
    [[0.75, 0.25], [0.5625, 0.4375]],
    [[0.625, 0.375], [0.75, 0.25]],
    [[0.8125, 0.1875], [0.875, 0.125]],
    [[0.75, 0.25], [0.625, 0.375]],
]
PHASES = ["prefill", "prefill", "decode", "decode"]


def jsonl(*lines: object) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def tokens(**more: list[object]) -> list[dict[str, object]]:
    """The four tokens as plain JSONL records."""
    rows: list[dict[str, object]] = []
    for i in range(4):
        row: dict[str, object] = {"phase": PHASES[i], "experts": EXPERTS[i], "weights": WEIGHTS[i]}
        rows.append(row | {name: values[i] for name, values in more.items()})
    return rows


def plain_jsonl(folder: Path) -> Path:
    meta = {"meta": {"model": "hand", "n_experts": 4}}
    return put(folder / "plain.jsonl", jsonl(meta, *tokens(token_id=[5, 6, 7, 8])))


def plain_csv(folder: Path) -> Path:
    lines = ["request,phase,token,layer,rank,expert,weight"]
    for t in range(4):
        for layer in range(2):
            lines += [
                f"a,{PHASES[t]},{t},{layer},{rank},{EXPERTS[t][layer][rank]},{WEIGHTS[t][layer][rank]}"
                for rank in range(2)
            ]
    return put(folder / "plain.csv", "\n".join(lines).encode() + b"\n")


def bigmoe(folder: Path) -> Path:
    """Prefill is layer by layer, and a third layer ran for the last prompt token only, as llama.cpp does it."""
    lines = [
        "# route_trace v1",
        "# model=/models/hand.gguf arch=tiny n_layer=3 n_expert=4 n_expert_used=2",
        "# layer=0 expert_bytes=1 dense_bytes=1",
        "turn,phase,step,layer,slot,expert,weight,residency",
    ]

    def cell(phase: int, step: int, layer: int) -> None:
        for slot in range(2):
            expert, weight = EXPERTS[step][layer % 2][slot], WEIGHTS[step][layer % 2][slot]
            lines.append(f"0,{phase},{step},{layer},{slot},{expert},{weight},0")

    for layer in range(2):
        cell(0, 0, layer)
        cell(0, 1, layer)
    cell(0, 1, 2)
    for step in (2, 3):
        for layer in range(3):
            cell(1, step, layer)
    return put(folder / "hand.route.csv", "\n".join(lines).encode() + b"\n")


def esft(folder: Path) -> Path:
    """Two sequences (of one and three tokens) in two files, one gzipped; within a token not in order."""
    for layer in range(2):
        lines = []
        for own in ((0,), (1, 2, 3)):
            ids = [i for t in own for i in EXPERTS[t][layer][::-1]]
            weights = [w for t in own for w in WEIGHTS[t][layer][::-1]]
            lines.append("\t".join(map(str, ids)) + "\t\t" + "\t".join(map(str, weights)))
        data = "\n".join(lines).encode() + b"\n"
        (folder / "esft").mkdir(exist_ok=True)
        name = f"expert_weights_{layer + 1}.txt" + (".gz" if layer else "")
        put(folder / "esft" / name, gzip.compress(data, mtime=0) if layer else data)
    return folder / "esft"


def moe_ocs(folder: Path) -> Path:
    routes = [
        {
            "token_pos": t,
            "token_id": 5 + t,
            "token_str": "x",
            "phase": PHASES[t],
            "layers": {
                str(layer): {"experts": EXPERTS[t][layer][::-1], "weights": WEIGHTS[t][layer][::-1]}
                for layer in range(2)
            },
        }
        for t in range(4)
    ]
    meta = {"model_id": "hand", "num_moe_layers": 2, "num_experts": 4, "top_k": 2}
    document = {"meta": meta, "prompt_tokens": [5, 6], "generated_tokens": [7, 8], "routes": routes}
    return put(folder / "routing.json", json.dumps(document, indent=2).encode())


def warp(folder: Path) -> Path:
    return put(folder / "warp.jsonl", jsonl(*({"tok": 1 + t, "layers": EXPERTS[t]} for t in range(4))))


def strata(folder: Path) -> Path:
    source = {"kind": "captured", "model": {"id": "hand", "revision": "1" * 40}}
    return put(
        folder / "router-trace.v2.json",
        json.dumps(
            {
                "version": 2,
                "source": source,
                "scenario": "steady",
                "seed": 1,
                "tokens": 4,
                "layers": 2,
                "expertsPerLayer": 4,
                "topK": 2,
                "selections": EXPERTS,
            }
        ).encode(),
    )


def vllm(folder: Path) -> Path:
    """A profiling pass of 64 equal tokens, one of a single token, a prompt of two and two decode steps."""
    lines: list[object] = [{"type": "meta", "model_id": "hand", "num_experts": 4, "top_k": 2, "layers_logged": [0, 1]}]
    dummy = [[[3, 2], [3, 2]]] * 64

    def forward(experts: list[list[list[int]]], weights: list[list[list[float]]]) -> None:
        for layer in range(2):
            for i, (ids, own) in enumerate(zip(experts, weights, strict=True)):
                lines.append(
                    {
                        "type": "route",
                        "req_id": "r0",
                        "token_idx": i,
                        "layer": layer,
                        "topk_ids": ids[layer],
                        "topk_weights": own[layer],
                    }
                )

    forward(dummy, [[[0.5, 0.5]] * 2] * 64)
    forward(dummy[:1], [[[0.5, 0.5]] * 2])
    forward(EXPERTS[:2], WEIGHTS[:2])
    forward(EXPERTS[2:3], WEIGHTS[2:3])
    forward(EXPERTS[3:], WEIGHTS[3:])
    return put(folder / "moe_routes.jsonl", jsonl(*lines))


def sglang(folder: Path) -> Path:
    """Three model layers, the first dense (-1); a third column is unused (-1)."""

    def record(own: list[int], mode: int) -> dict[str, object]:
        ids = [[[-1] * 3 for _ in own]] + [[[*EXPERTS[t][layer], -1] for t in own] for layer in range(2)]
        return {
            "forward_pass_id": own[0],
            "rank": 0,
            "forward_mode": mode,
            "input_ids": [5 + t for t in own],
            "positions": own,
            "extend_seq_lens": [len(own)] if mode == 1 else None,
            "topk_ids_of_layer": ids,
        }

    return put(folder / "expert_distribution.jsonl", jsonl(record([0, 1], 1), record([2], 2), record([3], 2)))


def logits() -> np.ndarray:
    """(4, 2, 4) whose two highest are EXPERTS, by a clear margin."""
    values = np.full((4, 2, 4), -2.0, np.float32)
    for t in range(4):
        for layer in range(2):
            for rank, expert in enumerate(EXPERTS[t][layer]):
                values[t, layer, expert] = 2.0 - rank
    return values


def hf_npz(folder: Path) -> Path:
    path = folder / "router_logits.npz"
    np.savez_compressed(path, router_logits=logits(), input_ids=np.arange(5, 9), prompt_len=np.array([2]))
    return path


def hf_safetensors(folder: Path) -> Path:
    from safetensors.numpy import save_file

    path = folder / "router_logits.safetensors"
    arrays = {f"router_logits.{layer}": np.ascontiguousarray(logits()[:, layer]) for layer in range(2)}
    save_file(arrays | {"prompt_len": np.array([2])}, path)
    return path


def hf_jsonl(folder: Path) -> Path:
    rows = [{"router_logits": logits()[t].tolist(), "phase": PHASES[t], "token_id": 5 + t} for t in range(4)]
    return put(folder / "router_logits.jsonl", jsonl(*rows))


def llama_csv(folder: Path) -> Path:
    """A third layer ran for the last prompt token only; layout of thecodacus/llama.cpp, tools/moe-trace."""
    rows = [f"{t - 2},{layer},{_ids(t, layer, ',')}" for layer in range(2) for t in range(2)]
    rows.append(f"-1,2,{_ids(1, 0, ',')}")
    rows += [f"{t - 2},{layer},{_ids(t, layer % 2, ',')}" for t in (2, 3) for layer in range(3)]
    return put(folder / "moe-trace.csv", "\n".join(rows).encode() + b"\n")


def llama_text(folder: Path) -> Path:
    """As `llama_csv`, with scores; layout of tools/moe-trace/moe-trace.cpp, sangharshadhyeta/solid.cpp."""

    def pairs(t: int, layer: int) -> str:
        both = zip(EXPERTS[t][layer], WEIGHTS[t][layer], strict=True)
        return " ".join(f"{expert}:{weight:.6g}" for expert, weight in both)

    rows = [f"{layer} {t} {pairs(t, layer)}" for layer in range(2) for t in range(2)] + [f"2 0 {pairs(1, 0)}"]
    rows += [f"{layer} 0 {pairs(t, layer % 2)}" for t in (2, 3) for layer in range(3)]
    return put(folder / "moe-trace.txt", "\n".join(rows).encode() + b"\n")


def ggml_log(folder: Path) -> Path:
    """A prompt of two tokens, computed on the CPU; layout as read by thejustinwalsh/yamadori, bench/moe_hit_sim.py."""
    cells = [(t, layer) for layer in range(2) for t in range(2)] + [(t, layer) for t in (2, 3) for layer in range(2)]
    rows = [f"blk.{layer}.ffn_gate_exps.weight {_ids(t, layer, ' ')}" for t, layer in cells]
    return put(folder / "moe.log", "\n".join(rows).encode() + b"\n")


def imp(folder: Path) -> Path:
    """Layout as tools/analysis/expert_cache_sim.py of kekzl/imp reads it."""
    records = [[layer, *EXPERTS[t][layer]] for t in range(4) for layer in range(2)]
    return put(folder / "trace.json", json.dumps({"top_k": 2, "trace": records}).encode())


def _ids(t: int, layer: int, between: str) -> str:
    return between.join(map(str, EXPERTS[t][layer]))


def put(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


SHAPE = Options(n_experts=4, model="hand")
HF = Options(model="hand", top_k=2, renormalised=True)
# name -> how to write it, what the user has to say, the source it is recognised as
SAMPLES: dict[str, tuple[Callable[[Path], Path], Options, str]] = {
    "jsonl": (plain_jsonl, Options(), "jsonl"),
    "csv": (plain_csv, SHAPE, "csv"),
    "bigmoe": (bigmoe, Options(), "bigmoe"),
    "esft": (esft, Options(n_experts=4, top_k=2, model="hand"), "esft"),
    "moe_ocs": (moe_ocs, Options(), "moe_ocs"),
    "warp": (warp, SHAPE, "warp"),
    "strata": (strata, Options(prompt_len=2), "strata"),
    "vllm": (vllm, Options(), "vllm"),
    "sglang": (sglang, SHAPE, "sglang"),
    "llama_csv": (llama_csv, SHAPE, "llama_csv"),
    "llama_text": (llama_text, SHAPE, "llama_text"),
    "ggml_log": (ggml_log, SHAPE, "ggml_log"),
    "imp": (imp, SHAPE, "imp"),
    "hf_npz": (hf_npz, HF, "hf"),
    "hf_safetensors": (hf_safetensors, HF, "hf"),
    "hf_jsonl": (hf_jsonl, HF, "hf"),
}


def converted(tmp_path, path, options=SHAPE, **kwargs):
    """The open trace of one conversion."""
    done = convert(
        [path] if not isinstance(path, list) else path, tmp_path / "out.safetensors", options=options, **kwargs
    )
    return Trace(done.path)


def refused(tmp_path, path, options=SHAPE, **kwargs):
    """The one-line message of a conversion that must fail and leave nothing behind."""
    out = tmp_path / "out" / "t.safetensors"
    out.parent.mkdir(exist_ok=True)
    with pytest.raises(BadInput) as caught:
        convert([path], out, options=options, **kwargs)
    assert list(out.parent.iterdir()) == []
    message = str(caught.value)
    assert "\n" not in message
    return message
