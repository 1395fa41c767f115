"""Which experts eMoE keeps (arXiv 2503.06823, section 3.4): expected tokens per expert, the top L of a layer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

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
