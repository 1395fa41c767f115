"""Transfers: what the host asks the links to copy, what asking costs it, and how long each copy takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sim.machine.copies import Copy, copy_of
from sim.machine.copy_queue import CopyQueue
from sim.machine.host import Host
from sim.machine.lanes import H2D, HOST, NVME, SerialLane
from sim.machine.protocol import DEMAND, NO_TICKETS

if TYPE_CHECKING:
    from sim.machine.cost import Cost
    from sim.machine.turn import Turn
    from sim.policy.pieces import Piece
    from sim.policy.tickets import Ticket

_DEMAND, _HOST = DEMAND, HOST  # machine integers where this is compiled


class Transfers:
    """Copies of experts and their parts, to GPUs and back; reads of a drive; pages of the KV cache.

    `launch_s`, `calls`: what the copy of an expert costs the host. `back_bytes`: of pieces written back. `kv_*`: pages
    that went down (`out`) and came back.

    Args:
        down: the lane of activations that go down, the same engine as pages that do.
    """

    def __init__(self, cost: Cost, host: Host, down: SerialLane) -> None:
        self._cost = cost
        self._host = host
        self._stream = host.stream
        self._links = host.links
        self._first = host.links.first
        self._down = down
        self.launch_s = cost.launches.copy_s
        self.calls = cost.launches.calls(1.0)
        # By `Piece.index`: of a copy its seconds, and their place in its link's counters; of a part also what the host
        # launches: seconds, calls.
        self._copies: list[tuple[float, int] | None] = []
        self._part_launches: list[tuple[float, int] | None] = []
        self.ends_s = 0.0
        self.back_bytes = 0
        self.kv_out_bytes = 0
        self.kv_in_bytes = 0
        self.kv_out_s = 0.0
        self.n_kv_out = 0  # copies

    # -- an expert's way to a GPU -----------------------------------------------------------------------------------

    def demand(self, piece: Piece, ready_s: float) -> bool:
        """Copy a whole expert that somebody waits for, whose end is known then; False where it is not, undone."""
        queue, host = self._first, self._host
        now_s = host.now_s + self.launch_s
        if queue.n_queued or queue.report or self._links.n > 1 or self._stream.n_pending or not piece.serving:
            return False
        if piece.n_bytes != queue.last_bytes or (ready_s > now_s and ready_s > queue.free_s):
            return False
        if host.spans is not None:
            host.spans("host", "launch copy", piece.layer, piece.expert, 0, piece.n_bytes, host.now_s, now_s)
        host.now_s = now_s
        host.experts_copied += 1.0
        host.n_copies += self.calls
        if ready_s < now_s:
            ready_s = now_s
        start_s = ready_s if ready_s > queue.free_s else queue.free_s
        queue.serve_now(piece, start_s, queue.last_s, queue.last_length)
        return True

    def demand_turn(self, turn: Turn) -> bool:
        """`demand` of the experts of a turn that are not there, into clean room."""
        queue, host = self._first, self._host
        if queue.n_queued or queue.report or self._links.n > 1 or self._stream.n_pending:
            return False
        if turn.n_bytes != queue.last_bytes:
            return False
        spans = host.spans
        now_s, free_s = host.now_s, queue.free_s
        copy_s, launch_s, launched = queue.last_s, self.launch_s, host.experts_copied
        shares = queue.memory is not None
        slows_until_s = self._stream.free_s if queue.n_slows else -1.0  # a kernel that is placed already
        told = spans is not None or shares
        at = turn.n_here
        while at < turn.n:
            while not told and at < turn.n:  # no call, as in `Experts.run_turn`
                start_s = now_s + launch_s
                idle = start_s > free_s
                if not idle:
                    start_s = free_s
                if start_s < slows_until_s:
                    break
                if idle:
                    queue.runs.begin(start_s, _HOST)
                now_s += launch_s
                free_s = start_s + copy_s
                turn.arrived_s[at] = free_s
                launched += 1.0
                at += 1
            if at < turn.n:
                begun_s = now_s
                now_s += launch_s
                start_s = now_s if now_s > free_s else free_s
                if start_s > free_s:
                    queue.runs.begin(start_s, _HOST)
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
        host.now_s = now_s
        host.experts_copied = launched
        host.n_copies += (turn.n - turn.n_here) * self.calls
        if queue.n_slows and turn.n > turn.n_here:
            self._stream.copied_s = free_s
        queue.served(turn.n - turn.n_here, free_s)
        return True

    def copy(self, piece: Piece, priority: int, ready_s: float, after: tuple[Ticket, ...]) -> Copy | None:
        """Ask for a copy of a piece; None where it is settled, and ends at `ends_s`."""
        host, links = self._host, self._links
        self._launch(piece)
        now_s = host.now_s
        if links.n > 1:
            links.advance(now_s)
        queue: CopyQueue = links.h2d[piece.gpu]
        n_bytes = piece.n_bytes
        parts_differ = self.calls > 1 and not piece.serving  # from what has as many bytes and fewer calls
        if n_bytes != queue.last_bytes or parts_differ:
            self._time(piece, queue)
            if parts_differ:
                queue.last_bytes = -1
        duration_s = queue.last_s
        length = queue.last_length
        if priority == _DEMAND:
            copy = queue.demand(piece, duration_s, length, now_s, ready_s, after)
            self.ends_s = queue.free_s
            return copy
        if ready_s < now_s:
            ready_s = now_s
        copy = copy_of(piece, "prefetch", duration_s, length, False, ready_s, after)
        if ready_s > now_s:
            copy.submit_lane = queue.stream_lane
        queue.submit(copy, now_s)
        return copy

    def _launch(self, piece: Piece) -> None:
        """The host launches a copy."""
        host = self._host
        launch_s, calls = self.launch_s, self.calls
        if not piece.serving:
            index = piece.index
            known = self._part_launches[index] if index < len(self._part_launches) else None
            launch_s, calls = self._part_launch(piece) if known is None else known
        host.spend("launch copy", piece.layer, piece.expert, 0, piece.n_bytes, launch_s)
        host.experts_copied += piece.stop_frac - piece.start_frac
        host.n_copies += calls

    def _part_launch(self, piece: Piece) -> tuple[float, int]:
        """Host seconds, and calls, of launching a copy of a part."""
        launches, frac, of_index = self._cost.launches, piece.stop_frac - piece.start_frac, self._part_launches
        launch_s = launches.copy_s if frac == 1.0 else launches.copy_part_s(frac)
        while piece.index >= len(of_index):
            of_index.append(None)
        launch = of_index[piece.index] = launch_s, launches.calls(frac) if self.calls > 1 else self.calls
        return launch

    def _time(self, piece: Piece, queue: CopyQueue) -> None:
        """How long a copy of the piece takes, as that of the piece copied last."""
        of_index, index = self._copies, piece.index
        while index >= len(of_index):
            of_index.append(None)
        timed = of_index[index]
        if timed is None:
            seconds = self._cost.copies.expert_s(piece.n_bytes, piece.stop_frac - piece.start_frac)
            timed = of_index[index] = (seconds, queue.seconds.meter.at(seconds))
        queue.last_bytes = piece.n_bytes
        queue.last_s, queue.last_length = timed

    # -- other ways -------------------------------------------------------------------------------------------------

    def copy_back(self, piece: Piece, ready_s: float, after: tuple[Ticket, ...]) -> Copy:
        """Ask for a piece to be written back to host memory."""
        queue, host = self._links.settle_write_backs(), self._host
        self._launch(piece)
        seconds = self._cost.copies.expert_back_s(piece.n_bytes, piece.stop_frac - piece.start_frac)
        length = queue.seconds.meter.at(seconds)
        if ready_s < host.now_s:
            ready_s = host.now_s
        layer, expert, n_bytes = piece.layer, piece.expert, piece.n_bytes
        copy = Copy("write_back", layer, expert, n_bytes, seconds, length, True, ready_s, after, None, H2D)
        if ready_s > host.now_s:
            link: CopyQueue = self._links.h2d[piece.gpu]
            copy.submit_lane = link.stream_lane
        self.back_bytes += n_bytes
        host.look()
        queue.submit(copy, host.now_s)
        return copy

    def read(self, layer: int, expert: int, n_bytes: int, priority: int) -> Copy:
        """Ask for an expert to be read from the drive into host memory."""
        queue, host = self._links.drive, self._host
        drive: Any = self._cost.drive  # there is one where anybody reads
        seconds = drive.busy_s(n_bytes)
        length = queue.seconds.meter.at(seconds)
        host.look()
        demanded = priority == _DEMAND
        read = Copy("read", layer, expert, n_bytes, seconds, length, demanded, host.now_s, NO_TICKETS, None, NVME)
        queue.submit(read, host.now_s)
        return read

    def move_kv(self, n_pages: int, page_bytes: int, down: bool) -> None:
        """Copy pages of the KV cache to host memory (`down`) or back, each in one copy; GPU 0 waits for the last."""
        prices, links, host, n_bytes = self._cost.copies, self._links, self._host, n_pages * page_bytes
        queue = links.write_backs if down else links.first
        seconds = n_pages * (prices.d2h_s(page_bytes) if down else prices.h2d_s(page_bytes))
        op = "kv_out" if down else "kv_in"
        host.spend(f"launch {op}", -1, -1, 0, n_bytes, n_pages * self._cost.launches.enqueue_s)
        host.n_copies += n_pages
        if links.n > 1:
            host.look()
        if down and self._down.free_s > queue.free_s:
            queue.free_s = self._down.free_s  # one engine: activations of experts on the CPU went down before
        length = queue.seconds.meter.at(seconds)
        copy = Copy(op, -1, -1, n_bytes, seconds, length, True, host.now_s, NO_TICKETS, None, H2D)
        queue.submit(copy, host.now_s)
        queue.n_copies += n_pages - 1
        if down:
            self.kv_out_bytes += n_bytes
            self.kv_out_s += seconds
            self.n_kv_out += n_pages
            if copy.end_s > self._down.free_s:
                self._down.free_s = copy.end_s
        else:
            self.kv_in_bytes += n_bytes
        self._stream.join(copy)
