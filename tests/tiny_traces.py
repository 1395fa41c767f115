"""Tiny traces for tests: seeded ones with every level, and explicit ones written down id by id.

Made from integer arithmetic only, so that they are the same bytes on every machine and numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from traces.format.container import Entry, header_bytes, read_file
from traces.format.header import GateRule, Header
from traces.format.layout import DISTANCES, DTYPES
from traces.format.reader import Trace
from traces.format.requests import Request
from traces.format.writer import Layout, write_trace

ALL = frozenset(
    {
        "weights",
        "scores",
        "next_scores_1",
        "next_scores_2",
        "next_scores_3",
        "shared_scores",
        "token_ids",
        "embeddings",
        "gate_inputs",
        "gate_input_norms",
        "tasks",
        "arrivals",
        "iterations",
    }
)
TASKS = ("chat", "code")
WIDTH = 8  # of embeddings and gate inputs


def noise(seed: int, *shape: int) -> Any:
    """Integers 0..65535 of a shape, from splitmix64 over (seed, position)."""
    n = int(np.prod(shape))
    x = np.arange(1, n + 1, dtype=np.uint64) + np.uint64(seed * 1_000_003 + 17) * np.uint64(2**32)
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) & np.uint64(0xFFFF)).astype(np.int64).reshape(shape)


def scores_from(logits: Any) -> Any:
    """Integer "softmax": cubes of non-negative integers shared out as multiples of 1/4095 that sum to 1."""
    cubes = (logits.astype(np.int64) >> 4) ** 3 + 1
    codes = cubes * 4095 // cubes.sum(axis=-1, keepdims=True)
    best = np.argmax(codes, axis=-1)[..., None]
    rest = 4095 - codes.sum(axis=-1, keepdims=True)
    np.put_along_axis(codes, best, np.take_along_axis(codes, best, -1) + rest, -1)
    return codes / 4095.0  # floats that quantise back to the same integers


def ranked(scores: Any, k: int) -> Any:
    """The k highest scores' positions, highest first, ties to the lowest id."""
    return np.argsort(-scores, axis=-1, kind="stable")[..., :k]


def requests_of(lengths: Iterable[tuple[int, int]], with_tasks: bool, with_arrivals: bool) -> list[Request]:
    """Requests of (prompt, outputs); every second one belongs to the store split, arrivals half a second apart."""
    found: list[Request] = []
    for i, (prompt, outputs) in enumerate(lengths):
        first = found[-1].end_row if found else 0
        found.append(
            Request(
                i,
                first,
                prompt,
                prompt + outputs - 1,
                TASKS[i % 2] if with_tasks else "",
                i / 2 if with_arrivals else None,
                "store" if i % 2 == 0 else "test",
            )
        )
    return found


def tiny_header(n_layers: int, n_experts: int, top_k: int, **facts: Any) -> Header:
    """A header whose gate is softmax, renormalised."""
    facts = {
        "model": "tiny",
        "model_source": "tests/tiny_traces.py",
        "gate": GateRule(),
        "labels": ("synthetic",),
        "created_by": "tests",
        "text_licence": "CC0-1.0",
    } | facts
    return Header(n_layers=n_layers, n_experts=n_experts, top_k=top_k, **facts)


