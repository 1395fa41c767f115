"""What prices are made of: the figures of a profile that one (model, stack, precision) runs on.

Rates and fixed times of links, host, GPU and CPU, what launching each operation costs, and the curves and ranges that
were measured. Each figure is entered in `rests_on` with its source, so that a result can say what share of its time is
measured, datasheet or assumed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oracle.price import Launch, Price, kernels_of
from sim.base.errors import BadInput
from sim.base.quantities import Quantity, Source
from sim.profiles.curves import AGAINST

if TYPE_CHECKING:
    from sim.profiles.curves import Curve, Curves
    from sim.profiles.hardware import Dtype, Hardware
    from sim.profiles.models import Model
    from sim.profiles.stack import Stack

# Arithmetic types: packed weights are multiplied in 16 bits after unpacking; fp8 uses fp8 units where they exist.
COMPUTE_TYPE: dict[str, Dtype] = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}
WIDER: tuple[Dtype, ...] = ("bf16", "fp16", "fp32")

SIX_DIGITS = 1.00001
"""Profiles are written with six significant digits: what was the largest measured may read as a little less."""

SOURCES: tuple[Source, ...] = ("measured", "datasheet", "assumed")


def unpacked_type(flops_per_s: dict[Dtype, Quantity]) -> Dtype:
    """The 16-bit type that unpacked weights are multiplied in: bf16, or fp16 on a GPU that only emulates bf16, which
    then is slower than fp32 (Turing)."""
    rates = {kind: rate.value for kind, rate in flops_per_s.items()}
    emulated = rates.get("bf16", 0.0) < rates.get("fp32", 0.0)
    return "fp16" if emulated and "fp16" in rates else "bf16"


class Rates:
    """The figures of one (hardware, model, stack, precision), each entered with its source."""

    def __init__(self, hw: Hardware, model: Model, stack: Stack, precision: str) -> None:
        self.hw, self.model, self.stack, self.precision = hw, model, stack, precision
        self.rests_on: list[tuple[str, Quantity]] = []
        curves = hw.curves_of(model.id, precision)
        # Curves were measured on a loop that runs experts one by one and launches kernel by kernel.
        self.grouped = stack.grouped and curves is None
        self._graphs = stack.graphs and curves is None
        gpu = hw.gpu
        # Without a unit for the type on this GPU, weights are converted and multiplied in the next wider type.
        types = (COMPUTE_TYPE.get(precision) or unpacked_type(gpu.flops_per_s), *WIDER)
        rate_type = next((kind for kind in types if kind in gpu.flops_per_s), None)
        if rate_type is None:
            raise BadInput(f"hardware {hw.id}: gpu.flops_per_s has no rate for {precision}; add bf16, fp16 or fp32")
        self._bandwidth = gpu.memory_bandwidth_bytes_per_s.value
        self._flops = gpu.flops_per_s[rate_type].value
        self._floor_s = gpu.kernel_floor_s.value
        self._q_bandwidth = self._rest("gpu.memory_bandwidth_bytes_per_s", gpu.memory_bandwidth_bytes_per_s)
        self._q_flops = self._rest(f"gpu.flops_per_s.{rate_type}", gpu.flops_per_s[rate_type])
        self._q_floor = self._rest("gpu.kernel_floor_s", gpu.kernel_floor_s)
        self._set_links()
        self._set_host()
        self._set_cpu()
        self._set_predictors()
        # Of slices of matrices, by their share of the expert's kernels and whether they come first.
        self.launch_parts: dict[tuple[float, bool], Launch] = {}
        self.begin_s = 0.0
        self._beyond: dict[str, tuple[float, str]] = {}  # by operation: the farthest price outside its measured range
        self._ranges = hw.ranges
        self._curves: dict[str, tuple[Curve, int]] = {}
        if curves is not None:
            self._take_curves(curves)
        elif hw.curves is not None:
            self._beyond["model"] = (
                1.0,
                f"{model.id} in {precision}, for which fits stand in (curves measured: "
                f"{hw.curves.model} in {hw.curves.precision})",
            )

    def _rest(self, name: str, quantity: Quantity) -> int:
        self.rests_on.append((name, quantity))
        return len(self.rests_on) - 1

    def _set_predictors(self) -> None:
        """Predictor time rests on whatever the policy says its figure rests on."""
        self.q_predictor = {
            source: self._rest(f"predictor time ({source})", Quantity(value=1.0, source=source, ref="policy's file"))
            for source in SOURCES
        }

    def _set_links(self) -> None:
        hw, stack = self.hw, self.stack
        kind = "h2d" if stack.pinned else "h2d_pageable"
        up, down = (hw.h2d, hw.d2h) if stack.pinned else (hw.h2d_pageable, hw.d2h_pageable)
        self.h2d_latency_s = up.latency_s.value
        self.h2d_bytes_per_s = up.bandwidth_bytes_per_s.value * stack.copy_efficiency_frac.value
        self.d2h_latency_s = down.latency_s.value
        self.d2h_bytes_per_s = down.bandwidth_bytes_per_s.value * stack.copy_efficiency_frac.value
        self.p2p_latency_s = hw.p2p.latency_s.value
        self.p2p_bytes_per_s = hw.p2p.bandwidth_bytes_per_s.value
        self.q_h2d_latency = self._rest(f"{kind}.latency_s", up.latency_s)
        self.q_h2d_bandwidth = self._rest(f"{kind}.bandwidth_bytes_per_s", up.bandwidth_bytes_per_s)
        self.q_p2p_latency = self._rest("p2p.latency_s", hw.p2p.latency_s)
        self.q_p2p_bandwidth = self._rest("p2p.bandwidth_bytes_per_s", hw.p2p.bandwidth_bytes_per_s)

    def _set_host(self) -> None:
        hw, stack = self.hw, self.stack
        self.launch_s = hw.host.launch_s.value
        self.sync_s = hw.host.sync_s.value
        self.copy_launch_s = self.cpu_launch_s = self.part_launch_s(1.0)
        self.q_launch = self._rest("host.launch_s", hw.host.launch_s)
        self.q_sync = self._rest("host.sync_s", hw.host.sync_s)
        self.q_copy_launch = self._rest("host.copy_launch_s", hw.host.copy_launch_s)
        self.q_stack_layer = self._rest("engine.per_layer_s", stack.per_layer_s)
        self.q_stack_expert = self._rest("engine.per_expert_s", stack.per_expert_s)
        self.q_stack_copy = self._rest("engine.per_copy_s", stack.per_copy_s)
        self.q_stack_iteration = self._rest("engine.per_iteration_s", stack.per_iteration_s)
        kernels = stack.kernels
        dense = self.model.n_layers - len(self.model.moe_layer_ids)
        self.launch_attention = self._launch(kernels.attention, stack.per_layer_s.value)
        self.launch_dense = self._launch(kernels.attention + kernels.dense_ffn, stack.per_layer_s.value)
        self.launch_gate = self._launch(kernels.gate, 0.0, replayed=True)
        self.launch_shared = self._launch(kernels.shared_expert, 0.0, replayed=True)
        self.launch_expert = self._launch(kernels.expert, stack.per_expert_s.value)
        self.launch_member = Launch(0, self.launch_s, stack.per_expert_s.value)  # joins a group: no kernels of its own
        self.launch_head = self._launch(kernels.head, stack.per_iteration_s.value)
        self.has_shared = self.model.shared_expert_bytes(self.precision) > 0
        self.has_dense = dense > 0

    def part_launch_s(self, frac: float) -> float:
        """Host seconds of enqueuing the copy of this share of an expert.

        Enqueuing costs the same however small the copy is. What the framework spends is known per expert: its parts
        share it, so that nobody gains or loses by splitting.
        """
        return self.hw.host.copy_launch_s.value + self.stack.per_copy_s.value * frac

    def launch_part(self, kernels_frac: float, first: bool) -> Launch:
        """Launching a slice of an expert's matrices: its share of the kernels, and at least one.

        What the framework spends on an expert it spends before the first of them. So launching all slices in turn is
        never quicker than launching the expert, on the host or on the stream.
        """
        launch = self.launch_parts.get((kernels_frac, first))
        if launch is None:
            whole = self.launch_expert
            n_kernels, extra_s = kernels_of(whole.n_kernels, kernels_frac), whole.extra_s if first else 0.0
            launch = self.launch_parts[kernels_frac, first] = Launch(n_kernels, whole.launch_s, extra_s)
        return launch

    def _launch(self, n_kernels: float, extra_s: float, replayed: bool = False) -> Launch:
        """Launching kernels, or the graph they are part of; `replayed`: by the graph of the operation before."""
        if self._graphs:
            n_kernels = 0 if replayed else min(1, n_kernels)
        return Launch(n_kernels, self.launch_s, extra_s)

    def _set_cpu(self) -> None:
        cpu = self.hw.cpu
        self._cpu_bandwidth = cpu.memory_bandwidth_bytes_per_s.value
        self._cpu_flops = cpu.flops_per_s.value
        self._cpu_overhead_s = cpu.expert_overhead_s.value
        self._q_cpu_bandwidth = self._rest("cpu.memory_bandwidth_bytes_per_s", cpu.memory_bandwidth_bytes_per_s)
        self._q_cpu_flops = self._rest("cpu.flops_per_s", cpu.flops_per_s)
        self._q_cpu_overhead = self._rest("cpu.expert_overhead_s", cpu.expert_overhead_s)

    def _take_curves(self, curves: Curves) -> None:
        """Prices as measured on the real machine's lanes, launches included, instead of rooflines over kernels."""
        for name, curve in curves.operations.items():
            self._curves[name] = (curve, self._rest(f"curves.{name}", curve.figure()))
        stack, launches = self.stack, curves.launches
        extras = {
            "attention": stack.per_layer_s.value,
            "dense_layer": stack.per_layer_s.value,
            "expert": stack.per_expert_s.value,
            "head": stack.per_iteration_s.value,
        }
        made = {name: Launch(1, figure.value, extras.get(name, 0.0)) for name, figure in launches.items()}
        self.launch_attention = made.get("attention", self.launch_attention)
        self.launch_dense = made.get("dense_layer", self.launch_dense)
        self.launch_gate = made.get("gate", self.launch_gate)
        self.launch_shared = made.get("shared_expert", self.launch_shared)
        self.launch_expert = made.get("expert", self.launch_expert)
        self.launch_head = made.get("head", self.launch_head)
        if "begin" in launches:
            self.begin_s = launches["begin"].value
        if "cpu_expert" in launches:
            self.cpu_launch_s = launches["cpu_expert"].value + stack.per_copy_s.value

    # -- what was measured, and how far ------------------------------------------------------------------------------

    def _measured(self, name: str, at: float) -> Price | None:
        """The price on a measured curve, None where the profile has none."""
        found = self._curves.get(name)
        if found is None:
            return None
        curve, rests_on = found
        if not curve.covers(at):
            self._leave(name, at, AGAINST[name], (curve.at[0], curve.at[-1]))
        return Price(curve.value(at), rests_on)

    @property
    def beyond(self) -> set[str]:
        """Operations priced outside the range they were measured in, each at the farthest."""
        return {text for _, text in self._beyond.values()}

    def _leave(self, name: str, at: float, unit: str, measured: tuple[float, float]) -> None:
        """Note an operation outside its measured range."""
        low, high = measured
        outside = at / high if at > high else low / max(at, 1e-9)
        if outside > self._beyond.get(name, (0.0, ""))[0]:
            self._beyond[name] = (outside, f"{name} at {at:g} {unit} (measured: {low:g} to {high:g})")

    def _check(self, name: str, at: float, unit: str, measured: tuple[float, float] | None) -> None:
        """Note a fit that is asked for more than it rests on; for less, its constant term holds."""
        if measured is not None and at > measured[1] * SIX_DIGITS:
            self._leave(name, at, unit, measured)
