"""A small seeded routing trace with any levels, from integer arithmetic: the same bytes on every machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from traces.format.header import GateRule, Header
from traces.format.layout import DISTANCES
from traces.format.requests import Request
from traces.format.writer import write_trace

N_LAYERS, N_EXPERTS, TOP_K = 4, 6, 2
WIDTH = 8  # of embeddings and gate inputs
TASKS = ("chat", "code")
# (prompt, outputs, split): what is learnt from comes first, so that rows of the test split can change behind it.
REQUESTS = ((4, 4, "store"), (3, 5, "store"), (4, 4, "store"), (4, 6, "test"), (3, 6, "test"), (5, 4, "test"))
CHANGED_AT = (4, 3)  # test request 1 (of 0..2), after its prefill and one decode token
CHANGED_LAYER = 2  # of the first changed row, where only the layers from there on change
N_BEFORE_CHANGE = 8  # iterations of the test split, one at a time, that a change there leaves alone


def noise(seed: int, *shape: int) -> Any:
    """Integers 0..65535 of a shape, from splitmix64 over (seed, position)."""
    x = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64) + np.uint64(seed * 1_000_003 + 17) * np.uint64(2**32)
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) & np.uint64(0xFFFF)).astype(np.int64).reshape(shape)


def scores_of(logits: Any) -> Any:
    """Integer "softmax": cubes shared out as multiples of 1/4095 that sum to 1; the best takes what is left over."""
    cubes = (logits >> 4) ** 3 + 1
    codes = cubes * 4095 // cubes.sum(axis=-1, keepdims=True)
    best = np.argmax(codes, axis=-1)[..., None]
    rest = 4095 - codes.sum(axis=-1, keepdims=True)
    np.put_along_axis(codes, best, np.take_along_axis(codes, best, -1) + rest, -1)
    return codes / 4095.0


def arrays(n_rows: int, seed: int) -> dict[str, Any]:
    """Every tensor of `n_rows` rows. A row keeps half of the one before; predictions see their target through noise."""
    logits = noise(seed, n_rows, N_LAYERS, N_EXPERTS)
    for row in range(1, n_rows):
        logits[row] = (logits[row] + logits[row - 1]) // 2
    scores = scores_of(logits)
    experts = np.argsort(-scores, axis=-1, kind="stable")[..., :TOP_K]
    chosen = np.rint(np.take_along_axis(scores, experts, -1) * 4095)
    target = np.concatenate([logits, np.roll(logits[:, :1], -1, axis=0)], axis=1)  # layer L: the next row's layer 0
    found: dict[str, Any] = {
        "experts": experts,
        "weights": chosen / chosen.sum(-1, keepdims=True),
        "scores": scores,
        "gate_inputs": noise(seed + 7, n_rows, N_LAYERS, WIDTH) / 65536.0,
        "gate_input_norms": 1.0 + noise(seed + 8, n_rows, N_LAYERS) / 65536.0,
        "embeddings": noise(seed + 9, n_rows, WIDTH) / 65536.0,
        "token_ids": noise(seed + 10, n_rows) % 100,
        "iterations": np.arange(n_rows),
    }
    for d in DISTANCES:
        seen = target[:, d : N_LAYERS + (d == 1)]
        found[f"next_scores_{d}"] = scores_of((seen * (4 - d) + noise(seed + d, *seen.shape) * d) // 4)
    blur = noise(seed + 5, n_rows, N_LAYERS - 1, N_EXPERTS)
    found["shared_scores"] = scores_of((target[:, 1:N_LAYERS] * 2 + blur) // 3)
    return found


def write(path: Path, levels: Iterable[str], changed: bool = False, from_layer: int = 0) -> Path:
    """Write the trace with these levels beside `experts`.

    Args:
        changed: from `CHANGED_AT` on, every row is another one and the request goes on for longer; the requests after
            it have another length, task and arrival. from_layer: in the first changed row, layers before this one (and
            what is known before any) stay.
    """
    wanted = frozenset(levels) | {"experts"}
    plan = [
        (p + (changed and at > CHANGED_AT[0]), n + 2 * (changed and at == CHANGED_AT[0]), split)
        for at, (p, n, split) in enumerate(REQUESTS)
    ]
    requests = _requests(plan, "tasks" in wanted, "arrivals" in wanted, CHANGED_AT[0] if changed else len(plan))
    n_rows = requests[-1].end_row
    rows = arrays(n_rows + 2, seed=1)
    if changed:
        other = arrays(n_rows + 2, seed=2)
        at = requests[CHANGED_AT[0]].first_row + plan[CHANGED_AT[0]][0] + 1
        for name, array in rows.items():
            array[at + bool(from_layer) :] = other[name][at + bool(from_layer) :]
            if from_layer and array.ndim > 1 and name != "embeddings":
                array[at, from_layer:] = other[name][at, from_layer:]
    header = Header(
        model="seeded",
        model_source="sim/conformance/seeded.py",
        gate=GateRule(),
        labels=("synthetic",),
        text_licence="CC0-1.0",
        created_by="moesim conformance",
        n_layers=N_LAYERS,
        n_experts=N_EXPERTS,
        top_k=TOP_K,
        tasks=TASKS if "tasks" in wanted else (),
    )
    return write_trace(path, header, requests, None, **{k: a[:n_rows] for k, a in rows.items() if k in wanted})


def _requests(plan: Sequence[tuple[int, int, str]], tasks: bool, arrivals: bool, last: int) -> list[Request]:
    """The plan's requests; those after `last` have another task and come later."""
    found: list[Request] = []
    for i, (prompt, outputs, split) in enumerate(plan):
        first, other = found[-1].end_row if found else 0, i > last
        task, arrival_s = TASKS[(i + other) % 2] if tasks else "", (i + other) / 256 if arrivals else None
        found.append(Request(i, first, prompt, prompt + outputs - 1, task, arrival_s, split))
    return found
