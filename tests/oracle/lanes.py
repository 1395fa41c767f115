"""Lanes as arithmetic: when does each piece of work start and end, given order and readiness?

Lanes that serve in order; copies have priorities, see `oracle.copy_queue`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from oracle.protocol import UNKNOWN_S, Ticket

# Causes: what a waiting compute stream waits for. Indices into `Composition.parts_s`.
GPU, H2D, HOST, CPU, SIDE, IDLE = range(6)
CAUSES = ("gpu", "h2d", "host", "cpu", "predictor", "idle")

Spans = Callable[[str, str, int, int, int, int, float, float], None]


def add_up(uses: dict[float, int], busy_s: float) -> float:
    """`busy_s` and what has been counted since by duration; counts are cheaper than a sum per operation."""
    for duration_s, n in uses.items():
        busy_s += n * duration_s
    uses.clear()
    return busy_s


class Launched(Ticket):
    """Work launched on a compute stream whose start is not settled yet."""

    __slots__ = ("after", "duration_s", "expert", "first_s", "last_s", "layer", "n_tokens", "op")

    def __init__(
        self,
        op: str,
        layer: int,
        expert: int,
        n_tokens: int,
        first_s: float,
        last_s: float,
        duration_s: float,
        after: tuple[Ticket, ...],
    ) -> None:
        super().__init__(UNKNOWN_S, GPU)
        self.op = op
        self.layer = layer
        self.expert = expert
        self.n_tokens = n_tokens
        self.first_s = first_s
        self.last_s = last_s
        self.duration_s = duration_s
        self.after = after


def waited_s(start_s: float, cause: int, free_s: float, first_s: float, after: tuple[Ticket, ...]) -> float:
    """How much later work starts than had what it waited for last, the `cause`, not been in its way."""
    for ticket in after:
        if ticket.cause != cause and ticket.end_s > free_s:
            free_s = ticket.end_s
    return start_s - (free_s if cause == HOST or free_s > first_s else first_s)


class Stream:
    """A GPU's compute stream: serves in launch order; an operation waits for its host launch and its tickets.

    The gap before an operation is charged to whatever it waited for last.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.free_s = 0.0
        self.gaps_s = [0.0] * len(CAUSES)  # waiting, by the cause named by the index
        self.uses: dict[float, int] = {}  # operations not added up yet, by duration
        self._busy_s = 0.0
        self.blame = GPU  # what a stream that waits for the operation placed last is really waiting for
        self.pending: deque[Launched] = deque()
        self.spans: Spans | None = None

    @property
    def busy_s(self) -> float:
        """Seconds spent on operations."""
        self._busy_s = add_up(self.uses, self._busy_s)
        return self._busy_s

    @property
    def parts_s(self) -> list[float]:
        """A partition of the stream's whole timeline: busy, or waiting for the cause named by the index."""
        parts_s = list(self.gaps_s)
        parts_s[GPU] += self.busy_s  # waiting for another GPU's result counts as GPU time too
        return parts_s

    def run(
        self,
        op: str,
        layer: int,
        expert: int,
        n_tokens: int,
        first_s: float,
        last_s: float,
        duration_s: float,
        after: tuple[Ticket, ...],
    ) -> Ticket:
        """Launch work whose first kernel reaches the GPU at `first_s` and whose last one ends at `last_s` at best."""
        if not self.pending:
            start_s, cause = first_s, HOST
            for ticket in after:
                end_s = ticket.end_s
                if end_s == UNKNOWN_S:
                    break
                if end_s > start_s:
                    start_s, cause = end_s, ticket.cause
            else:
                gap_s = start_s - self.free_s
                late_s = waited_s(start_s, cause, self.free_s, first_s, after) if gap_s > duration_s else 0.0
                end_s = self._place(op, layer, expert, n_tokens, start_s, cause, last_s, duration_s, late_s)
                return Ticket(end_s, self.blame)
        work = Launched(op, layer, expert, n_tokens, first_s, last_s, duration_s, after)
        self.pending.append(work)
        return work

    def _place(
        self,
        op: str,
        layer: int,
        expert: int,
        n_tokens: int,
        start_s: float,
        cause: int,
        last_s: float,
        duration_s: float,
        late_s: float,
    ) -> float:
        free_s = self.free_s
        self.blame = GPU
        if start_s > free_s:
            self.gaps_s[cause] += start_s - free_s
            if late_s > duration_s:
                # An expert on another GPU that mostly waited for its copy: whoever waits for it waits for the link.
                # How long that GPU had been idle says nothing: it may just have had nothing to do.
                self.blame = cause
        else:
            start_s = free_s
        end_s = start_s + duration_s
        self.uses[duration_s] = self.uses.get(duration_s, 0) + 1
        if self.spans is not None:
            self.spans(self.name, op, layer, expert, n_tokens, 0, start_s, end_s)
        if last_s > end_s:
            # Kernels shorter than their launches: the stream starves between them.
            self.gaps_s[HOST] += last_s - end_s
            end_s = last_s
        self.free_s = end_s
        return end_s

    def progress(self) -> bool:
        """Settle pending work whose tickets have settled; True when none is left pending."""
        pending = self.pending
        while pending:
            work = pending[0]
            start_s, cause = work.first_s, HOST
            for ticket in work.after:
                if ticket.end_s == UNKNOWN_S:
                    return False
                if ticket.end_s > start_s:
                    start_s, cause = ticket.end_s, ticket.cause
            pending.popleft()
            late_s = waited_s(start_s, cause, self.free_s, work.first_s, work.after)
            work.end_s = self._place(
                work.op, work.layer, work.expert, work.n_tokens, start_s, cause, work.last_s, work.duration_s, late_s
            )
            work.cause = self.blame
            work.after = ()
        return True

    def idle_until(self, time_s: float, cause: int) -> None:
        """Charge the time up to `time_s` to `cause` (the host's last read, or waiting for an arrival)."""
        if time_s > self.free_s:
            self.gaps_s[cause] += time_s - self.free_s
            self.free_s = time_s


class SerialLane:
    """A lane that serves in order of asking: the CPU pool, the predictor's side lane."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.free_s = 0.0
        self.busy_s = 0.0
        self.spans: Spans | None = None

    def use(self, op: str, layer: int, expert: int, n_tokens: int, ready_s: float, duration_s: float) -> float:
        """Serve next; return the end."""
        start_s = ready_s if ready_s > self.free_s else self.free_s
        self.free_s = start_s + duration_s
        self.busy_s += duration_s
        if self.spans is not None:
            self.spans(self.name, op, layer, expert, n_tokens, 0, start_s, self.free_s)
        return self.free_s
