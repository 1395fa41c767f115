"""The simulated machine: a host clock, a compute stream and copy engines per GPU, a CPU pool, a predictor's lane."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from oracle.copy_queue import Copy
from oracle.group import Group
from oracle.lanes import CPU, GPU, H2D, HOST, IDLE, SIDE, SerialLane, Spans
from oracle.links import SimLinks
from oracle.protocol import DEMAND, UNKNOWN_S, Ticket

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from oracle.cost import Cost
    from oracle.iterations import Iteration
    from oracle.pieces import Piece
    from oracle.price import Launch, Price
    from sim.base.quantities import Source

NOTHING: tuple[Ticket, ...] = ()


class SimMachine(SimLinks):
    """Implements `oracle.protocol.Machine` in arithmetic: + - * / max on floats, so equal inputs give equal bits.

    Args:
        cost: prices. n_gpus: compute streams and copy engines. spans: called with every span, or None.
        report_copies: keep completions for `poll`.
    """

    measured: Literal[False] = False

    def __init__(self, cost: Cost, n_gpus: int = 1, spans: Spans | None = None, report_copies: bool = False) -> None:
        super().__init__(cost, n_gpus, spans, report_copies)
        self.down = SerialLane("d2h")
        self.cpu = SerialLane("cpu")
        self.side = SerialLane("predictor")
        for serial in (self.down, self.cpu, self.side):
            serial.spans = spans
        self.gpu_s = [0.0] * len(cost.rests_on)  # busy seconds of compute streams by the quantity they rest on
        self.used: dict[Price, int] = {}  # operations of this iteration, added to `gpu_s` when it ends
        self.cpu_s = [0.0] * len(cost.rests_on)
        self.side_s = [0.0] * len(cost.rests_on)
        self.host_predict_s = [0.0] * len(cost.rests_on)
        self.n_syncs = 0
        self._groups: dict[int, Group] = {}  # by GPU: experts launched last, which others may still join
        self._joins: tuple[Ticket, ...] = NOTHING
        self._gate: Ticket | None = None
        self._n_tokens = 0
        self._n_ranges = 0

    # -- the iteration ----------------------------------------------------------------------------------------------

    def begin(self, iteration: Iteration) -> None:
        cost = self.cost
        self.now_s += cost.begin_s
        self._n_tokens = iteration.n_tokens
        self._n_ranges = len(iteration.ranges)
        self._attention = cost.attention(iteration)
        self._gate_price = cost.gate(iteration.n_tokens)
        self._shared_price = cost.shared(iteration.n_tokens) if cost.has_shared else None
        self._dense_price = cost.dense_layer(iteration) if cost.has_dense else None
        blocks = [(self._attention, cost.launch_attention), (self._gate_price, cost.launch_gate)]
        if self._shared_price is not None:
            blocks.append((self._shared_price, cost.launch_shared))
        self._blocks = [(price, launch, launch.tail_frac * price.duration_s) for price, launch in blocks]

    def prices(self) -> tuple[Price, Price, Price | None]:
        """This iteration's attention, gate and shared expert."""
        return self._attention, self._gate_price, self._shared_price

    def _launch(self, op: str, layer: int, launch: Launch, price: Price, after: tuple[Ticket, ...]) -> Ticket:
        """Launch on GPU 0's stream, after what the stream must join first."""
        host_s = self.now_s
        self.now_s = launched_s = host_s + launch.all_s
        launch.n += 1
        self.used[price] = self.used.get(price, 0) + 1
        self._groups.clear()
        if self._joins:
            after, self._joins = self._joins + after, NOTHING
        if self.spans is not None:
            self.spans("host", f"launch {op}", layer, -1, self._n_tokens, 0, host_s, launched_s)
        return self.streams[0].run(
            op,
            layer,
            -1,
            self._n_tokens,
            host_s + launch.first_s,
            launched_s + launch.tail_frac * price.duration_s,
            price.duration_s,
            after,
        )

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

    def to_gate(self, layer: int) -> None:
        stream = self.streams[0]
        if stream.pending or self._joins or self.spans is not None or self._dense_price is not None:
            self.attention(layer)
            ticket = self.gate(layer)
            self.shared(layer)
            self.sync(ticket)
            return
        # Nothing to wait for and nobody looking: the sums those four would do, without their calls.
        now_s, free_s, gate_s, gate_price = self.now_s, stream.free_s, 0.0, self._gate_price
        gaps_s, uses, used = stream.gaps_s, stream.uses, self.used
        for price, launch, tail_s in self._blocks:
            start_s = now_s + launch.first_s
            now_s += launch.all_s
            launch.n += 1
            used[price] = used.get(price, 0) + 1
            duration_s = price[0]
            uses[duration_s] = uses.get(duration_s, 0) + 1
            if start_s > free_s:
                gaps_s[HOST] += start_s - free_s
                free_s = start_s
            free_s += duration_s
            if now_s + tail_s > free_s:
                gaps_s[HOST] += now_s + tail_s - free_s
                free_s = now_s + tail_s
            if price is gate_price:
                gate_s = free_s
        stream.free_s = free_s
        self._groups.clear()
        if self.n_gpus > 1:
            self._gate = Ticket(gate_s, GPU)
        self.now_s = (gate_s if gate_s > now_s else now_s) + self.cost.sync_s
        self.n_syncs += 1

    def sync(self, ticket: Ticket) -> None:
        if ticket.end_s == UNKNOWN_S:
            self._settle(ticket)
        host_s = self.now_s
        if ticket.end_s > host_s:
            self.now_s = host_s = ticket.end_s
            if self.streams[0].pending:
                self._advance()  # Correction: copies on other links that have started by now
            if ticket.cause in (H2D, CPU) and not self.streams[0].pending:
                # A stream that idles because the host waits for a copy waits for that copy, not for the host.
                self.streams[0].idle_until(host_s, ticket.cause)
        self.now_s = host_s + self.cost.sync_s
        self.n_syncs += 1
        self._groups.clear()
        if self.spans is not None:
            self.spans("host", "sync", -1, -1, 0, 0, host_s, self.now_s)

    def end(self) -> None:
        cost = self.cost
        if self._dense_price is not None:
            for _ in range(cost.n_dense_before[-1]):
                self._launch("dense_layer", -1, cost.launch_dense, self._dense_price, NOTHING)
        self.sync(self._launch("head", -1, cost.launch_head, cost.head(self._n_ranges), NOTHING))
        self.streams[0].idle_until(self.now_s, HOST)
        for price, n in self.used.items():
            self.gpu_s[price.rests_on] += n * price.duration_s
        self.used.clear()

    # -- experts ----------------------------------------------------------------------------------------------------

    def expert(self, piece: Piece, n_tokens: int, after: tuple[Ticket, ...], parts: Sequence[Piece] = ()) -> Ticket:
        cost = self.cost
        kernels_frac = piece.kernels_frac
        if cost.grouped and kernels_frac == 1.0:
            price, launch = self.grouped(piece, n_tokens, after)
        else:
            self._groups.pop(piece.gpu, None)
            price = cost.expert(n_tokens, piece.precision, piece.stop_frac - piece.start_frac, kernels_frac)
            whole, first = kernels_frac == 1.0, piece.start_frac == 0.0
            launch = cost.launch_expert if whole else cost.launch_part(kernels_frac, first)
        host_s = self.now_s
        self.now_s = launched_s = host_s + launch.all_s
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
        first_s, peer_s = host_s + launch.first_s, cost.peer_s(cost.activation_bytes(n_tokens))
        crossing_s = peer_s  # back; and there, as far as the launch does not hide it
        if self._gate is not None and self._gate.end_s != UNKNOWN_S:
            after = (*after, Ticket(self._gate.end_s + peer_s, GPU))
            crossing_s += min(peer_s, max(0.0, self._gate.end_s + peer_s - first_s))
        if peer_s:
            latency_s = crossing_s * cost.p2p_latency_s / peer_s
            self.gpu_s[cost.q_p2p_latency] += latency_s
            self.gpu_s[cost.q_p2p_bandwidth] += crossing_s - latency_s
        ticket = stream.run(
            "expert", piece.layer, piece.expert, n_tokens, first_s, last_s, price.duration_s + peer_s, after
        )
        self._joins = (*self._joins, ticket)
        return ticket

    def grouped(self, piece: Piece, n_tokens: int, after: tuple[Ticket, ...]) -> tuple[Price, Launch]:
        """What an expert (or a slice of its columns) adds to the group launched last, or to one that it begins."""
        cost, frac, group = self.cost, piece.stop_frac - piece.start_frac, self._groups.get(piece.gpu)
        if group is not None and group.precision == piece.precision:
            for ticket in after:
                if ticket.end_s == UNKNOWN_S:
                    self._advance()
                # Correction: what the first waits for, all of the group wait for.
                awaited = any(one is ticket for one in group.waits)
                if not UNKNOWN_S < ticket.end_s <= group.launched_s and not awaited:
                    break
            else:
                price, group.slack_s = cost.member(group.slack_s, n_tokens, piece.precision, frac)
                return price, cost.launch_member
        price, slack_s = cost.leader(n_tokens, piece.precision, frac)
        self._groups[piece.gpu] = Group(self.now_s, piece.precision, slack_s, after)
        return price, cost.launch_expert

    def cpu_expert(self, layer: int, expert: int, n_tokens: int) -> Ticket:
        cost = self.cost
        n_bytes = cost.activation_bytes(n_tokens)
        host_s = self.now_s
        self.now_s = host_s + cost.cpu_launch_s
        self.n_copy_launches += 1
        self.experts_launched += 1.0
        if self.spans is not None:
            self.spans("host", "launch cpu_expert", layer, expert, n_tokens, n_bytes, host_s, self.now_s)
        down_s = cost.back_s(n_bytes)
        arrived_s = self.down.use("activations", layer, expert, n_tokens, self.now_s, down_s)
        price = cost.expert_cpu(n_tokens)
        self.cpu_s[price.rests_on] += price.duration_s
        done = Ticket(self.cpu.use("expert", layer, expert, n_tokens, arrived_s, price.duration_s), CPU)
        self.d2h_bytes += n_bytes
        back = Copy("activations", layer, expert, n_bytes, cost.copy_s(n_bytes), DEMAND, self.now_s, (done,))
        back.cause = CPU
        self._submit(0, back)
        return back

    def join(self, ticket: Ticket) -> None:
        self._joins = (*self._joins, ticket)

    # -- the rest ---------------------------------------------------------------------------------------------------

    def predict(self, duration_s: float, lane: str, blocking: bool, basis: Source) -> Ticket:
        rests_on = self.cost.q_predictor[basis]
        if lane != "side":
            self._groups.clear()  # no group spans what the host or the stream does in between
        if lane == "host":
            self.host_predict_s[rests_on] += duration_s
            begun_s = self.now_s
            self.now_s += duration_s
            ticket = Ticket(self.now_s, HOST)
            if self.spans is not None:
                self.spans("host", "predict", -1, -1, 0, 0, begun_s, self.now_s)
        elif lane == "gpu":
            launch = self.cost.launch_s
            self.now_s += launch
            self.gpu_s[rests_on] += duration_s
            ticket = self.streams[0].run("predict", -1, -1, 0, self.now_s, self.now_s, duration_s, NOTHING)
        else:
            # A blocked host launches nothing: its waiting is then what the stream waits for.
            (self.host_predict_s if blocking else self.side_s)[rests_on] += duration_s
            ticket = Ticket(self.side.use("predict", -1, -1, 0, self.now_s, duration_s), SIDE)
        if blocking:
            self.sync(ticket)
        return ticket

    def route(self, layer: int, ids: np.ndarray, weights: np.ndarray) -> None:
        """Nothing is computed here, so it matters to nobody which token goes where."""

    def wait_until(self, time_s: float) -> None:
        if time_s > self.now_s:
            self.now_s = time_s
            self.streams[0].idle_until(time_s, IDLE)

    def parts_s(self) -> list[float]:
        """GPU 0's timeline so far, split by what it did or waited for; order of `oracle.lanes.CAUSES`."""
        stream = self.streams[0]
        if not stream.pending:
            stream.idle_until(self.now_s, HOST)  # hooks after the last read may have kept the host busy
        return stream.parts_s

    def host_shares(self) -> list[tuple[int, float]]:
        """The host's busy seconds by the quantity they rest on (an index into `cost.rests_on`)."""
        cost = self.cost
        layers = (cost.launch_attention, cost.launch_dense)
        experts = (cost.launch_expert, cost.launch_member, *cost.launch_parts.values())
        launches = (*layers, cost.launch_gate, cost.launch_shared, *experts, cost.launch_head)
        return [
            (cost.q_launch, math.fsum(launch.n * launch.kernels_s for launch in launches)),
            (cost.q_stack_layer, math.fsum(launch.n * launch.extra_s for launch in layers)),
            (cost.q_stack_expert, math.fsum(launch.n * launch.extra_s for launch in experts)),
            (cost.q_stack_iteration, cost.launch_head.n * cost.launch_head.extra_s),
            (cost.q_sync, self.n_syncs * cost.sync_s),
            (cost.q_copy_launch, self.n_copy_launches * cost.hw.host.copy_launch_s.value),
            (cost.q_stack_copy, self.experts_launched * cost.stack.per_copy_s.value),
            *((rests_on, spent_s) for rests_on, spent_s in enumerate(self.host_predict_s) if spent_s),
        ]

    def lane_busy_s(self) -> dict[str, float]:
        """Busy seconds by lane."""
        lanes = {stream.name: stream.busy_s for stream in self.streams}
        lanes |= {link.name: link.busy_s for link in self.up}
        lanes |= {lane.name: lane.busy_s for lane in (self.down, self.cpu, self.side)}
        lanes["d2h"] += self.back.busy_s  # one engine: activations of CPU experts, or pieces written back
        lanes["host"] = math.fsum(share for _, share in self.host_shares())
        return lanes

    def lane_ends_s(self) -> dict[str, float]:
        """When links, CPU pool and predictor ended their last work: some goes on after the last token."""
        ends_s = {up.name: up.free_s for up in self.up} | {lane.name: lane.free_s for lane in (self.cpu, self.side)}
        return ends_s | {"d2h": max(self.down.free_s, self.back.free_s)}
