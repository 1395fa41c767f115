"""How long an iteration takes when nothing is ever missing: launches, kernels and reads in stream order.

The engine's own arithmetic (`SimMachine`, `Stream`) with every expert resident, and the experts of a layer in the order
that is best for it: longest first. An iteration ends with the host reading the token, when host and stream stand at the
same time, so iterations add up and each can be worked out from zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sim.base.flat import floats, ints, longer_floats, numbers
from sim.machine.kernel_group import beyond_s, left_s
from sim.machine.price import Launch

if TYPE_CHECKING:
    from sim.machine.cost import Cost
    from sim.machine.dense_parallel import Together
    from sim.workload.iterations import Iteration
    from traces.format.layout import Ints

NOT_KNOWN_S = -1.0


class Clocks:
    """The host's clock and the time the compute stream is free."""

    __slots__ = ("free_s", "host_s")

    def __init__(self, host_s: float, free_s: float) -> None:
        self.host_s = host_s
        self.free_s = free_s

    def launch(self, launch: Launch, duration_s: float) -> None:
        """One operation on the stream."""
        start_s = self.host_s + launch.first_s
        if start_s < self.free_s:
            start_s = self.free_s
        self.host_s += launch.all_s
        self.free_s = start_s + duration_s
        last_s = self.host_s + launch.tail_frac * duration_s
        if last_s > self.free_s:
            self.free_s = last_s


class Path(NamedTuple):
    """Lower bounds on the time of an iteration (or of several, in turn), whoever decides.

    Attributes:
        whole_s: every expert on the GPU. dense_s: no expert there at all. host_s: what the host alone spends.
        last_s: from the end of the last copy, but for the expert that waited for it, to the end.
    """

    whole_s: float
    dense_s: float
    host_s: float
    last_s: float

    def plus(self, other: Path, weight: float = 1.0, own: float = 1.0) -> Path:
        """Both in turn, `other` last; or a mean of them, with weights."""
        whole_s, dense_s = own * self.whole_s + weight * other.whole_s, own * self.dense_s + weight * other.dense_s
        return Path(whole_s, dense_s, own * self.host_s + weight * other.host_s, other.last_s)


class Experts:
    """What experts of one layer take that are all there: each one's seconds by the tokens it serves, and in turn."""

    def __init__(self, cost: Cost) -> None:
        self.cost = cost
        self.grouped = cost.launches.grouped
        self.first = cost.launches.expert
        self.next = cost.launches.member if self.grouped else cost.launches.expert
        self.whole_s = floats(64, NOT_KNOWN_S)  # alone
        self.work_s = floats(64, NOT_KNOWN_S)  # without the floor of kernels
        self.n_known = 64
        self.tokens = ints(64)
        self.n_at_most = 64

    def ask(self, n_tokens: int) -> None:
        """Know what an expert takes for so many."""
        if n_tokens >= self.n_known:
            n_known = max(n_tokens + 1, 2 * self.n_known)
            self.whole_s = longer_floats(self.whole_s, n_known, NOT_KNOWN_S)
            self.work_s = longer_floats(self.work_s, n_known, NOT_KNOWN_S)
            self.n_known = n_known
        if self.whole_s[n_tokens] < 0.0:
            cost = self.cost
            self.whole_s[n_tokens] = whole_s = cost.expert(n_tokens, cost.precision).duration_s
            self.work_s[n_tokens] = cost.work(n_tokens, cost.precision).duration_s if self.grouped else whole_s

    def work_of(self, n_tokens: int) -> float:
        """Seconds of one for so many, without the floor of kernels where experts share them."""
        if n_tokens >= self.n_known or self.whole_s[n_tokens] < 0.0:
            self.ask(n_tokens)
        return self.work_s[n_tokens]

    def run(self, clocks: Clocks, tokens: Sequence[int], start: int, stop: int) -> None:
        """Launch one for each of these numbers of tokens [start, stop), longest first."""
        n = stop - start
        if n > self.n_at_most:
            self.tokens = ints(n)
            self.n_at_most = n
        for at in range(n):
            n_tokens = tokens[start + at]
            work_s = self.work_of(n_tokens)
            place = at
            while place > 0 and self.work_s[self.tokens[place - 1]] < work_s:
                self.tokens[place] = self.tokens[place - 1]
                place -= 1
            self.tokens[place] = n_tokens
        slack_s = 0.0
        for at in range(n):
            n_tokens = self.tokens[at]
            work_s = self.work_s[n_tokens]
            if at == 0 or not self.grouped:
                clocks.launch(self.first, self.whole_s[n_tokens])
                slack_s = self.whole_s[n_tokens] - work_s
            else:
                clocks.launch(self.next, beyond_s(work_s, slack_s))
                slack_s = left_s(work_s, slack_s)


