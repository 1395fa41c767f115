"""Links: copy engines side by side, whose queued copies are settled in order of time.

On one link a queue says which copy is next (`copy_queue.py`). Over several the order of their starts decides, so that
no link runs ahead of what another may hold back.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from sim.base.lanes import BACK, H2D, NVME, PEER_IN, PEER_OUT
from sim.machine.copies import Copy
from sim.machine.copy_queue import CopyQueue

if TYPE_CHECKING:
    from sim.machine.cost import Cost
    from sim.machine.lanes import Spans
    from sim.machine.memory_law import Sharing
    from sim.machine.runs import Paths
    from sim.machine.shared_memory import HostMemory
    from sim.machine.stream import Stream
    from sim.policy.pieces import Piece
    from sim.policy.tickets import Ticket


class Links:
    """Everything that copies: a link to each GPU, the way back, the ports of GPU 0 and the drive.

    `h2d`: by GPU; `first`: GPU 0's. `write_backs`: pieces on their way back, on the same engine as activations that go
    down, never both in one run. `p2p_out`, `p2p_in`: the ports of GPU 0, where transfers to and from peers queue.
    `settled`: those `n` whose copies are settled together; a run that has no drive, say, does not look at its queue.

    Args:
        n_gpus: each with a link. streams: compute streams, by GPU; one where GPUs compute in turn. report_copies: keep
            completions for `poll`. paths: of the machine.
    """

    def __init__(
        self, cost: Cost, n_gpus: int, streams: list[Stream], spans: Spans | None, report_copies: bool, paths: Paths
    ) -> None:
        self.h2d = [
            CopyQueue("h2d" if n_gpus == 1 else f"h2d{gpu}", streams, paths.of(H2D, gpu), paths.stream_of(gpu))
            for gpu in range(n_gpus)
        ]
        self.first = self.h2d[0]
        self.write_backs = CopyQueue("d2h", streams, paths.of(BACK, 0))
        self.p2p_out = CopyQueue("p2p_out", streams, paths.of(PEER_OUT, 0))
        self.p2p_in = CopyQueue("p2p_in", streams, paths.of(PEER_IN, 0))
        self.drive = CopyQueue("nvme", streams, paths.of(NVME, 0))
        self.settled = list(self.h2d)
        if cost.several.gathers:
            self.settled.append(self.p2p_in)  # what goes out is settled when it is asked for
        if cost.drive is not None:
            self.drive.lag_s = cost.drive.lag_s
            paths.lags(NVME, cost.drive.lag_s)
            self.settled.insert(0, self.drive)  # a read that takes no time is over before the links choose
        self.n = len(self.settled)
        for queue in (*self.h2d, self.write_backs, self.p2p_out, self.p2p_in, self.drive):
            queue.spans = spans
        for queue in self.h2d:
            queue.report = report_copies

    # -- when a copy starts -----------------------------------------------------------------------------------------

    def advance(self, now_s: float) -> None:
        """Settle every copy that starts before the host's clock; over several links in the order of their starts."""
        if self.n == 1:
            if self.first.n_queued:
                self.first.advance(now_s)
            return
        while True:
            queue = self._next()
            if queue is None or queue.start_s > now_s or (queue.start_s == now_s and not queue.starts_demand):
                return
            queue.settle_next()

    def settle(self, ticket: Ticket) -> None:
        """The host is blocked: let copies start, in time order, until the ticket's end is known."""
        while ticket.end_s < 0.0:
            if not self.settle_next():
                raise RuntimeError("deadlock: the host waits for work that waits for no copy (a bug in the engine)")

    def settle_next(self) -> bool:
        """Let the next copy start; False when none can."""
        queue = self._next()
        return queue is not None and queue.settle_next()

    def _next(self) -> CopyQueue | None:
        """The link on which the next copy starts; of several that start together a demand, then the drive."""
        found: CopyQueue | None = None
        first_s = -1.0
        for queue in self.settled:
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

    def settle_write_backs(self) -> CopyQueue:
        """From the first piece that is written back on, that queue is settled with the others."""
        if self.settled[self.n - 1] is not self.write_backs:
            self.settled.append(self.write_backs)
            self.n += 1
        return self.write_backs

    # -- what becomes of one ----------------------------------------------------------------------------------------

    def promote(self, copy: Copy, now_s: float) -> bool:
        """Make a queued speculative copy or read a demanded one; False when it has started."""
        self.advance(now_s)
        if copy.end_s >= 0.0:
            return False
        for queue in self.h2d:
            queue.promote(copy, now_s)
        self.drive.promote(copy, now_s)
        return True

    def cancel(self, copy: Copy, now_s: float) -> bool:
        """Withdraw a queued speculative copy or read; False when it has started, or was demanded since."""
        if copy.end_s >= 0.0:
            return False
        self.advance(now_s)
        for queue in self.h2d:
            if queue.cancel(copy, now_s):
                return True
        return self.drive.cancel(copy, now_s)

    def completions(self, now_s: float) -> list[Piece]:
        """Pieces whose copies have ended, in order of completion, each copy once."""
        self.advance(now_s)
        pieces: list[Piece] = []
        if len(self.h2d) > 1:
            done: list[Copy] = []
            for queue in self.h2d:
                done += queue.completions(now_s)
            done.sort(key=attrgetter("end_s"))
        elif self.first.finished:
            done = self.first.completions(now_s)
        else:
            return pieces
        for copy in done:
            if copy.piece is not None:
                pieces.append(copy.piece)  # noqa: PERF401 - a loop is what compiles well
        return pieces

    def ended(self, ticket: Ticket, now_s: float) -> bool:
        """Whether a copy has ended by now."""
        if ticket.end_s < 0.0:
            if self.n == 1 and self.first.free_s > now_s:
                return False  # busy until now with what started before
            self.advance(now_s)
        return 0.0 <= ticket.end_s <= now_s

    def ends_after_s(self, ticket: Ticket) -> float:
        """Until when a copy cannot end, whatever is asked meanwhile; 0 where that cannot be known."""
        if ticket.end_s >= 0.0:
            return ticket.end_s
        return 0.0 if self.n > 1 else self.first.free_s  # it will start after what has been started

    # -- memory that it shares --------------------------------------------------------------------------------------

    def slow(self, streams: list[Stream]) -> None:
        """What is copied shares memory with the kernels of these streams, by GPU, or of the one they take turns on."""
        for gpu, queue in enumerate(self.h2d):
            queue.slows = [streams[gpu if len(streams) > 1 else 0]]
            queue.n_slows = 1
        self.write_backs.slows = streams
        self.write_backs.n_slows = len(streams)
        self.write_backs.back = True

    def share(self, memory: HostMemory, sharing: Sharing, now_s: float) -> None:
        """From now on copies draw from the memory that the CPU's experts draw from, and reads write to it."""
        if memory.has_drive:
            self.drive.memory, self.drive.lane = memory, len(self.h2d) + 2
        for at, queue in enumerate((*self.h2d, self.write_backs)):
            queue.memory, queue.lane = memory, at + 1
            if queue.free_s > now_s:
                draws_per_s = sharing.down_bytes_per_s if queue.back else sharing.up_bytes_per_s
                memory.lanes[at + 1].note(now_s, queue.free_s, draws_per_s)

    def pay(self) -> None:
        """Links are free later, by what they owe to an expert on the CPU."""
        for queue in self.h2d:
            queue.pay()
        self.write_backs.pay()
        self.drive.pay()
