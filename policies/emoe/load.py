"""Which experts eMoE keeps (arXiv 2503.06823, section 3.4): expected tokens per expert, the top L of a layer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sim.policy import BadInput

Counts = NDArray[np.int64]


def expected_tokens(inputs: int, requests: int, outputs: int, sensitive: NDArray[np.bool_], shares: Counts) -> Counts:
    """Equation 2 for one task type and every layer: N = (sum of W_j + T x W_o) x s x f, [L, E].

    Args:
        inputs: input tokens of the requests that run or are to be scheduled. requests: T, their number. outputs: W_o,
            output tokens expected of one. sensitive: s by layer. shares: f [L, E] in 1 / 65536.
    """
    return np.asarray((inputs + requests * outputs) * (shares * sensitive[:, None]))


def insensitive_layers(similarity: NDArray[np.float64], threshold: float) -> NDArray[np.bool_]:
    """Sections 2.2.3 and 3.4: the layers, from the input on, whose random routing leaves the output similar enough.

    Args:
        similarity: of the output with random routing in the first 1, 2 ... L layers.
    """
    return np.asarray(np.logical_and.accumulate(similarity > threshold))


def profiled(path: Path, tasks: Sequence[str], n_layers: int) -> list[int]:
    """By task, the layers from the input on that a profile says are insensitive (section 3.4).

    Raises:
        BadInput: no JSON of task -> whole number, an unknown or missing task, or more layers than there are.
    """
    where = f"parameter emoe.sensitivity, got {path}"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{where}: {error}; write JSON of task -> layers") from None
    if not isinstance(found, dict) or {type(n) for n in found.values()} - {int}:
        raise BadInput(f"{where}: no JSON of task -> whole number; write JSON of task -> layers")
    if set(found) != set(tasks):
        odd = ", ".join(sorted(set(found) ^ set(tasks)))
        raise BadInput(f"{where}: {odd}, in the file or in the trace alone; give each task of the trace once")
    for task, n in found.items():
        if not 0 <= n <= n_layers:
            raise BadInput(f"{where}: {task} {n}: the trace has {n_layers} layers; write 0 to {n_layers}")
    return [found[task] for task in tasks]


def choose(expected: NDArray[np.int64], n: int, home: Callable[[int], int], quota: list[int]) -> set[int]:
    """The top `n` experts of a layer by expected tokens [E], ties to the lowest id; no GPU beyond its quota."""
    left, chosen = list(quota), set[int]()
    for expert in np.argsort(-expected, kind="stable").tolist():
        gpu = home(expert)
        if len(chosen) < n and left[gpu]:
            left[gpu] -= 1
            chosen.add(expert)
    return chosen


def by_tokens(experts: set[int], expected: NDArray[np.int64]) -> list[int]:
    """Experts in the order they are loaded in: most expected tokens [E] first, ties to the lowest id."""
    return sorted(experts, key=lambda e: (-int(expected[e]), e))


def reroute(scores: NDArray[np.float64], ids: NDArray[np.int64], resident: set[int]) -> NDArray[np.int64]:
    """Section 3.2.2: a choice that is not on the GPU goes to the next-ranked expert that is; -1 where none is left.

    Args:
        scores: [n, E]. ids: [n, k] as the router chose. resident: experts on the GPUs.
    """
    out = ids.tolist()
    for row, chosen in zip(scores, out, strict=True):
        if resident.issuperset(chosen):
            continue
        of = row.tolist()
        ranked = iter(sorted(resident.difference(chosen), key=lambda e: (-of[e], e)))
        chosen[:] = [e if e in resident else next(ranked, -1) for e in chosen]
    return np.array(out, dtype=np.int64)
