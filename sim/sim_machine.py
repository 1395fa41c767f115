"""The simulated machine: a host clock, a compute stream and copy engines per GPU, a CPU pool, a predictor's lane."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from sim.copy_lane import Copy, CopyLane
from sim.lanes import CPU, GPU, H2D, HOST, IDLE, SIDE, SerialLane, Spans, Stream
from sim.machine import DEMAND, UNKNOWN_S, Ticket

if TYPE_CHECKING:
    import numpy as np

    from sim.cost import Cost, Launch, Price
    from sim.iterations import Iteration
    from sim.pieces import Piece
    from sim.quantity import Source

NOTHING: tuple[Ticket, ...] = ()


class SimMachine:
    """Implements `sim.machine.Machine` in arithmetic: only + - * / max on floats, so equal inputs give equal bits.

    Args:
        cost: prices. n_gpus: compute streams and copy engines. spans: called with every span, or None.
        report_copies: keep completions for `poll`.
    """

    measured: Literal[False] = False

    def __init__(self, cost: Cost, n_gpus: int = 1, spans: Spans | None = None, report_copies: bool = False) -> None:
        self.cost = cost
        self.host_s = 0.0
        self.spans = spans
        self.n_gpus = n_gpus
        self.streams = [Stream("gpu" if n_gpus == 1 else f"gpu{g}") for g in range(n_gpus)]
        self.up = [CopyLane("h2d" if n_gpus == 1 else f"h2d{g}") for g in range(n_gpus)]
        self.down = SerialLane("d2h")
        self.back = CopyLane("d2h")  # pieces written back; the same engine as `down`, never both in one run
        self.links = list(self.up)  # lanes whose copies are settled together, in order of time
        self.cpu = SerialLane("cpu")
        self.side = SerialLane("predictor")
        for stream in self.streams:
            stream.spans = spans
        for serial in (self.down, self.cpu, self.side):
            serial.spans = spans
        for up in (*self.up, self.back):
            up.spans = spans
            up.report = report_copies and up is not self.back
            up.on_served = self._progress if n_gpus > 1 else self.streams[0].progress
        self.d2h_bytes = 0
        self.written_back_bytes = 0
        self.gpu_s = [0.0] * len(cost.rests_on)  # busy seconds of compute streams by the quantity they rest on
        self.used: dict[Price, int] = {}  # operations of this iteration, added to `gpu_s` when it ends
        self.cpu_s = [0.0] * len(cost.rests_on)
        self.side_s = [0.0] * len(cost.rests_on)
        self.host_predict_s = [0.0] * len(cost.rests_on)
        self.n_syncs = 0
        self.n_copy_launches = 0
        self._joins: tuple[Ticket, ...] = NOTHING
        self._gate: Ticket | None = None
        self._n_tokens = 0
        self._n_ranges = 0

    @property
    def now_s(self) -> float:
        return self.host_s

    # -- the iteration ----------------------------------------------------------------------------------------------

    def begin(self, iteration: Iteration) -> None:
        cost = self.cost
        self.host_s += cost.begin_s
        self._n_tokens = iteration.n_tokens
        self._n_ranges = len(iteration.ranges)
        self._attention = cost.attention(iteration)
        self._gate_price = cost.gate(iteration.n_tokens)
        self._shared_price = cost.shared(iteration.n_tokens) if cost.has_shared else None
        self._dense_price = cost.dense_layer(iteration) if cost.has_dense else None

    def prices(self) -> tuple[Price, Price, Price | None]:
        """This iteration's attention, gate and shared expert."""
        return self._attention, self._gate_price, self._shared_price

    def _launch(self, op: str, layer: int, launch: Launch, price: Price, after: tuple[Ticket, ...]) -> Ticket:
        """Launch on GPU 0's stream, after what the stream must join first."""
        host_s = self.host_s
        self.host_s = launched_s = host_s + launch.all_s
        launch.n += 1
        self.used[price] = self.used.get(price, 0) + 1
        if self._joins:
            after, self._joins = self._joins + after, NOTHING
        if self.spans is not None:
            self.spans("host", f"launch {op}", layer, -1, self._n_tokens, 0, host_s, launched_s)
        return self.streams[0].run(
            op, layer, -1, self._n_tokens, host_s + launch.first_s,
            launched_s + launch.tail_frac * price.duration_s, price.duration_s, after,
        )  # fmt: skip

    def attention(self, layer: int) -> None:
        cost = self.cost
        if self._dense_price is not None:
            for _ in range(cost.n_dense_before[layer]):
                self._launch("dense_layer", layer, cost.launch_dense, self._dense_price, NOTHING)
        self._launch("attention", layer, cost.launch_attention, self._attention, NOTHING)

    def gate(self, layer: int) -> Ticket:
        self._gate = ticket = self._launch("gate", layer, self.cost.launch_gate, self._gate_price, NOTHING)
        return ticket

    def shared(self, layer: int) -> None:
        if self._shared_price is not None:
            self._launch("shared_expert", layer, self.cost.launch_shared, self._shared_price, NOTHING)

    def sync(self, ticket: Ticket) -> None:
        if ticket.end_s == UNKNOWN_S:
            self._settle(ticket)
        host_s = self.host_s
        if ticket.end_s > host_s:
            host_s = ticket.end_s
            if ticket.cause in (H2D, CPU) and not self.streams[0].pending:
                # A stream that idles because the host waits for a copy waits for that copy, not for the host.
                self.streams[0].idle_until(host_s, ticket.cause)
        self.host_s = host_s + self.cost.sync_s
        self.n_syncs += 1
        if self.spans is not None:
            self.spans("host", "sync", -1, -1, 0, 0, host_s, self.host_s)

    def end(self) -> None:
        cost = self.cost
        if self._dense_price is not None:
            for _ in range(cost.n_dense_before[-1]):
                self._launch("dense_layer", -1, cost.launch_dense, self._dense_price, NOTHING)
        self.sync(self._launch("head", -1, cost.launch_head, cost.head(self._n_ranges), NOTHING))
        self.streams[0].idle_until(self.host_s, HOST)
        for price, n in self.used.items():
            self.gpu_s[price.rests_on] += n * price.duration_s
        self.used.clear()

    # -- experts ----------------------------------------------------------------------------------------------------

    def expert(self, piece: Piece, n_tokens: int, after: tuple[Ticket, ...]) -> Ticket:
        cost = self.cost
        kernels_frac = piece.kernels_frac
        price = cost.expert(n_tokens, piece.precision, piece.stop_frac - piece.start_frac, kernels_frac)
        launch = cost.launch_expert if kernels_frac == 1.0 else cost.launch_part(kernels_frac, piece.start_frac == 0.0)
        host_s = self.host_s
        self.host_s = launched_s = host_s + launch.all_s
        launch.n += 1
        self.used[price] = self.used.get(price, 0) + 1
        if self.spans is not None:
            self.spans("host", "launch expert", piece.layer, piece.expert, n_tokens, 0, host_s, launched_s)
        stream = self.streams[piece.gpu]
        last_s = launched_s + launch.tail_frac * price.duration_s
        if piece.gpu == 0:  # joins are for the next block: an expert here does not wait for one elsewhere
            return stream.run(
                "expert", piece.layer, piece.expert, n_tokens, host_s + launch.first_s, last_s, price.duration_s, after
            )
        # Hidden states cross to the expert's GPU and back; the peer link is not a bottleneck at these sizes.
        peer_s = cost.peer_s(cost.activation_bytes(n_tokens))
        if self._gate is not None and self._gate.end_s != UNKNOWN_S:
            after = (*after, Ticket(self._gate.end_s + peer_s, GPU))
        ticket = stream.run(
            "expert", piece.layer, piece.expert, n_tokens, host_s + launch.first_s, last_s,
            price.duration_s + peer_s, after,
        )  # fmt: skip
        self._joins = (*self._joins, ticket)
        return ticket

    def cpu_expert(self, layer: int, expert: int, n_tokens: int) -> Ticket:
        cost = self.cost
        n_bytes = cost.activation_bytes(n_tokens)
        host_s = self.host_s
        self.host_s = host_s + cost.cpu_launch_s
        self.n_copy_launches += 1
        if self.spans is not None:
            self.spans("host", "launch cpu_expert", layer, expert, n_tokens, n_bytes, host_s, self.host_s)
        down_s = cost.back_s(n_bytes)
        arrived_s = self.down.use("activations", layer, expert, n_tokens, self.host_s, down_s)
        price = cost.expert_cpu(n_tokens)
        self.cpu_s[price.rests_on] += price.duration_s
        done = Ticket(self.cpu.use("expert", layer, expert, n_tokens, arrived_s, price.duration_s), CPU)
        self.d2h_bytes += n_bytes
        back = Copy("activations", layer, expert, n_bytes, cost.copy_s(n_bytes), DEMAND, self.host_s, (done,))
        back.cause = CPU
        self._submit(0, back)
        return back

    def join(self, ticket: Ticket) -> None:
        self._joins = (*self._joins, ticket)

    # -- copies -----------------------------------------------------------------------------------------------------

    def copy(self, piece: Piece, priority: int, after: tuple[Ticket, ...]) -> Ticket:
        cost = self.cost
        self.host_s = now_s = self.host_s + cost.copy_launch_s
        self.n_copy_launches += 1
        if self.spans is not None:
            begun_s = now_s - cost.copy_launch_s
            self.spans("host", "launch copy", piece.layer, piece.expert, 0, piece.n_bytes, begun_s, now_s)
        op = "demand" if priority == DEMAND else "prefetch"
        n_bytes = piece.n_bytes
        copy = Copy(op, piece.layer, piece.expert, n_bytes, cost.copy_s(n_bytes), priority, now_s, after)
        copy.piece = piece
        if len(self.links) > 1:
            self._advance()
        self.links[piece.gpu].submit(copy, now_s)
        return copy

    def copy_back(self, piece: Piece, after: tuple[Ticket, ...]) -> Ticket:
        if self.back not in self.links:
            self.links.append(self.back)
        begun_s = self.host_s
        self.host_s = now_s = begun_s + self.cost.copy_launch_s
        self.n_copy_launches += 1
        if self.spans is not None:
            self.spans("host", "launch copy", piece.layer, piece.expert, 0, piece.n_bytes, begun_s, now_s)
        duration_s = self.cost.back_s(piece.n_bytes)
        copy = Copy("write_back", piece.layer, piece.expert, piece.n_bytes, duration_s, DEMAND, now_s, after)
        self.d2h_bytes += piece.n_bytes
        self.written_back_bytes += piece.n_bytes
        self._submit(self.links.index(self.back), copy)
        return copy

    def promote(self, ticket: Ticket) -> None:
        assert isinstance(ticket, Copy)
        self._advance()
        for lane in self.up:
            lane.promote(ticket, self.host_s)

    def cancel(self, ticket: Ticket) -> bool:
        assert isinstance(ticket, Copy)
        if ticket.end_s != UNKNOWN_S:
            return False
        self._advance()
        return any(lane.cancel(ticket, self.host_s) for lane in self.up)

    def poll(self) -> list[Piece]:
        done: list[Copy] = []
        self._advance()
        for lane in self.up:
            done += lane.completions(self.host_s)
        if self.n_gpus > 1:
            done.sort(key=lambda copy: copy.end_s)
        return [copy.piece for copy in done if copy.piece is not None]

    def ended(self, ticket: Ticket) -> bool:
        """True when a copy has completed by the host's clock."""
        end_s = ticket.end_s
        if end_s == UNKNOWN_S:
            if len(self.links) == 1 and self.up[0].free_s >= self.host_s:
                return False  # busy until now with what started before
            self._advance()
            end_s = ticket.end_s
        return UNKNOWN_S < end_s <= self.host_s

    # -- the rest ---------------------------------------------------------------------------------------------------

    def predict(self, duration_s: float, lane: str, blocking: bool, basis: Source) -> Ticket:
        rests_on = self.cost.q_predictor[basis]
        if lane == "host":
            self.host_predict_s[rests_on] += duration_s
            begun_s = self.host_s
            self.host_s += duration_s
            ticket = Ticket(self.host_s, HOST)
            if self.spans is not None:
                self.spans("host", "predict", -1, -1, 0, 0, begun_s, self.host_s)
        elif lane == "gpu":
            launch = self.cost.launch_s
            self.host_s += launch
            self.gpu_s[rests_on] += duration_s
            ticket = self.streams[0].run("predict", -1, -1, 0, self.host_s, self.host_s, duration_s, NOTHING)
        else:
            # A blocked host launches nothing: its waiting is then what the stream waits for.
            (self.host_predict_s if blocking else self.side_s)[rests_on] += duration_s
            ticket = Ticket(self.side.use("predict", -1, -1, 0, self.host_s, duration_s), SIDE)
        if blocking:
            self.sync(ticket)
        return ticket

    def route(self, layer: int, ids: np.ndarray, weights: np.ndarray) -> None:
        """Nothing is computed here, so it matters to nobody which token goes where."""

    def wait_until(self, time_s: float) -> None:
        if time_s > self.host_s:
            self.host_s = time_s
            self.streams[0].idle_until(time_s, IDLE)

    def drain(self) -> None:
        while self._settle_next():
            pass

    def parts_s(self) -> list[float]:
        """GPU 0's timeline so far, split by what it did or waited for; order of `sim.lanes.CAUSES`."""
        return self.streams[0].parts_s

    def host_shares(self) -> list[tuple[int, float]]:
        """The host's busy seconds by the quantity they rest on (an index into `cost.rests_on`)."""
        cost = self.cost
        layers = (cost.launch_attention, cost.launch_dense)
        experts = (cost.launch_expert, *cost.launch_parts.values())
        launches = (*layers, cost.launch_gate, cost.launch_shared, *experts, cost.launch_head)
        return [
            (cost.q_launch, math.fsum(launch.n * launch.kernels_s for launch in launches)),
            (cost.q_stack_layer, math.fsum(launch.n * launch.extra_s for launch in layers)),
            (cost.q_stack_expert, math.fsum(launch.n * launch.extra_s for launch in experts)),
            (cost.q_stack_iteration, cost.launch_head.n * cost.launch_head.extra_s),
            (cost.q_sync, self.n_syncs * cost.sync_s),
            (cost.q_copy_launch, self.n_copy_launches * cost.copy_launch_s),
            *((rests_on, spent_s) for rests_on, spent_s in enumerate(self.host_predict_s) if spent_s),
        ]

    @property
    def h2d_bytes(self) -> int:
        """Bytes copied to the GPUs."""
        return sum(up.copied_bytes for up in self.up)

    def lane_busy_s(self) -> dict[str, float]:
        """Busy seconds by lane."""
        lanes = {stream.name: stream.busy_s for stream in self.streams}
        lanes |= {link.name: link.busy_s for link in self.up}
        lanes |= {lane.name: lane.busy_s for lane in (self.down, self.cpu, self.side)}
        lanes["d2h"] += self.back.busy_s  # one engine: activations of CPU experts, or pieces written back
        lanes["host"] = math.fsum(share for _, share in self.host_shares())
        return lanes

    def _submit(self, link: int, copy: Copy) -> None:
        if len(self.links) > 1:
            self._advance()
        self.links[link].submit(copy, self.host_s)

    def _advance(self) -> None:
        """Settle every copy that starts before the host's clock; over several links in the order of their starts."""
        if len(self.links) == 1:
            self.up[0].advance(self.host_s)
            return
        while (start := self._next_start()) is not None and start[0] < self.host_s:
            self.links[start[1]].settle_next()

    def _next_start(self) -> tuple[float, int] | None:
        """(when, which link) the next copy starts."""
        starts = [(lane.next_start_s(), index) for index, lane in enumerate(self.links)]
        return min(((start_s, index) for start_s, index in starts if start_s is not None), default=None)

    def _settle_next(self) -> bool:
        start = self._next_start()
        return start is not None and self.links[start[1]].settle_next()

    def _progress(self) -> None:
        """Work on any stream may wait for work on any other, so go round until nothing more can be placed."""
        waiting, before = sum(len(stream.pending) for stream in self.streams), -1
        while waiting and waiting != before:
            for stream in reversed(self.streams):  # GPU 0's mostly waits for the others'
                if stream.pending:
                    stream.progress()
            before, waiting = waiting, sum(len(stream.pending) for stream in self.streams)

    def _settle(self, ticket: Ticket) -> None:
        """The host is blocked: let copies start, in time order, until the ticket's end is known."""
        while ticket.end_s == UNKNOWN_S:
            if not self._settle_next():
                raise RuntimeError("deadlock: the host waits for work that waits for no copy (a bug in the engine)")
