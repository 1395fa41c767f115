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


def best_front(missing: Sequence[Missing], cpu_s: float, load_s: float) -> tuple[list[int], list[int]]:
    """What section 5.4 asks for in words, min max(T_load, T_CPU): as `two_pointers`, at the least of all maxima.

    Some front of the experts, most tokens first, is always a best choice to load: every load takes the same time. Of
    equal maxima the one with the fewest loads is taken.
    """
    ordered = by_batch(missing)
    on_cpu = sum(n for _, n in ordered)  # tokens
    best_s, n_loaded = on_cpu * cpu_s, 0
    for at, (_, n) in enumerate(ordered, start=1):
        on_cpu -= n
        spent_s = max(at * load_s, on_cpu * cpu_s)
        if spent_s < best_s:
            best_s, n_loaded = spent_s, at
    experts = [expert for expert, _ in ordered]
    return experts[:n_loaded], experts[n_loaded:][::-1]


def one_pass(missing: Sequence[Missing], cpu_s: float, load_s: float) -> tuple[list[int], list[int]]:
    """Public code: one pass, largest batch first, to PCIe only while it has strictly less to do than the CPU.

    A tie goes to the CPU, hence the largest batch; the cost of an expert on the CPU does not grow with its tokens.
    Equal batches as they are named: a lone token's by rank, as in the code (several tokens' by id, there by first use).
    """
    load: list[int] = []
    on_cpu: list[int] = []
    spent_cpu_s = spent_load_s = 0.0
    for expert, _ in sorted(missing, key=lambda item: -item[1]):
        if spent_load_s < spent_cpu_s:
            spent_load_s += load_s
            load.append(expert)
        else:
            spent_cpu_s += cpu_s
            on_cpu.append(expert)
    return load, on_cpu


class Costs:
    """What the public code believes operations cost: the mean of the last ten measurements without outliers, beyond one
    standard deviation; the first of them is a guess. Each layer measures its own experts on the CPU, and until it has
    measured two, the cost of a load is taken to be theirs. All layers measure loads together.
    """

    KEPT, CPU_NEEDED = 10, 3
    FIRST_CPU_S, FIRST_LOAD_S = 0.05, 0.002  # the code's guesses

    def __init__(self, n_layers: int) -> None:
        self._cpu = [[self.FIRST_CPU_S] for _ in range(n_layers)]
        self._load = [self.FIRST_LOAD_S]

    def measured(self, layer: int, cpu_s: Sequence[float], n_loaded: int, load_s: float) -> None:
        """A layer has run: seconds of each expert on the CPU, and of a load. Of loads the code times what is left to
        wait for when the CPU is done, shared among them.
        """
        self._cpu[layer] = [*self._cpu[layer], *cpu_s][-self.KEPT :]
        if n_loaded:
            left_s = max(0.0, n_loaded * load_s - math.fsum(cpu_s))
            self._load = [*self._load, left_s / n_loaded][-self.KEPT :]

    def of(self, layer: int) -> tuple[float, float]:
        """Seconds of an expert on the CPU, and of a load."""
        cpu = self._cpu[layer]
        return typical(cpu), typical(self._load if len(cpu) >= self.CPU_NEEDED else cpu)


def typical(samples: Sequence[float]) -> float:
    """Mean of the samples within one standard deviation of their mean; of one or two, of all."""
    mean = math.fsum(samples) / len(samples)
    if len(samples) <= 2:
        return mean
    squares = [(x - mean) * (x - mean) for x in samples]
    variance = math.fsum(squares) / len(samples)
    near = [x for x, square in zip(samples, squares, strict=True) if square <= variance] or samples
    return math.fsum(near) / len(near)
