"""The simulated machine: a host clock, a compute stream and copy engines per GPU, a CPU pool, a predictor's lane."""

from __future__ import annotations

import math
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from sim.machine.copy_queue import Copy, CopyQueue, copy_of, result_of
from sim.machine.exchange import Exchange
from sim.machine.group import Group, Members
from sim.machine.lanes import CPU, GPU, H2D, HOST, IDLE, NVME, SIDE, SerialLane, Spans, Stream
from sim.machine.meter import Meter
from sim.machine.price import Launch, Operation, Price
from sim.machine.protocol import DEMAND, NO_TICKETS, Machine
from sim.machine.shared_memory import GpuMemory, HostMemory
from sim.machine.sharing import GPU_BY_COPIES
from sim.machine.together import Step, Together
from sim.machine.turn import Turn
from sim.machine.waiting import KINDS, Waiting
from sim.policy.tickets import Ticket, ends_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.base.quantities import Basis
    from sim.machine.cost import Cost
    from sim.machine.sharing import Sharing
    from sim.policy.pieces import Piece
    from sim.workload.iterations import Iteration, Range

_H2D, _HOST, _CPU, _NVME, _KINDS = H2D, HOST, CPU, NVME, len(KINDS)  # machine integers where this is compiled
MOST_LENGTHS = 512
"""Different durations kept counters for; each context has one of its own, so they begin anew now and then."""