def tiny_arrays(n_rows: int, n_layers: int, n_experts: int, top_k: int, seed: int) -> dict[str, Any]:
    """Every tensor of rows. A row's logits keep half of the row's before; predictions see the target through noise."""
    logits = noise(seed, n_rows, n_layers, n_experts)
    for row in range(1, n_rows):
        logits[row] = (logits[row] + logits[row - 1]) // 2
    scores = scores_from(logits)
    experts = ranked(scores, top_k)
    chosen = np.rint(np.take_along_axis(scores, experts, -1) * 4095)  # whole, so that their sum is exact
    target = np.concatenate([logits, np.roll(logits[:, :1], -1, axis=0)], axis=1)  # layer L is the next row's layer 0
    arrays: dict[str, Any] = {
        "experts": experts,
        "weights": chosen / chosen.sum(-1, keepdims=True),
        "scores": scores,
        "gate_inputs": noise(seed + 7, n_rows, n_layers, WIDTH) / 65536.0,
        "gate_input_norms": 1.0 + noise(seed + 8, n_rows, n_layers) / 65536.0,
        "embeddings": noise(seed + 9, n_rows, WIDTH) / 65536.0,
        "token_ids": noise(seed + 10, n_rows) % 100,
        "iterations": np.arange(n_rows),
    }
    for d in DISTANCES:
        seen = target[:, d : n_layers + (d == 1)]
        if seen.shape[1]:
            blurred = (seen * (4 - d) + noise(seed + d, *seen.shape) * d) // 4
            arrays[f"next_scores_{d}"] = scores_from(blurred)
    if n_layers > 1:
        blur = noise(seed + 5, n_rows, n_layers - 1, n_experts)
        arrays["shared_scores"] = scores_from((target[:, 1:n_layers] * 2 + blur) // 3)
    return arrays


def tiny_trace(
    path: Path,
    n_layers: int = 3,
    n_experts: int = 4,
    top_k: int = 2,
    n_requests: int = 4,
    prompt: int = 3,
    outputs: int = 5,
    seed: int = 0,
    levels: str | Iterable[str] = "all",
    store: Layout | None = None,
    **facts: Any,
) -> Path:
    """Write a seeded trace with the named levels ("all", or e.g. {"scores"}; experts always) and return its path."""
    wanted = ALL if levels == "all" else frozenset(levels)
    assert wanted <= ALL | {"experts"}, wanted - ALL
    requests = requests_of([(prompt, outputs)] * n_requests, "tasks" in wanted, "arrivals" in wanted)
    arrays = tiny_arrays(requests[-1].end_row, n_layers, n_experts, top_k, seed)
    rows = {name: array for name, array in arrays.items() if name in wanted | {"experts"}}
    header = tiny_header(n_layers, n_experts, top_k, **({"tasks": TASKS} if "tasks" in wanted else {}) | facts)
    return write_trace(path, header, requests, store, **rows)


def from_rows(
    path: Path,
    rows: Sequence[Sequence[Sequence[int]]],
    n_experts: int | None = None,
    lengths: Iterable[tuple[int, int]] | None = None,
    splits: Sequence[str] | None = None,
    **facts: Any,
) -> Path:
    """Write explicit expert ids, `rows[token][layer]` = ids heaviest first, and return the path.

    lengths: (prompt, outputs) of each request; without it one request with a prompt of one token.
    splits: `store` or `test` of each request; all `test` without it.
    """
    experts = np.array(rows)
    assert experts.ndim == 3, "rows[token][layer] must all have the same number of ids"
    n_experts = n_experts or int(experts.max()) + 1
    requests = requests_of(lengths or [(1, len(rows))], False, False)
    assert requests[-1].end_row == len(rows), f"lengths cover {requests[-1].end_row} rows, there are {len(rows)}"
    chosen = splits or ["test"] * len(requests)
    owned = [replace(request, split=split) for request, split in zip(requests, chosen, strict=True)]
    header = tiny_header(experts.shape[1], n_experts, experts.shape[2], **facts)
    return write_trace(path, header, owned, experts=experts)


def surgery(path: Path, edit: Callable[[dict[str, str], dict[str, Any]], Any]) -> Path:
    """Rewrite a trace after `edit(metadata, arrays)` changed the two in place, without any check; returns the path."""
    metadata, entries, _ = read_file(path)
    with Trace(path) as trace:
        arrays: dict[str, Any] = {name: trace.stored(name).copy() for name in entries}
    edit(metadata, arrays)
    names = {dtype: name for name, dtype in DTYPES.items()}
    names[np.dtype("i1")] = "I8"
    shapes = {name: (names[array.dtype], array.shape) for name, array in arrays.items()}
    at, placed = 0, {}
    for name, (dtype, shape) in sorted(shapes.items(), key=lambda item: (-arrays[item[0]].itemsize, item[0])):
        placed[name] = Entry(dtype, shape, at, at + arrays[name].nbytes)
        at += arrays[name].nbytes
    path.write_bytes(header_bytes(metadata, placed) + b"".join(arrays[name].tobytes() for name in placed))
    return path
