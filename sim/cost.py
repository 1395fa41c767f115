"""Seconds for every operation: hardware x geometry x stack.

Each price also names the quantity it rests on (an index into `Cost.rests_on`), so that a result can say what share
of its time is measured, datasheet or assumed. Formulas: a copy takes latency + bytes / bandwidth; an operation of
n kernels takes max(n x kernel floor, bytes / memory bandwidth, FLOPs / rate).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from sim.curves import AGAINST
from sim.errors import BadInput
from sim.model_bytes import BITS_PER_PARAM
from sim.quantity import Quantity, Source

if TYPE_CHECKING:
    from sim.curves import Curve, Curves
    from sim.hardware import Dtype, Hardware
    from sim.iterations import Iteration
    from sim.models import Model
    from sim.stack import Stack

# Arithmetic types: 4-bit weights are multiplied in bf16 after dequantisation; fp8 uses fp8 units where they exist.
COMPUTE_TYPE: dict[str, Dtype] = {"fp32": "fp32", "fp16": "fp16", "fp8": "fp8"}
WIDER: tuple[Dtype, ...] = ("bf16", "fp16", "fp32")


SIX_DIGITS = 1.00001
"""Profiles are written with six significant digits: what was the largest measured may read as a little less."""

SOURCES: tuple[Source, ...] = ("measured", "datasheet", "assumed")


class Price(NamedTuple):
    """Seconds, and the index of the quantity that bounds them."""

    duration_s: float
    rests_on: int


def kernels_of(n_kernels: float, frac: float) -> float:
    """Kernels that a slice of an operation runs: its share, and at least one where the operation has any."""
    return min(n_kernels, max(1.0, frac * n_kernels))


class Launch:
    """Host seconds of one operation: until its first kernel is launched, and until its last is; `n` counts uses.

    `tail_frac` is the share of the operation's device time its last kernel takes: equal shares, for want of better.
    """

    __slots__ = ("all_s", "extra_s", "first_s", "kernels_s", "launch_s", "n", "n_kernels", "tail_frac")

    def __init__(self, n_kernels: float, launch_s: float, extra_s: float) -> None:
        self.n_kernels = n_kernels
        self.launch_s = launch_s
        self.extra_s = extra_s
        self.kernels_s = n_kernels * launch_s
        self.first_s = extra_s + min(launch_s, self.kernels_s)
        self.all_s = extra_s + self.kernels_s
        self.tail_frac = min(1.0, 1.0 / n_kernels) if n_kernels else 0.0
        self.n = 0


class Cost:
    """Prices of one (hardware, model, stack, precision)."""

    def __init__(self, hw: Hardware, model: Model, stack: Stack, precision: str) -> None:
        self.hw, self.model, self.stack, self.precision = hw, model, stack, precision
        self.rests_on: list[tuple[str, Quantity]] = []
        gpu = hw.gpu
        # Without a unit for the type on this GPU, weights are converted and multiplied in the next wider type.
        types = (COMPUTE_TYPE.get(precision, "bf16"), *WIDER)
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
        self._experts: dict[tuple[int, str, float, float], Price] = {}
        # Of slices of matrices, by their share of the expert's kernels and whether they come first.
        self.launch_parts: dict[tuple[float, bool], Launch] = {}
        # Asked once per iteration; few differ.
        self.gate = lru_cache(maxsize=1024)(self._gate)
        self.shared = lru_cache(maxsize=1024)(self._shared)
        self.head = lru_cache(maxsize=1024)(self._head)
        self._attention_bytes = self.model.attention_bytes(precision)
        self._kv_bytes = self.model.kv_bytes_per_token_per_layer(self._kv_precision())
        self.n_dense_before = self._dense_layers_before()
        self.begin_s = 0.0
        self._beyond: dict[str, tuple[float, str]] = {}  # by operation: the farthest price outside its measured range
        self._ranges = hw.ranges
        self._curves: dict[str, tuple[Curve, int]] = {}
        curves = hw.curves_of(model.id, precision)
        if curves is not None:
            self._take_curves(curves)
        elif hw.curves is not None:
            self._beyond["model"] = (1.0, f"{model.id} in {precision}, for which fits stand in (curves measured: "
                                          f"{hw.curves.model} in {hw.curves.precision})")  # fmt: skip

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

    def _set_host(self) -> None:
        hw, stack = self.hw, self.stack
        self.launch_s = hw.host.launch_s.value
        self.sync_s = hw.host.sync_s.value
        self.copy_launch_s = self.cpu_launch_s = hw.host.copy_launch_s.value + stack.per_copy_s.value
        self.q_launch = self._rest("host.launch_s", hw.host.launch_s)
        self.q_sync = self._rest("host.sync_s", hw.host.sync_s)
        self.q_copy_launch = self._rest("host.copy_launch_s", hw.host.copy_launch_s)
        self.q_stack_layer = self._rest("stack.per_layer_s", stack.per_layer_s)
        self.q_stack_expert = self._rest("stack.per_expert_s", stack.per_expert_s)
        self.q_stack_copy = self._rest("stack.per_copy_s", stack.per_copy_s)
        self.q_stack_iteration = self._rest("stack.per_iteration_s", stack.per_iteration_s)
        kernels = stack.kernels
        dense = self.model.n_layers - len(self.model.moe_layer_ids)
        self.launch_attention = self._launch(kernels.attention, stack.per_layer_s.value)
        self.launch_dense = self._launch(kernels.attention + kernels.dense_ffn, stack.per_layer_s.value)
        self.launch_gate = self._launch(kernels.gate, 0.0)
        self.launch_shared = self._launch(kernels.shared_expert, 0.0)
        self.launch_expert = self._launch(kernels.expert, stack.per_expert_s.value)
        self.launch_head = self._launch(kernels.head, stack.per_iteration_s.value)
        self.has_shared = self.model.shared_expert_bytes(self.precision) > 0
        self.has_dense = dense > 0

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

    def _launch(self, n_kernels: float, extra_s: float) -> Launch:
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
        extras = {"attention": stack.per_layer_s.value, "dense_layer": stack.per_layer_s.value,
                  "expert": stack.per_expert_s.value, "head": stack.per_iteration_s.value}  # fmt: skip
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

    def _dense_layers_before(self) -> list[int]:
        """Dense (no experts) layers that run before each MoE layer, and after the last one at the end."""
        before, previous = [], -1
        for layer in self.model.moe_layer_ids:
            before.append(layer - previous - 1)
            previous = layer
        before.append(self.model.n_layers - 1 - previous)
        return before

    # -- prices -----------------------------------------------------------------------------------------------------

    def _roofline(self, n_kernels: float, n_bytes: float, flops: float) -> Price:
        best_s, rests_on = n_kernels * self._floor_s, self._q_floor
        if n_bytes / self._bandwidth > best_s:
            best_s, rests_on = n_bytes / self._bandwidth, self._q_bandwidth
        if flops / self._flops > best_s:
            best_s, rests_on = flops / self._flops, self._q_flops
        return Price(best_s, rests_on)

    def copy_s(self, n_bytes: int) -> float:
        """Host-to-device seconds of one copy."""
        if self._ranges.copy_bytes is not None:
            self._check("copy", n_bytes, "bytes", self._ranges.copy_bytes)
        return self.h2d_latency_s + n_bytes / self.h2d_bytes_per_s

    def back_s(self, n_bytes: int) -> float:
        """Device-to-host seconds of one copy."""
        if self._ranges.copy_bytes is not None:
            self._check("copy", n_bytes, "bytes", self._ranges.copy_bytes)
        return self.d2h_latency_s + n_bytes / self.d2h_bytes_per_s

    def peer_s(self, n_bytes: int) -> float:
        """GPU-to-GPU seconds of one copy."""
        return self.p2p_latency_s + n_bytes / self.p2p_bytes_per_s

    def activation_bytes(self, n_tokens: int) -> int:
        """Bytes of the hidden states of n tokens, 2 bytes an element (4 when the model is served in fp32)."""
        return n_tokens * self.model.hidden_size * (4 if self.precision == "fp32" else 2)

    def expert(self, n_tokens: int, precision: str, frac: float = 1.0, kernels_frac: float = 1.0) -> Price:
        """One routed expert, or the `frac` of it that a piece holds, for n tokens on the GPU.

        Args:
            kernels_frac: share of its kernels that run: all for a slice of columns, its own for one of matrices.
        """
        key = (n_tokens, precision, frac, kernels_frac)
        price = self._experts.get(key)
        if price is None:
            model = self.model
            if (whole := self._measured("expert", n_tokens)) is not None:
                # A part costs its share of what the expert takes beyond handing over a small operation.
                least = self._curves.get("gate")
                fixed_s = min(least[0].seconds[0] if least is not None else 0.0, whole.duration_s)
                timed_s = kernels_frac * fixed_s + frac * (whole.duration_s - fixed_s + self._unpack_s(precision))
                self._experts[key] = Price(timed_s, whole.rests_on)
                return self._experts[key]
            self._check("expert", n_tokens, "tokens", self._ranges.expert_tokens)
            n_bytes = frac * model.expert_bytes(precision) + 2 * self.activation_bytes(n_tokens)
            n_kernels, flops = kernels_of(self.stack.kernels.expert, kernels_frac), frac * model.expert_flops(n_tokens)
            price = self._experts[key] = self._roofline(n_kernels, n_bytes, flops)
        return price

    def _unpack_s(self, precision: str) -> float:
        """What unpacking a whole expert of a lower precision takes on the real machine that was measured."""
        if precision == self.precision:
            return 0.0
        bits, curve = BITS_PER_PARAM[precision], self._curves.get("unpack")
        if curve is None or bits not in curve[0].at:
            text = f"unpacking {precision}, not measured and taken to cost nothing"
            self._beyond[f"unpack {precision}"] = (1.0, text)
            return 0.0
        return curve[0].value(bits)

    def expert_gpu_s(self, n_tokens: int) -> float:
        """Seconds of one whole expert on the GPU: what a policy may compare."""
        return self.expert(n_tokens, self.precision).duration_s

    def expert_cpu(self, n_tokens: int) -> Price:
        """One routed expert for n tokens on the CPU pool: overhead + max(bytes / bandwidth, FLOPs / rate)."""
        if (measured := self._measured("cpu_expert", n_tokens)) is not None:
            return measured
        self._check("cpu_expert", n_tokens, "tokens", self._ranges.cpu_expert_tokens)
        bytes_s = self.model.expert_bytes(self.precision) / self._cpu_bandwidth
        flops_s = self.model.expert_flops(n_tokens) / self._cpu_flops
        bound_s, rests_on = (flops_s, self._q_cpu_flops) if flops_s > bytes_s else (bytes_s, self._q_cpu_bandwidth)
        if self._cpu_overhead_s > bound_s:
            rests_on = self._q_cpu_overhead
        return Price(self._cpu_overhead_s + bound_s, rests_on)

    def expert_cpu_s(self, n_tokens: int) -> float:
        """Seconds of one expert on the CPU, without moving activations."""
        return self.expert_cpu(n_tokens).duration_s

    def attention(self, iteration: Iteration) -> Price:
        """One attention block: projections for all tokens, then each range against its own context."""
        if "attention" in self._curves:
            return self._measured_attention(iteration)
        kv_bytes, attention_flops = self._kv_bytes, self.model.attention_flops
        n_bytes = float(self._attention_bytes + 4 * self.activation_bytes(iteration.n_tokens))
        flops = 0.0
        for r in iteration.ranges:
            n_tokens = r.stop_row - r.start_row
            n_bytes += kv_bytes * (r.context + n_tokens)
            # A prefill token sees on average the context before it plus half of its own prompt.
            flops += attention_flops(n_tokens, r.context + (n_tokens + 1) / 2)
            self._check("attention", r.context + n_tokens, "positions attended to", self._ranges.context_tokens)
        return self._roofline(self.stack.kernels.attention, n_bytes, flops)

    def _measured_attention(self, iteration: Iteration) -> Price:
        """Each range on its curve: prompts against their tokens, decode against positions."""
        total_s, rests_on = 0.0, 0
        for r in iteration.ranges:
            n_tokens = r.stop_row - r.start_row
            decodes = n_tokens == 1 and "attention_decode" in self._curves
            price = self._measured(*(("attention_decode", r.context + 1) if decodes else ("attention", n_tokens)))
            assert price is not None
            total_s, rests_on = total_s + price.duration_s, price.rests_on
        return Price(total_s, rests_on)

    def decode_points(self) -> tuple[float, ...]:
        """Positions attended to at which the price of a decode token's attention need not be convex."""
        curve = self._curves.get("attention_decode")
        return curve[0].at if curve is not None and "attention" in self._curves else ()

    def attention_one_s(self, context: int) -> float:
        """One attention block for one token after `context` others: what a policy may compare."""
        if (measured := self._measured("attention_decode", context + 1)) is not None:
            return measured.duration_s
        model, precision = self.model, self.precision
        n_bytes = model.attention_bytes(precision) + 4 * self.activation_bytes(1)
        n_bytes += model.kv_bytes_per_token_per_layer(self._kv_precision()) * (context + 1)
        flops = model.attention_flops(1, context + 1)
        return self._roofline(self.stack.kernels.attention, n_bytes, flops).duration_s

    def _kv_precision(self) -> str:
        return "fp32" if self.precision == "fp32" else "bf16"

    def dense_layer(self, iteration: Iteration) -> Price:
        """A whole layer without experts: attention, then its feed-forward network."""
        if (measured := self._measured("dense_layer", iteration.n_tokens)) is not None:
            return measured
        attention = self.attention(iteration)
        ffn = self._roofline(
            self.stack.kernels.dense_ffn,
            self.model.dense_ffn_bytes(self.precision) + 2 * self.activation_bytes(iteration.n_tokens),
            self.model.dense_ffn_flops(iteration.n_tokens),
        )
        longer = attention if attention.duration_s >= ffn.duration_s else ffn
        return Price(attention.duration_s + ffn.duration_s, longer.rests_on)

    def _gate(self, n_tokens: int) -> Price:
        """Router of one layer: its matrix, softmax and top-k."""
        if (measured := self._measured("gate", n_tokens)) is not None:
            return measured
        n_bytes = self.model.gate_bytes(self.precision) + self.activation_bytes(n_tokens)
        return self._roofline(self.stack.kernels.gate, n_bytes, self.model.gate_flops(n_tokens))

    def _shared(self, n_tokens: int) -> Price:
        """Shared experts of one layer."""
        if (measured := self._measured("shared_expert", n_tokens)) is not None:
            return measured
        n_bytes = self.model.shared_expert_bytes(self.precision) + 2 * self.activation_bytes(n_tokens)
        return self._roofline(self.stack.kernels.shared_expert, n_bytes, self.model.shared_expert_flops(n_tokens))

    def _head(self, n_ranges: int) -> Price:
        """Final norm, output head and sampling: one token per range."""
        if (measured := self._measured("head", n_ranges)) is not None:
            return measured
        n_bytes = self.model.head_bytes(self.precision) + self.activation_bytes(n_ranges)
        return self._roofline(self.stack.kernels.head, n_bytes, self.model.head_flops(n_ranges))
