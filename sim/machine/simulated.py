"""The simulated machine in arithmetic: the verbs the engine speaks, each handed to the part that knows it.

Each part has a file. The host has the clock (`host.py`); transfers ask for copies (`transfers.py`), which links settle
(`links.py`); experts run alone, in groups and in turn (`experts.py`), on other GPUs (`peers.py`) and on the CPU
(`cpu_pool.py`), between a layer's blocks (`blocks.py`); operations count what all of that adds up to (`operations.py`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from sim.base.lanes import BACK, PEER_IN, PEER_OUT, WIRE
from sim.machine.blocks import Blocks
from sim.machine.copies import Copy
from sim.machine.cpu_pool import CpuPool
from sim.machine.experts import Experts
from sim.machine.host import Host
from sim.machine.lanes import CPU, GPU, H2D, HOST, NVME, SIDE, SerialLane, Spans
from sim.machine.links import Links
from sim.machine.memory_law import GPU_BY_COPIES
from sim.machine.operations import Operations
from sim.machine.peers import Peers
from sim.machine.protocol import NO_TICKETS, Machine
from sim.machine.runs import Paths
from sim.machine.shared_memory import GpuMemory
from sim.machine.stream import Stream
from sim.machine.transfers import Transfers
from sim.machine.turn import Turn
from sim.machine.waiting import Waiting
from sim.policy.tickets import Ticket, ends_at

if TYPE_CHECKING:
    from collections.abc import MutableSequence, Sequence

    from sim.base.quantities import Basis
    from sim.machine.cost import Cost
    from sim.policy.pieces import Piece
    from sim.workload.iterations import Iteration

_H2D = H2D  # a machine integer where this is compiled


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
        n_layers = len(cost.n_dense_before) - 1
        n_streams = 1 if cost.several.in_turn else n_gpus  # GPUs that take turns are one lane
        self.paths = paths = Paths(n_gpus, n_streams)
        self.streams = [
            Stream("gpu" if n_streams == 1 else f"gpu{gpu}", n_layers, paths.of(GPU, gpu), paths.of(H2D, gpu).number)
            for gpu in range(n_streams)
        ]
        for stream in self.streams:
            stream.spans = spans
        self.streams[0].looks_down = cost.drive is not None
        self.stream = self.streams[0]
        self.links = Links(cost, n_gpus, self.streams, spans, report_copies, paths)
        self.h2d = self.links.h2d
        self._links_per_stream = n_gpus > n_streams
        self._shares = cost.sharing.on
        self.side = SerialLane("predictor", spans, paths.of(SIDE, 0))
        self.gpu_s = [0.0] * len(cost.figures.entries)  # busy seconds of compute streams by the quantity they rest on
        self.side_s = [0.0] * len(cost.figures.entries)
        self._predicted_by = cost.q_predictor
        self._kernel_s = cost.launches.kernel_s
        self.host = Host(cost, self.stream, self.links, spans, paths.of(HOST, 0))
        self.operations = Operations(self.stream, self._gpu_memory(cost))
        self.experts = Experts(cost, self.host, self.streams, self.operations, n_gpus)
        self.peers = Peers(cost, self.host, self.streams, self.gpu_s, paths.of(WIRE, 0))
        self.blocks = Blocks(cost, self.host, self.streams, self.operations, self.experts, self.peers)
        self.pool = CpuPool(cost, self.host, n_layers, spans, paths)
        self.transfers = Transfers(cost, self.host, self.pool.d2h)
        self.serial = [self.pool.d2h, self.pool.lane, self.side]  # lanes that serve in order of asking; results tell

    def _gpu_memory(self, cost: Cost) -> GpuMemory | None:
        """What copies slow kernels in; None: nothing is shared."""
        sharing = cost.sharing
        if not sharing.on:
            return None
        self.links.slow(self.streams)
        up, down = (sharing.stated.get(term, -1.0) for term in GPU_BY_COPIES)
        return GpuMemory(sharing.gpu_bytes_per_s, sharing.up_bytes_per_s, sharing.down_bytes_per_s, up, down)

    @property
    def now_s(self) -> float:
        """The host's clock."""
        return self.host.now_s

    @now_s.setter
    def now_s(self, now_s: float) -> None:
        self.host.now_s = now_s

    def now(self) -> float:
        return self.host.now_s

    # -- the iteration ----------------------------------------------------------------------------------------------

    def begin(self, iteration: Iteration) -> None:
        if self.operations.are_many():
            self.operations.forget()
            self.blocks.forget()
            self.experts.forget()
        self.stream.begin(iteration.number)
        self.pool.begin()
        self.blocks.begin(iteration)

    def attention(self, layer: int) -> None:
        self.blocks.attention(layer)

    def gate(self, layer: int) -> Ticket:
        return self.blocks.gate(layer)

    def shared(self, layer: int) -> None:
        self.blocks.shared(layer)

    def to_gate(self, layer: int) -> float:
        return self.blocks.to_gate(layer)

    def leave_unread(self, layers: frozenset[int]) -> None:
        self.blocks.leave_unread(layers)

    def sync(self, ticket: Ticket) -> None:
        self.host.sync(ticket)
        self.experts.close()

    def join(self, ticket: Ticket) -> None:
        self.stream.join(ticket)

    def end(self) -> None:
        self.sync(self.blocks.head())
        self.host.keep_waiting()
        self.operations.spend(self.gpu_s)

    def wait_until(self, time_s: float) -> None:
        self.host.wait_until(time_s)

    # -- experts ----------------------------------------------------------------------------------------------------

    def run_turn(self, turn: Turn) -> bool:
        return self.experts.run_turn(turn)

    def expert(
        self,
        piece: Piece,
        n_tokens: int,
        arrived_s: float,
        after: tuple[Ticket, ...],
        parts: Sequence[Piece],
    ) -> Ticket | None:
        host, stream = self.host, self.stream
        operation = self.experts.operation(piece, n_tokens, arrived_s, after)
        host_s = host.now_s
        host.spend("launch expert", piece.layer, piece.expert, n_tokens, 0, operation.all_s)
        self.operations.use(operation)
        if piece.gpu and len(self.streams) > 1:
            return self.peers.run(piece, n_tokens, operation, host_s, arrived_s, after)
        if self._links_per_stream:
            stream.link = self.h2d[piece.gpu].runs.number
        # What the next block joins, an expert here does not wait for.
        layer, expert = piece.layer, piece.expert
        work = stream.launch("expert", layer, expert, n_tokens, operation, host_s, host.now_s, arrived_s, after)
        self.ends_s = stream.free_s
        self.cause = stream.blame
        return work

    def dispatch(self, layer: int, n_tokens: list[int]) -> None:
        self.peers.dispatch(layer, n_tokens)

    def cpu_expert(self, layer: int, expert: int, n_tokens: int, after: tuple[Ticket, ...] = NO_TICKETS) -> Ticket:
        return self.pool.run(layer, expert, n_tokens, after, self.blocks.n_tokens)

    def predict(self, duration_s: float, lane: str, blocking: bool, basis: Basis) -> Ticket:
        attributed_to = self._predicted_by[basis]
        host, stream = self.host, self.stream
        if lane == "side":
            # A blocked host launches nothing: its waiting is then what the stream waits for.
            (host.predict_s if blocking else self.side_s)[attributed_to] += duration_s
            ticket = ends_at(self.side.use("predict", -1, -1, 0, host.now_s, duration_s), SIDE, SIDE)
        elif lane == "host":
            self.experts.close()  # no group spans what the host or the stream does in between
            host.predict_s[attributed_to] += duration_s
            host.spend("predict", -1, -1, 0, 0, duration_s)
            ticket = Ticket(host.now_s, HOST)
        else:
            self.experts.close()
            host.now_s += self._kernel_s
            self.gpu_s[attributed_to] += duration_s
            self.operations.tell()
            length = stream.seconds.meter.at(duration_s)
            work = stream.run("predict", -1, -1, 0, host.now_s, host.now_s, duration_s, length, 0.0, NO_TICKETS)
            ticket = ends_at(stream.free_s, stream.blame, GPU) if work is None else work
        if blocking:
            self.sync(ticket)
        return ticket

    # -- copies -----------------------------------------------------------------------------------------------------

    def demand(self, piece: Piece, ready_s: float) -> bool:
        if not self.transfers.demand(piece, ready_s):
            return False
        self.ends_s = self.links.first.free_s
        self.cause = _H2D
        return True

    def demand_turn(self, turn: Turn) -> bool:
        return self.transfers.demand_turn(turn)

    def copy(self, piece: Piece, priority: int, ready_s: float, after: tuple[Ticket, ...]) -> Ticket | None:
        copy = self.transfers.copy(piece, priority, ready_s, after)
        if copy is None:
            self.ends_s = self.transfers.ends_s
            self.cause = _H2D
        return copy

    def copy_back(self, piece: Piece, ready_s: float, after: tuple[Ticket, ...]) -> Ticket:
        return self.transfers.copy_back(piece, ready_s, after)

    def read(self, layer: int, expert: int, n_bytes: int, priority: int) -> Ticket:
        return self.transfers.read(layer, expert, n_bytes, priority)

    def move_kv(self, n_pages: int, page_bytes: int, down: bool) -> None:
        self.experts.close()
        self.transfers.move_kv(n_pages, page_bytes, down)

    def promote(self, ticket: Ticket) -> bool:
        assert isinstance(ticket, Copy)
        return self.links.promote(ticket, self.host.now_s)

    def cancel(self, ticket: Ticket) -> bool:
        assert isinstance(ticket, Copy)
        return self.links.cancel(ticket, self.host.now_s)

    def poll(self) -> list[Piece]:
        return self.links.completions(self.host.now_s)

    def ended(self, ticket: Ticket) -> bool:
        return self.links.ended(ticket, self.host.now_s)

    def ends_after_s(self, ticket: Ticket) -> float:
        return self.links.ends_after_s(ticket)

    def drain(self) -> None:
        while self.links.settle_next():
            pass
        sharing = self.cost.sharing
        if sharing.on:
            self.gpu_s[sharing.q_gpu] = math.fsum([stream.slowed_s for stream in self.streams])
            self.cpu_s[sharing.q_cpu] = self.pool.lane.slowed_s

    # -- what it has done -------------------------------------------------------------------------------------------

    @property
    def h2d_bytes(self) -> int:
        """Bytes copied to the GPUs."""
        return sum(queue.copied_bytes for queue in self.h2d)

    @property
    def d2h_bytes(self) -> int:
        """Bytes that went down: activations of experts on the CPU, pieces written back, pages of the KV cache."""
        return self.pool.d2h_bytes + self.transfers.back_bytes + self.transfers.kv_out_bytes

    @property
    def written_back_bytes(self) -> int:
        """Of them pieces."""
        return self.transfers.back_bytes

    @property
    def kv_out_bytes(self) -> int:
        """Of them pages."""
        return self.transfers.kv_out_bytes

    @property
    def kv_out_s(self) -> float:
        """What those took."""
        return self.transfers.kv_out_s

    @property
    def n_kv_out(self) -> int:
        """In how many copies."""
        return self.transfers.n_kv_out

    @property
    def kv_in_bytes(self) -> int:
        """Pages of the KV cache that came back."""
        return self.transfers.kv_in_bytes

    @property
    def n_reads(self) -> int:
        """Experts read from the drive."""
        return self.links.drive.n_copies

    @property
    def read_bytes(self) -> int:
        """Their bytes."""
        return self.links.drive.copied_bytes

    @property
    def copies_slowed_s(self) -> float:
        """What experts on the CPU added to the time of copies to the GPUs."""
        return math.fsum([queue.slowed_s for queue in self.h2d])

    @property
    def write_backs_slowed_s(self) -> float:
        """What sharing added to the time of what is copied back."""
        return self.links.write_backs.slowed_s

    @property
    def reads_slowed_s(self) -> float:
        """What sharing added to the time of the drive's reads."""
        return self.links.drive.slowed_s

    @property
    def cpu_s(self) -> list[float]:
        """Busy seconds of the CPU by the quantity they rest on."""
        return self.pool.busy_s

    @property
    def waiting(self) -> Waiting:
        """What GPU 0 waited for, by phase and layer."""
        return self.stream.waiting

    def parts_s(self) -> list[float]:
        self.operations.tell()
        stream = self.stream
        if not stream.n_pending:
            self.host.keep_waiting()  # hooks after the last read may have kept the host busy
        stream.leave()
        return stream.parts()

    def path_s(self) -> MutableSequence[float]:
        self._look_at_lanes()
        return self.paths.settle(self.host.now_s)

    def _look_at_lanes(self) -> None:
        """Until when each lane is busy, with what starts by now."""
        links, pool, busy_until_s = self.links, self.pool, self.paths.busy_until_s
        if not self._shares:  # what is settled sooner shares memory with others
            links.advance(self.host.now_s)
        for stream in self.streams:
            busy_until_s[stream.runs.number] = stream.free_s
        for queue in links.h2d:
            busy_until_s[queue.runs.number] = queue.free_s
        busy_until_s[CPU] = pool.lane.free_s
        busy_until_s[SIDE] = self.side.free_s
        busy_until_s[NVME] = links.drive.free_s + links.drive.lag_s
        busy_until_s[BACK] = max(pool.d2h.free_s, links.write_backs.free_s)
        busy_until_s[PEER_OUT] = links.p2p_out.free_s
        busy_until_s[PEER_IN] = links.p2p_in.free_s

    def host_shares(self) -> list[tuple[int, float]]:
        """The host's busy seconds by the quantity they rest on (an index into `cost.figures.entries`)."""
        self.operations.tell()
        host = self.host
        spent = self.cost.launches.spent(host.n_syncs, host.n_copies, host.experts_copied, self.pool.n_hybrid)
        return spent + [(figure, spent_s) for figure, spent_s in enumerate(host.predict_s) if spent_s]

    def lane_busy_s(self) -> dict[str, float]:
        """Busy seconds by lane."""
        self.operations.tell()
        lanes = {stream.name: stream.busy_s for stream in self.streams}
        lanes |= {queue.name: queue.busy_s for queue in self.h2d}
        lanes |= {lane.name: lane.busy_s for lane in self.serial}
        if self.gathers:
            lanes |= {port.name: port.busy_s for port in (self.links.p2p_out, self.links.p2p_in)}
        if self.cost.drive is not None:
            lanes[self.links.drive.name] = self.links.drive.busy_s
        lanes["d2h"] += self.links.write_backs.busy_s  # one engine: activations of CPU experts, or pieces written back
        lanes["host"] = math.fsum([share for _, share in self.host_shares()])
        return lanes

    def lane_ends_s(self) -> dict[str, float]:
        """When links and lanes that serve in order ended their last work: some goes on after the last token."""
        ends_s = {queue.name: queue.free_s for queue in self.h2d}
        ends_s |= {lane.name: lane.free_s for lane in self.serial}
        if self.cost.drive is not None:
            ends_s[self.links.drive.name] = self.links.drive.free_s
        return ends_s | {"d2h": max(self.pool.d2h.free_s, self.links.write_backs.free_s)}
