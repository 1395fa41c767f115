"""Seconds for every operation: hardware x geometry x stack.

Each price also names the figure it rests on (an index into `Cost.figures.entries`). An operation of n kernels takes
max(n x kernel floor, bytes / memory bandwidth, FLOPs / rate), or their sum (`roofline.py`). Experts that share kernels
are one operation: the first pays the floor, the others what exceeds it (in a sum, all of their own). What a copy takes
stands in `copy_prices.py`, what the host spends in `launch_costs.py`.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

from sim.machine.copy_prices import CopyPrices
from sim.machine.figures import Figures
from sim.machine.kernel_group import beyond_s, left_s
from sim.machine.kernel_rates import rooflines
from sim.machine.launch_costs import Launches
from sim.machine.measured import SIX_DIGITS, Measured
from sim.machine.memory_law import Sharing
from sim.machine.price import Price, kernels_of
from sim.machine.roofline import Attention
from sim.machine.several import ALONE, TENSOR, Several
from sim.profiles.cpu_products import expert_flops_frac
from sim.profiles.precisions import BITS_PER_PARAM

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.machine.drive_prices import DrivePrices
    from sim.profiles.hardware import Hardware
    from sim.profiles.models import Model
    from sim.profiles.stack import Stack
    from sim.workload.iterations import Iteration


class Cost:
    """Prices of one (hardware, model, stack, precision).

    `copies`: of links. `launches`: of the host. `figures`: what prices rest on. `measured`: curves, and what was priced
    beyond them.

    Args:
        several: how several GPUs work together. shares: what runs at once shares memory.
    """

    def __init__(
        self,
        hw: Hardware,
        model: Model,
        stack: Stack,
        precision: str,
        several: Several = ALONE,
        shares: bool = False,
    ) -> None:
        self.several = several
        self.hw, self.model, self.stack, self.precision = hw, model, stack, precision
        self.figures = figures = Figures()
        self.measured = measured = Measured(hw, model.id, precision)
        self.roofline, self.of_experts = rooflines(hw, stack, precision, figures)
        self.copies = CopyPrices(hw, stack, measured, figures, several)
        self.launches = Launches(hw, model, stack, measured, figures)
        self.drive: DrivePrices | None = None  # of a machine whose host memory does not hold all experts
        self._share = 1.0 / several.n_gpus if several.dense == TENSOR else 1.0  # of dense weights, on each GPU
        self._key_share = 1.0 if several.dense != TENSOR else key_share(model, several.n_gpus)
        self._cpu = hw.cpu
        self._cpu_flops_frac = expert_flops_frac(model, precision)
        self._q_cpu_bandwidth = figures.enter("cpu.memory_bandwidth_bytes_per_s", hw.cpu.memory_bandwidth_bytes_per_s)
        self._q_cpu_flops = figures.enter("cpu.flops_per_s", hw.cpu.flops_per_s)
        self._q_cpu_overhead = figures.enter("cpu.expert_overhead_s", hw.cpu.expert_overhead_s)
        self.q_predictor = figures.enter_predictors(self.launches.q_stack_hybrid, self.launches.q_stack_overlap)
        measured.enter(figures)
        self.sharing = Sharing(hw, self.copies, several, figures, shares)
        self.has_shared = model.shared_expert_bytes(precision) > 0
        self.has_dense = model.n_layers > len(model.moe_layer_ids)
        self._expert_bytes = cache(model.expert_bytes)  # asked for every length of a prompt
        self._experts: dict[tuple[int, str, float, float], Price] = {}
        self._members: dict[tuple[float, int, str, float], tuple[Price, float]] = {}
        self._leaders: dict[tuple[int, str, float], tuple[Price, float]] = {}
        self.expert_cpu = cache(self._expert_cpu)
        self.expert_cpu_joined = cache(self._expert_cpu_joined)
        self.work = cache(self._work)
        # Asked once per iteration; few differ.
        self.gate = lru_cache(maxsize=1024)(self._gate)
        self.shared = lru_cache(maxsize=1024)(self._shared)
        self.head = lru_cache(maxsize=1024)(self._head)
        self.attention: Callable[[Iteration], Price] = self._measured_attention
        self.attention_of_one: Callable[[int], Price] | None = None  # by the tokens before it; None: a curve says it
        if measured.curve("attention") is None:
            attention = self._attention()
            self.attention, self.attention_of_one = attention.price, attention.of_one
        self.n_dense_before = self._dense_layers_before()
        self.gpu_of, self.n_hops_before = self._stages()

    def _dense_layers_before(self) -> list[int]:
        """Dense (no experts) layers that run before each MoE layer, and after the last one at the end."""
        before, previous = [], -1
        for layer in self.model.moe_layer_ids:
            before.append(layer - previous - 1)
            previous = layer
        before.append(self.model.n_layers - 1 - previous)
        return before

    def _stages(self) -> tuple[list[int], list[int]]:
        """The GPU of each MoE layer and of the head; and how often hidden states go on to another GPU before each."""
        moe_layers = self.model.moe_layer_ids
        if not self.several.in_turn:
            return [0] * (len(moe_layers) + 1), [0] * (len(moe_layers) + 1)
        of_layer = self.several.stages_of(self.model.n_layers)
        gpus = [*[of_layer[layer] for layer in moe_layers], of_layer[-1]]
        return gpus, [gpu - before for before, gpu in pairwise([0, *gpus])]

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
            if (whole := self.measured.price("expert", n_tokens)) is not None:
                # A part costs its share of what the expert takes beyond handing over a small operation.
                least = self.measured.curve("gate")
                fixed_s = min(least.seconds[0] if least is not None else 0.0, whole.duration_s)
                timed_s = kernels_frac * fixed_s + frac * (whole.duration_s - fixed_s + self._unpack_s(precision))
                self._experts[key] = Price(timed_s, whole.attributed_to)
                return self._experts[key]
            self.measured.check("expert", n_tokens, "tokens", self.measured.ranges.expert_tokens)
            n_kernels = kernels_of(self.stack.kernels.expert, kernels_frac)
            price = self._experts[key] = self.of_experts.price(n_kernels, *self._expert_work(n_tokens, precision, frac))
        return price

    def _expert_work(self, n_tokens: int, precision: str, frac: float) -> tuple[float, float]:
        """(bytes, FLOPs) of the `frac` of an expert."""
        n_bytes = frac * self._expert_bytes(precision) + 2 * self.activation_bytes(n_tokens)
        return n_bytes, frac * self.model.expert_flops(n_tokens)

    def _work(self, n_tokens: int, precision: str, frac: float = 1.0) -> Price:
        """What bytes or FLOPs of the `frac` of an expert take."""
        return self.of_experts.price(0, *self._expert_work(n_tokens, precision, frac))

    def leader(self, n_tokens: int, precision: str, frac: float = 1.0) -> tuple[Price, float]:
        """The first expert of a group: its price, and what of the floor of its kernels others can still fill."""
        key = (n_tokens, precision, frac)
        found = self._leaders.get(key)
        if found is None:
            price = self.expert(n_tokens, precision, frac)
            work = self.work(n_tokens, precision, frac)
            left_s = 0.0 if self.of_experts.adds else price.duration_s - work.duration_s
            found = self._leaders[key] = price, left_s
        return found

    def member(self, slack_s: float, n_tokens: int, precision: str, frac: float = 1.0) -> tuple[Price, float]:
        """Another expert of the group: what it takes beyond the floor left to fill, and what is left of that then.

        So a group of experts takes max(kernels x floor, the sum of what bytes or FLOPs of each take), in any order; or
        the sum of both.
        """
        key = (slack_s, n_tokens, precision, frac)
        found = self._members.get(key)
        if found is None:
            work = self.work(n_tokens, precision, frac)
            price = Price(beyond_s(work.duration_s, slack_s), work.attributed_to, work.n_bytes)
            found = self._members[key] = price, left_s(work.duration_s, slack_s)
        return found

    def _unpack_s(self, precision: str) -> float:
        """What unpacking a whole expert of a lower precision takes on the real machine that was measured."""
        if precision == self.precision:
            return 0.0
        bits, curve = BITS_PER_PARAM[precision], self.measured.curve("unpack")
        if curve is None or bits not in curve.at:
            text = f"unpacking {precision}, not measured and taken to cost nothing"
            self.measured.not_measured(f"unpack {precision}", text)
            return 0.0
        return curve.value(bits)

    def expert_gpu_s(self, n_tokens: int) -> float:
        """Seconds of one whole expert on the GPU: what a policy may compare."""
        return self.expert(n_tokens, self.precision).duration_s

    def _expert_cpu(self, n_tokens: int) -> Price:
        """One routed expert for n tokens on the CPU pool: overhead + max(bytes / bandwidth, FLOPs / rate).

        FLOPs hold what unpacking the weights takes, for each token anew.
        """
        n_bytes = self.model.expert_bytes(self.precision)
        if (measured := self.measured.price("cpu_expert", n_tokens)) is not None:
            return Price(measured.duration_s, measured.attributed_to, n_bytes)
        self.measured.check("cpu_expert", n_tokens, "tokens", self.measured.ranges.cpu_expert_tokens)
        bytes_s = n_bytes / self._cpu.memory_bandwidth_bytes_per_s.value
        flops_s = self._cpu_flops_frac * self.model.expert_flops(n_tokens) / self._cpu.flops_per_s.value
        bound_s, attributed_to = (flops_s, self._q_cpu_flops) if flops_s > bytes_s else (bytes_s, self._q_cpu_bandwidth)
        overhead_s = self._cpu.expert_overhead_s.value
        if overhead_s > bound_s:
            attributed_to = self._q_cpu_overhead
        return Price(overhead_s + bound_s, attributed_to, n_bytes)

    def _expert_cpu_joined(self, n_tokens: int) -> Price:
        """One that is not the first of its layer there: where a layer is one region, its overhead is paid already.

        Curves were measured on a loop that runs experts one by one.
        """
        first = self.expert_cpu(n_tokens)
        if self.stack.cpu_region == "expert" or self.measured.price("cpu_expert", n_tokens) is not None:
            return first
        bound_s = first.duration_s - self._cpu.expert_overhead_s.value
        return Price(bound_s, first.attributed_to, first.n_bytes)

    def expert_cpu_s(self, n_tokens: int) -> float:
        """Seconds of one expert on the CPU, without moving activations."""
        return self.expert_cpu(n_tokens).duration_s

    def _attention(self) -> Attention:
        """One attention block by its bytes and FLOPs, as `model.attention_flops` counts them."""
        model, measured = self.model, self.measured.ranges.context_tokens
        key_bytes, window_bytes = self._key_bytes()
        window_products = self._share * model.window_products_per_key()
        return Attention(
            self.roofline,
            self.stack.kernels.attention,
            self.stack.prompt_kernels,
            self._share * model.attention_bytes(self.precision),
            4 * self.activation_bytes(1),
            key_bytes - window_bytes,
            self._share * model.attention_params(),
            self._share * model.products_per_key() - window_products,
            math.inf if measured is None else measured[1] * SIX_DIGITS,
            lambda at: self.measured.check("attention", at, "positions attended to", measured),
            0 if model.window is None else model.window.tokens,
            window_bytes,
            window_products,
        )

    def _measured_attention(self, iteration: Iteration) -> Price:
        """Each range on its curve: prompts against their tokens, decode against positions."""
        total_s, attributed_to = 0.0, 0
        for r in iteration.ranges:
            n_tokens = r.stop_row - r.start_row
            decodes = n_tokens == 1 and self.measured.curve("attention_decode") is not None
            price = self.measured.price(*(("attention_decode", r.context + 1) if decodes else ("attention", n_tokens)))
            assert price is not None
            if r.context and n_tokens > 1:
                price = self._measured_part(price, r.context, n_tokens)
            total_s, attributed_to = total_s + price.duration_s, price.attributed_to
        return Price(total_s, attributed_to)

    def _measured_part(self, alone: Price, context: int, n_tokens: int) -> Price:
        """Part of a prompt after others: what a whole prompt takes up to its end, less up to its start; no less than a
        prompt of so many tokens, which has the same weights to read and kernels to run."""
        self.measured.not_measured("parts of prompts", "attention of parts of prompts, taken from that of whole ones")
        until, before = (self.measured.price("attention", n) for n in (context + n_tokens, context))
        assert until is not None
        assert before is not None
        added_s = until.duration_s - before.duration_s
        return Price(added_s, until.attributed_to) if added_s > alone.duration_s else alone

    def decode_points(self) -> tuple[float, ...]:
        """Positions attended to at which the price of a decode token's attention need not be convex."""
        if self.measured.curve("attention") is None:  # priced by its bytes: from a full window on, a token more is less
            return () if self.model.window is None else (float(self.model.window.tokens),)
        curve = self.measured.curve("attention_decode")
        return () if curve is None else curve.at

    def attention_one_s(self, context: int) -> float:
        """One attention block for one token after `context` others: what a policy may compare."""
        if (measured := self.measured.price("attention_decode", context + 1)) is not None:
            return measured.duration_s
        model, precision = self.model, self.precision
        n_bytes = self._share * model.attention_bytes(precision) + 4 * self.activation_bytes(1)
        key_bytes, window_bytes = self._key_bytes()
        n_bytes += key_bytes * (context + 1)
        flops = self._share * model.attention_flops(1, context + 1)
        if model.window is not None and (unseen := context + 1 - model.window.tokens) > 0:
            n_bytes -= window_bytes * unseen
            flops -= self._share * 2 * model.window_products_per_key() * unseen
        return self.roofline.price(self.stack.kernels.attention, n_bytes, flops).duration_s

    def _key_bytes(self) -> tuple[float, float]:
        """Of the keys and values of a token in one layer, and of those that a window shows, on the mean of all layers;
        as so many bytes of weights (`Roofline`)."""
        scale, kept_in = self._key_share * self.roofline.as_weights, self._kv_precision()
        keys, window = self.model.kv_bytes_per_token_per_layer, self.model.window_kv_bytes_per_token_per_layer
        return scale * keys(kept_in), scale * window(kept_in)

    def _kv_precision(self) -> str:
        return "fp32" if self.precision == "fp32" else "bf16"

    def dense_layer(self, iteration: Iteration) -> Price:
        """A whole layer without experts: attention, then its feed-forward network."""
        if (measured := self.measured.price("dense_layer", iteration.n_tokens)) is not None:
            return measured
        attention = self.attention(iteration)
        ffn = self.roofline.price(
            self.stack.kernels.dense_ffn,
            self._share * self.model.dense_ffn_bytes(self.precision) + 2 * self.activation_bytes(iteration.n_tokens),
            self._share * self.model.dense_ffn_flops(iteration.n_tokens),
        )
        longer = attention if attention.duration_s >= ffn.duration_s else ffn
        return Price(attention.duration_s + ffn.duration_s, longer.attributed_to, attention.n_bytes + ffn.n_bytes)

    def _gate(self, n_tokens: int) -> Price:
        """Router of one layer: its matrix, softmax and top-k."""
        if (measured := self.measured.price("gate", n_tokens)) is not None:
            return measured
        n_bytes = self.model.gate_bytes(self.precision) + self.activation_bytes(n_tokens)
        return self.roofline.price(self.stack.kernels.gate, n_bytes, self.model.gate_flops(n_tokens))

    def _shared(self, n_tokens: int) -> Price:
        """Shared experts of one layer."""
        if (measured := self.measured.price("shared_expert", n_tokens)) is not None:
            return measured
        n_bytes = self._share * self.model.shared_expert_bytes(self.precision) + 2 * self.activation_bytes(n_tokens)
        flops = self._share * self.model.shared_expert_flops(n_tokens)
        return self.roofline.price(self.stack.kernels.shared_expert, n_bytes, flops)

    def _head(self, n_ranges: int) -> Price:
        """Final norm, output head and sampling: one token per range that puts one out; without any, nothing."""
        if not n_ranges:
            return Price(0.0, self.roofline.q_floor)
        if (measured := self.measured.price("head", n_ranges)) is not None:
            return measured
        n_bytes = self._share * self.model.head_bytes(self.precision) + self.activation_bytes(n_ranges)
        return self.roofline.price(self.stack.kernels.head, n_bytes, self._share * self.model.head_flops(n_ranges))

    # -- between GPUs -----------------------------------------------------------------------------------------------

    def all_reduce(self, n_tokens: int) -> Price:
        """Hidden states that each GPU has a part of are added up, on all of them: a ring of 2 (N - 1) steps."""
        n = self.several.n_gpus
        return self._between(2 * (n - 1), 2 * (n - 1) / n * self.activation_bytes(n_tokens))

    def all_gather_logits(self, n_ranges: int) -> Price:
        """Logits that each GPU has a part of, on all of them: a ring of N - 1 steps; of none, nothing."""
        if not n_ranges:
            return Price(0.0, self.copies.q_p2p_latency)
        n, element_bytes = self.several.n_gpus, 4 if self.precision == "fp32" else 2
        return self._between(n - 1, (n - 1) / n * n_ranges * self.model.vocab_size * element_bytes)

    def all_to_all(self, n_pairs: int) -> Price:
        """Hidden states go to their experts, or back; the busiest port moves so many."""
        return self._between(self.several.n_gpus - 1, self.activation_bytes(n_pairs))

    def hand_over(self, n_tokens: int) -> Price:
        """Hidden states go on to the GPU that has the next layer."""
        return self._between(1, self.activation_bytes(n_tokens))

    def _between(self, n_steps: int, n_bytes: float) -> Price:
        """Transfers one after the other, which move so many bytes through a port."""
        copies = self.copies
        waits_s, moves_s = n_steps * copies.p2p_latency_s, n_bytes / copies.p2p_bytes_per_s
        return Price(waits_s + moves_s, copies.q_p2p_bandwidth if moves_s > waits_s else copies.q_p2p_latency)


def key_share(model: Model, n_gpus: int) -> float:
    """The share of keys and values that each GPU holds and reads where heads are dealt out.

    With fewer heads of keys than GPUs each is held by several; MLA's latent is one for all heads.
    """
    return 1.0 if model.mla is not None else 1.0 / min(n_gpus, model.n_kv_heads)
