"""What a real run took: spans for the sinks, busy seconds by lane, GPU 0's time line by cause, host seconds by verb."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from sim.machine.lanes import CAUSES, GPU, HOST
from sim.machine.waiting import Waiting
from sim.real.devices.work import COMPUTE, H2D, LANES, Work

if TYPE_CHECKING:
    from sim.machine.lanes import Spans
    from sim.policy.pieces import Piece
    from sim.policy.tickets import Ticket


def lane_names(gpu: int, n_gpus: int) -> tuple[str, ...]:
    """Names of a GPU's lanes, as a simulation's; the CPU pool and the way back are shared."""
    return LANES if n_gpus == 1 else (f"gpu{gpu}", f"h2d{gpu}", *LANES[2:])


class Spent:
    """How often and how long."""

    __slots__ = ("n", "samples_s", "total_s")

    def __init__(self) -> None:
        self.n = 0
        self.total_s = 0.0
        self.samples_s: list[float] = []


class Ledger:
    """Folds work that is over; constant in memory unless `keep`.

    `host_by` has the host's seconds by verb, each with the engine's own time since the verb before it, but without the
    policy's (`policy_s`) and without waiting: what launching really costs the thread that drives.
    """

    def __init__(
        self, spans: Spans | None, report_copies: bool, keep: bool, n_gpus: int = 1, n_layers: int = 1
    ) -> None:
        self.spans = spans
        self.report_copies = report_copies
        self.keep = keep
        self.kept: list[Work] = []
        self.arrived: list[Piece] = []
        self._names = [lane_names(gpu, n_gpus) for gpu in range(n_gpus)]
        self.busy_s = dict.fromkeys((*(name for names in self._names for name in names), "host"), 0.0)
        self.by_op: dict[tuple[str, str], Spent] = {}  # (lane, operation)
        self.host_by: dict[str, Spent] = {}
        self.parts_s = [0.0] * len(CAUSES)
        self.waiting = Waiting(n_layers)
        self.policy_s = 0.0
        self.predict_asked_s = 0.0
        self.n_copies = 0
        self._free_s = 0.0
        self._lane_free_s = dict.fromkeys(self.busy_s, 0.0)
        self._mark_s = 0.0  # end of the host's last verb
        self._left_out_s = 0.0

    def start(self, now_s: float) -> None:
        """The run begins: what was spent on loading does not count."""
        self._free_s = self._mark_s = now_s

    # -- the host ---------------------------------------------------------------------------------------------------

    def host(self, op: str, layer: int, expert: int, n_tokens: int, n_bytes: int, began_s: float, end_s: float) -> None:
        """A verb has returned."""
        self._spend(op, end_s)
        if self.spans is not None:
            self.spans("host", op, layer, expert, n_tokens, n_bytes, began_s, end_s)

    def leave_out(self, seconds: float) -> None:
        """Of the host's time since its last verb, these are no part of the next one's."""
        self._left_out_s += seconds

    def _spend(self, op: str, end_s: float) -> None:
        spent_s = max(0.0, end_s - self._mark_s - self._left_out_s)
        self._mark_s, self._left_out_s = end_s, 0.0
        self.busy_s["host"] += spent_s
        cost = self.host_by.setdefault(op, Spent())
        cost.n += 1
        cost.total_s += spent_s
        if self.keep:
            cost.samples_s.append(spent_s)

    def waited(self, ticket: Ticket, began_s: float, end_s: float) -> None:
        """A sync is over: what came before it is the host's work, and so is the time from the work's end on."""
        self._spend("before sync", began_s)
        ready_s = max(began_s, ticket.end_s)
        self.busy_s["host"] += max(0.0, end_s - ready_s)
        cost = self.host_by.setdefault("sync", Spent())
        cost.n += 1
        cost.total_s += max(0.0, end_s - ready_s)
        if self.keep:
            cost.samples_s.append(max(0.0, end_s - ready_s))
        self._mark_s = end_s
        if self.spans is not None:
            self.spans("host", "sync", -1, -1, 0, 0, began_s, end_s)

    def policy(self, hook: str, layer: int, began_s: float, end_s: float) -> None:
        """Policy code has run on the host."""
        self.policy_s += end_s - began_s
        self.leave_out(end_s - began_s)
        if self.spans is not None:
            self.spans("host", f"policy {hook}", layer, -1, 0, 0, began_s, end_s)

    # -- the lanes --------------------------------------------------------------------------------------------------

    def take(self, finished: deque[Work]) -> None:
        """Fold everything that has ended since the last call."""
        while finished:
            work = finished.popleft()
            lane, spent_s = self._names[work.gpu][work.lane], work.end_s - work.start_s
            self.busy_s[lane] += spent_s
            cost = self.by_op.setdefault((lane, work.op), Spent())
            cost.n += 1
            # What a simulation calls the operation's time: from when it could have started.
            cost.total_s += work.end_s - max(work.ready_s, self._lane_free_s[lane])
            self._lane_free_s[lane] = work.end_s
            if self.spans is not None:
                self.spans(
                    lane, work.op, work.layer, work.expert, work.n_tokens, work.n_bytes, work.start_s, work.end_s
                )
            if work.lane == COMPUTE and work.gpu == 0:
                gap_s = self._stood_still(work.start_s, work.waited_for)
                self.waiting.wait(work.layer, work.expert, work.waited_for, work.waited_for_prefetch, gap_s)
                self.parts_s[GPU] += spent_s
                self._free_s = work.end_s
            elif work.lane == H2D and work.piece is not None:
                self.n_copies += 1
                if self.report_copies:
                    self.arrived.append(work.piece)
            if self.keep:
                self.kept.append(work)

    def idle_until(self, time_s: float, cause: int = HOST) -> None:
        """Charge GPU 0's time since its last operation to what it waited for."""
        self.waiting.wait(-1, -1, cause, False, self._stood_still(time_s, cause))

    def _stood_still(self, time_s: float, cause: int) -> float:
        gap_s = max(0.0, time_s - self._free_s)
        if gap_s:
            self.parts_s[cause] += gap_s
            self._free_s = time_s
        return gap_s
