"""Router logits out of a Hugging Face model (`output_router_logits=True`), saved as .npz, .safetensors or .jsonl.

Arrays (.npz, .safetensors), T tokens, B sequences of S tokens, L MoE layers, E experts:

    router_logits            [T, L, E]   torch.stack(outputs.router_logits, dim=1), or one array per layer:
    router_logits.<layer>    [T, E] or [B, S, E]
    input_ids                [T] or [B, S]      optional
    attention_mask           [B, S]             optional: padding (0) is dropped
    request                  [T]                optional: equal numbers are one request; else B requests, or one
    prompt_len               [N]                optional: prefill rows of each request; else all, or --prompt-len

JSONL: a line per token, `{"router_logits": [[E] x L], "request": "a", "phase": "decode", "token_id": 5}`.

Built from the public documentation of `MoeModelOutputWithPast.router_logits` (a tuple, one tensor per layer, before
softmax). The library defines no file, so the names above are this project's. A .pt file is a pickle and refused;
docs/convert.md has the lines that save one of these. --top-k and whether the model renormalises have to be given.
Chosen are the highest logits, ties to the lowest id: `torch.topk` may break a tie between equal half-precision logits
otherwise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sim.base.errors import BadInput
from traces.convert.arrays import Arrays
from traces.convert.options import Facts, Options, Source
from traces.convert.spool import DROPPED, Spool
from traces.convert.text import DECODE, PREFILL, UNKNOWN, a_list, bad, field, records
from traces.format.layout import MAX_EXPERTS, MAX_LAYERS, U16_LINEAR, Array

IDS = "ids of experts go into JSONL or CSV, docs/convert.md"
_LAYER = re.compile(r"^router_logits[._]([0-9]{1,5})$")
_BLOCK_VALUES = 1 << 20
_MOST_TOKENS = 1 << 30


def read(path: Path, spool: Spool, options: Options) -> Facts:
    """Put every token with its scores into the spool. Raises BadInput with file, array or line."""
    with path.open("rb") as file:
        is_text = file.read(1) == b"{" or file.seek(0) or file.read(2) == b"\x1f\x8b"
    n_experts = _read_lines(path, spool, options) if is_text else _read_arrays(path, spool, options)
    return Facts(n_experts=n_experts, weights_kind="raw", gate=options.gate or "softmax")


def _read_lines(path: Path, spool: Spool, options: Options) -> int | None:
    spool.at(path)
    n_experts = None
    for number, data in records(path):
        where = spool.place(number)
        logits = _matrix(where, a_list(where, "router_logits", field(where, data, "router_logits")))
        told = {name: value for name, value in data.items() if name != "iteration"}
        spool.told_token(where, told, spool.told_request(where, told, options.task))
        _put(where, spool, options, logits[None], np.array([number]))
        n_experts = logits.shape[1]
    return n_experts


def _matrix(where: str, value: list[Any]) -> Array:
    try:
        logits = np.array(value)
    except ValueError:
        logits = np.empty(0)
    if logits.ndim != 2 or logits.dtype.kind not in "if" or not logits.size:
        got = f"{logits.dtype} of shape {logits.shape}"
        raise bad(where, "router_logits", got, "numbers, a list of E per layer")
    return logits


def _read_arrays(path: Path, spool: Spool, options: Options) -> int:
    spool.at(path, ": row ")
    with Arrays(path) as arrays:
        if arrays.facts.get("format") == "moe-routing":
            raise BadInput(f"{path}: already a trace of this format; use it as it is")
        names, n_tokens, n_experts, batch = _logits(arrays)
        owner, phase, token_id = _rows(arrays, spool, options, n_tokens, batch)
        step = max(1, _BLOCK_VALUES // (len(names) * math.prod(arrays.shapes[names[0]][1:])))
        start = 0
        for logits in _blocks(arrays, names, step):
            count = len(logits)
            own = slice(start, start + count)
            for row in zip(owner[own].tolist(), phase[own].tolist(), token_id[own].tolist(), strict=True):
                spool.token(*row)
            _put(str(path), spool, options, logits, np.arange(start, start + count))
            start += count
    return n_experts


def _logits(arrays: Arrays) -> tuple[list[str], int, int, tuple[int, int] | None]:
    """Names of the arrays of logits, T, E and, where the file tells, (B, S)."""
    path = arrays.path
    names = ["router_logits"] if "router_logits" in arrays.shapes else []
    layers = sorted((int(match[1]), name) for name in arrays.shapes if (match := _LAYER.match(name)))
    if bool(names) == bool(layers):
        got = ", ".join(map(ascii, list(arrays.shapes)[:3])) or "no arrays"
        rule = "one array router_logits [T, L, E] or router_logits.<layer> each"
        raise bad(str(path), "router_logits", got, rule, f"rename them ({IDS})")
    names = names or [name for _, name in layers]
    batch = None
    for name in ("attention_mask", "input_ids"):
        if len(shape := arrays.shapes.get(name, ())) == 2:
            batch = (shape[0], shape[1])
    for name in names:
        if arrays.is_whole(name):
            raise bad(str(path), name, "whole numbers", "logits are none", f"save them as they came ({IDS})")
        shape = arrays.shapes[name]
        if layers and len(shape) == 3:
            batch = batch or (shape[0], shape[1])
            shape = arrays.shapes[name] = (shape[0] * shape[1], shape[2])
        if len(shape) != (2 if layers else 3) or shape != arrays.shapes[names[0]] or not all(shape):
            rule = "[T, E], the same in every layer" if layers else "[T, L, E]"
            raise bad(str(path), name, f"shape {shape}", rule, "stack the layers on dimension 1")
    shape = arrays.shapes[names[0]]
    if shape[-1] > MAX_EXPERTS or (len(names) if layers else shape[1]) > MAX_LAYERS or shape[0] > _MOST_TOKENS:
        rule = f"at most {MAX_EXPERTS} experts, {MAX_LAYERS} layers and {_MOST_TOKENS} tokens"
        raise bad(str(path), names[0], f"shape {shape}", rule, "is it [T, L, E]?")
    if batch is not None and batch[0] * batch[1] != shape[0]:
        rule = f"input_ids or attention_mask have {batch[0]} x {batch[1]}"
        raise bad(str(path), names[0], f"{shape[0]} tokens", rule, "stack the layers on dimension 1 ([T, L, E])")
    return names, shape[0], shape[-1], batch


def _rows(
    arrays: Arrays, spool: Spool, options: Options, n_tokens: int, batch: tuple[int, int] | None
) -> tuple[Array, Array, Array]:
    """Owner, phase and token id of every row."""
    where, again = str(arrays.path), "save it again"

    def column(name: str, default: Array, kinds: str = "iu") -> Array:
        if name not in arrays.shapes:
            return default
        values = arrays.whole(name, n_tokens).reshape(-1)
        if len(values) != n_tokens or values.dtype.kind not in kinds:
            got = f"{values.dtype} of shape {arrays.shapes[name]}"
            raise bad(where, name, got, f"a whole number for each of {n_tokens} rows", again)
        return values.astype(np.int64)

    keys = column("request", np.repeat(np.arange(batch[0]), batch[1]) if batch else np.zeros(n_tokens, np.int64))
    token_id = column("input_ids", np.full(n_tokens, -1))
    if token_id.min() < -1 or token_id.max() > 2**31 - 1:
        raise bad(where, "input_ids", f"{token_id.min()} to {token_id.max()}", "token ids fit 31 bits", again)
    real = column("attention_mask", np.ones(n_tokens, np.int64), "iub") != 0
    order = list(dict.fromkeys(keys[real].tolist()))
    owner = np.full(n_tokens, DROPPED)
    for key in order:
        owner[(keys == key) & real] = spool.request(key, options.task)
    phase = np.full(n_tokens, UNKNOWN)
    if "prompt_len" in arrays.shapes:
        lengths = arrays.whole("prompt_len", n_tokens).reshape(-1)
        if len(lengths) != len(order) or lengths.dtype.kind not in "iu":
            got = f"{lengths.dtype} of shape {arrays.shapes['prompt_len']}"
            raise bad(where, "prompt_len", got, f"a whole number for each of {len(order)} requests", again)
        for key, length in zip(order, lengths.tolist(), strict=True):
            rows = np.flatnonzero((keys == key) & real)
            if not 1 <= length <= len(rows):
                raise bad(where, "prompt_len", length, f"from 1 to the request's {len(rows)} rows", again)
            phase[rows[:length]], phase[rows[length:]] = PREFILL, DECODE
    return owner, phase, token_id


def _blocks(arrays: Arrays, names: list[str], step: int) -> Iterator[Array]:
    """(n, L, E) logits."""
    readers = [arrays.blocks(name, step) for name in names]
    for parts in zip(*readers, strict=True):
        yield parts[0] if parts[0].ndim == 3 else np.stack(parts, axis=1)


def _put(where: str, spool: Spool, options: Options, logits: Array, numbers: Array) -> None:
    """Choose the experts, and store scores and weights. Raises BadInput naming the row of a logit that is no number."""
    assert options.top_k is not None
    if logits.dtype.kind not in "if" or not 1 <= options.top_k <= logits.shape[2] <= MAX_EXPERTS:
        got = f"{logits.dtype} for {logits.shape[2]} experts"
        rule = f"numbers for k = {options.top_k} to {MAX_EXPERTS} experts"
        raise bad(where, "router_logits", got, rule, "correct --top-k, or save it again")
    exact = logits.astype(np.float64)
    if not (fine := np.isfinite(exact).all(axis=(1, 2))).all():
        where = spool.place(int(numbers[np.argmin(fine)]))
        raise bad(where, "router_logits", "NaN or infinity", "finite numbers", "record it again")
    if (options.gate or "softmax") == "softmax":
        powers = np.exp(exact - exact.max(axis=-1, keepdims=True))
        scores = powers / powers.sum(axis=-1, keepdims=True)
    else:
        with np.errstate(over="ignore"):
            scores = 1.0 / (1.0 + np.exp(-exact))
    ids = np.argsort(-exact, axis=-1, kind="stable")[..., : options.top_k]
    spool.block(ids, np.take_along_axis(scores, ids, -1), numbers, U16_LINEAR.encode(scores))


SOURCE = Source(
    "hf",
    "Hugging Face router logits (.npz, .safetensors, .jsonl)",
    "the library's public documentation",
    lambda _path, head: head[:4] == b"PK\x03\x04" or b'"router_logits' in head[8:65_536],
    read,
    silent=("model", "top_k", "renormalised"),
    hint=" (whether the model divides the chosen scores by their sum, norm_topk_prob: Mixtral does, Qwen1.5-MoE "
    "does not)",
)
