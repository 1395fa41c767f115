"""The CPU-load balancer of Importance-Driven Expert Scheduling (arXiv 2508.18983, section 5.4, Algorithm 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

Missing = tuple[int, int]  # (expert, tokens routed to it)


def by_batch(missing: Sequence[Missing]) -> list[Missing]:
    """Larger batches first (Algorithm 2, line 2); equal ones by id."""
    return sorted(missing, key=lambda item: (-item[1], item[0]))


def two_pointers(missing: Sequence[Missing], cpu_s: float, load_s: float) -> tuple[list[int], list[int]]:
    """Algorithm 2: (experts to load, experts for the CPU), each in the order they were given out.

    Args:
        cpu_s: CPU seconds per token of an expert. load_s: seconds to load one.
    """
    if len(missing) == 1:
        return [missing[0][0]], []
    ordered = by_batch(missing)
    n_loaded = _n_loaded(tuple([n for _, n in ordered]), cpu_s, load_s)
    experts = [expert for expert, _ in ordered]
    return experts[:n_loaded], experts[: n_loaded - len(experts) - 1 : -1]


@cache
def _n_loaded(tokens: tuple[int, ...], cpu_s: float, load_s: float) -> int:
    """How many of the experts with these tokens, most first, are loaded: the left pointer takes them, the right one
    gives its own to the CPU, whoever has spent less."""
    spent_cpu_s = spent_load_s = 0.0
    left, right = 0, len(tokens) - 1
    while left <= right:
        if spent_load_s <= spent_cpu_s:
            spent_load_s += load_s
            left += 1
        else:
            spent_cpu_s += tokens[right] * cpu_s
            right -= 1
    return left


def one_pass(missing: Sequence[Missing], cpu_s: float, load_s: float) -> tuple[list[int], list[int]]:
    """Public code: one pass, largest batch first, to PCIe only while it has strictly less to do than the CPU.

    A tie goes to the CPU, hence the largest batch; the cost of an expert on the CPU does not grow with its tokens.
    """
    load: list[int] = []
    on_cpu: list[int] = []
    spent_cpu_s = spent_load_s = 0.0
    for expert, _ in by_batch(missing):
        if spent_load_s < spent_cpu_s:
            spent_load_s += load_s
            load.append(expert)
        else:
            spent_cpu_s += cpu_s
            on_cpu.append(expert)
    return load, on_cpu


class Costs:
    """What the public code believes operations cost: the mean of the last measurements without outliers.

    Ten are kept, those beyond one standard deviation are left out; until three CPU experts were measured the cost of a
    load is taken to be that of the CPU.
    """

    KEPT, CPU_NEEDED = 10, 3
    FIRST_CPU_S, FIRST_LOAD_S = 0.05, 0.002  # initial values of the code

    def __init__(self) -> None:
        self._cpu: list[float] = []
        self._load: list[float] = []

    def ran_on_cpu(self, seconds: float) -> None:
        self._cpu = [*self._cpu, seconds][-self.KEPT :]

    def loaded(self, seconds: float) -> None:
        self._load = [*self._load, seconds][-self.KEPT :]

    @property
    def cpu_s(self) -> float:
        return typical(self._cpu) if self._cpu else self.FIRST_CPU_S

    @property
    def load_s(self) -> float:
        if len(self._cpu) < self.CPU_NEEDED:
            return self.cpu_s
        return typical(self._load) if self._load else self.FIRST_LOAD_S


def typical(samples: Sequence[float]) -> float:
    """Mean of the samples within one standard deviation of their mean."""
    mean = math.fsum(samples) / len(samples)
    squares = [(x - mean) * (x - mean) for x in samples]
    variance = math.fsum(squares) / len(samples)
    near = [x for x, square in zip(samples, squares, strict=True) if square <= variance]
    return math.fsum(near) / len(near)
