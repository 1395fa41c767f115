"""DAOP (DATE'25, arXiv 2501.10375): prompts settle which experts stay; predicted CPU experts are computed early.

Source: Zhang, Aggarwal and Mitra, "DAOP: Data-Aware Offloading and Predictive Pre-Calculation for Efficient MoE
Inference"; code ecolab-nus/DAOP@08fef33, model/modeling_daop.py, DAOP/daop_moe.py (`set_expert_loc`) and
data/calibration_data.py, cited at each step. What the paper's text says is taken from third-party notes, not read.
`variant=code` decides prompts by the code's constants, pairs experts to be swapped as the code does, and first copies
each one that leaves to the host (`.to("cpu")`); `variant=paper` compares this machine's latencies, pairs the CPU's
experts with the GPU's, and bills the way up alone, as the host keeps every expert. Popularity is learnt from decode
tokens of the store split, where the code has a list from ShareGPT.

Departures: the way down is time that the host waits (the copy goes into pageable memory), all of it before the layer is
computed, and is not among the bytes of the link down; an expert that leaves while its layer still wants it on the GPU
runs before it leaves, and variant code then sends it once more, as the code does.

Batches (not published): predictions per token, an expert computed early for all tokens it was predicted for; the newest
prompt settles what stays. Several GPUs: swaps stay within a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from policies.common.placement import beside, fill, fits_whole, most_used, uses
from policies.fiddler import Constants, cpu_is_better
from sim.policy import (
    DECODE,
    PREFILL,
    Assignment,
    Evict,
    Fetch,
    Gate,
    Piece,
    Policy,
    Predict,
    RunCpu,
    RunCpuAhead,
    RunGpu,
    Steps,
    StoreSplit,
    Ticket,
    View,
    param,
)


class Daop(Policy):
    """Swaps experts after the prompt's wishes, then executes what the layer before predicted."""

    name = "daop"
    title = "DAOP: per-sequence placement, pre-calculation on the CPU"
    source = "arXiv 2501.10375 (DATE'25); ecolab-nus/DAOP@08fef33 model/modeling_daop.py"
    traits = frozenset({"cpu", "lossy"})
    needs = frozenset({"experts", "scores", "next_scores_1"})
    variant: str = param(
        "paper", "decide prompts by this machine's latencies, or by the code's constants", ("paper", "code")
    )
    cache_experts: int = param(240, "experts on the GPU, at most (`designated_cache_size`)", within=(0, 10**6))
    swap_ratio: float = param(
        1.05,
        "a CPU expert of a prompt replaces a GPU expert with fewer than 1/this of its tokens (`swap_in_out`)",
        within=(0.0, 1e6),
    )
    largest_num: int = param(8, "pairs of experts per layer that may be swapped (`largest_num`)", within=(0, 4096))
    first_predict_layer: int = param(
        5,
        "first layer whose predicted experts are executed; earlier ones use their gate (`first_predict_layer`)",
        within=(1, 4096),
    )
    degrade: bool = param(
        True,
        "of experts that are all on the CPU keep the best, and take the best of those on the GPU for the others "
        "(graceful degradation)",
    )
    copy_down: str = param(
        "variant",
        'an expert that leaves is copied to the host, and waited for (`.to("cpu")`); variant: code does, paper does '
        "not",
        ("variant", "yes", "no"),
    )
    cpu_cost_per_token: float = param(
        3.5,
        "variant code: an expert on the CPU, per token (`latency_cpu`; the code lists A100: Mixtral 5, Phi 2.5; "
        "A6000: 8.5, 3.5)",
        within=(0.0, 1e6),
    )
    copy_cost: float = param(
        30.0,
        "variant code: copying an expert (`latency_gpu`; A100: Mixtral 40, Phi 25; A6000: 210, 30)",
        within=(0.0, 1e6),
    )

    def bind(self, view: View) -> None:
        code = self.variant == "code"
        self._constants = Constants(self.cpu_cost_per_token, self.copy_cost) if code else None
        self._ahead: Assignment | None = None  # what the layer before decided for this one
        self._n_predicted = self._n_right = self._n_swaps = 0

    def learn(self, store: StoreSplit) -> None:
        self._uses: NDArray[np.int64] = uses(store, self.name, prompts=False)

    def initial(self, view: View) -> Iterable[Piece]:
        """`set_expert_loc`: equally many of each layer, its most popular; then by popularity over all layers."""
        spare = 0 if fits_whole(view) else 1  # the placeholder
        room = sum(beside(spare, gpu, view) for gpu in range(view.n_gpus))
        n = min(room, self.cache_experts)
        ranked = most_used(self._uses)
        order = [
            place
            for layer in range(view.n_layers)
            for place in [p for p in ranked if p[0] == layer][: n // view.n_layers]
        ]
        chosen = set(order)
        return fill([*order, *(place for place in ranked if place not in chosen)], view, spare, n)

    # -- prompts ----------------------------------------------------------------------------------------------------

    def gate_done(self, gate: Gate, view: View) -> Steps:
        if gate.phase == PREFILL:
            yield from self._prompt(gate, view)
        else:
            yield from self._token(gate, view)

    def _prompt(self, gate: Gate, view: View) -> Steps:
        """Swap, then share the layer out between CPU and GPU as Fiddler does, both at the same time."""
        layer, needs = gate.layer, gate.needs
        swaps = [swap for gpu in range(view.n_gpus) for swap in self._swaps(gate, gpu, view)]
        self._n_swaps += len(swaps)
        there = {expert for expert in range(view.n_experts) if view.resident(layer, expert)}
        there = there - {cold.expert for _, cold in swaps} | {hot.expert for hot, _ in swaps}
        on_cpu = [e for e in sorted(needs) if e not in there and cpu_is_better(needs[e], view.prices, self._constants)]
        if self.copy_down == "yes" or (self.copy_down == "variant" and self.variant == "code"):
            yield [Predict(view.prices.back_s(), "side", blocking=True) for _ in swaps]
        yield [RunCpu(expert) for expert in on_cpu]
        copies: list[Ticket] = []
        for hot, cold in swaps:
            if not view.evictable(cold):  # it has tokens, too many for the CPU
                copies.append((yield RunGpu(cold.expert)))
                if self._constants is not None:
                    yield Evict(cold)
                    copies.append((yield Fetch(cold)))
            yield Evict(cold)
            copies.append((yield Fetch(hot)))
        last = tuple(copies)
        for expert in view.pending_experts():
            piece = view.piece(layer, expert)
            passing = not view.holds(piece)
            if passing:
                last = (*last, (yield Fetch(piece, after=last)))
            last = ((yield RunGpu(expert, after=last)),)
            if passing:
                yield Evict(piece)

    def _swaps(self, gate: Gate, gpu: int, view: View) -> list[tuple[Piece, Piece]]:
        """(comes, leaves): the CPU's experts by falling and the GPU's by rising number of tokens, in pairs.

        The code sorts all experts into both lists, those of the other side so that they come last: with no token among
        the hot, with as many times their tokens as the prompt is long among the cold. A CPU expert without tokens is so
        the coldest, and a hot one paired with it stays where it is.
        """
        pieces = [p for p in (view.piece(gate.layer, e) for e in range(view.n_experts)) if p.gpu == gpu]
        tokens = {piece: gate.needs.get(piece.expert, 0) for piece in pieces}
        held = {piece for piece in pieces if view.holds(piece)}
        if self.variant == "paper":
            hot = sorted((p for p in pieces if p not in held), key=lambda p: -tokens[p])
            cold = sorted(held, key=lambda p: (tokens[p], p.expert))
        else:
            length = gate.iteration.n_tokens
            hot = sorted(pieces, key=lambda p: -(0 if p in held else tokens[p]))
            cold = sorted(pieces, key=lambda p: tokens[p] * (1 if p in held else length))
        return [
            (comes, leaves)
            for comes, leaves in zip(hot[: self.largest_num], cold[: self.largest_num], strict=False)
            if tokens[comes] > self.swap_ratio * tokens[leaves] and comes not in held and leaves in held
        ]

    # -- tokens -----------------------------------------------------------------------------------------------------

    def assign(self, gate: Gate, view: View) -> Assignment | None:
        if gate.phase != DECODE or gate.layer < self.first_predict_layer:
            return None
        assert self._ahead is not None
        for named, chosen in zip(self._ahead.ids.tolist(), gate.ids.tolist(), strict=True):
            self._n_predicted += len(named)
            self._n_right += sum(expert in chosen for expert in named)
        return self._ahead

    def _token(self, gate: Gate, view: View) -> Steps:
        """Compute ahead what the next layer will want of the CPU; then this layer."""
        layer = gate.layer
        if self.first_predict_layer <= layer + 1 < view.n_layers:
            self._ahead = ahead = self._predict(gate, view)
            for expert, n_tokens in sorted(Counter(ahead.ids.ravel().tolist()).items()):
                if not view.resident(layer + 1, expert):
                    yield RunCpuAhead(layer + 1, expert, n_tokens)
        on_cpu = [expert for expert in gate.needs if not view.resident(layer, expert)]
        before: tuple[Ticket, ...] = ()
        for expert in on_cpu:
            result = yield RunCpu(expert)
            if layer < self.first_predict_layer:  # a layer that follows its gate runs the CPU's experts first
                before = (*before, result)
        for expert in gate.needs:
            if expert not in on_cpu:
                yield RunGpu(expert, after=before)

    def _predict(self, gate: Gate, view: View) -> Assignment:
        """`assign_gate_on_inps`: the next layer's gate on this layer's input, degraded where all is on the CPU."""
        layer, k, experts = gate.layer + 1, view.top_k, range(view.n_experts)
        ids, weights = [], []
        for scores in gate.next_scores(1).tolist():
            ranked = sorted(experts, key=lambda e: -scores[e])
            named = ranked[:k]
            if self.degrade and not any(view.resident(layer, expert) for expert in named):
                better = [expert for expert in ranked if view.resident(layer, expert)][: k - 1]
                named[1 : 1 + len(better)] = better
            mass = [scores[expert] for expert in named]
            total = sum(mass)
            ids.append(named)
            weights.append([share / total if total > 0 else 0.0 for share in mass])
        return Assignment(np.array(ids, dtype=np.int64), np.array(weights))

    def stats(self) -> dict[str, float]:
        """Share of the executed predictions that the gate would have chosen; experts swapped in for prompts."""
        right = self._n_right / self._n_predicted if self._n_predicted else 0.0
        return {"prediction_accuracy": right, "swaps": float(self._n_swaps)}
