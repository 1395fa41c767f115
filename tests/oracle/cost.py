"""Seconds for every operation: hardware x geometry x stack.

Each price also names the quantity it rests on (an index into `Cost.rests_on`). Formulas: a copy takes
latency + bytes / bandwidth; an operation of n kernels takes max(n x kernel floor, bytes / memory bandwidth,
FLOPs / rate). Experts that share kernels are one operation: the first pays the floor, the others what exceeds it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from oracle.price import Price, kernels_of
from oracle.rates import Rates
from sim.profiles.geometry import BITS_PER_PARAM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oracle.iterations import Iteration
    from oracle.price import Launch
    from sim.profiles.hardware import Hardware
    from sim.profiles.models import Model
    from sim.profiles.stack import Stack


class Cost(Rates):
    """Prices of one (hardware, model, stack, precision)."""

    def __init__(self, hw: Hardware, model: Model, stack: Stack, precision: str) -> None:
        super().__init__(hw, model, stack, precision)
        self._experts: dict[tuple[int, str, float, float], Price] = {}
        self._members: dict[tuple[float, int, str, float], tuple[Price, float]] = {}
        # Asked once per iteration; few differ.
        self.gate = lru_cache(maxsize=1024)(self._gate)
        self.shared = lru_cache(maxsize=1024)(self._shared)
        self.head = lru_cache(maxsize=1024)(self._head)
        self._attention_bytes = self.model.attention_bytes(precision)
        self._kv_bytes = self.model.kv_bytes_per_token_per_layer(self._kv_precision())
        self.n_dense_before = self._dense_layers_before()

    def _dense_layers_before(self) -> list[int]:
        """Dense (no experts) layers that run before each MoE layer, and after the last one at the end."""
        before, previous = [], -1
        for layer in self.model.moe_layer_ids:
            before.append(layer - previous - 1)
            previous = layer
        before.append(self.model.n_layers - 1 - previous)
        return before

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
            if (whole := self._measured("expert", n_tokens)) is not None:
                # A part costs its share of what the expert takes beyond handing over a small operation.
                least = self._curves.get("gate")
                fixed_s = min(least[0].seconds[0] if least is not None else 0.0, whole.duration_s)
                timed_s = kernels_frac * fixed_s + frac * (whole.duration_s - fixed_s + self._unpack_s(precision))
                self._experts[key] = Price(timed_s, whole.rests_on)
                return self._experts[key]
            self._check("expert", n_tokens, "tokens", self._ranges.expert_tokens)
            n_kernels = kernels_of(self.stack.kernels.expert, kernels_frac)
            price = self._experts[key] = self._roofline(n_kernels, *self._expert_work(n_tokens, precision, frac))
        return price

    def _expert_work(self, n_tokens: int, precision: str, frac: float) -> tuple[float, float]:
        """(bytes, FLOPs) of the `frac` of an expert."""
        n_bytes = frac * self.model.expert_bytes(precision) + 2 * self.activation_bytes(n_tokens)
        return n_bytes, frac * self.model.expert_flops(n_tokens)

    def leader(self, n_tokens: int, precision: str, frac: float = 1.0) -> tuple[Price, float]:
        """The first expert of a group: its price, and what of the floor of its kernels others can still fill."""
        price = self.expert(n_tokens, precision, frac)
        return price, price.duration_s - self._roofline(0, *self._expert_work(n_tokens, precision, frac)).duration_s

    def member(self, slack_s: float, n_tokens: int, precision: str, frac: float = 1.0) -> tuple[Price, float]:
        """Another expert of the group: what it takes beyond the floor left to fill, and what is left of that then.

        So a group of experts takes max(kernels x floor, the sum of what bytes or FLOPs of each take), in any order.
        """
        key = (slack_s, n_tokens, precision, frac)
        found = self._members.get(key)
        if found is None:
            work = self._roofline(0, *self._expert_work(n_tokens, precision, frac))
            beyond_s = max(0.0, work.duration_s - slack_s)
            found = self._members[key] = Price(beyond_s, work.rests_on), max(0.0, slack_s - work.duration_s)
        return found

    def in_turn(self, tokens: Sequence[int]) -> list[tuple[Launch, float]]:
        """Launches and seconds of a layer's experts that are all there, one per number of tokens, longest first."""
        precision = self.precision
        if not self.grouped:
            prices = sorted((self.expert(n, precision).duration_s for n in tokens), reverse=True)
            return [(self.launch_expert, duration_s) for duration_s in prices]
        found: list[tuple[Launch, float]] = []
        slack_s = 0.0
        for n in sorted(tokens, key=lambda n: -self._roofline(0, *self._expert_work(n, precision, 1.0)).duration_s):
            price, slack_s = self.member(slack_s, n, precision) if found else self.leader(n, precision)
            found.append((self.launch_member if found else self.launch_expert, price.duration_s))
        return found

    def launching_s(self, n_experts: int) -> float:
        """The host's least seconds for a layer's experts on one GPU."""
        if not self.grouped:
            return n_experts * self.launch_expert.all_s
        return self.launch_expert.all_s + (n_experts - 1) * self.launch_member.all_s if n_experts else 0.0

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
            unseen_bytes, unseen_flops = self._unseen(r.context, n_tokens)
            n_bytes, flops = n_bytes - unseen_bytes, flops - unseen_flops
            self._check("attention", r.context + n_tokens, "positions attended to", self._ranges.context_tokens)
        return self._roofline(self.stack.kernels.attention, n_bytes, flops)

    def _unseen(self, context: int, n_tokens: int) -> tuple[float, float]:
        """(bytes, FLOPs) that layers with a window save, position by position."""
        if self.model.window is None:
            return 0.0, 0.0
        tokens = self.model.window.tokens
        last = context + n_tokens
        first_seen = max(0, context + 1 - tokens)  # by the first of these tokens
        skipped = sum(max(0, at - tokens) for at in range(context + 1, last + 1))
        n_bytes = self.model.window_kv_bytes_per_token_per_layer(self._kv_precision()) * first_seen
        return float(n_bytes), 2.0 * self.model.window_products_per_key() * skipped

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
        if "attention" not in self._curves:
            return () if self.model.window is None else (float(self.model.window.tokens),)
        curve = self._curves.get("attention_decode")
        return () if curve is None else curve[0].at

    def attention_one_s(self, context: int) -> float:
        """One attention block for one token after `context` others: what a policy may compare."""
        if (measured := self._measured("attention_decode", context + 1)) is not None:
            return measured.duration_s
        model, precision = self.model, self.precision
        n_bytes = model.attention_bytes(precision) + 4 * self.activation_bytes(1)
        n_bytes += model.kv_bytes_per_token_per_layer(self._kv_precision()) * (context + 1)
        flops = model.attention_flops(1, context + 1)
        unseen_bytes, unseen_flops = self._unseen(context, 1)
        n_bytes, flops = n_bytes - unseen_bytes, flops - unseen_flops
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
