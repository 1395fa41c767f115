"""What will be asked for: granted to policies with the trait `oracle` alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from oracle.iterations import Feed, Iteration, Range, RequestInfo, Scheduler

if TYPE_CHECKING:
    from traces.format.reader import Trace


class Future:
    """Uses of every (layer, expert) over the iterations to come, in the order a closed loop will run them.

    A step is `iteration * n_layers + layer`. `split`: passes are iterations, too; 0.1 left them out, and took a step
    of two passes for one.
    """

    def __init__(self, trace: Trace, requests: Sequence[RequestInfo], batch: int, split: Any = None) -> None:
        self.n_layers = trace.n_layers
        self._uses: list[list[list[int]]] = [[[] for _ in range(trace.n_experts)] for _ in range(trace.n_layers)]
        self._at = [[0] * trace.n_experts for _ in range(trace.n_layers)]
        self._now = (-1, -1)
        feed, scheduler, index = Feed(trace), Scheduler(requests, batch, False, split), 0
        while isinstance(ranges := scheduler.next(math.inf), list):
            iteration = Iteration(index, ranges, trace, decode_row(feed, ranges))
            for layer in range(trace.n_layers):
                uses = self._uses[layer]
                for expert in iteration.chosen(layer):
                    uses[expert].append(index)
            index += 1
        self.n_steps = index * trace.n_layers

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


def decode_row(feed: Feed, ranges: list[Range]) -> list[Any] | None:
    """What the feed has of its row when the iteration is a single decode token, else None."""
    if len(ranges) == 1 and ranges[0].phase == "decode":
        only = ranges[0]
        request = only.request
        return feed.row(request.index, only.start_row, request.first_row + request.prompt_len + request.outputs - 1)
    return None
