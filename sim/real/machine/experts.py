"""The part of the real machine that computes experts: on the GPUs from their pieces, or on the CPU's cores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sim.machine.lanes import CPU
from sim.policy.tickets import Ticket
from sim.real.devices.work import COMPUTE, DOWN, POOL, UP, Work, works_of
from sim.real.machine.copies import RealLinks
from sim.real.machine.decoder import Decoder
from sim.real.machine.partial import Partial, Result
from sim.real.machine.store import extent

if TYPE_CHECKING:
    from sim.policy.pieces import Piece
    from sim.profiles.models import Model
    from sim.real.devices.work import Lanes
    from sim.real.machine.ledger import Ledger
    from sim.real.machine.routing import Routing
    from sim.real.weights.weights import Weights


class RealExperts(RealLinks):
    """Experts of the layer under way, whose results the next block of GPU 0's stream adds up."""

    def __init__(
        self, lanes: Lanes, model: Model, weights: Weights, arena_bytes: Sequence[int], routing: Routing,
        max_positions: int, ledger: Ledger,
    ) -> None:  # fmt: skip
        # Its tables go to the device before the arena does, which waits for the device.
        self.decoder = Decoder(model, weights, lanes.torch, lanes.device, max_positions)
        super().__init__(lanes, weights, arena_bytes, ledger)
        self.model, self.routing = model, routing
        self._partials: dict[int, Partial] = {}  # of the layer under way, by expert
        self._results: list[Result] = []
        self._on_cpu: dict[Ticket, Result] = {}
        self._joins: tuple[Work, ...] = ()
        self._gate: Work | None = None
        self._gate_layer = 0

    def expert(
        self,
        piece: Piece,
        n_tokens: int,
        arrived_s: float,
        after: tuple[Ticket, ...],
        parts: Sequence[Piece],
    ) -> Ticket:
        began_s = self.now_s
        expert = self._partials.get(piece.expert)
        if expert is None:
            routed = self.routing.rows(piece.layer, piece.expert)
            expert = self._partials[piece.expert] = Partial(piece.layer, piece.expert, self.weights.rows, routed)
        read = self._input if piece.gpu == 0 else self._sent
        part = extent(piece, self.weights.rows)
        values = self.store.side_by_side(parts) if parts else self.store.values(piece)
        results, compute = expert.add(part, values, self.decoder, read)
        self._results += results
        works = works_of(after)
        if piece.gpu:  # its stream knows nothing of GPU 0's: it waits for the gate, and the next block for it
            assert self._gate is not None
            works = (*works, self._gate)
        work = Work(COMPUTE, "expert", compute, works, layer=piece.layer, expert=piece.expert, n_tokens=n_tokens)
        work.gpu = piece.gpu
        self.lanes.submit(work)
        if piece.gpu:
            self._joins = (*self._joins, work)
        for read_from in parts or (piece,):
            self.store.last_use[read_from] = work
        self._said("launch expert", piece.layer, piece.expert, n_tokens, 0, began_s)
        return work

    def _sent(self, result: Result) -> Any:
        """The rows that an expert elsewhere computes, in memory of its own."""
        result.foreign = True
        return self._input(result).clone()

    def _input(self, result: Result, normed: Any = None) -> Any:
        """The rows that an expert computes, on the device; runs on the lane that reads them."""
        normed = self.decoder.normed if normed is None else normed
        if result.rows is None:
            return normed
        result.rows, result.share = self.lanes.upload(result.rows), self.lanes.upload(result.share)
        return normed.index_select(0, result.rows)

    def cpu_expert(self, layer: int, expert: int, n_tokens: int) -> Ticket:
        began_s = self.now_s
        torch, weights, hidden = self.torch, self.weights, self.model.hidden_size
        ahead = layer > self._gate_layer
        rows, share = self.routing.first(n_tokens) if ahead else self.routing.rows(layer, expert)
        n_bytes = n_tokens * hidden * weights.element_bytes
        matrices = self._at_home(layer, expert)
        inbox = self.lanes.on_host(n_bytes).view(weights.dtype).view(n_tokens, hidden)
        outbox = self.lanes.on_host(n_bytes).view(weights.dtype).view(n_tokens, hidden)
        result = Result((layer, expert, 0.0), rows, share)
        result.foreign = True
        source = self._gate  # the rows to send are there once the gate has run

        normed = self.decoder.normed  # now: this lane may get there after the next layer has begun

        def send() -> None:
            self.lanes.used_here(normed)
            inbox.copy_(self._input(result, normed), non_blocking=True)

        def compute() -> None:
            outbox.copy_(self.decoder.ffn(inbox, matrices))

        def bring() -> None:
            result.out = torch.empty((n_tokens, hidden), dtype=weights.dtype, device=self.lanes.device)
            result.out.copy_(outbox, non_blocking=True)

        facts: dict[str, Any] = {"layer": layer, "expert": expert, "n_tokens": n_tokens}
        down = Work(DOWN, "activations", send, () if source is None else (source,), n_bytes=n_bytes, **facts)
        pool = Work(POOL, "expert", compute, (down,), **facts)
        back = Work(UP, "activations", bring, (pool,), n_bytes=n_bytes, **facts)
        back.cause = CPU
        for work in (down, pool, back):
            self.lanes.submit(work)
        self.d2h_bytes += n_bytes
        self.h2d_bytes += n_bytes
        self._on_cpu[back] = result
        self._said("launch cpu_expert", layer, expert, n_tokens, n_bytes, began_s)
        return back

    def _at_home(self, layer: int, expert: int) -> Any:
        """An expert's matrices [3, intermediate, hidden] as they lie in host memory."""
        weights, hidden = self.weights, self.model.hidden_size
        values = weights.experts[layer][expert].view(weights.dtype)
        return values[: 3 * weights.rows * hidden].view(3, weights.rows, hidden)

    def join(self, ticket: Ticket) -> None:
        assert isinstance(ticket, Work)
        self._joins = (*self._joins, ticket)
        result = self._on_cpu.pop(ticket)
        if result.rows is None:  # computed ahead, its weight was not known yet
            result.share = self.routing.rows(ticket.layer, ticket.expert)[1]
        self._results.append(result)
