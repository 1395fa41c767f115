"""Dense parts on all GPUs at once: tensor-parallel, or data-parallel over requests, with the collectives between.

`tensor` (Megatron-LM, arXiv 1909.08053): each GPU has 1/N of attention's heads, of shared and dense FFNs and of the
vocabulary. What they compute is added up by an all-reduce after attention and one after the FFN or experts; so hidden
states are on every GPU, and experts need no transfer. A ring all-reduce of b bytes takes 2 (N - 1) steps of b / N bytes
(Patarasuk and Yuan, JPDC 69(2), 2009), an all-gather N - 1 of them.

`data` (DeepSpeed-MoE, arXiv 2201.05596; DeepSeek-V3, arXiv 2412.19437): each GPU has all dense weights and serves
requests of its own. Pairs of token and expert go to the experts' GPUs by an all-to-all, and come back by another: N - 1
latencies (pairwise exchange; Thakur et al., IJHPCA 19(1), 2005) and the bytes of the busiest port, out or in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sim.machine.price import Launch, Price
from sim.machine.several import TENSOR
from sim.workload.iterations import Iteration

if TYPE_CHECKING:
    from sim.machine.cost import Cost
    from sim.workload.iterations import Range


class Step(NamedTuple):
    """An operation on several GPUs, launched once; `prices` by GPU, None where it has no part.

    `meets`: it starts on all of them when the last is there.
    """

    op: str
    launch: Launch
    prices: list[Price | None]
    meets: bool = False


class Together:
    """Dense operations of one iteration, in the order of a stream, with the collectives between them."""

    def __init__(self, cost: Cost) -> None:
        self.cost = cost
        self.n_gpus = cost.several.n_gpus
        self.tensor = cost.several.dense == TENSOR
        self.gpu_of: dict[int, int] = {}  # request -> the GPU that serves it, while it runs
        self.n_served = [0] * self.n_gpus
        self.attention_s: list[Price | None] = []
        self._reduces = False  # experts' results are still to be brought together

    # -- an iteration -----------------------------------------------------------------------------------------------

    def begin(self, iteration: Iteration) -> None:
        """Price an iteration."""
        cost = self.cost
        self._reduces = False
        if self.tensor:
            mine: list[Iteration | None] = [iteration] * self.n_gpus
            self.reduced = [cost.all_reduce(iteration.n_tokens)] * self.n_gpus
            self.gathered = [cost.all_gather_logits(iteration.n_out)] * self.n_gpus
        else:
            shares = self._shares(iteration)
            mine = [Iteration(iteration.index, ranges, None) if ranges else None for ranges in shares]  # type: ignore[arg-type]
            self.exchanged = [cost.all_to_all(n) for n in self._pairs(iteration)]
        self.attention_s = [None if one is None else cost.attention(one) for one in mine]
        self.gate_s = [None if one is None else cost.gate(one.n_tokens) for one in mine]
        self.shared_s = [None if one is None or not cost.has_shared else cost.shared(one.n_tokens) for one in mine]
        self.dense_s = [None if one is None or not cost.has_dense else cost.dense_layer(one) for one in mine]
        self.head_s = [None if one is None else cost.head(one.n_out) for one in mine]
        self.head = cost.launches.head_of(iteration.n_out)

    def priced(self) -> tuple[list[Price | None], ...]:
        """Attention, gate, shared experts, dense layer and head, by GPU."""
        return self.attention_s, self.gate_s, self.shared_s, self.dense_s, self.head_s

    def _shares(self, iteration: Iteration) -> list[list[Range]]:
        """Each GPU's ranges: a request stays where it started, on the GPU that then served fewest."""
        shares: list[list[Range]] = [[] for _ in range(self.n_gpus)]
        for r in iteration.ranges:
            request = r.request
            gpu = self.gpu_of.get(request.index)
            if gpu is None:
                gpu = self.gpu_of[request.index] = self.n_served.index(min(self.n_served))
                self.n_served[gpu] += 1
            shares[gpu].append(r)
        self._at = [self.gpu_of[r.request.index] for r in iteration.ranges]
        for r in iteration.ranges:
            if r.stop_row >= r.request.first_row + r.request.prompt_len + r.request.outputs - 1:
                self.n_served[self.gpu_of.pop(r.request.index)] -= 1
        return shares

    def _pairs(self, iteration: Iteration) -> list[int]:
        """Pairs of token and expert that the busiest port moves, by layer."""
        n = self.n_gpus
        ids = iteration.all_ids()  # [tokens, layers, experts]
        n_layers, n_experts = ids.shape[1], self.cost.model.n_experts
        homes = np.array(self.cost.several.homes_of(n_layers * n_experts))
        to = homes[ids + n_experts * np.arange(n_layers)[None, :, None]]
        tokens = [r.stop_row - r.start_row for r in iteration.ranges]
        source = np.repeat(np.array(self._at), tokens)[:, None, None]
        moved = []
        for layer in range(n_layers):
            flow = np.zeros((n, n), dtype=np.int64)
            np.add.at(flow, (np.broadcast_to(source[:, 0], to[:, layer].shape), to[:, layer]), 1)
            np.fill_diagonal(flow, 0)
            moved.append(int(max(flow.sum(axis=0).max(), flow.sum(axis=1).max())))
        return moved

    # -- its steps --------------------------------------------------------------------------------------------------

    def attention(self, layer: int) -> list[Step]:
        """From the experts of the layer before to attention, dense layers between them included."""
        steps = self._results(layer - 1)
        for _ in range(self.cost.n_dense_before[layer]):
            steps += self._dense()
        steps.append(Step("attention", self.cost.launches.attention, self.attention_s))
        if self.tensor:
            steps.append(Step("all_reduce", self.cost.launches.joined, [*self.reduced], True))
        return steps

    def _dense(self) -> list[Step]:
        launches = self.cost.launches
        steps = [Step("dense_layer", launches.dense, self.dense_s)]
        if self.tensor:
            steps += [Step("all_reduce", launches.joined, [*self.reduced], True)] * 2
        return steps

    def gate(self, layer: int) -> list[Step]:
        """The gate; where tokens are apart, they then go to their experts."""
        self._reduces = True
        steps = [Step("gate", self.cost.launches.gate, self.gate_s)]
        if not self.tensor:
            steps.append(Step("all_to_all", self.cost.launches.joined, [self.exchanged[layer]] * self.n_gpus, True))
        return steps

    def shared(self) -> list[Step]:
        """The shared experts, where there are any."""
        return [Step("shared_expert", self.cost.launches.shared, self.shared_s)] if self.cost.has_shared else []

    def _results(self, layer: int) -> list[Step]:
        """What experts have computed is brought together, or back."""
        if not self._reduces:
            return []
        self._reduces = False
        if self.tensor:
            return [Step("all_reduce", self.cost.launches.joining, [*self.reduced], True)]
        return [Step("all_to_all", self.cost.launches.joining, [self.exchanged[layer]] * self.n_gpus, True)]

    def end(self) -> list[Step]:
        """After the last layer: dense ones, the head, and whatever makes its tokens one GPU's to tell."""
        cost, launches = self.cost, self.cost.launches
        steps = self._results(len(cost.n_dense_before) - 2)
        for _ in range(cost.n_dense_before[-1]):
            steps += self._dense()
        steps.append(Step("head", self.head, self.head_s))
        if self.tensor:
            steps.append(Step("all_gather", launches.joined, [*self.gathered], True))
        else:
            nothing: list[Price | None] = [Price(0.0, cost.copies.q_p2p_latency)] * self.n_gpus
            steps.append(Step("meet", launches.meeting, nothing, True))
        return steps
