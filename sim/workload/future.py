"""What will be asked for: granted to policies with the trait `oracle` alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sim.workload.iterations import Feed, Iteration

if TYPE_CHECKING:
    from sim.workload.batching import Batching
    from traces.format.reader import Trace


def closed_loop(trace: Trace, batching: Batching) -> Iterator[Iteration]:
    """The iterations that a closed loop will run, in their order; `batching` composes them and is used up."""
    feed, index = Feed(trace), 0
    while isinstance(ranges := batching.next(math.inf), list):
        yield Iteration(index, ranges, trace, feed.row(ranges))
        index += 1


class Future:
    """Uses of every (layer, expert) over the iterations to come, in the order a closed loop will run them.

    A step is `iteration * n_layers + layer`.

    Args:
        batching: composes them; used up here.
    """

    def __init__(self, trace: Trace, batching: Batching) -> None:
        self.n_layers = trace.n_layers
        self._uses: list[list[list[int]]] = [[[] for _ in range(trace.n_experts)] for _ in range(trace.n_layers)]
        self._at = [[0] * trace.n_experts for _ in range(trace.n_layers)]
        self._now = (-1, -1)
        self.n_steps = 0
        for iteration in closed_loop(trace, batching):
            index = iteration.index
            self.n_steps += trace.n_layers
            for layer in range(trace.n_layers):
                uses = self._uses[layer]
                for expert in iteration.chosen(layer):
                    uses[expert].append(index)

    def advance(self, iteration: int, layer: int) -> None:
        """The pass has entered this layer: uses up to and including it are no longer ahead."""
        self._now = (iteration, layer)

    def next_use(self, layer: int, expert: int) -> float:
        """Step of the next use after the layer being served now; infinity when there is none."""
        uses, at = self._uses[layer][expert], self._at[layer][expert]
        iteration, now_layer = self._now
        while at < len(uses) and (uses[at] < iteration or (uses[at] == iteration and layer <= now_layer)):
            at += 1
        self._at[layer][expert] = at
        return uses[at] * self.n_layers + layer if at < len(uses) else math.inf

    def uses(self, layer: int, expert: int) -> tuple[list[int], int]:
        """All iterations that ask for an expert, ascending, and where in that list its next use stands."""
        self.next_use(layer, expert)
        return self._uses[layer][expert], self._at[layer][expert]
