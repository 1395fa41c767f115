"""The host thread: its clock, what happens when it blocks, and what it has done."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.machine.lanes import CPU, H2D, HOST, IDLE, NVME
from sim.machine.links import Links
from sim.machine.runs import Runs
from sim.machine.stream import Stream

if TYPE_CHECKING:
    from sim.machine.cost import Cost
    from sim.machine.lanes import Spans
    from sim.policy.tickets import Ticket

_H2D, _HOST, _CPU, _NVME = H2D, HOST, CPU, NVME  # machine integers where this is compiled


class Host:
    """One thread walks the layers: it launches and waits, and its clock `now_s` is the machine's.

    `n_syncs`: how often it has waited for a GPU. `n_copies`: calls that launched copies, `experts_copied` what they add
    up to, a part counting as its share. `predict_s`: seconds of predictors here, by the quantity they rest on.

    Args:
        stream: GPU 0's, which waits for the host. links: what the host waits for itself.
    """

    def __init__(self, cost: Cost, stream: Stream, links: Links, spans: Spans | None, runs: Runs) -> None:
        self.now_s = 0.0
        self.runs = runs
        self.stream = stream
        self.links = links
        self.spans = spans
        self.sync_s = cost.launches.sync_s
        self.n_syncs = 0
        self.n_copies = 0
        self.experts_copied = 0.0
        self.predict_s = [0.0] * len(cost.figures.entries)

    def spend(self, op: str, layer: int, expert: int, n_tokens: int, n_bytes: int, seconds: float) -> None:
        """Be busy."""
        begun_s = self.now_s
        self.now_s = begun_s + seconds
        if self.spans is not None:
            self.spans("host", op, layer, expert, n_tokens, n_bytes, begun_s, self.now_s)

    def look(self) -> None:
        """Bring links up to the clock: what starts by now has started."""
        self.links.advance(self.now_s)

    def sync(self, ticket: Ticket) -> None:
        """Block until something has ended and its result has been read."""
        if ticket.end_s < 0.0:
            self.links.settle(ticket)
        stream = self.stream
        host_s = self.now_s
        if ticket.end_s > host_s:
            self.now_s = host_s = ticket.end_s
            self.runs.begin(host_s, ticket.lane)
            if stream.n_pending:
                self.look()  # copies on other links that have started by now
            waited = ticket.cause == _H2D or ticket.cause == _CPU or ticket.cause == _NVME
            if waited and not stream.n_pending:
                # A stream that idles because the host waits for a copy waits for that copy, not for the host.
                stream.idle_until(host_s, ticket.cause, ticket.speculative, ticket.lane)
        self.n_syncs += 1
        self.spend("sync", -1, -1, 0, 0, self.sync_s)

    def keep_waiting(self) -> None:
        """What GPU 0 has done is over: until now it waits for the host."""
        self.stream.idle_until(self.now_s, _HOST)

    def wait_until(self, time_s: float) -> None:
        """Nothing is asked for until then."""
        if time_s > self.now_s:
            self.now_s = time_s
            self.runs.begin(time_s, IDLE)
            self.stream.idle_until(time_s, IDLE)
