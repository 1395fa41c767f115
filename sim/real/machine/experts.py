"""Routed experts of the layer under way: on the GPUs from their pieces, or on the CPU's cores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sim.machine.lanes import CPU
from sim.real.devices.work import COMPUTE, D2H, H2D, POOL, Work
from sim.real.machine.partial import Partial, Result
from sim.real.machine.store import DeviceStore, extent

if TYPE_CHECKING:
    from sim.policy.pieces import Piece
    from sim.policy.tickets import Ticket
    from sim.real.devices.lanes import Lanes
    from sim.real.machine.combine import Combine
    from sim.real.machine.decoder import Decoder
    from sim.real.machine.routing import Routing
    from sim.real.weights.weights import Weights


class Experts:
    """Launches experts; what they make goes to `combine`."""

    def __init__(
        self, lanes: Lanes, weights: Weights, store: DeviceStore, decoder: Decoder, routing: Routing, combine: Combine
    ) -> None:
        self._lanes, self._weights, self._store, self._decoder = lanes, weights, store, decoder
        self._routing, self._combine = routing, combine
        self._partials: dict[int, Partial] = {}  # of the layer under way, by expert
        self._on_cpu: dict[Ticket, Result] = {}
        self.gate: Work | None = None
        self.gate_layer = 0

    def begin_layer(self, layer: int, gate: Work) -> None:
        """The gate of `layer` has been launched: its rows are what experts read from now on."""
        self.gate, self.gate_layer = gate, layer
        self._partials = {}

    def launch(self, piece: Piece, n_tokens: int, after: tuple[Work, ...], parts: Sequence[Piece]) -> Work:
        """Compute the expert of `piece` for `n_tokens` on the piece's GPU; `parts` as in `Machine.expert`."""
        expert = self._partials.get(piece.expert)
        if expert is None:
            routed = self._routing.rows(piece.layer, piece.expert)
            expert = self._partials[piece.expert] = Partial(piece.layer, piece.expert, self._weights.rows, routed)
        read = self._input if piece.gpu == 0 else self._sent
        part = extent(piece, self._weights.rows)
        values = self._store.side_by_side(parts) if parts else self._store.values(piece)
        results, compute = expert.add(part, values, self._decoder, read)
        self._combine.add(*results)
        if piece.gpu:  # its stream knows nothing of GPU 0's: it waits for the gate, and the next block for it
            assert self.gate is not None
            after = (*after, self.gate)
        work = Work(COMPUTE, "expert", compute, after, layer=piece.layer, expert=piece.expert, n_tokens=n_tokens)
        work.gpu = piece.gpu
        self._lanes.submit(work)
        if piece.gpu:
            self._combine.join(work)
        for read_from in parts or (piece,):
            self._store.last_use[read_from] = work
        return work

    def _sent(self, result: Result) -> Any:
        """The rows that an expert elsewhere computes, in memory of its own."""
        result.foreign = True
        return self._input(result).clone()

    def _input(self, result: Result, normed: Any = None) -> Any:
        """The rows that an expert computes, on the device; runs on the lane that reads them."""
        normed = self._decoder.normed if normed is None else normed
        if result.rows is None:
            return normed
        device = self._lanes.device
        result.rows, result.share = device.upload(result.rows), device.upload(result.share)
        return normed.index_select(0, result.rows)

    def bytes_of(self, n_tokens: int) -> int:
        """Of the rows that an expert on the CPU reads, and of its results."""
        return n_tokens * self._weights.hidden_size * self._weights.element_bytes

    def on_cpu(self, layer: int, expert: int, n_tokens: int) -> Work:
        """Send rows down, compute on the CPU, bring the results up; what comes back is the way up."""
        lanes, device, weights = self._lanes, self._lanes.device, self._weights
        hidden, n_bytes = weights.hidden_size, self.bytes_of(n_tokens)
        ahead = layer > self.gate_layer
        rows, share = self._routing.first(n_tokens) if ahead else self._routing.rows(layer, expert)
        matrices = weights.matrices(layer, expert)
        inbox = device.on_host(n_bytes).view(weights.dtype).view(n_tokens, hidden)
        outbox = device.on_host(n_bytes).view(weights.dtype).view(n_tokens, hidden)
        result = Result((layer, expert, 0.0), rows, share)
        result.foreign = True
        source = self.gate  # the rows to send are there once the gate has run
        normed = self._decoder.normed  # now: this lane may get there after the next layer has begun

        def send() -> None:
            device.used_here(normed)
            inbox.copy_(self._input(result, normed), non_blocking=True)

        def compute() -> None:
            outbox.copy_(self._decoder.ffn(inbox, matrices))

        def bring() -> None:
            result.out = lanes.torch.empty((n_tokens, hidden), dtype=weights.dtype, device=device.place)
            result.out.copy_(outbox, non_blocking=True)

        facts: dict[str, Any] = {"layer": layer, "expert": expert, "n_tokens": n_tokens}
        down = Work(D2H, "activations", send, () if source is None else (source,), n_bytes=n_bytes, **facts)
        pool = Work(POOL, "expert", compute, (down,), **facts)
        back = Work(H2D, "activations", bring, (pool,), n_bytes=n_bytes, **facts)
        back.cause = CPU
        for work in (down, pool, back):
            lanes.submit(work)
        self._on_cpu[back] = result
        return back

    def join(self, work: Work) -> None:
        """The next block adds up what an expert on the CPU has made."""
        self._combine.join(work)
        result = self._on_cpu.pop(work)
        if result.rows is None:  # computed ahead, its weight was not known yet
            result.share = self._routing.rows(work.layer, work.expert)[1]
        self._combine.add(result)
