"""The real machine: it launches, copies and computes, and reads a clock. Policies, engine and `drive` are the same."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sim.base.interrupts import POLL_S, heard
from sim.machine.lanes import HOST, IDLE
from sim.machine.protocol import Ticket
from sim.real.devices.work import COMPUTE, Done, Work
from sim.real.machine.decoder import Span
from sim.real.machine.experts import RealExperts
from sim.real.machine.ledger import Ledger
from sim.real.machine.partial import Result
from sim.real.machine.routing import Routing
from sim.workload.iterations import PREFILL

if TYPE_CHECKING:
    from sim.base.quantities import Source
    from sim.machine.lanes import Spans
    from sim.profiles.models import Model
    from sim.real.devices.work import Lanes
    from sim.real.weights.weights import Weights
    from sim.workload.iterations import Iteration


class RealMachine(RealExperts):
    """Implements `sim.machine.protocol.Machine` on one device.

    Args:
        lanes: the device. weights: of `model`'s geometry. arena_bytes: expert budget on each GPU.
        routing: which rows go to which expert (forced from a trace, or the model's own choice).
        max_positions: longest context. spans: called with every span, or None.
        report_copies: keep completions for `poll`. keep: collect every `Work` in `ledger.kept` (for calibration).
    """

    measured: Literal[True] = True

    def __init__(
        self, lanes: Lanes, model: Model, weights: Weights, arena_bytes: Sequence[int], routing: Routing,
        max_positions: int, max_tokens: int, spans: Spans | None = None, report_copies: bool = False,
        keep: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(lanes, model, weights, arena_bytes, routing, max_positions,
                         Ledger(spans, report_copies, keep, len(arena_bytes)))  # fmt: skip
        self._caches: dict[int, Span] = {}
        self._chosen = self._host_ids(max_tokens, model.top_k)  # the gate's choice, read back
        self._next_ids = self._host_ids(max_tokens)
        self._iteration: Iteration | None = None
        self._embed: Any = None
        self._longest = 0
        self.digest = 0
        self.keep_hidden = False
        self.hidden: list[Any] = []  # of each iteration, on the host, where `keep_hidden` asks for it
        self.on_logits: Any = None  # called with (iteration, logits on the host)

    def _host_ids(self, *shape: int) -> Any:
        """Host memory for ids; a read-back has to fill one run of it, or it would go through pageable memory."""
        return self.lanes.on_host(8 * math.prod(shape)).view(self.torch.int64).view(shape)

    # -- the iteration ----------------------------------------------------------------------------------------------

    def begin(self, iteration: Iteration) -> None:
        began_s = self.now_s
        self._iteration = iteration
        at, spans = 0, []
        for r in iteration.ranges:
            n = r.stop_row - r.start_row
            if r.phase == PREFILL:
                self._caches[r.request.index] = Span(0, 0, 0, None, None)
            spans.append((at, n, r.context, r.request.prompt_len + r.request.outputs, r.request.index))
            at += n
        self.routing.begin(iteration)
        ids = self.torch.from_numpy(self.routing.token_ids(iteration))
        self._embed = (spans, ids)
        self._longest = max(n + context for _, n, context, _, _ in spans)
        self._said("begin", -1, -1, iteration.n_tokens, 0, began_s)

    def _compute(self, op: str, layer: int, call: Any, after: tuple[Work, ...] = (), expert: int = -1,
                 n_tokens: int | None = None) -> Work:  # fmt: skip
        """Launch on the compute stream, with whatever it must join first."""
        assert self._iteration is not None
        work = Work(COMPUTE, op, call, after, layer=layer, expert=expert,
                    n_tokens=self._iteration.n_tokens if n_tokens is None else n_tokens)  # fmt: skip
        self.lanes.submit(work)
        return work

    def _begin_block(self) -> tuple[Any, tuple[Work, ...]]:
        """What the next block of the stream does first: embed, add up the experts' results; and what it waits for."""
        results, self._results = sorted(self._results, key=lambda r: r.key), []
        after, self._joins = self._joins, ()
        embed, self._embed = self._embed, None
        return partial(self._open_block, embed, results), after

    def _open_block(self, embed: Any, results: list[Result]) -> None:
        decoder = self.decoder
        if embed is not None:
            spans, ids = embed
            decoder.spans = [self._span(*span) for span in spans]
            decoder.embed(self.lanes.upload(ids))
        hidden = decoder.hidden
        for result in results:
            if result.foreign:
                for tensor in (result.out, result.rows, result.share):
                    if isinstance(tensor, self.torch.Tensor):
                        self.lanes.used_here(tensor)
            out = result.out if result.share is None else result.out * result.share
            hidden = hidden + out if result.rows is None else hidden.index_add(0, result.rows, out)
        decoder.hidden = hidden

    def _span(self, at: int, n_tokens: int, context: int, n_positions: int, request: int) -> Span:
        """A request's rows with its caches, which are made on the lane that fills them."""
        kept = self._caches[request]
        if kept.keys is None:
            kept.keys, kept.values = self.decoder.cache(n_positions)
        return Span(at, n_tokens, context, kept.keys, kept.values)

    def _dense_layers(self, moe_layer: int) -> None:
        """Layers without experts before MoE layer `moe_layer` (or after the last one)."""
        ids = self.model.moe_layer_ids
        first = 0 if moe_layer == 0 else ids[moe_layer - 1] + 1
        for number in range(first, ids[moe_layer] if moe_layer < len(ids) else self.model.n_layers):
            began_s = self.now_s
            opening, after = self._begin_block()

            def dense(opening: Any = opening, number: int = number) -> None:
                opening()
                self.decoder.attention(number)
                self.decoder.dense_ffn(number)

            self._compute("dense_layer", moe_layer, dense, after)
            self._said("launch dense_layer", moe_layer, -1, 0, 0, began_s)

    def attention(self, layer: int) -> None:
        self._dense_layers(layer)
        began_s = self.now_s
        opening, after = self._begin_block()
        number = self.model.moe_layer_ids[layer]

        def attend() -> None:
            opening()
            self.decoder.attention(number)

        work = self._compute("attention", layer, attend, after)
        work.context = self._longest
        self._said("launch attention", layer, -1, 0, 0, began_s)

    def gate(self, layer: int) -> Ticket:
        began_s = self.now_s
        assert self._iteration is not None
        number, n = self.model.moe_layer_ids[layer], self._iteration.n_tokens

        def choose() -> None:
            self.decoder.gate(number)
            self._chosen[:n].copy_(self.decoder.top[1], non_blocking=True)

        self._gate, self._gate_layer = self._compute("gate", layer, choose), layer
        self._partials = {}
        self._said("launch gate", layer, -1, n, 0, began_s)
        return self._gate

    def shared(self, layer: int) -> None:
        if not self.model.shared_intermediate_size:
            return
        began_s = self.now_s
        number, result = self.model.moe_layer_ids[layer], Result((layer, -1, 0.0), None, None)

        def compute() -> None:
            result.out = self.decoder.shared(number)

        self._results.append(result)
        self._compute("shared_expert", layer, compute)
        self._said("launch shared_expert", layer, -1, 0, 0, began_s)

    def sync(self, ticket: Ticket) -> None:
        began_s = self.now_s
        if isinstance(ticket, Work):
            self.lanes.wait(ticket)
            if ticket is self._gate:
                assert self._iteration is not None
                chosen = self._chosen[: self._iteration.n_tokens].tolist()
                self.routing.chose(self._gate_layer, chosen, self.decoder)
        self.ledger.waited(ticket, began_s, self.now_s)

    def end(self) -> None:
        self._dense_layers(self.model.n_moe_layers)
        began_s = self.now_s
        opening, after = self._begin_block()
        assert self._iteration is not None
        n_ranges = len(self._iteration.ranges)

        def head() -> None:
            opening()
            self.decoder.head()
            self._next_ids[:n_ranges].copy_(self.decoder.out[1], non_blocking=True)

        work = self._compute("head", -1, head, after, n_tokens=n_ranges)
        self._said("launch head", -1, -1, n_ranges, 0, began_s)
        self.sync(work)
        self._read_out()
        self.ledger.take(self.lanes.finished)
        self.ledger.idle_until(self.now_s, HOST)

    def _read_out(self) -> None:
        """What the pass has come to: the next tokens, and a digest of its hidden rows."""
        iteration = self._iteration
        assert iteration is not None
        hidden = self.decoder.hidden.to("cpu")
        self.digest = zlib.crc32(hidden.view(self.torch.uint8).numpy(), self.digest)
        if self.keep_hidden:
            self.hidden.append(hidden.clone())
        if self.on_logits is not None:
            self.on_logits(iteration, self.decoder.out[0].to("cpu"))
        self.routing.put_out(iteration, self._next_ids[: len(iteration.ranges)].tolist())
        for r in iteration.ranges:
            if r.stop_row == r.request.first_row + r.request.prompt_len + r.request.outputs - 1:
                self._caches.pop(r.request.index, None)

    def warm_up(self, n_tokens: int) -> None:
        """Run every kernel once at many widths, untimed: the first call of a shape loads and plans."""
        decoder, torch, number, home = self.decoder, self.torch, self.model.moe_layer_ids[0], self._at_home(0, 0)
        dense = next((i for i in range(self.model.n_layers) if i not in self.model.moe_layer_ids), None)
        widths = {1, n_tokens, *(2**i for i in range(13))}
        if self.lanes.device != "cpu":  # which kernel a product takes depends on how many rows it has
            widths |= {*range(3, 65), *range(64, 513, 16)}

        def run() -> None:
            matrices = home.to(decoder.device)
            for n in sorted(width for width in widths if width <= n_tokens):
                decoder.spans = [Span(0, n, 0, *decoder.cache(n))]
                decoder.embed(self.lanes.upload(torch.zeros(n, dtype=torch.int64)))
                every, ones = self.lanes.upload(torch.arange(n)), self.lanes.upload(torch.ones(n, 1))
                for _ in range(3 if n == 1 else 1):
                    decoder.attention(number)
                    decoder.gate(number)
                    out = decoder.ffn(decoder.normed.index_select(0, every), matrices) * ones.to(matrices.dtype)
                    if self.model.shared_intermediate_size:
                        out = out + decoder.shared(number)
                    decoder.hidden = decoder.hidden.index_add(0, every, out) + out
                    if dense is not None:
                        decoder.dense_ffn(dense)
                    decoder.head()

        work = Work(COMPUTE, "settle", run)
        self.lanes.submit(work)
        self.lanes.wait(work)
        self.lanes.finished.clear()

    # -- the rest ---------------------------------------------------------------------------------------------------

    def route(self, layer: int, ids: np.ndarray, weights: np.ndarray) -> None:
        """A lossy policy has changed which rows go where."""
        self.routing.changed(layer, ids, weights)

    def predict(self, duration_s: float, lane: str, blocking: bool, basis: Source) -> Ticket:
        """Nothing more to spend: the policy's own code has just taken its real time (see `ledger.policy_s`)."""
        self.ledger.predict_asked_s += duration_s
        return Done(self.now_s)

    def wait_until(self, time_s: float) -> None:
        """Idle until an arrival: the one place where a real run waits for the clock."""
        while (left_s := time_s - self.now_s) > 0:
            time.sleep(min(left_s, POLL_S))
            heard()
        self.ledger.take(self.lanes.finished)
        self.ledger.idle_until(self.now_s, IDLE)

    def parts_s(self) -> list[float]:
        return list(self.ledger.parts_s)

    def lane_busy_s(self) -> dict[str, float]:
        """Busy seconds by lane; the host's are its launches and reads, policy code apart."""
        return dict(self.ledger.busy_s)
