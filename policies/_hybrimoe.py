"""HybriMoE's two decisions: how CPU and GPU share a layer's experts, and which experts a cache is to keep (MRS)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Rates(NamedTuple):
    """What the schedule reckons with, in any one unit of time: an expert on each side by its tokens, and a copy.

    `cpu_first`: what the first expert of a layer on the CPU takes longer.
    """

    gpu: Callable[[int], float]
    cpu: Callable[[int], float]
    cpu_first: float
    move: float

    def remembered(self) -> Rates:
        """The same, each asked for once."""
        return self._replace(gpu=cache(self.gpu), cpu=cache(self.cpu))


class Shares(NamedTuple):
    """Experts in the order each side runs them, and when each side is done."""

    gpu: list[int]
    cpu: list[int]
    gpu_end: float
    cpu_end: float

    @property
    def makespan(self) -> float:
        """Until the slower side is done."""
        return max(self.gpu_end, self.cpu_end)


def share_out(there: Sequence[int], missing: Sequence[int], tokens: Mapping[int, int], rates: Rates) -> Shares:
    """`HSS` of the public code: the GPU takes from the front, the CPU from the back, whoever would be done earlier.

    In front what is on the GPU, then what is not, each with most tokens first (ties in the order given). The GPU waits
    for a copy, copies go one after the other. A tie goes to the GPU.
    """
    order = sorted(there, key=lambda e: -tokens[e]) + sorted(missing, key=lambda e: -tokens[e])
    absent = frozenset(missing)
    on_gpu: list[int] = []
    on_cpu: list[int] = []
    gpu_end = cpu_end = moved_end = 0.0
    first, last = 0, len(order) - 1
    while first <= last:
        front, back = order[first], order[last]
        gpu_time = rates.gpu(tokens[front])
        cpu_time = rates.cpu(tokens[back]) + (0.0 if on_cpu else rates.cpu_first)
        arrival = moved_end + rates.move if front in absent else 0.0
        if arrival > gpu_end:
            gpu_time += arrival - gpu_end
        if gpu_end + gpu_time <= cpu_end + cpu_time:
            moved_end = arrival if front in absent else moved_end
            gpu_end += gpu_time
            on_gpu.append(front)
            first += 1
        else:
            cpu_end += cpu_time
            on_cpu.append(back)
            last -= 1
    return Shares(on_gpu, on_cpu, gpu_end, cpu_end)


class Simulation:
    """Makespans of `share_out`, remembered: they depend on nothing but how many tokens each expert has."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}

    def makespan(self, there: Iterable[int], missing: Iterable[int]) -> float:
        """Of a layer whose experts on the GPU, and whose others, have these tokens."""
        key = (tuple(sorted(there)), tuple(sorted(missing)))
        found = self._known.get(key)
        if found is None:
            counts = (*key[0], *key[1])
            tokens, split = dict(enumerate(counts)), len(key[0])
            shares = share_out(range(split), range(split, len(counts)), tokens, self._rates)
            found = self._known[key] = shares.makespan
        return found


class MrsScores:
    """Minus Recent Score: S <- alpha x TopP(s) + (1 - alpha) x S, per layer and iteration; the least leaves first.

    Scores are kept in the trace's integer units. `lru` keeps the time of the last use instead.
    """

    def __init__(self, n_layers: int, n_experts: int, alpha: float, top_p: int, lru: bool = False) -> None:
        self._scores = np.zeros((n_layers, n_experts))
        self._alpha = alpha
        self._top_p = min(top_p, n_experts)
        self._lru = lru
        self._time = 0.0

    def update(self, layer: int, scores: NDArray[np.float64], used: Sequence[int]) -> None:
        """Take in one layer's gate scores [n_experts] and the experts it chose."""
        row = self._scores[layer]
        if self._lru:
            self._time += 1.0
            row[list(used)] = self._time
            return
        best = np.argsort(-scores, kind="stable")[: self._top_p]
        row *= 1.0 - self._alpha
        row[best] += self._alpha * scores[best]

    def of(self, layer: int) -> list[float]:
        """S of every expert of a layer."""
        scores: list[float] = self._scores[layer].tolist()
        return scores
