"""The simulated machine on SimPy events: the verbs the engine speaks, and what each asks of which lane.

The host is the program that calls these verbs. Its clock is `now_s`; whenever it moves, what is due on the lanes by
then happens (`_happens`). How lanes work is told in `sim.machine.events.lanes` and `copies`; what they do to one
another, in `docs/contention.md`; how to add a lane, in `docs/simpy.md`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from sim.base.lanes import BACK, WIRE
from sim.machine.dense_parallel import Step, Together
from sim.machine.events.bill import Bill
from sim.machine.events.clock import Clock, Pending
from sim.machine.events.copies import Copy, CopyEngine
from sim.machine.events.groups import Groups
from sim.machine.events.lane_set import Lanes, couple, share_host_memory
from sim.machine.events.lanes import NOTHING, Work
from sim.machine.exchange import Exchange
from sim.machine.lanes import CPU, GPU, H2D, HOST, IDLE, NVME, SIDE
from sim.machine.protocol import DEMAND, Machine
from sim.machine.several import SHARED
from sim.machine.waiting import Waiting
from sim.policy.tickets import UNKNOWN_S, Ticket, ends_at

if TYPE_CHECKING:
    from collections.abc import MutableSequence, Sequence

    from sim.base.quantities import Basis
    from sim.machine.cost import Cost
    from sim.machine.lanes import Spans
    from sim.machine.price import Launch, Price
    from sim.policy.pieces import Piece
    from sim.workload.iterations import Iteration


class EventMachine(Machine):
    """Implements `sim.machine.protocol.Machine` on SimPy events.

    Args:
        cost: prices. n_gpus: compute streams and copy engines. spans: called with every span, or None.
        report_copies: keep completions for `poll`.
    """

    measured: Literal[False] = False

    def __init__(self, cost: Cost, n_gpus: int = 1, spans: Spans | None = None, report_copies: bool = False) -> None:
        super().__init__()
        self.gathers = cost.several.gathers
        self.exchange = Exchange(n_gpus)
        self.together = Together(cost) if cost.several.together else None
        self._elsewhere = not cost.several.together and not cost.several.in_turn  # hidden states are on GPU 0
        self.cost = cost
        self.n_gpus = n_gpus
        self.spans = spans
        self.now_s = 0.0  # the host's clock
        self.bill = Bill(cost)
        self.groups = Groups(cost)
        self.clock = Clock()
        self.lanes = lanes = Lanes(
            self.clock, n_gpus, spans, report_copies, len(cost.n_dense_before) - 1, cost.several.in_turn
        )
        self.streams, self.h2d, self.paths = lanes.streams, lanes.h2d, lanes.paths
        if cost.sharing.on:
            couple(lanes, cost.sharing, cost.drive is not None)
        if cost.drive is not None:
            lanes.drive.lag_s = cost.drive.lag_s
            lanes.paths.lags(NVME, cost.drive.lag_s)
            lanes.streams[0].looks_down = True
        if cost.several.host_links == SHARED:
            share_host_memory(lanes, cost.copies)
        self._joins: tuple[Ticket, ...] = NOTHING
        # One engine for what goes down: activations wait for the last pages, and pages for the last activations.
        self._last_kv_down = self._last_down = NOTHING
        self._gate: Ticket | None = None
        self._unread: frozenset[int] = frozenset()  # layers in which the host does not read the gate's choice
        self._n_tokens = 0
        self._n_out = 0
        self._hybrid: set[int] = set()  # layers of this iteration of which the CPU has computed an expert

    def now(self) -> float:
        return self.now_s

    def _happens(self) -> None:
        """The host has got to `now_s`: let happen what is due by then."""
        self.clock.run_up_to(self.now_s)

    def _host(self, op: str, layer: int, expert: int, n_tokens: int, n_bytes: int, seconds: float) -> float:
        """The host is busy; returns when it began."""
        begun_s = self.now_s
        self.now_s = begun_s + seconds
        if self.spans is not None:
            self.spans("host", op, layer, expert, n_tokens, n_bytes, begun_s, self.now_s)
        return begun_s

    # -- the iteration ----------------------------------------------------------------------------------------------

    def begin(self, iteration: Iteration) -> None:
        cost = self.cost
        self.now_s += cost.launches.begin_s
        self.waiting.begin(iteration.number)
        self._hybrid.clear()
        self._n_tokens = iteration.n_tokens
        self._n_out = iteration.n_out
        if self.together is not None:
            self.together.begin(iteration)
            return
        self._attention = cost.attention(iteration)
        self._gate_price = cost.gate(iteration.n_tokens)
        self._shared_price = cost.shared(iteration.n_tokens) if cost.has_shared else None
        self._dense_price = cost.dense_layer(iteration) if cost.has_dense else None
        if cost.several.in_turn:
            self._handed_price = cost.hand_over(iteration.n_tokens)

    def _launch(self, op: str, layer: int, launch: Launch, price: Price) -> Ticket:
        """Launch on GPU 0's stream, after what the stream must join first."""
        self._combine()
        host_s = self._host(f"launch {op}", layer, -1, self._n_tokens, 0, launch.all_s)
        launch.n += 1
        self.bill.runs(price)
        self.groups.end()
        after, self._joins = self._joins, NOTHING
        tail_s = launch.tail_frac * price.duration_s
        last_s = self.now_s + tail_s
        ticket = self.streams[0].launch(
            Work(
                *(GPU, op, layer, -1, self._n_tokens, host_s + launch.first_s, price.duration_s, after, last_s),
                *(price.n_bytes, tail_s),
            )
        )
        self._happens()
        return ticket

    def _on_all(self, steps: list[Step], layer: int) -> Ticket:
        """Launch dense operations on all GPUs, each with its own price; the ticket of the last one on GPU 0."""
        ticket = Ticket(0.0, GPU)
        for op, launch, prices, meets in steps:
            host_s = self._host(f"launch {op}", layer, -1, self._n_tokens, 0, launch.all_s)
            launch.n += 1
            self.groups.end()
            after = NOTHING
            if meets:
                given = (stream.under_way[-1] for stream in self.streams if stream.under_way)
                after, self._joins = (*self._joins, *given), NOTHING
            for gpu, price in enumerate(prices):
                if price is None:
                    continue
                self.bill.runs(price)
                tail_s = launch.tail_frac * price.duration_s
                last_s = self.now_s + tail_s
                first_s = host_s + launch.first_s
                work = Work(
                    *(GPU, op, layer, -1, self._n_tokens, first_s, price.duration_s, after, last_s),
                    *(price.n_bytes, tail_s),
                )
                self.streams[gpu].launch(work)
                if gpu == 0:
                    ticket = work
            self._happens()
        return ticket

    def attention(self, layer: int) -> None:
        self.waiting.enter(layer)
        cost = self.cost
        if self.together is not None:
            self._on_all(self.together.attention(layer), layer)
            return
        self._hand_over(layer, layer)
        if self._dense_price is not None:
            for _ in range(cost.n_dense_before[layer]):
                self._launch("dense_layer", layer, cost.launches.dense, self._dense_price)
        self._launch("attention", layer, cost.launches.attention, self._attention)

    def _hand_over(self, at: int, layer: int) -> None:
        """Hidden states go on to the GPU that has the layer `at`, where another had the one before."""
        for _ in range(self.cost.n_hops_before[at] if self.cost.several.in_turn else 0):
            self._launch("hand_over", layer, self.cost.launches.handing_over, self._handed_price)

    def gate(self, layer: int) -> Ticket:
        if self.together is not None:
            return self._on_all(self.together.gate(layer), layer)
        self._gate = ticket = self._launch("gate", layer, self.cost.launches.gate, self._gate_price)
        return ticket

    def shared(self, layer: int) -> None:
        if self.together is not None:
            self._on_all(self.together.shared(), layer)
        elif self._shared_price is not None:
            self._launch("shared_expert", layer, self.cost.launches.shared, self._shared_price)

    def leave_unread(self, layers: frozenset[int]) -> None:
        self._unread = layers

    def to_gate(self, layer: int) -> float:
        self.attention(layer)
        ticket = self.gate(layer)
        self.shared(layer)
        if layer not in self._unread:
            self.sync(ticket)
        return self.now_s

    def sync(self, ticket: Ticket) -> None:
        self.clock.run_until_over(ticket)
        if ticket.end_s > self.now_s:
            self.now_s = ticket.end_s
            self.paths.of(HOST, 0).begin(self.now_s, ticket.lane)
            if ticket.cause in (H2D, CPU, NVME):
                # A stream that idles because the host waits for a copy waits for that copy, not for the host.
                self.streams[0].idle_until(self.now_s, ticket.cause, ticket.speculative, ticket.lane)
        self._host("sync", -1, -1, 0, 0, self.cost.launches.sync_s)
        self.bill.n_syncs += 1
        self.groups.end()
        self._happens()

    def end(self) -> None:
        cost = self.cost
        if self.together is not None:
            self.sync(self._on_all(self.together.end(), -1))
        else:
            self._hand_over(-1, -1)
            if self._dense_price is not None:
                for _ in range(cost.n_dense_before[-1]):
                    self._launch("dense_layer", -1, cost.launches.dense, self._dense_price)
            self.sync(self._launch("head", -1, cost.launches.head_of(self._n_out), cost.head(self._n_out)))
        self.streams[0].idle_until(self.now_s, HOST)
        self.bill.end_iteration()

    # -- experts ----------------------------------------------------------------------------------------------------

    def expert(
        self,
        piece: Piece,
        n_tokens: int,
        arrived_s: float,
        after: tuple[Ticket, ...],
        parts: Sequence[Piece],
    ) -> Ticket:
        cost = self.cost
        self._happens()
        if arrived_s:
            after = (ends_at(arrived_s, H2D, self.paths.of(H2D, piece.gpu).number), *after)
        price, launch = self.groups.priced(piece, n_tokens, after, self.now_s)
        host_s = self._host("launch expert", piece.layer, piece.expert, n_tokens, 0, launch.all_s)
        launch.n += 1
        self.bill.runs(price)
        first_s, duration_s = host_s + launch.first_s, price.duration_s
        tail_s = launch.tail_frac * duration_s
        last_s = self.now_s + tail_s
        if piece.gpu != 0 and self.gathers:
            if self.exchange.sent[piece.gpu] is None:  # the gate asked for none there: its home is elsewhere
                self._send(piece.layer, piece.gpu, n_tokens)
            sent = self.exchange.sent[piece.gpu]
            assert sent is not None
            after = (*after, sent)
        elif piece.gpu != 0 and self._elsewhere:
            # Hidden states cross to the expert's GPU and back; by themselves they never queue.
            peer_s = cost.copies.p2p_s(cost.activation_bytes(n_tokens))
            crossing_s = peer_s  # back; and there, as far as the launch does not hide it
            if self._gate is not None and self._gate.end_s != UNKNOWN_S:
                after = (*after, ends_at(self._gate.end_s + peer_s, GPU, WIRE))
                wire = self.paths.of(WIRE, 0)
                if wire.began_s() != self._gate.end_s:
                    wire.begin(self._gate.end_s, GPU)
                crossing_s += min(peer_s, max(0.0, self._gate.end_s + peer_s - first_s))
            if peer_s:
                self.bill.crosses(crossing_s, peer_s)
            duration_s += peer_s
        ticket = self.lanes.stream_of(piece.gpu).launch(
            Work(
                *(GPU, "expert", piece.layer, piece.expert, n_tokens, first_s, duration_s, after, last_s),
                *(price.n_bytes, tail_s),
            )
        )
        if piece.gpu != 0 and self.gathers:
            self.exchange.last[piece.gpu] = ticket
        elif piece.gpu != 0 and self._elsewhere:
            # Joins are for the next block: an expert on GPU 0 does not wait for one elsewhere.
            self._joins = (*self._joins, ticket)
        self._happens()
        return ticket

    def dispatch(self, layer: int, n_tokens: list[int]) -> None:
        self.exchange.begin(layer)
        for gpu in range(1, self.n_gpus):
            if n_tokens[gpu]:
                self._send(layer, gpu, n_tokens[gpu])

    def _send(self, layer: int, gpu: int, n_tokens: int) -> None:
        self.exchange.sent[gpu] = self._cross("dispatch", layer, n_tokens, self.lanes.p2p_out, NOTHING)
        self.exchange.n_tokens[gpu] += n_tokens

    def _combine(self) -> None:
        """Bring back what other GPUs have computed; GPU 0 waits for it before it goes on."""
        exchange, port = self.exchange, self.lanes.p2p_in
        for gpu in exchange.away():
            last = exchange.last[gpu]
            assert last is not None
            back = self._cross("combine", exchange.layer, exchange.n_tokens[gpu], port, (last,))
            self._joins = (*self._joins, back)
        exchange.begin(-1)

    def _cross(self, op: str, layer: int, n_tokens: int, port: CopyEngine, after: tuple[Ticket, ...]) -> Copy:
        """Hidden states cross to or from GPU 0, as soon as its port is free."""
        copies, n_bytes = self.cost.copies, self.cost.activation_bytes(n_tokens)
        seconds = copies.p2p_s(n_bytes)
        self._host(f"launch {op}", layer, -1, n_tokens, n_bytes, self.cost.launches.enqueue_s)
        self.bill.exchanged(seconds)
        copy = Copy(op, layer, -1, n_bytes, seconds, DEMAND, self.now_s, after, GPU, carries=bool(after))
        return self._submit(port, copy)

    def cpu_expert(self, layer: int, expert: int, n_tokens: int, after: tuple[Ticket, ...] = NOTHING) -> Ticket:
        cost, bill = self.cost, self.bill
        joins = layer in self._hybrid
        if not joins:
            self._begin_hybrid(layer)
        n_bytes = cost.activation_bytes(n_tokens)
        self._host("launch cpu_expert", layer, expert, n_tokens, n_bytes, cost.launches.cpu_s)
        bill.copy_launched(1.0)
        bill.d2h_bytes += n_bytes
        seconds = cost.copies.d2h_s(n_bytes)
        down = Work(CPU, "activations", layer, expert, n_tokens, self.now_s, seconds, self._last_kv_down)
        self.lanes.d2h.ask(down)
        self._last_down = (down,)
        price = cost.expert_cpu_joined(n_tokens) if joins else cost.expert_cpu(n_tokens)
        bill.cpu_s[price.attributed_to] += price.duration_s
        done = self.lanes.cpu.ask(
            Work(
                *(CPU, "expert", layer, expert, n_tokens, self.now_s, price.duration_s, (down, *after)),
                n_bytes=price.n_bytes,
            )
        )
        up = Copy("activations", layer, expert, n_bytes, cost.copies.h2d_s(n_bytes), DEMAND, self.now_s, (done,), CPU)
        return self._submit(self.h2d[cost.gpu_of[layer]], up)

    def _begin_hybrid(self, layer: int) -> None:
        """The CPU gets its first expert of a layer: the host submits, and will synchronise and merge."""
        self._hybrid.add(layer)
        self.bill.n_hybrid += 1
        if self.cost.launches.hybrid_layer_s:
            self._host("hybrid layer", layer, -1, self._n_tokens, 0, self.cost.launches.hybrid_layer_s)
            self._happens()
            self.streams[0].idle_until(self.now_s, HOST)  # what the stream waits for afterwards is the CPU's

    def join(self, ticket: Ticket) -> None:
        self._joins = (*self._joins, ticket)

    # -- copies -----------------------------------------------------------------------------------------------------

    def copy(self, piece: Piece, priority: int, ready_s: float, after: tuple[Ticket, ...]) -> Ticket:
        op = "demand" if priority == DEMAND else "prefetch"
        launched_s = max(self._copy_launched(piece), ready_s)
        n_bytes, engine = piece.n_bytes, self.h2d[piece.gpu]
        seconds = self.cost.copies.expert_s(n_bytes, piece.stop_frac - piece.start_frac)
        copy = Copy(op, piece.layer, piece.expert, n_bytes, seconds, priority, launched_s, after, piece=piece)
        if launched_s > self.now_s:
            copy.submit_lane = self.paths.stream_of(piece.gpu)
        return self._submit(engine, copy)

    def read(self, layer: int, expert: int, n_bytes: int, priority: int) -> Ticket:
        assert self.cost.drive is not None
        seconds = self.cost.drive.busy_s(n_bytes)
        return self._submit(
            self.lanes.drive, Copy("read", layer, expert, n_bytes, seconds, priority, self.now_s, NOTHING, NVME)
        )

    def copy_back(self, piece: Piece, ready_s: float, after: tuple[Ticket, ...]) -> Ticket:
        launched_s = max(self._copy_launched(piece), ready_s)
        n_bytes, bill = piece.n_bytes, self.bill
        bill.d2h_bytes += n_bytes
        bill.written_back_bytes += n_bytes
        seconds = self.cost.copies.expert_back_s(n_bytes, piece.stop_frac - piece.start_frac)
        copy = Copy("write_back", piece.layer, piece.expert, n_bytes, seconds, DEMAND, launched_s, after)
        if launched_s > self.now_s:
            copy.submit_lane = self.paths.stream_of(piece.gpu)
        return self._submit(self.lanes.write_backs, copy)

    def _copy_launched(self, piece: Piece) -> float:
        """The host launches a copy; when it has."""
        frac = piece.stop_frac - piece.start_frac
        launch_s = self.cost.launches.copy_s if frac == 1.0 else self.cost.launches.copy_part_s(frac)
        self._host("launch copy", piece.layer, piece.expert, 0, piece.n_bytes, launch_s)
        self.bill.copy_launched(frac, self.cost.launches.calls(frac))
        return self.now_s

    def move_kv(self, n_pages: int, page_bytes: int, down: bool) -> None:
        prices, bill, n_bytes = self.cost.copies, self.bill, n_pages * page_bytes
        seconds = n_pages * (prices.d2h_s(page_bytes) if down else prices.h2d_s(page_bytes))
        op = "kv_out" if down else "kv_in"
        self._host(f"launch {op}", -1, -1, 0, n_bytes, n_pages * self.cost.launches.enqueue_s)
        bill.n_copy_launches += n_pages
        self.groups.end()
        after, engine = (self._last_down, self.lanes.write_backs) if down else (NOTHING, self.h2d[0])
        copy = Copy(op, -1, -1, n_bytes, seconds, DEMAND, self.now_s, after, n_copies=n_pages)
        self._submit(engine, copy)
        if down:
            bill.d2h_bytes += n_bytes
            bill.kv_out_bytes += n_bytes
            bill.kv_out_s += seconds
            bill.n_kv_out += n_pages
            self._last_kv_down = (copy,)
        else:
            bill.kv_in_bytes += n_bytes
        self.join(copy)

    def _submit(self, engine: CopyEngine, copy: Copy) -> Copy:
        """Queue a copy at `now_s`, after what was due by then; it may start at once."""
        self._happens()
        engine.submit(copy)
        self._happens()
        return copy

    def promote(self, ticket: Ticket) -> bool:
        assert isinstance(ticket, Copy)
        self._happens()
        if ticket.end_s != UNKNOWN_S:
            return False
        for engine in (*self.h2d, self.lanes.drive):
            engine.promote(ticket)
        self._happens()
        return True

    def cancel(self, ticket: Ticket) -> bool:
        assert isinstance(ticket, Copy)
        self._happens()
        return any(engine.cancel(ticket, self.now_s) for engine in (*self.h2d, self.lanes.drive))

    def poll(self) -> list[Piece]:
        self._happens()
        done = [copy for engine in self.h2d for copy in engine.completions()]
        if self.n_gpus > 1:
            done.sort(key=lambda copy: copy.end_s)
        return [copy.piece for copy in done if copy.piece is not None]

    def ended(self, ticket: Ticket) -> bool:
        self._happens()
        return ticket.over if isinstance(ticket, Pending) else ticket.end_s <= self.now_s

    # -- the rest ---------------------------------------------------------------------------------------------------

    def predict(self, duration_s: float, lane: str, blocking: bool, basis: Basis) -> Ticket:
        bill, attributed_to = self.bill, self.cost.q_predictor[basis]
        if lane != "side":
            self.groups.end()  # no group spans what the host or the stream does in between
        ticket: Ticket
        if lane == "host":
            bill.host_predict_s[attributed_to] += duration_s
            self._host("predict", -1, -1, 0, 0, duration_s)
            ticket = Ticket(self.now_s, HOST)
        elif lane == "gpu":
            self.now_s += self.cost.launches.kernel_s
            bill.gpu_s[attributed_to] += duration_s
            ticket = self.streams[0].launch(Work(GPU, "predict", -1, -1, 0, self.now_s, duration_s, last_s=self.now_s))
        else:
            # A blocked host launches nothing: its waiting is then what the stream waits for.
            (bill.host_predict_s if blocking else bill.side_s)[attributed_to] += duration_s
            ticket = self.lanes.side.ask(Work(SIDE, "predict", -1, -1, 0, self.now_s, duration_s))
        self._happens()
        if blocking:
            self.sync(ticket)
        return ticket

    def wait_until(self, time_s: float) -> None:
        if time_s > self.now_s:
            self.now_s = time_s
            self.paths.of(HOST, 0).begin(time_s, IDLE)
            self._happens()
            self.streams[0].idle_until(time_s, IDLE)

    def drain(self) -> None:
        self.clock.run()
        self.bill.stretched(math.fsum(stream.stretched_s for stream in self.streams), self.lanes.cpu.stretched_s)

    # -- what it came to --------------------------------------------------------------------------------------------

    def parts_s(self) -> list[float]:
        """GPU 0's timeline so far, split by what it did or waited for; order of `sim.machine.lanes.CAUSES`."""
        stream = self.streams[0]
        stream.idle_until(self.now_s, HOST)  # hooks after the last read may have kept the host busy
        if not self.cost.sharing.on:
            stream.book_ahead()
        self.waiting.leave()
        return stream.time.parts_s

    def path_s(self) -> MutableSequence[float]:
        self._happens()
        lanes, busy_until_s = self.lanes, self.paths.busy_until_s
        for stream in self.streams:
            busy_until_s[stream.runs.number] = stream.time.free_s
        for lane in lanes.serial:
            busy_until_s[lane.runs.number] = max(lane.free_s, lane.flow.end_s)
        for engine in (*self.h2d, lanes.p2p_out, lanes.p2p_in, lanes.drive):
            busy_until_s[engine.runs.number] = max(engine.free_s, engine.flow.end_s) + engine.lag_s
        busy_until_s[BACK] = max(max(one.free_s, one.flow.end_s) for one in (lanes.d2h, lanes.write_backs))
        return self.paths.settle(self.now_s)

    @property
    def waiting(self) -> Waiting:
        """What GPU 0 waited for, by phase and layer."""
        return self.streams[0].waiting

    @property
    def copies_slowed_s(self) -> float:
        """What contention added to the time of copies to the GPUs."""
        return math.fsum(engine.stretched_s for engine in self.h2d)

    @property
    def write_backs_slowed_s(self) -> float:
        """What contention added to the time of what is copied back."""
        return self.lanes.write_backs.stretched_s

    @property
    def reads_slowed_s(self) -> float:
        """What contention added to the time of the drive's reads."""
        return self.lanes.drive.stretched_s

    @property
    def h2d_bytes(self) -> int:
        """Bytes copied to the GPUs."""
        return sum(engine.copied_bytes for engine in self.h2d)

    @property
    def n_reads(self) -> int:
        """Experts read from the drive."""
        return self.lanes.drive.n_copies

    @property
    def read_bytes(self) -> int:
        """Their bytes."""
        return self.lanes.drive.copied_bytes

    @property
    def d2h_bytes(self) -> int:
        """Bytes copied from the GPUs: activations of experts on the CPU, pieces written back."""
        return self.bill.d2h_bytes

    @property
    def kv_out_bytes(self) -> int:
        """Of these, pages of the KV cache."""
        return self.bill.kv_out_bytes

    @property
    def kv_in_bytes(self) -> int:
        """Pages of the KV cache copied back."""
        return self.bill.kv_in_bytes

    @property
    def kv_out_s(self) -> float:
        """Seconds of copies of pages from the GPU."""
        return self.bill.kv_out_s

    @property
    def n_kv_out(self) -> int:
        """How many of them."""
        return self.bill.n_kv_out

    @property
    def gpu_s(self) -> list[float]:
        """Busy seconds of compute streams by the quantity they rest on (an index into `cost.figures.entries`)."""
        return self.bill.gpu_s

    @property
    def cpu_s(self) -> list[float]:
        """The same of the CPU pool."""
        return self.bill.cpu_s

    @property
    def side_s(self) -> list[float]:
        """The same of the predictor's side lane."""
        return self.bill.side_s

    def host_shares(self) -> list[tuple[int, float]]:
        """The same of the host."""
        return self.bill.host_shares()

    def lane_busy_s(self) -> dict[str, float]:
        """Busy seconds by lane."""
        lanes = self.lanes
        ports = {port.name: port.busy_s for port in (lanes.p2p_out, lanes.p2p_in) if self.gathers}
        if self.cost.drive is not None:
            ports[lanes.drive.name] = lanes.drive.busy_s
        return lanes.busy_s() | ports | {"host": math.fsum(share for _, share in self.host_shares())}

    def lane_ends_s(self) -> dict[str, float]:
        """When links, CPU pool and predictor ended their last work: some goes on after the last token."""
        drive = self.lanes.drive
        return self.lanes.ends_s() | ({} if self.cost.drive is None else {drive.name: drive.free_s})