class Layers:
    """The operations of an iteration's layers but their experts: (launch, seconds) of each."""

    def __init__(self, cost: Cost, iteration: Iteration, together: Together | None, reads: bool) -> None:
        launches = cost.launches
        self.cost = cost
        self.reads = reads
        self.attention = launches.attention
        self.attention_s = cost.attention(iteration).duration_s
        self.gate = launches.gate
        self.gate_s = cost.gate(iteration.n_tokens).duration_s
        self.has_shared = cost.has_shared
        self.shared = launches.shared
        self.shared_s = cost.shared(iteration.n_tokens).duration_s if cost.has_shared else 0.0
        self.has_dense = cost.has_dense
        self.dense = launches.dense
        self.dense_s = cost.dense_layer(iteration).duration_s if cost.has_dense else 0.0
        self.head = launches.head_of(iteration.n_out)
        self.head_s = cost.head(iteration.n_out).duration_s
        self.sync_s = launches.sync_s
        # Collectives, where dense parts are on all GPUs; those around experts by layer.
        self.met_attention_s = self.met_head_s = 0.0
        n_layers = len(cost.n_dense_before) - 1
        self.met_gate_s, self.met_experts_s = floats(n_layers, 0.0), floats(n_layers, 0.0)
        self.handed_s = floats(n_layers + 1, 0.0)  # hidden states go on to another GPU before a layer, or the head
        if cost.several.in_turn:
            for at, n_hops in enumerate(cost.n_hops_before):
                self.handed_s[at] = n_hops * cost.hand_over(iteration.n_tokens).duration_s
        if together is not None:
            self._divided(together, iteration)

    def _divided(self, together: Together, iteration: Iteration) -> None:
        """Operations of the GPU that has most to attend to: the others wait for it in every layer, for its collectives.

        Experts follow the shared experts of GPU 0 on its stream. Launches of collectives are left out.
        """
        together.begin(iteration)
        seconds = [[0.0 if price is None else price.duration_s for price in prices] for prices in together.priced()]
        attention_s, gate_s, shared_s, dense_s, head_s = seconds
        busiest = attention_s.index(max(attention_s))
        self.attention_s, self.gate_s, self.shared_s = attention_s[busiest], gate_s[busiest], shared_s[0]
        self.dense_s, self.head_s = dense_s[busiest], head_s[busiest]
        if together.tensor:
            reduced_s = together.reduced[0].duration_s
            self.dense_s += 2.0 * reduced_s
            self.met_attention_s, self.met_head_s = reduced_s, together.gathered[0].duration_s
            self.met_experts_s = floats(len(self.met_experts_s), reduced_s)
        else:
            for layer, exchanged in enumerate(together.exchanged):
                self.met_gate_s[layer] = self.met_experts_s[layer] = exchanged.duration_s

    def through(
        self,
        experts: Experts | None,
        tokens: Sequence[int],
        stops: Sequence[int],
        elsewhere: Sequence[int],
        away_s: Sequence[float],
    ) -> float:
        """Seconds of all layers, with experts for these numbers of tokens (None: with none), and of the head.

        Args:
            stops: per layer, where its numbers end.
            away_s: per layer, what other GPUs take for their experts, or nothing.
        """
        total_s = ahead_s = 0.0
        n_dense_before: list[int] = self.cost.n_dense_before
        clocks = Clocks(0.0, 0.0)
        start = stop = 0
        for layer in range(len(n_dense_before) - 1):
            clocks.host_s = 0.0
            clocks.free_s = ahead_s + self.handed_s[layer]
            for _ in range(n_dense_before[layer]):
                clocks.launch(self.dense, self.dense_s)
            clocks.launch(self.attention, self.attention_s)
            clocks.free_s += self.met_attention_s
            clocks.launch(self.gate, self.gate_s)
            clocks.free_s += self.met_gate_s[layer]
            gate_s = clocks.free_s
            if self.has_shared:
                clocks.launch(self.shared, self.shared_s)
            if self.reads:
                if gate_s > clocks.host_s:
                    clocks.host_s = gate_s
                clocks.host_s += self.sync_s
            if experts is not None:
                start, stop = stop, stops[layer]
                there_s = clocks.host_s + away_s[layer] if elsewhere[layer] else 0.0
                experts.run(clocks, tokens, start, stop)
                if elsewhere[layer]:
                    clocks.host_s += self.cost.launches.experts_s(elsewhere[layer])
                if there_s > clocks.free_s:
                    clocks.free_s = there_s
            clocks.free_s += self.met_experts_s[layer]
            total_s += clocks.host_s
            ahead_s = clocks.free_s - clocks.host_s
        clocks.host_s = 0.0
        clocks.free_s = ahead_s + self.handed_s[len(n_dense_before) - 1]
        for _ in range(n_dense_before[len(n_dense_before) - 1]):
            clocks.launch(self.dense, self.dense_s)
        clocks.launch(self.head, self.head_s)
        clocks.free_s += self.met_head_s
        return total_s + (clocks.host_s if clocks.host_s > clocks.free_s else clocks.free_s) + self.sync_s


