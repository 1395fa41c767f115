"""Copy engines as arithmetic: which copy is served next, and when is that settled?

The host is the only submitter, so a copy's start is settled as soon as nothing the host may still say can overtake
it. Demand copies settle at once; speculative ones settle when the host's clock has passed their start, or when
somebody has to wait for them. No event queue is needed for that; `sim/DESIGN.md` gives the argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from oracle.lanes import H2D, Spans, add_up
from oracle.protocol import DEMAND, UNKNOWN_S, Ticket

if TYPE_CHECKING:
    from oracle.pieces import Piece


class Copy(Ticket):
    """A copy on a lane: what it moves and when it may start."""

    __slots__ = (
        "after",
        "cancelled",
        "duration_s",
        "expert",
        "layer",
        "n_bytes",
        "op",
        "piece",
        "priority",
        "start_s",
        "submit_s",
    )

    def __init__(
        self,
        op: str,
        layer: int,
        expert: int,
        n_bytes: int,
        duration_s: float,
        priority: int,
        submit_s: float,
        after: tuple[Ticket, ...],
    ) -> None:
        self.end_s = UNKNOWN_S
        self.cause = H2D
        self.op = op
        self.layer = layer
        self.expert = expert
        self.n_bytes = n_bytes
        self.duration_s = duration_s
        self.priority = priority
        self.submit_s = submit_s
        self.after = after
        self.start_s = UNKNOWN_S
        self.cancelled = False
        self.piece: Piece | None = None  # None: activations

    def ready_s(self) -> float:
        """Earliest possible start, or UNKNOWN_S while something before it is unsettled."""
        ready_s = self.submit_s
        for ticket in self.after:
            if ticket.end_s == UNKNOWN_S:
                return UNKNOWN_S
            if ticket.end_s > ready_s:
                ready_s = ticket.end_s
        return ready_s


class CopyLane:
    """One copy engine, one direction: serves one copy at a time, demand before speculative, then in order of asking.

    A copy in flight is never aborted. Work is settled lazily, in time order.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.free_s = 0.0
        self.uses: dict[float, int] = {}  # copies not added up yet, by duration
        self._busy_s = 0.0
        self.n_copies = 0
        self.copied_bytes = 0
        self.queue: list[Copy] = []  # in order of asking
        self.finished: deque[Copy] = deque()  # settled, not yet reported by `completions`
        self.spans: Spans | None = None
        self.report = False  # keep `finished` (only where somebody polls)
        self.on_served: Callable[[], object] | None = None  # set while a compute stream waits for an unsettled copy

    @property
    def busy_s(self) -> float:
        """Seconds spent on copies."""
        self._busy_s = add_up(self.uses, self._busy_s)
        return self._busy_s

    def submit(self, copy: Copy, now_s: float) -> None:
        """Take a copy at host time `now_s`; settle it at once when nothing can overtake it."""
        queue = self.queue
        if queue:
            self.advance(now_s)
        if copy.priority != DEMAND:
            queue.append(copy)
            return
        for queued in queue:
            if queued.priority == DEMAND:
                queue.append(copy)
                self._settle_demand(now_s)
                return
        free_s, ready_s = self.free_s, copy.ready_s() if copy.after else copy.submit_s
        if ready_s == UNKNOWN_S or (ready_s > now_s and ready_s > free_s):
            queue.append(copy)
        else:
            self._serve(copy, ready_s if ready_s > free_s else free_s)

    def _settle_demand(self, now_s: float) -> None:
        """Settle queued demand copies in the order they will run, as far as no later demand can precede them."""
        while True:
            at_s = max(self.free_s, now_s)
            best: Copy | None = None
            for copy in self.queue:
                if copy.priority == DEMAND:
                    ready_s = copy.ready_s()
                    if ready_s == UNKNOWN_S:
                        return  # asked earlier, and may be ready first: leave it to the order of time
                    if ready_s <= at_s:
                        best = copy
                        break
            if best is None:
                return
            self.queue.remove(best)
            self._serve(best, max(self.free_s, best.ready_s()))

    def advance(self, now_s: float) -> None:
        """Settle every copy that starts before `now_s`, and demands at it: speculation can still be overtaken then."""
        queue = self.queue
        while queue and self.free_s <= now_s:
            start = self._next_start()
            if start is None or (start[0], start[1].priority) > (now_s, DEMAND):  # Correction: demands at `now_s` too
                return
            queue.remove(start[1])
            self._serve(start[1], start[0])

    def settle_next(self) -> bool:
        """Settle the next copy whatever the host's clock (the host is blocked); False when none can start."""
        start = self._next_start()
        if start is None:
            return False
        self.queue.remove(start[1])
        self._serve(start[1], start[0])
        return True

    def next_start(self) -> tuple[float, int] | None:
        """When the next queued copy would start, given what is queued now, and its priority; None when none can."""
        start = self._next_start()
        return None if start is None else (start[0], start[1].priority)

    def _next_start(self) -> tuple[float, Copy] | None:
        """(start, copy) of the next service: at the earliest time anything is ready, the best of what is ready."""
        if len(self.queue) == 1:
            only = self.queue[0]
            ready_s = only.ready_s()
            return None if ready_s == UNKNOWN_S else (max(self.free_s, ready_s), only)
        earliest_s = UNKNOWN_S
        ready: list[tuple[float, Copy]] = []
        for copy in self.queue:
            ready_s = copy.ready_s()
            if ready_s == UNKNOWN_S:
                continue
            ready.append((ready_s, copy))
            if earliest_s == UNKNOWN_S or ready_s < earliest_s:
                earliest_s = ready_s
        if not ready:
            return None
        at_s = max(self.free_s, earliest_s)
        best: Copy | None = None
        for ready_s, copy in ready:
            if ready_s <= at_s and (best is None or copy.priority < best.priority):
                best = copy
        assert best is not None
        return at_s, best

    def _serve(self, copy: Copy, start_s: float) -> None:
        duration_s = copy.duration_s
        copy.start_s = start_s
        copy.end_s = self.free_s = start_s + duration_s
        copy.after = ()  # settled: let go of what it waited for, or tickets would chain through the whole run
        self.uses[duration_s] = self.uses.get(duration_s, 0) + 1
        self.n_copies += 1
        self.copied_bytes += copy.n_bytes
        if self.report:
            self.finished.append(copy)
        if self.spans is not None:
            self.spans(self.name, copy.op, copy.layer, copy.expert, 0, copy.n_bytes, start_s, copy.end_s)
        if self.on_served is not None:
            self.on_served()

    def cancel(self, copy: Copy, now_s: float) -> bool:
        """Withdraw a speculative copy that has not started by `now_s`; a demand is a commitment."""
        self.advance(now_s)
        if copy.priority == DEMAND or copy not in self.queue:
            return False
        self.queue.remove(copy)
        copy.cancelled = True
        copy.end_s = now_s  # nothing that was to follow it waits any more
        copy.after = ()
        if self.on_served is not None:
            self.on_served()
        return True

    def promote(self, copy: Copy, now_s: float) -> None:
        """Turn a queued speculative copy into a demand copy asked for now."""
        self.advance(now_s)
        if copy in self.queue and copy.priority != DEMAND:
            self.queue.remove(copy)
            copy.priority = DEMAND
            self.queue.append(copy)
            self._settle_demand(now_s)

    def completions(self, now_s: float) -> list[Copy]:
        """Copies ended by `now_s`, in order of completion, each once."""
        self.advance(now_s)
        done = []
        while self.finished and self.finished[0].end_s <= now_s:
            done.append(self.finished.popleft())
        return done