class SimulatedMachine(Machine):
    """Implements `sim.machine.protocol.Machine` in arithmetic: + - * / max on floats, so equal inputs give equal bits.

    Args:
        cost: prices. n_gpus: compute streams and copy engines. spans: called with every span, or None.
        report_copies: keep completions for `poll`.
    """

    measured: Literal[False] = False

    def __init__(self, cost: Cost, n_gpus: int = 1, spans: Spans | None = None, report_copies: bool = False) -> None:
        self.ends_s = 0.0
        self.cause = 0
        self.keeps_pieces = False
        self.gathers = cost.several.gathers
        self.cost = cost
        self.now_s = 0.0  # the host's clock
        self.spans = spans
        self.n_gpus = n_gpus
        n_layers = len(cost.n_dense_before) - 1
        self.streams = [Stream("gpu" if n_gpus == 1 else f"gpu{g}", n_layers) for g in range(n_gpus)]
        self.stream = self.streams[0]
        self.h2d = [CopyQueue("h2d" if n_gpus == 1 else f"h2d{g}", self.streams) for g in range(n_gpus)]
        self._link = self.h2d[0]
        self.write_backs = CopyQueue("d2h", self.streams)  # the same engine as `d2h`, never both in one run
        self.links = list(self.h2d)  # queues whose copies are settled together, in order of time
        self.p2p_out = CopyQueue("p2p_out", self.streams)  # the ports of GPU 0, where transfers to and from peers queue
        self.p2p_in = CopyQueue("p2p_in", self.streams)
        self.exchange = Exchange(n_gpus)
        self.together = Together(cost) if cost.several.together else None
        self._n_away = 0  # GPUs whose results are still to be brought back
        if self.gathers:
            self.links.append(self.p2p_in)  # what goes out is settled when it is asked for
        self.drive = CopyQueue("nvme", self.streams)
        if cost.drive is not None:
            self.drive.lag_s = cost.drive.lag_s
            self.links.insert(0, self.drive)  # a read that takes no time is over before the links choose
        self.n_links = len(self.links)
        self.d2h = SerialLane("d2h")
        self.cpu = SerialLane("cpu")
        self.side = SerialLane("predictor")
        lanes: list[Stream | CopyQueue | SerialLane] = [*self.streams, *self.h2d, self.write_backs]
        lanes += [self.p2p_out, self.p2p_in, self.drive]
        for lane in (*lanes, self.d2h, self.cpu, self.side):
            lane.spans = spans
        for queue in self.h2d:
            queue.report = report_copies
        self.d2h_bytes = 0
        self.written_back_bytes = 0
        self.kv_out_bytes = 0
        self.kv_in_bytes = 0
        self.kv_out_s = 0.0
        self.n_kv_out = 0  # copies
        self.n_copy_launches = 0
        self.experts_launched = 0.0  # copies of experts, a part counting as its share
        self.n_syncs = 0
        self._predicted_by = cost.q_predictor
        self.gpu_s = [0.0] * len(cost.figures.entries)  # busy seconds of compute streams by the quantity they rest on
        self.cpu_s = [0.0] * len(cost.figures.entries)
        self.side_s = [0.0] * len(cost.figures.entries)
        self.host_predict_s = [0.0] * len(cost.figures.entries)
        self._begin_s, self._sync_s = cost.launches.begin_s, cost.launches.sync_s
        self._has_dense = cost.has_dense
        self._copy_launch_s = cost.launches.copy_s
        self._copy_calls = cost.launches.calls(1.0)
        self._prices = Meter()  # operations of this iteration by price, added to `gpu_s` when it ends
        self._experts: dict[tuple[int, object, float, float, bool], Operation] = {}
        self._alone_of: list[Operation | None] = []  # of one token, by `Piece.index`; the commonest
        # In a group: what others left to fill (-1: the first) -> tokens (of others than whole experts in the serving
        # precision: with precision and share) -> and what it leaves.
        self._grouped_experts: dict[float, dict[object, tuple[Operation, float]]] = {}
        # Tokens -> bytes, seconds there, seconds back and their place in the link's counters, seconds, basis, bytes/s.
        self._on_cpu: dict[int, tuple[int, float, float, int, float, int, float]] = {}
        self._joined_on_cpu: dict[
            int, tuple[int, float, float, int, float, int, float]
        ] = {}  # of experts after the first
        self._hybrid_s = cost.launches.hybrid_layer_s
        self.n_hybrid = 0  # layers of which the CPU computed an expert
        self._n_begun = 0
        self._hybrid_in = [0] * n_layers  # the iteration (from 1) in which a layer had its last expert on the CPU
        # By `Piece.index`: of a copy its seconds, and their place in its link's counters; of a part also what the host
        # launches: seconds, calls.
        self._copies: list[tuple[float, int] | None] = []
        self._part_launches: list[tuple[float, int] | None] = []
        self._leader: Operation | None = None  # a whole expert of one token, in the serving precision, begins a group
        self._members = Members()  # it, and who joins it
        self._used: list[Operation] = []  # the first `_n_used` have uses that no counter knows of yet
        self._n_used = 0
        self._gpu_memory: GpuMemory | None = None  # None: nothing is shared
        if cost.sharing.on:
            self._share(cost.sharing)
            if cost.drive is not None:
                self._share_host_memory()
        self._groups = [Group() for _ in range(n_gpus)]  # experts launched last, which others may still join
        self._group = self._groups[0]
        self._grouped = cost.launches.grouped
        self._precision = cost.precision
        self._waits: tuple[Ticket, ...] = NO_TICKETS  # what the next block of GPU 0 joins
        self._gate: Ticket | None = None
        self._n_tokens = 0
        self._n_out = 0
        self._n_heads = -1  # of this many ranges `_head` is the price
        self._n_layers = n_layers
        self._blocks: list[Operation] = []
        self._attentions: dict[int, Operation] = {}  # of one token, by the positions before it
        self._shared: Operation | None = None
        self._dense: Operation | None = None

    def _share(self, sharing: Sharing) -> None:
        """Copies and what runs beside them share memory."""
        up, down = (sharing.stated.get(term, -1.0) for term in GPU_BY_COPIES)
        rates = sharing.gpu_bytes_per_s, sharing.up_bytes_per_s, sharing.down_bytes_per_s
        self._gpu_memory = GpuMemory(*rates, up, down)
        for queue, stream in zip(self.h2d, self.streams, strict=True):
            queue.slows = [stream]
            queue.n_slows = 1
        self.write_backs.slows = self.streams
        self.write_backs.n_slows = self.n_gpus
        self.write_backs.back = True

    def _share_host_memory(self) -> None:
        """Experts on the CPU draw from the memory that copies draw from: from the first on; above a drive, at once."""
        sharing, reads = self.cost.sharing, self.cost.drive is not None
        cpu, link = (sharing.stated.get(term, -1.0) for term in ("cpu_slowdown_by_h2d", "h2d_slowdown_by_cpu"))
        self.cpu.memory = memory = HostMemory(sharing.host_bytes_per_s, self.n_gpus, cpu, link, reads)
        if reads:
            self.drive.memory, self.drive.lane = memory, self.n_gpus + 2
        for at, queue in enumerate((*self.h2d, self.write_backs)):
            queue.memory, queue.lane = memory, at + 1
            if queue.free_s > self.now_s:
                draws_per_s = sharing.down_bytes_per_s if queue.back else sharing.up_bytes_per_s
                memory.lanes[at + 1].note(self.now_s, queue.free_s, draws_per_s)

    def now(self) -> float:
        return self.now_s

    # -- the iteration ----------------------------------------------------------------------------------------------

    def begin(self, iteration: Iteration) -> None:
        cost = self.cost
        if self.stream.seconds.meter.n_known > MOST_LENGTHS:
            self._forget()
        self.now_s += self._begin_s
        self._n_begun += 1
        self.stream.begin(iteration.number)
        self._n_out = iteration.n_out
        if self.together is not None:
            self._n_tokens = iteration.n_tokens
            self.together.begin(iteration)
            return
        if iteration.n_tokens == 1 and self._n_tokens == 1:
            alone: Range = iteration.ranges[0]
            attention = self._attentions.get(alone.context)
            if attention is None:  # of no earlier token there
                price = cost.attention(iteration)
                attention = self._attentions[alone.context] = self._operation(price, cost.launches.attention)
            self._attention = self._blocks[0] = attention
        elif iteration.n_tokens != self._n_tokens:
            self._n_tokens = n_tokens = iteration.n_tokens
            self._attention = self._operation(cost.attention(iteration), cost.launches.attention)
            self._gate_block = self._operation(cost.gate(n_tokens), cost.launches.gate)
            self._blocks = [self._attention, self._gate_block]
            if cost.has_shared:
                self._shared = self._operation(cost.shared(n_tokens), cost.launches.shared)
                self._blocks.append(self._shared)
        else:
            self._reprice(self._attention, cost.attention(iteration))
        if self._has_dense:
            self._dense = self._operation(cost.dense_layer(iteration), cost.launches.dense)

    def _forget(self) -> None:
        """Begin the stream's counters anew, so that memory does not grow with the trace. All of them are read."""
        self._count_uses()
        self.stream.seconds.total_s()
        self.stream.seconds.meter.forget()
        self._prices.forget()
        self._n_tokens = 0
        self._n_heads = -1
        self._attentions.clear()
        self._experts.clear()
        self._alone_of.clear()
        self._grouped_experts.clear()
        self._leader = None
        self._members.forget()

    def _operation(self, price: Price, launch: Launch) -> Operation:
        """A price with its launch, on GPU 0's stream."""
        operation = Operation(launch)
        self._reprice(operation, price)
        return operation

    def _reprice(self, operation: Operation, price: Price) -> None:
        length = self.stream.seconds.meter.at(price.duration_s)
        operation.cost(price.duration_s, length, self._prices.at(price.duration_s, price.attributed_to))
        if self._gpu_memory is not None:
            self._gpu_memory.slow(operation, price)

    def _launch(
        self, op: str, layer: int, operation: Operation, after: tuple[Ticket, ...] = NO_TICKETS
    ) -> Ticket | None:
        """Launch on GPU 0's stream, after what the stream must join first."""
        if self._n_away:
            self._combine()
        host_s = self.now_s
        self.now_s = launched_s = host_s + operation.all_s
        self._count_use(operation)
        self._close_groups()
        if self._waits:
            after, self._waits = self._waits + after, NO_TICKETS
        if self.spans is not None:
            self.spans("host", f"launch {op}", layer, -1, self._n_tokens, 0, host_s, launched_s)
        return self.stream.run(
            op,
            layer,
            -1,
            self._n_tokens,
            host_s + operation.first_s,
            launched_s + operation.tail_s,
            operation.duration_s,
            operation.length,
            0.0,
            after,
            operation.slowed_s,
            operation.more_s,
        )

    def _on_all(self, steps: list[Step], layer: int) -> Ticket:
        """Launch dense operations on all GPUs, each with its own price; the ticket of the last one on GPU 0."""
        ticket = Ticket(0.0, GPU)
        for op, launch, prices, meets in steps:
            host_s = self.now_s
            self.now_s = launched_s = host_s + launch.all_s
            launch.n += 1
            self._close_groups()
            after = NO_TICKETS
            if meets:
                after, self._waits = (*self._waits, *self._ends()), NO_TICKETS
            if self.spans is not None:
                self.spans("host", f"launch {op}", layer, -1, self._n_tokens, 0, host_s, launched_s)
            if self._n_used:
                self._count_uses()
            for gpu, price in enumerate(prices):
                if price is None:
                    continue
                stream: Stream = self.streams[gpu]
                duration_s = price.duration_s
                self._prices.add(self._prices.at(duration_s, price.attributed_to), 1)
                length = stream.seconds.meter.at(duration_s)
                last_s = launched_s + launch.tail_frac * duration_s
                first_s = host_s + launch.first_s
                beside = Operation(launch)
                if self._gpu_memory is not None:
                    self._gpu_memory.slow(beside, price)
                work = stream.run(
                    op,
                    layer,
                    -1,
                    self._n_tokens,
                    first_s,
                    last_s,
                    duration_s,
                    length,
                    0.0,
                    after,
                    beside.slowed_s,
                    beside.more_s,
                )
                if gpu == 0:
                    ticket = self._settled() if work is None else work
        return ticket

    def _ends(self) -> list[Ticket]:
        """What each GPU has been given last."""
        found: list[Ticket] = []
        for stream in self.streams:
            if stream.n_pending:
                found.append(stream.pending[stream.n_pending - 1])
            else:
                ticket = Ticket(stream.free_s, stream.blame)
                ticket.speculative = stream.blames_prefetch
                found.append(ticket)
        return found

    def _count_use(self, operation: Operation) -> None:
        """Count an operation's price and launch; its stream counts its seconds once it is placed."""
        if self._n_used:
            self._count_uses()
        operation.launch.n += 1
        self._prices.add(operation.priced, 1)

    def _count_uses(self) -> None:
        """Hand uses over to the counters, in the order in which the operations were first met."""
        if self._n_used:
            self._members.tell()
        for at in range(self._n_used):
            operation: Operation = self._used[at]
            operation.launch.n += operation.n
            self._prices.add(operation.priced, operation.n)
            self.stream.seconds.meter.add(operation.length, operation.n)
            operation.n = 0
        self._n_used = 0

    def _note_use(self, operation: Operation) -> None:
        """An operation is used for the first time since counters were told."""
        if self._n_used == len(self._used):
            self._used.append(operation)
        else:
            self._used[self._n_used] = operation
        self._n_used += 1

    def _close_groups(self) -> None:
        self._group.open = False
        if self.n_gpus > 1:
            for group in self._groups:
                group.open = False

    def _settled(self) -> Ticket:
        """A ticket for what GPU 0's stream has just placed."""
        return ends_at(self.stream.free_s, self.stream.blame)

    def attention(self, layer: int) -> None:
        self.stream.enter(layer)
        if self.together is not None:
            self._on_all(self.together.attention(layer), layer)
            return
        if self._dense is not None:
            for _ in range(self.cost.n_dense_before[layer]):
                self._launch("dense_layer", layer, self._dense)
        self._launch("attention", layer, self._attention)

    def gate(self, layer: int) -> Ticket:
        if self.together is not None:
            return self._on_all(self.together.gate(layer), layer)
        ticket = self._launch("gate", layer, self._gate_block)
        if ticket is None:
            ticket = self._settled()
        self._gate = ticket
        return ticket

    def shared(self, layer: int) -> None:
        if self.together is not None:
            self._on_all(self.together.shared(), layer)
        elif self._shared is not None:
            self._launch("shared_expert", layer, self._shared)

    def to_gate(self, layer: int) -> float:
        stream = self.stream
        open_ends = stream.n_pending > 0 or len(self._waits) > 0 or self._n_away > 0
        if stream.written_s > self.now_s:
            open_ends = True
        if open_ends or self.together is not None or self.spans is not None or self._dense is not None:
            self.attention(layer)
            ticket = self.gate(layer)
            self.shared(layer)
            self.sync(ticket)
            return self.now_s
        # Nothing to wait for and nobody looking: the sums those four would do, without their calls.
        if stream.owed_s > 0.0:
            stream.pay()
        now_s = self.now_s
        free_s = stream.free_s
        copied_s = stream.copied_s
        starved_s = stream.gaps_s[_HOST]
        at = stream.row
        waited_s = stream.gaps_s[_H2D]
        stream.waited_s[at + _HOST] += starved_s - stream.charged_host_s
        stream.waited_s[at + _H2D] += waited_s - stream.charged_h2d_s
        stream.charged_host_s = starved_s
        stream.charged_h2d_s = waited_s
        stream.row = stream.first_row + layer * _KINDS
        gate_s = 0.0
        for operation in self._blocks:
            if operation.n == 0:
                self._note_use(operation)
            operation.n += 1
            start_s = now_s + operation.first_s
            now_s += operation.all_s
            if start_s > free_s:
                starved_s += start_s - free_s
                free_s = start_s
            start_s = free_s
            free_s += operation.duration_s
            if start_s < copied_s:
                free_s += operation.slowed_s
                stream.slowed_s += operation.slowed_s
            elif stream.remembers and (operation.slowed_s > 0.0 or operation.more_s > 0.0):
                stream.note(start_s, free_s, operation.slowed_s, operation.more_s)
            last_s = now_s + operation.tail_s
            if last_s > free_s:
                starved_s += last_s - free_s
                free_s = last_s
            if operation is self._gate_block:
                gate_s = free_s
        stream.free_s = free_s
        stream.gaps_s[_HOST] = starved_s
        self._close_groups()
        if self.n_gpus > 1:
            self._gate = Ticket(gate_s, GPU)
        self.now_s = (gate_s if gate_s > now_s else now_s) + self._sync_s
        self.n_syncs += 1
        return self.now_s

    def sync(self, ticket: Ticket) -> None:
        if ticket.end_s < 0.0:
            self._settle(ticket)
        host_s = self.now_s
        if ticket.end_s > host_s:
            self.now_s = host_s = ticket.end_s
            if self.stream.n_pending:
                self._advance()  # copies on other links that have started by now
            waited = ticket.cause == _H2D or ticket.cause == _CPU or ticket.cause == _NVME
            if waited and not self.stream.n_pending:
                # A stream that idles because the host waits for a copy waits for that copy, not for the host.
                self.stream.idle_until(host_s, ticket.cause, ticket.speculative)
        self.now_s = host_s + self._sync_s
        self.n_syncs += 1
        self._close_groups()
        if self.spans is not None:
            self.spans("host", "sync", -1, -1, 0, 0, host_s, self.now_s)

    def end(self) -> None:
        cost = self.cost
        ticket: Ticket | None
        if self.together is not None:
            ticket = self._on_all(self.together.end(), -1)
        else:
            if self._dense is not None:
                for _ in range(cost.n_dense_before[self._n_layers]):
                    self._launch("dense_layer", -1, self._dense)
            if self._n_out != self._n_heads:
                self._n_heads = self._n_out
                self._head = self._operation(cost.head(self._n_out), cost.launches.head_of(self._n_out))
            ticket = self._launch("head", -1, self._head)
        self.sync(self._settled() if ticket is None else ticket)
        self.stream.idle_until(self.now_s, _HOST)
        self._count_uses()
        self._prices.spend(self.gpu_s)

    # -- experts ----------------------------------------------------------------------------------------------------

    def run_turn(self, turn: Turn) -> bool:
        group, stream, spans, members = self._group, self.stream, self.spans, self._members
        if not self._grouped or self.n_gpus > 1 or stream.n_pending:
            return False
        place = -1
        launched_s = -1.0  # no copy has arrived before that
        if group.open:
            if group.last is None or group.last.place >= members.n_met:
                return False
            place = group.last.place
            launched_s = group.launched_s
        if stream.written_s > self.now_s:
            return False
        if stream.owed_s > 0.0:
            stream.pay()
        copied_s = stream.copied_s
        now_s, free_s = self.now_s, stream.free_s
        waited_s, starved_s = stream.gaps_s[_H2D], stream.gaps_s[_HOST]
        told = spans is not None or stream.remembers
        begins = ran = False
        n, at = turn.n, 0
        while at < n:
            # This loop makes no call, so a processor keeps its sums at hand.
            while at < n:
                arrived_s = turn.arrived_s[at]
                place = place + 1 if arrived_s <= launched_s else 0
                if place >= members.n_met:
                    break  # to be noted
                if place == 0:
                    launched_s = now_s
                    begins = True
                members.n_used[place] += 1
                costs = 8 * place
                host_s = now_s
                now_s += members.costs_s[costs]  # all_s
                start_s = host_s + members.costs_s[costs + 1]  # first_s
                if arrived_s > start_s:
                    start_s = arrived_s
                    if start_s > free_s:
                        waited_s += start_s - free_s
                    else:
                        start_s = free_s
                elif start_s > free_s:
                    starved_s += start_s - free_s
                else:
                    start_s = free_s
                free_s = start_s + members.costs_s[costs + 2]  # duration_s
                if start_s < copied_s:
                    free_s += members.costs_s[costs + 4]  # slowed_s
                    stream.slowed_s += members.costs_s[costs + 4]
                end_s = free_s
                last_s = now_s + members.costs_s[costs + 3]  # tail_s
                if last_s > free_s:
                    # Kernels shorter than their launches: the stream starves between them.
                    starved_s += last_s - free_s
                    free_s = last_s
                turn.ends_s[at] = free_s
                at += 1
                if told:
                    ran = True
                    break
            if ran:
                ran = False
                slowed_s, more_s = members.costs_s[costs + 4], members.costs_s[costs + 5]
                if stream.remembers and start_s >= copied_s and (slowed_s > 0.0 or more_s > 0.0):
                    stream.note(start_s, end_s, slowed_s, more_s)
                if spans is not None:
                    spans("host", "launch expert", turn.layer, turn.experts[at - 1], 1, 0, host_s, now_s)
                    spans(stream.name, "expert", turn.layer, turn.experts[at - 1], 1, 0, start_s, end_s)
            elif at < n:
                self._note_member(place)
                place -= 1
        if begins:
            group.waits = None
        if n:
            group.open = True
            group.launched_s = launched_s
            group.last = members.operations[place]
        group.precision = self._precision
        self.now_s = now_s
        stream.free_s = free_s
        stream.gaps_s[_H2D] = waited_s
        stream.gaps_s[_HOST] = starved_s
        return True

    def plain_layers(self, first: int, n: int, here: Sequence[int], coming: Sequence[int], turn: Turn) -> bool:
        """`to_gate`, `demand_turn` and `run_turn` of `n` layers in a row, by how many experts are here and come.

        All of one token each, and who is here has arrived before the gate was read. The same sums without calls, since
        a sweep takes them for every point; False, and nothing done, where there is more to look at.
        """
        stream, queue, group = self.stream, self._link, self._group
        if stream.n_pending > 0 or len(self._waits) > 0 or self._n_away > 0 or self.n_gpus > 1 or self.n_links > 1:
            return False
        if self.together is not None or self.spans is not None or self._dense is not None or not self._grouped:
            return False
        if queue.n_queued or queue.report or turn.n_bytes != queue.last_bytes:
            return False
        if queue.memory is not None or stream.written_s > self.now_s or (queue.n_slows and self._shared is not None):
            return False
        if stream.owed_s > 0.0:
            stream.pay()
        copied_s = stream.copied_s
        now_s, free_s, link_s, launched_s = self.now_s, stream.free_s, queue.free_s, group.launched_s
        waited_s, starved_s = stream.gaps_s[_H2D], stream.gaps_s[_HOST]
        members = self._members
        place = -1
        joins = False
        n_copies = 0
        for layer in range(n):
            row = stream.row
            stream.waited_s[row + _HOST] += starved_s - stream.charged_host_s
            stream.waited_s[row + _H2D] += waited_s - stream.charged_h2d_s
            stream.charged_host_s = starved_s
            stream.charged_h2d_s = waited_s
            stream.row = stream.first_row + (first + layer) * _KINDS
            gate_s = 0.0
            for operation in self._blocks:
                if operation.n == 0:
                    self._note_use(operation)
                operation.n += 1
                start_s = now_s + operation.first_s
                now_s += operation.all_s
                if start_s > free_s:
                    starved_s += start_s - free_s
                    free_s = start_s
                start_s = free_s
                free_s += operation.duration_s
                if start_s < copied_s:
                    free_s += operation.slowed_s
                    stream.slowed_s += operation.slowed_s
                elif stream.remembers and (operation.slowed_s > 0.0 or operation.more_s > 0.0):
                    stream.note(start_s, free_s, operation.slowed_s, operation.more_s)
                last_s = now_s + operation.tail_s
                if last_s > free_s:
                    starved_s += last_s - free_s
                    free_s = last_s
                if operation is self._gate_block:
                    gate_s = free_s
            now_s = (gate_s if gate_s > now_s else now_s) + self._sync_s
            n_here, n_coming = here[layer], coming[layer]
            for at in range(n_coming):
                now_s += self._copy_launch_s
                start_s = now_s if now_s > link_s else link_s
                link_s = start_s + queue.last_s
                turn.arrived_s[at] = link_s
            if n_coming and queue.n_slows:
                copied_s = link_s
            n_copies += n_coming
            joins = False
            for at in range(n_here + n_coming):
                arrived_s = 0.0 if at < n_here else turn.arrived_s[at - n_here]
                if joins and arrived_s <= launched_s:
                    place += 1
                else:
                    place = 0
                    launched_s = now_s
                    joins = True
                if place == members.n_met:
                    self._note_member(place)
                members.n_used[place] += 1
                costs = 8 * place
                start_s = now_s + members.costs_s[costs + 1]  # first_s
                now_s += members.costs_s[costs]  # all_s
                if arrived_s > start_s:
                    start_s = arrived_s
                    if start_s > free_s:
                        waited_s += start_s - free_s
                    else:
                        start_s = free_s
                elif start_s > free_s:
                    starved_s += start_s - free_s
                else:
                    start_s = free_s
                free_s = start_s + members.costs_s[costs + 2]  # duration_s
                slowed_s, more_s = members.costs_s[costs + 4], members.costs_s[costs + 5]
                if start_s < copied_s:
                    free_s += slowed_s
                    stream.slowed_s += slowed_s
                elif stream.remembers and (slowed_s > 0.0 or more_s > 0.0):
                    stream.note(start_s, free_s, slowed_s, more_s)
                last_s = now_s + members.costs_s[costs + 3]  # tail_s
                if last_s > free_s:
                    starved_s += last_s - free_s
                    free_s = last_s
        group.open = joins
        group.launched_s = launched_s
        if place >= 0:
            group.last = members.operations[place]
        group.waits = None
        group.precision = self._precision
        self.now_s = now_s
        self.n_syncs += n
        stream.free_s = free_s
        stream.copied_s = copied_s
        stream.gaps_s[_H2D] = waited_s
        stream.gaps_s[_HOST] = starved_s
        self.experts_launched += n_copies
        self.n_copy_launches += n_copies * self._copy_calls
        queue.served(n_copies, link_s)
        return True

    def expert(
        self,
        piece: Piece,
        n_tokens: int,
        arrived_s: float,
        after: tuple[Ticket, ...],
        parts: Sequence[Piece],
    ) -> Ticket | None:
        if self._grouped and piece.kernels_frac == 1.0:
            operation = self._join_group(piece, n_tokens, arrived_s, after)
        else:
            group: Group = self._groups[piece.gpu]
            group.open = False
            operation = self._alone(piece, n_tokens)
        host_s = self.now_s
        self.now_s = launched_s = host_s + operation.all_s
        self._count_use(operation)
        if self.spans is not None:
            self.spans("host", "launch expert", piece.layer, piece.expert, n_tokens, 0, host_s, launched_s)
        if piece.gpu:
            return self._elsewhere(piece, n_tokens, operation, host_s, arrived_s, after)
        # What the next block joins, an expert here does not wait for.
        stream = self.stream
        work = stream.run(
            "expert",
            piece.layer,
            piece.expert,
            n_tokens,
            host_s + operation.first_s,
            launched_s + operation.tail_s,
            operation.duration_s,
            operation.length,
            arrived_s,
            after,
            operation.slowed_s,
            operation.more_s,
        )
        self.ends_s = stream.free_s
        self.cause = stream.blame
        return work

    def _elsewhere(
        self,
        piece: Piece,
        n_tokens: int,
        operation: Operation,
        host_s: float,
        arrived_s: float,
        after: tuple[Ticket, ...],
    ) -> Ticket:
        """On another GPU: hidden states cross to it and back; by themselves they never queue."""
        cost, stream = self.cost, self.streams[piece.gpu]
        first_s, last_s = host_s + operation.first_s, self.now_s + operation.tail_s
        if self.gathers or self.together is not None:
            return self._with_the_others(piece, n_tokens, operation, first_s, last_s, arrived_s, after)
        peer_s = cost.copies.p2p_s(cost.activation_bytes(n_tokens))
        crossing_s = peer_s  # back; and there, as far as the launch does not hide it
        if self._gate is not None and self._gate.end_s >= 0.0:
            after = (*after, Ticket(self._gate.end_s + peer_s, GPU))
            crossing_s += min(peer_s, max(0.0, self._gate.end_s + peer_s - first_s))
        if peer_s:
            latency_s = crossing_s * cost.copies.p2p_latency_s / peer_s
            self.gpu_s[cost.copies.q_p2p_latency] += latency_s
            self.gpu_s[cost.copies.q_p2p_bandwidth] += crossing_s - latency_s
        duration_s = operation.duration_s + peer_s
        length = stream.seconds.meter.at(duration_s)
        ticket: Ticket | None = stream.run(
            "expert",
            piece.layer,
            piece.expert,
            n_tokens,
            first_s,
            last_s,
            duration_s,
            length,
            arrived_s,
            after,
            operation.slowed_s,
            operation.more_s,
        )
        if ticket is None:
            ticket = Ticket(stream.free_s, stream.blame)
            ticket.speculative = stream.blames_prefetch
        self._waits = (*self._waits, ticket)
        return ticket

    def dispatch(self, layer: int, n_tokens: list[int]) -> None:
        self.exchange.begin(layer)
        for gpu in range(1, self.n_gpus):
            if n_tokens[gpu]:
                self._send(layer, gpu, n_tokens[gpu])

    def _send(self, layer: int, gpu: int, n_tokens: int) -> None:
        exchange = self.exchange
        exchange.sent[gpu] = self._cross("dispatch", layer, n_tokens, self.p2p_out, NO_TICKETS)
        exchange.n_tokens[gpu] += n_tokens

    def _with_the_others(
        self,
        piece: Piece,
        n_tokens: int,
        operation: Operation,
        first_s: float,
        last_s: float,
        arrived_s: float,
        after: tuple[Ticket, ...],
    ) -> Ticket:
        """On another GPU, once the tokens of all its experts of the layer are there, or as they are there anyway."""
        exchange, gpu = self.exchange, piece.gpu
        if self.gathers:
            if exchange.sent[gpu] is None:  # the gate asked for none there: its home is elsewhere
                self._send(piece.layer, gpu, n_tokens)
            sent = exchange.sent[gpu]
            assert sent is not None
            after = (*after, sent)
        stream = self.streams[gpu]
        length = stream.seconds.meter.at(operation.duration_s)
        ticket: Ticket | None = stream.run(
            "expert",
            piece.layer,
            piece.expert,
            n_tokens,
            first_s,
            last_s,
            operation.duration_s,
            length,
            arrived_s,
            after,
            operation.slowed_s,
            operation.more_s,
        )
        if ticket is None:
            ticket = Ticket(stream.free_s, stream.blame)
            ticket.speculative = stream.blames_prefetch
        if self.gathers:
            if exchange.last[gpu] is None:
                self._n_away += 1
            exchange.last[gpu] = ticket
        return ticket

    def _combine(self) -> None:
        """Bring back what other GPUs have computed; GPU 0 waits for it before it goes on."""
        exchange = self.exchange
        self._n_away = 0
        for gpu in exchange.away():
            last = exchange.last[gpu]
            assert last is not None
            back = self._cross("combine", exchange.layer, exchange.n_tokens[gpu], self.p2p_in, (last,))
            self._waits = (*self._waits, back)
        exchange.begin(-1)

    def _cross(self, op: str, layer: int, n_tokens: int, port: CopyQueue, after: tuple[Ticket, ...]) -> Copy:
        """Hidden states cross to or from GPU 0, as soon as its port is free."""
        cost = self.cost
        n_bytes = cost.activation_bytes(n_tokens)
        seconds = cost.copies.p2p_s(n_bytes)
        host_s = self.now_s
        self.now_s = host_s + cost.launches.enqueue_s
        self.n_copy_launches += 1
        if self.spans is not None:
            self.spans("host", f"launch {op}", layer, -1, n_tokens, n_bytes, host_s, self.now_s)
        self.gpu_s[cost.copies.q_p2p_latency] += cost.copies.p2p_latency_s
        self.gpu_s[cost.copies.q_p2p_bandwidth] += seconds - cost.copies.p2p_latency_s
        length = port.seconds.meter.at(seconds)
        copy = Copy(op, layer, -1, n_bytes, seconds, length, True, self.now_s, after, None, GPU, len(after) > 0)
        self._advance()
        port.submit(copy, self.now_s)
        return copy

    def _alone(self, piece: Piece, n_tokens: int) -> Operation:
        """What an expert (or a piece of one) takes that shares no kernels with others."""
        of_index = self._alone_of
        index = piece.index
        while index >= len(of_index):
            of_index.append(None)
        operation: Operation | None = of_index[index]
        if operation is None or n_tokens != 1:
            operation = self._alone_by_size(piece, n_tokens)
            if n_tokens == 1:
                of_index[index] = operation
        return operation

    def _alone_by_size(self, piece: Piece, n_tokens: int) -> Operation:
        """The same of all pieces that take as long."""
        frac, first = piece.stop_frac - piece.start_frac, piece.start_frac == 0.0
        key = (n_tokens, piece.precision, frac, piece.kernels_frac, first)
        operation = self._experts.get(key)
        if operation is None:
            whole = piece.kernels_frac == 1.0
            launch = self.cost.launches.expert if whole else self.cost.launches.part(piece.kernels_frac, first)
            price = self.cost.expert(n_tokens, piece.precision, frac, piece.kernels_frac)
            operation = self._experts[key] = self._operation(price, launch)
        return operation

    def _join_group(self, piece: Piece, n_tokens: int, arrived_s: float, after: tuple[Ticket, ...]) -> Operation:
        """What an expert (or a slice of its columns) adds to the group launched last, or to one that it begins."""
        group = self._groups[piece.gpu]
        joins = group.open and group.precision == piece.precision and arrived_s <= group.launched_s
        if joins and after:
            for ticket in after:
                if ticket.end_s < 0.0:
                    self._advance()
                if not 0.0 <= ticket.end_s <= group.launched_s and not group.awaits(ticket):
                    joins = False
                    break
        plain = n_tokens == 1 and piece.serving  # of those, a place in the group says all
        last = group.last
        if joins:
            if plain and last is not None:
                group.last = last.next if last.next is not None else self._member(last)
                return group.last
            return self._in_group(group, group.slack_s if last is None else last.slack_s, piece, n_tokens)
        group.open = True
        group.launched_s = self.now_s
        group.precision = piece.precision
        group.waits = after if after else None
        if not plain:
            return self._in_group(group, -1.0, piece, n_tokens)
        group.last = self._leader if self._leader is not None else self._lead()
        return group.last

    def _lead(self) -> Operation:
        """A whole expert of one token that begins a group."""
        self._leader = self._place(self.cost.launches.expert, self.cost.leader(1, self._precision, 1.0))
        return self._leader

    def _member(self, last: Operation) -> Operation:
        """One that joins after `last`."""
        last.next = self._place(self.cost.launches.member, self.cost.member(last.slack_s, 1, self._precision, 1.0))
        last.next.place = last.place + 1
        return last.next

    def _note_member(self, place: int) -> None:
        """A member of a group is used for the first time since counters were told, by its place."""
        members = self._members
        while place >= members.n:
            if members.n == 0:
                members.add(self._leader if self._leader is not None else self._lead())
            else:
                last: Operation = members.operations[members.n - 1]
                members.add(last.next if last.next is not None else self._member(last))
        self._note_use(members.operations[place])
        members.n_met = place + 1

    def _place(self, launch: Launch, priced: tuple[Price, float]) -> Operation:
        """A whole expert of one token by its place in a group: an operation of its own, which knows the next one."""
        price, slack_s = priced
        operation = self._operation(price, launch)
        operation.slack_s = slack_s
        return operation

    def _in_group(self, group: Group, slack_s: float, piece: Piece, n_tokens: int) -> Operation:
        """An expert whose place in its group does not say all: after what the others left to fill; -1: the first."""
        frac = piece.stop_frac - piece.start_frac
        group.last = None
        by_kind = self._grouped_experts.get(slack_s)
        if by_kind is None:
            by_kind = self._grouped_experts[slack_s] = {}
        key: object = n_tokens if piece.serving else (n_tokens, piece.precision, frac)
        found = by_kind.get(key)
        if found is None:
            cost = self.cost
            if slack_s < 0.0:
                price, left_s = cost.leader(n_tokens, piece.precision, frac)
                operation = self._operation(price, cost.launches.expert)
            else:
                price, left_s = cost.member(slack_s, n_tokens, piece.precision, frac)
                operation = self._operation(price, cost.launches.member)
            found = by_kind[key] = operation, left_s
        group.slack_s = found[1]
        joined: Operation = found[0]
        return joined

    def cpu_expert(self, layer: int, expert: int, n_tokens: int, after: tuple[Ticket, ...] = NO_TICKETS) -> Ticket:
        if self._gpu_memory is not None and self.cpu.memory is None:
            self._share_host_memory()
        joins = self._hybrid_in[layer] == self._n_begun
        if not joins:
            self._hybrid_in[layer] = self._n_begun
            self._begin_hybrid(layer)
        by_tokens = self._joined_on_cpu if joins else self._on_cpu
        known = by_tokens.get(n_tokens)
        if known is None:
            known = by_tokens[n_tokens] = self._cpu_work(n_tokens, joins)
        n_bytes, there_s, back_s, length, duration_s, attributed_to, draws_per_s = known
        host_s = self.now_s
        self.now_s = host_s + self.cost.launches.cpu_s
        self.n_copy_launches += 1
        self.experts_launched += 1.0
        if self.spans is not None:
            self.spans("host", "launch cpu_expert", layer, expert, n_tokens, n_bytes, host_s, self.now_s)
        arrived_s = self.d2h.use("activations", layer, expert, n_tokens, self.now_s, there_s)
        self.cpu_s[attributed_to] += duration_s
        cause = _CPU
        for read in after:  # its end is known: a demanded read waits for nothing
            if read.end_s > arrived_s:
                if read.end_s - (arrived_s if arrived_s > self.cpu.free_s else self.cpu.free_s) > duration_s:
                    cause = read.cause  # it has mostly waited for its read: so does who waits for it
                arrived_s = read.end_s
        done = ends_at(self.cpu.use("expert", layer, expert, n_tokens, arrived_s, duration_s, draws_per_s), cause)
        memory = self.cpu.memory
        if memory is not None:
            for queue in self.h2d:
                queue.pay()
            self.write_backs.pay()
            self.drive.pay()
        self.d2h_bytes += n_bytes
        back = result_of(layer, expert, n_bytes, back_s, length, self.now_s, done)
        if self.n_links > 1:
            self._advance()
        if memory is not None:
            memory.awaits(done, back)
        self.h2d[0].submit(back, self.now_s)
        return back

    def _begin_hybrid(self, layer: int) -> None:
        """The CPU gets its first expert of a layer: the host submits, and will synchronise and merge."""
        self.n_hybrid += 1
        if self._hybrid_s:
            host_s = self.now_s
            self.now_s = host_s + self._hybrid_s
            self._advance()  # what the stream waits for may end by then
            if not self.stream.n_pending:
                self.stream.idle_until(self.now_s, _HOST)  # what it waits for afterwards is the CPU's
            if self.spans is not None:
                self.spans("host", "hybrid layer", layer, -1, self._n_tokens, 0, host_s, self.now_s)

    def _cpu_work(self, n_tokens: int, joins: bool) -> tuple[int, float, float, int, float, int, float]:
        """What tokens on the CPU move and take; `joins`: the expert is not the first of its layer there."""
        cost = self.cost
        price = cost.expert_cpu_joined(n_tokens) if joins else cost.expert_cpu(n_tokens)
        n_bytes = cost.activation_bytes(n_tokens)
        back_s = cost.copies.h2d_s(n_bytes)
        length = self.h2d[0].seconds.meter.at(back_s)
        return (
            n_bytes,
            cost.copies.d2h_s(n_bytes),
            back_s,
            length,
            price.duration_s,
            price.attributed_to,
            price.draws_per_s,
        )

    def join(self, ticket: Ticket) -> None:
        self._waits = (*self._waits, ticket)

    # -- copies -----------------------------------------------------------------------------------------------------

    def _enqueue(self, piece: Piece) -> float:
        """The host launches a copy; when it has."""
        begun_s = self.now_s
        launch_s, calls = self._copy_launch_s, self._copy_calls
        if not piece.serving:
            index = piece.index
            known = self._part_launches[index] if index < len(self._part_launches) else None
            launch_s, calls = self._part_launch(piece) if known is None else known
        self.now_s = begun_s + launch_s
        self.experts_launched += piece.stop_frac - piece.start_frac
        self.n_copy_launches += calls
        if self.spans is not None:
            self.spans("host", "launch copy", piece.layer, piece.expert, 0, piece.n_bytes, begun_s, self.now_s)
        return self.now_s

    def _part_launch(self, piece: Piece) -> tuple[float, int]:
        """Host seconds, and calls, of launching a copy of a part."""
        launches, frac, of_index = self.cost.launches, piece.stop_frac - piece.start_frac, self._part_launches
        launch_s = launches.copy_s if frac == 1.0 else launches.copy_part_s(frac)
        while piece.index >= len(of_index):
            of_index.append(None)
        launch = of_index[piece.index] = launch_s, launches.calls(frac) if self._copy_calls > 1 else self._copy_calls
        return launch

    def demand(self, piece: Piece, ready_s: float) -> bool:
        queue = self._link
        now_s = self.now_s + self._copy_launch_s
        if queue.n_queued or queue.report or self.n_links > 1 or self.stream.n_pending or not piece.serving:
            return False
        if piece.n_bytes != queue.last_bytes or (ready_s > now_s and ready_s > queue.free_s):
            return False
        if self.spans is not None:
            self.spans("host", "launch copy", piece.layer, piece.expert, 0, piece.n_bytes, self.now_s, now_s)
        self.now_s = now_s
        self.experts_launched += 1.0
        self.n_copy_launches += self._copy_calls
        if ready_s < now_s:
            ready_s = now_s
        start_s = ready_s if ready_s > queue.free_s else queue.free_s
        queue.serve_now(piece, start_s, queue.last_s, queue.last_length)
        self.ends_s = queue.free_s
        self.cause = _H2D
        return True

    def demand_turn(self, turn: Turn) -> bool:
        queue, spans = self._link, self.spans
        if queue.n_queued or queue.report or self.n_links > 1 or self.stream.n_pending:
            return False
        if turn.n_bytes != queue.last_bytes:
            return False
        now_s, free_s = self.now_s, queue.free_s
        copy_s, launch_s, launched = queue.last_s, self._copy_launch_s, self.experts_launched
        shares = queue.memory is not None
        slows_until_s = self.stream.free_s if queue.n_slows else -1.0  # a kernel that is placed already
        told = spans is not None or shares
        at = turn.n_here
        while at < turn.n:
            while not told and at < turn.n:  # no call, as in `run_turn`
                start_s = now_s + launch_s
                if start_s < free_s:
                    start_s = free_s
                if start_s < slows_until_s:
                    break
                now_s += launch_s
                free_s = start_s + copy_s
                turn.arrived_s[at] = free_s
                launched += 1.0
                at += 1
            if at < turn.n:
                begun_s = now_s
                now_s += launch_s
                start_s = now_s if now_s > free_s else free_s
                if shares or start_s < slows_until_s:
                    free_s = queue.runs_s(start_s, copy_s, turn.n_bytes)
                else:
                    free_s = start_s + copy_s
                turn.arrived_s[at] = free_s
                launched += 1.0
                if spans is not None:
                    spans("host", "launch copy", turn.layer, turn.experts[at], 0, turn.n_bytes, begun_s, now_s)
                    spans(queue.name, "demand", turn.layer, turn.experts[at], 0, turn.n_bytes, start_s, free_s)
                at += 1
        self.now_s = now_s
        self.experts_launched = launched
        self.n_copy_launches += (turn.n - turn.n_here) * self._copy_calls
        if queue.n_slows and turn.n > turn.n_here:
            self.stream.copied_s = free_s
        queue.served(turn.n - turn.n_here, free_s)
        return True

    def copy(self, piece: Piece, priority: int, ready_s: float, after: tuple[Ticket, ...]) -> Ticket | None:
        now_s = self._enqueue(piece)
        if self.n_links > 1:
            self._advance()
        queue: CopyQueue = self.h2d[piece.gpu]
        n_bytes = piece.n_bytes
        parts_differ = self._copy_calls > 1 and not piece.serving  # from what has as many bytes and fewer calls
        if n_bytes != queue.last_bytes or parts_differ:
            self._time(piece, queue)
            if parts_differ:
                queue.last_bytes = -1
        duration_s = queue.last_s
        length = queue.last_length
        if priority == DEMAND:
            settled = queue.demand(piece, duration_s, length, now_s, ready_s, after)
            self.ends_s = queue.free_s
            self.cause = _H2D
            return settled
        if ready_s < now_s:
            ready_s = now_s
        copy = copy_of(piece, "prefetch", duration_s, length, False, ready_s, after)
        queue.submit(copy, now_s)
        return copy

    def _time(self, piece: Piece, queue: CopyQueue) -> None:
        """How long a copy of the piece takes, as that of the piece copied last."""
        of_index, index = self._copies, piece.index
        while index >= len(of_index):
            of_index.append(None)
        timed = of_index[index]
        if timed is None:
            seconds = self.cost.copies.expert_s(piece.n_bytes, piece.stop_frac - piece.start_frac)
            timed = of_index[index] = (seconds, queue.seconds.meter.at(seconds))
        queue.last_bytes = piece.n_bytes
        queue.last_s, queue.last_length = timed

    def read(self, layer: int, expert: int, n_bytes: int, priority: int) -> Ticket:
        queue = self.drive
        drive: Any = self.cost.drive  # there is one where anybody reads
        duration_s = drive.busy_s(n_bytes)
        length = queue.seconds.meter.at(duration_s)
        self._advance()
        demanded = priority == DEMAND
        read = Copy("read", layer, expert, n_bytes, duration_s, length, demanded, self.now_s, NO_TICKETS, None, NVME)
        queue.submit(read, self.now_s)
        return read

    def copy_back(self, piece: Piece, ready_s: float, after: tuple[Ticket, ...]) -> Ticket:
        queue = self.write_backs
        if self.links[self.n_links - 1] is not queue:
            self.links.append(queue)
            self.n_links += 1
        now_s = self._enqueue(piece)
        duration_s = self.cost.copies.expert_back_s(piece.n_bytes, piece.stop_frac - piece.start_frac)
        length = queue.seconds.meter.at(duration_s)
        if ready_s < now_s:
            ready_s = now_s
        copy = Copy(
            "write_back", piece.layer, piece.expert, piece.n_bytes, duration_s, length, True, ready_s, after, None, H2D
        )
        self.d2h_bytes += piece.n_bytes
        self.written_back_bytes += piece.n_bytes
        self._advance()
        queue.submit(copy, self.now_s)
        return copy

    def move_kv(self, n_pages: int, page_bytes: int, down: bool) -> None:
        prices, queue, n_bytes = self.cost.copies, self.write_backs if down else self._link, n_pages * page_bytes
        duration_s = n_pages * (prices.d2h_s(page_bytes) if down else prices.h2d_s(page_bytes))
        op = "kv_out" if down else "kv_in"
        begun_s = self.now_s
        self.now_s = begun_s + n_pages * self.cost.launches.enqueue_s
        self.n_copy_launches += n_pages
        self._close_groups()
        if self.spans is not None:
            self.spans("host", f"launch {op}", -1, -1, 0, n_bytes, begun_s, self.now_s)
        if self.n_links > 1:
            self._advance()
        if down and self.d2h.free_s > queue.free_s:
            queue.free_s = self.d2h.free_s  # one engine: activations of experts on the CPU went down before
        length = queue.seconds.meter.at(duration_s)
        copy = Copy(op, -1, -1, n_bytes, duration_s, length, True, self.now_s, NO_TICKETS, None, H2D)
        queue.submit(copy, self.now_s)
        queue.n_copies += n_pages - 1
        if down:
            self.d2h_bytes += n_bytes
            self.kv_out_bytes += n_bytes
            self.kv_out_s += duration_s
            self.n_kv_out += n_pages
            if copy.end_s > self.d2h.free_s:
                self.d2h.free_s = copy.end_s
        else:
            self.kv_in_bytes += n_bytes
        self.join(copy)

    def promote(self, ticket: Ticket) -> bool:
        assert isinstance(ticket, Copy)
        self._advance()
        if ticket.end_s >= 0.0:
            return False
        for queue in self.h2d:
            queue.promote(ticket, self.now_s)
        self.drive.promote(ticket, self.now_s)
        return True

    def cancel(self, ticket: Ticket) -> bool:
        assert isinstance(ticket, Copy)
        if ticket.end_s >= 0.0:
            return False
        self._advance()
        for queue in self.h2d:
            if queue.cancel(ticket, self.now_s):
                return True
        return self.drive.cancel(ticket, self.now_s)

    def poll(self) -> list[Piece]:
        self._advance()
        pieces: list[Piece] = []
        if self.n_gpus > 1:
            done: list[Copy] = []
            for queue in self.h2d:
                done += queue.completions(self.now_s)
            done.sort(key=attrgetter("end_s"))
        elif self._link.finished:
            done = self._link.completions(self.now_s)
        else:
            return pieces
        for copy in done:
            if copy.piece is not None:
                pieces.append(copy.piece)  # noqa: PERF401 - a loop is what compiles well
        return pieces

    def ended(self, ticket: Ticket) -> bool:
        if ticket.end_s < 0.0:
            if self.n_links == 1 and self._link.free_s > self.now_s:
                return False  # busy until now with what started before
            self._advance()
        return 0.0 <= ticket.end_s <= self.now_s

    def ends_after_s(self, ticket: Ticket) -> float:
        if ticket.end_s >= 0.0:
            return ticket.end_s
        return 0.0 if self.n_links > 1 else self._link.free_s  # it will start after what has been started

    def drain(self) -> None:
        while self._settle_next():
            pass
        sharing = self.cost.sharing
        if sharing.on:
            self.gpu_s[sharing.q_gpu] = math.fsum([stream.slowed_s for stream in self.streams])
            self.cpu_s[sharing.q_cpu] = self.cpu.slowed_s

    @property
    def h2d_bytes(self) -> int:
        """Bytes copied to the GPUs."""
        return sum(queue.copied_bytes for queue in self.h2d)

    @property
    def copies_slowed_s(self) -> float:
        """What experts on the CPU added to the time of copies to the GPUs."""
        return math.fsum([queue.slowed_s for queue in self.h2d])

    @property
    def write_backs_slowed_s(self) -> float:
        """What sharing added to the time of what is copied back."""
        return self.write_backs.slowed_s

    @property
    def reads_slowed_s(self) -> float:
        """What sharing added to the time of the drive's reads."""
        return self.drive.slowed_s

    @property
    def n_reads(self) -> int:
        """Experts read from the drive."""
        return self.drive.n_copies

    @property
    def read_bytes(self) -> int:
        """Their bytes."""
        return self.drive.copied_bytes

    def _advance(self) -> None:
        """Settle every copy that starts before the host's clock; over several links in the order of their starts."""
        if self.n_links == 1:
            if self._link.n_queued:
                self._link.advance(self.now_s)
            return
        while True:
            queue = self._next_link()
            if queue is None or queue.start_s > self.now_s or (queue.start_s == self.now_s and not queue.starts_demand):
                return
            queue.settle_next()

    def _next_link(self) -> CopyQueue | None:
        """The link on which the next copy starts; of several that start together a demand, then the drive."""
        found: CopyQueue | None = None
        first_s = -1.0
        for queue in self.links:
            if queue.n_queued:
                start_s = queue.next_start_s()
                if start_s >= 0.0 and (
                    found is None
                    or start_s < first_s
                    or (start_s == first_s and queue.starts_demand and not found.starts_demand)
                ):
                    found = queue
                    first_s = start_s
        return found

    def _settle_next(self) -> bool:
        queue = self._next_link()
        return queue is not None and queue.settle_next()

    def _settle(self, ticket: Ticket) -> None:
        """The host is blocked: let copies start, in time order, until the ticket's end is known."""
        while ticket.end_s < 0.0:
            if not self._settle_next():
                raise RuntimeError("deadlock: the host waits for work that waits for no copy (a bug in the engine)")

    # -- the rest ---------------------------------------------------------------------------------------------------

    def predict(self, duration_s: float, lane: str, blocking: bool, basis: Basis) -> Ticket:
        attributed_to = self._predicted_by[basis]
        if lane == "side":
            # A blocked host launches nothing: its waiting is then what the stream waits for.
            (self.host_predict_s if blocking else self.side_s)[attributed_to] += duration_s
            ticket = ends_at(self.side.use("predict", -1, -1, 0, self.now_s, duration_s), SIDE)
        elif lane == "host":
            self._close_groups()  # no group spans what the host or the stream does in between
            self.host_predict_s[attributed_to] += duration_s
            begun_s = self.now_s
            self.now_s += duration_s
            ticket = Ticket(self.now_s, HOST)
            if self.spans is not None:
                self.spans("host", "predict", -1, -1, 0, 0, begun_s, self.now_s)
        else:
            self._close_groups()
            self.now_s += self.cost.launches.kernel_s
            self.gpu_s[attributed_to] += duration_s
            self._count_uses()
            length = self.stream.seconds.meter.at(duration_s)
            work = self.stream.run("predict", -1, -1, 0, self.now_s, self.now_s, duration_s, length, 0.0, NO_TICKETS)
            ticket = self._settled() if work is None else work
        if blocking:
            self.sync(ticket)
        return ticket

    def wait_until(self, time_s: float) -> None:
        if time_s > self.now_s:
            self.now_s = time_s
            self.stream.idle_until(time_s, IDLE)

    def parts_s(self) -> list[float]:
        self._count_uses()
        stream = self.stream
        if not stream.n_pending:
            stream.idle_until(self.now_s, _HOST)  # hooks after the last read may have kept the host busy
        stream.leave()
        return stream.parts()

    @property
    def waiting(self) -> Waiting:
        """What GPU 0 waited for, by phase and layer."""
        return self.stream.waiting

    def host_shares(self) -> list[tuple[int, float]]:
        """The host's busy seconds by the quantity they rest on (an index into `cost.figures.entries`)."""
        self._count_uses()
        spent = self.cost.launches.spent(self.n_syncs, self.n_copy_launches, self.experts_launched, self.n_hybrid)
        return spent + [(figure, spent_s) for figure, spent_s in enumerate(self.host_predict_s) if spent_s]

    def lane_busy_s(self) -> dict[str, float]:
        """Busy seconds by lane."""
        self._count_uses()
        lanes = {stream.name: stream.busy_s for stream in self.streams}
        lanes |= {queue.name: queue.busy_s for queue in self.h2d}
        lanes |= {lane.name: lane.busy_s for lane in (self.d2h, self.cpu, self.side)}
        if self.gathers:
            lanes |= {port.name: port.busy_s for port in (self.p2p_out, self.p2p_in)}
        if self.cost.drive is not None:
            lanes[self.drive.name] = self.drive.busy_s
        lanes["d2h"] += self.write_backs.busy_s  # one engine: activations of CPU experts, or pieces written back
        lanes["host"] = math.fsum([share for _, share in self.host_shares()])
        return lanes

    def lane_ends_s(self) -> dict[str, float]:
        """When links, CPU pool and predictor ended their last work: some goes on after the last token."""
        ends_s = {queue.name: queue.free_s for queue in self.h2d}
        ends_s |= {lane.name: lane.free_s for lane in (self.cpu, self.side)}
        if self.cost.drive is not None:
            ends_s[self.drive.name] = self.drive.free_s
        return ends_s | {"d2h": max(self.d2h.free_s, self.write_backs.free_s)}
