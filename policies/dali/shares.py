"""DALI's greedy assignment: a layer's experts divided between GPU and CPU, so that the slower side is done early."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Costs(NamedTuple):
    """Seconds of one expert on either side; on the GPU its copy included, where it has to be copied."""

    gpu_s: float
    cpu_s: float


class Shares(NamedTuple):
    """Places of the experts on either side, in the order they were placed."""

    gpu: list[int]
    cpu: list[int]


def divide(costs: Sequence[Costs], order: str) -> Shares:
    """Place one expert after the other where max(T_gpu, T_cpu) grows least; a tie goes to the side that ends earlier,
    then to the GPU.

    Args:
        order: who is placed first: `descending`, the largest CPU time less GPU time; `absolute`, the largest difference
            whichever side is faster. Of equals the first.
    """
    differences = [one.cpu_s - one.gpu_s for one in costs]
    if order == "absolute":
        differences = [abs(difference) for difference in differences]
    shares = Shares([], [])
    gpu_s = cpu_s = 0.0
    for at in sorted(range(len(costs)), key=lambda at: -differences[at]):
        if_gpu_s, if_cpu_s = gpu_s + costs[at].gpu_s, cpu_s + costs[at].cpu_s
        if (max(if_gpu_s, cpu_s), if_gpu_s) <= (max(gpu_s, if_cpu_s), if_cpu_s):
            gpu_s = if_gpu_s
            shares.gpu.append(at)
        else:
            cpu_s = if_cpu_s
            shares.cpu.append(at)
    return shares
