"""The rooflines of one run: what its GPU, its stack and the format of its weights make of bytes and FLOPs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.base.errors import BadInput
from sim.base.quantities import Quantity
from sim.machine.figures import Figures, multiplied_in
from sim.machine.roofline import Roofline
from sim.profiles.precisions import multiplied_in_blocks

if TYPE_CHECKING:
    from sim.profiles.hardware import Hardware
    from sim.profiles.stack import Stack


def rooflines(hw: Hardware, stack: Stack, precision: str, figures: Figures) -> tuple[Roofline, Roofline]:
    """Of all operations but experts, and of experts, for weights of a precision. Raises BadInput: no rate for it."""
    gpu, kind, times = hw.gpu, multiplied_in(hw, precision), stack.kernel_times
    if kind is None:
        raise BadInput(f"hardware {hw.id}: gpu.flops_per_s has no rate for {precision}; add bf16, fp16 or fp32")
    bandwidth, rate, floor_s = gpu.memory_bandwidth_bytes_per_s, gpu.flops_per_s[kind], gpu.kernel_floor_s
    q_bandwidth = figures.enter("gpu.memory_bandwidth_bytes_per_s", bandwidth)
    q_flops = figures.enter(f"gpu.flops_per_s.{kind}", rate)
    q_floor = figures.enter("gpu.kernel_floor_s", floor_s)
    if times is not None:
        word, floor_s = ("replayed_s", times.replayed_s) if stack.graphs else ("launched_s", times.launched_s)
        q_floor = figures.enter(f"engine.kernel_times.{word}", floor_s)
    weights, as_weights, flops, experts_flops, q_experts = bandwidth, 1.0, rate.value, rate.value, q_flops
    if stack.quantised is not None and multiplied_in_blocks(precision):
        reads = gpu.quantised_bytes_per_s
        if stack.quantised.reads_of_card and isinstance(reads, Quantity) and reads.value < bandwidth.value:
            weights, as_weights = reads, reads.value / bandwidth.value
            q_bandwidth = figures.enter("gpu.quantised_bytes_per_s", reads)
        own = gpu.quantised_flops_per_s
        if isinstance(own, Quantity):
            flops, q_flops = own.value, figures.enter("gpu.quantised_flops_per_s", own)
        else:
            flops *= stack.quantised.dense_frac.value
            q_flops = figures.enter("engine.quantised.dense_frac", stack.quantised.dense_frac)
        experts_flops = flops * stack.quantised.expert_frac.value
        q_experts = figures.enter("engine.quantised.expert_frac", stack.quantised.expert_frac)

    def at(flops: float, q_flops: int) -> Roofline:
        adds, n_bytes_per_s = times is not None, weights.value
        return Roofline(floor_s.value, n_bytes_per_s, flops, q_floor, q_bandwidth, q_flops, adds, as_weights)

    return at(flops, q_flops), at(experts_flops, q_experts)
