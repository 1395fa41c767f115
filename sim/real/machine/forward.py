"""A pass of the model on GPU 0's compute stream, block by block, but for its routed experts."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from sim.real.devices.work import COMPUTE, Work
from sim.real.machine.combine import added_up
from sim.real.machine.decoder import Span
from sim.real.machine.partial import Result
from sim.workload.iterations import PREFILL

if TYPE_CHECKING:
    from sim.profiles.models import Model
    from sim.real.devices.lanes import Lanes
    from sim.real.machine.combine import Combine
    from sim.real.machine.decoder import Decoder
    from sim.real.machine.routing import Routing
    from sim.workload.iterations import Iteration


class Forward:
    """Launches embedding, attention, gates, shared experts, dense layers and head; keeps the requests' KV caches."""

    def __init__(
        self, lanes: Lanes, model: Model, decoder: Decoder, routing: Routing, combine: Combine, max_tokens: int
    ) -> None:
        self._lanes, self._model, self._decoder = lanes, model, decoder
        self._routing, self._combine = routing, combine
        self._caches: dict[int, Span] = {}
        self._chosen = self._host_ids(max_tokens, model.top_k)  # the gate's choice, read back
        self._next_ids = self._host_ids(max_tokens)
        self._embed: Any = None
        self._longest = 0
        self._iteration: Iteration | None = None

    @property
    def iteration(self) -> Iteration:
        """The one under way."""
        assert self._iteration is not None
        return self._iteration

    def _host_ids(self, *shape: int) -> Any:
        """Host memory for ids; a read-back has to fill one run of it, or it would go through pageable memory."""
        return self._lanes.device.on_host(8 * math.prod(shape)).view(self._lanes.torch.int64).view(shape)

    def begin(self, iteration: Iteration) -> None:
        """Take up an iteration's rows; its first block embeds them."""
        self._iteration = iteration
        at, spans = 0, []
        for r in iteration.ranges:
            n = r.stop_row - r.start_row
            if r.phase == PREFILL:
                self._caches[r.request.index] = Span(0, 0, 0, None, None)
            spans.append((at, n, r.context, r.request.prompt_len + r.request.outputs, r.request.index))
            at += n
        self._embed = (spans, self._lanes.torch.from_numpy(self._routing.token_ids(iteration)))
        self._longest = max(n + context for _, n, context, _, _ in spans)

    def _launch(
        self, op: str, layer: int, call: Any, after: tuple[Work, ...] = (), n_tokens: int | None = None
    ) -> Work:
        n = self.iteration.n_tokens if n_tokens is None else n_tokens
        work = Work(COMPUTE, op, call, after, layer=layer, n_tokens=n)
        self._lanes.submit(work)
        return work

    def _opening(self) -> tuple[Any, tuple[Work, ...]]:
        """What the next block does first: embed, add up the experts' results; and what it waits for."""
        results, joins = self._combine.take()
        embed, self._embed = self._embed, None
        return partial(self._open, embed, results), joins

    def _open(self, embed: Any, results: list[Result]) -> None:
        decoder, device = self._decoder, self._lanes.device
        if embed is not None:
            spans, ids = embed
            decoder.spans = [self._span(*span) for span in spans]
            decoder.embed(device.upload(ids))
        decoder.hidden = added_up(decoder.hidden, results, device)

    def _span(self, at: int, n_tokens: int, context: int, n_positions: int, request: int) -> Span:
        """A request's rows with its caches, which are made on the lane that fills them."""
        kept = self._caches[request]
        if kept.keys is None:
            kept.keys, kept.values = self._decoder.cache(n_positions)
        return Span(at, n_tokens, context, kept.keys, kept.values)

    def dense_before(self, moe_layer: int) -> range:
        """Layers without experts before MoE layer `moe_layer` (or after the last one)."""
        ids = self._model.moe_layer_ids
        first = 0 if moe_layer == 0 else ids[moe_layer - 1] + 1
        return range(first, ids[moe_layer] if moe_layer < len(ids) else self._model.n_layers)

    def dense(self, number: int, moe_layer: int) -> None:
        """Layer `number`, which has no experts and comes before MoE layer `moe_layer`."""
        opening, after = self._opening()

        def dense() -> None:
            opening()
            self._decoder.attention(number)
            self._decoder.dense_ffn(number)

        self._launch("dense_layer", moe_layer, dense, after)

    def attention(self, layer: int) -> None:
        """The attention block of MoE layer `layer`."""
        opening, after = self._opening()
        number = self._model.moe_layer_ids[layer]

        def attend() -> None:
            opening()
            self._decoder.attention(number)

        self._launch("attention", layer, attend, after).context = self._longest

    def gate(self, layer: int) -> Work:
        """The gate of MoE layer `layer`; its choice is read back into `chosen`."""
        number, n = self._model.moe_layer_ids[layer], self.iteration.n_tokens

        def choose() -> None:
            self._decoder.gate(number)
            self._chosen[:n].copy_(self._decoder.top[1], non_blocking=True)

        return self._launch("gate", layer, choose)

    def chosen(self) -> list[list[int]]:
        """What the gate has chosen, once it has ended."""
        ids: list[list[int]] = self._chosen[: self.iteration.n_tokens].tolist()
        return ids

    def shared(self, layer: int) -> None:
        """The shared experts of MoE layer `layer`."""
        number, result = self._model.moe_layer_ids[layer], Result((layer, -1, 0.0), None, None)

        def compute() -> None:
            result.out = self._decoder.shared(number)

        self._combine.add(result)
        self._launch("shared_expert", layer, compute)

    def head(self) -> Work:
        """Final norm and head; the next tokens are read back into `next_ids`."""
        opening, after = self._opening()
        n_ranges = len(self.iteration.ranges)

        def head() -> None:
            opening()
            self._decoder.head()
            self._next_ids[:n_ranges].copy_(self._decoder.out[1], non_blocking=True)

        return self._launch("head", -1, head, after, n_tokens=n_ranges)

    def next_ids(self) -> list[int]:
        """The most likely next token of each request, once the head has ended."""
        ids: list[int] = self._next_ids[: len(self.iteration.ranges)].tolist()
        return ids

    def end(self) -> None:
        """Let go of the caches of requests that are over."""
        for r in self.iteration.ranges:
            if r.stop_row == r.request.first_row + r.request.prompt_len + r.request.outputs - 1:
                self._caches.pop(r.request.index, None)