def path_of(
    cost: Cost,
    experts: Experts,
    iteration: Iteration,
    tokens: Ints,
    stops: Ints,
    elsewhere: Sequence[int],
    together: Together | None = None,
    away_s: Sequence[float] = (),
    reads: bool = True,
) -> Path:
    """The path of an iteration.

    Args:
        experts: of this cost. tokens: of each expert on the first GPU, layer by layer, most first; stops: where each
            layer ends there. elsewhere: per layer, how many experts other GPUs compute; they cost this one's host their
            launches.
        together: dense parts on all GPUs. away_s: what the busiest of the others takes for those, at least; left out
            where they may be computed on the CPU. reads: the host reads every router's choice.
    """
    layers = Layers(cost, iteration, together, reads)
    launches, n_layers, n_dense = cost.launches, len(stops), sum(cost.n_dense_before)
    host_s = n_layers * (launches.attention.all_s + launches.gate.all_s + (launches.sync_s if reads else 0.0))
    host_s += n_layers * launches.shared.all_s if cost.has_shared else 0.0
    host_s += n_dense * launches.dense.all_s
    here = np.diff(stops, prepend=0).tolist()
    of = {n: launches.experts_s(n) for n in {*here, *elsewhere}}
    host_s += sum([of[n] for n in (*here, *elsewhere) if n])
    host_s += layers.head.all_s + launches.sync_s
    n_dense_after = cost.n_dense_before[n_layers]
    after_s = layers.head_s + launches.sync_s + (n_dense_after * layers.dense_s if cost.has_dense else 0.0)
    away = away_s or [0.0] * n_layers
    whole_s = layers.through(experts, numbers(tokens), numbers(stops), elsewhere, away)
    none = numbers(stops[:0])
    return Path(whole_s, layers.through(None, none, none, (), ()), host_s, after_s)
