"""How long an iteration takes when nothing is ever missing: launches, kernels and reads in stream order.

The engine's own arithmetic (`SimMachine`, `Stream`) with every expert resident, and the experts of a layer in the order
that is best for it: longest first. An iteration ends with the host reading the token, when host and stream stand at the
same time, so iterations add up and each can be worked out from zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.machine.cost import Cost
    from sim.machine.price import Launch
    from sim.workload.iterations import Iteration


class Clocks:
    """The host's clock and the time the compute stream is free."""

    __slots__ = ("free_s", "host_s")

    def __init__(self, host_s: float, free_s: float) -> None:
        self.host_s, self.free_s = host_s, free_s

    def launch(self, launch: Launch, duration_s: float) -> None:
        """One operation on the stream."""
        start_s = max(self.host_s + launch.first_s, self.free_s)
        self.host_s += launch.all_s
        self.free_s = max(start_s + duration_s, self.host_s + launch.tail_frac * duration_s)


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


def path_of(cost: Cost, iteration: Iteration, experts: Sequence[Sequence[int]], elsewhere: Sequence[int]) -> Path:
    """The path of an iteration.

    Args:
        experts: per layer, the tokens of each expert on the first GPU. elsewhere: per layer, how many
            experts other GPUs compute; they cost this one's host their launches.
    """
    prices = [
        (cost.launches.attention, cost.attention(iteration).duration_s),
        (cost.launches.gate, cost.gate(iteration.n_tokens).duration_s),
    ]
    shared = (cost.launches.shared, cost.shared(iteration.n_tokens).duration_s) if cost.has_shared else None
    dense = (cost.launches.dense, cost.dense_layer(iteration).duration_s) if cost.has_dense else None
    head = (cost.launches.head, cost.head(len(iteration.ranges)).duration_s)
    steps: dict[tuple[float, int, tuple[int, ...], int], tuple[float, float]] = {}

    def layer(ahead_s: float, n_dense: int, tokens: tuple[int, ...], n_elsewhere: int) -> tuple[float, float]:
        """(host seconds, how far the stream is ahead of the host) after a layer it entered `ahead_s` ahead."""
        key = (ahead_s, n_dense, tokens, n_elsewhere)
        if key not in steps:
            clocks = Clocks(0.0, ahead_s)
            for _ in range(n_dense):
                assert dense is not None
                clocks.launch(*dense)
            for price in prices:
                clocks.launch(*price)
            gate_s = clocks.free_s
            if shared is not None:
                clocks.launch(*shared)
            clocks.host_s = max(gate_s, clocks.host_s) + cost.launches.sync_s
            for expert in cost.in_turn(tokens):
                clocks.launch(*expert)
            clocks.host_s += cost.launches.experts_s(n_elsewhere)
            steps[key] = clocks.host_s, clocks.free_s - clocks.host_s
        return steps[key]

    def through(lists: Sequence[Sequence[int]], others: Sequence[int]) -> float:
        total_s = ahead_s = 0.0
        for tokens, n_elsewhere, n_dense in zip(lists, others, cost.n_dense_before, strict=False):
            spent_s, ahead_s = layer(ahead_s, n_dense, tuple(tokens), n_elsewhere)
            total_s += spent_s
        clocks = Clocks(0.0, ahead_s)
        for _ in range(cost.n_dense_before[-1]):
            assert dense is not None
            clocks.launch(*dense)
        clocks.launch(*head)
        return total_s + max(clocks.free_s, clocks.host_s) + cost.launches.sync_s

    n_layers, n_dense = len(experts), sum(cost.n_dense_before)
    host_s = n_layers * (cost.launches.attention.all_s + cost.launches.gate.all_s + cost.launches.sync_s)
    host_s += n_layers * cost.launches.shared.all_s if shared is not None else 0.0
    host_s += n_dense * cost.launches.dense.all_s
    host_s += sum(cost.launches.experts_s(n) for n in (*map(len, experts), *elsewhere))
    host_s += cost.launches.head.all_s + cost.launches.sync_s
    after_s = head[1] + cost.launches.sync_s + (cost.n_dense_before[-1] * dense[1] if dense is not None else 0.0)
    nothing = [()] * n_layers
    return Path(through(experts, elsewhere), through(nothing, [0] * n_layers), host_s, after_s)
