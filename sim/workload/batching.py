"""What runs together: the iterations that are composed of the requests a scheduler picks.

Continuous batching (Yu et al., "Orca", OSDI 2022): requests join and leave between two iterations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from sim.base.errors import IllegalDecision
from sim.workload.iterations import DECODE, PREFILL, Range, RequestInfo
from sim.workload.scheduler import Scheduler


class Running:
    """A request whose prompt is done: the row of its next decode token, and where its rows end."""

    __slots__ = ("request", "row", "stop_row")

    def __init__(self, request: RequestInfo) -> None:
        self.request = request
        self.row = request.first_row + request.prompt_len
        self.stop_row = self.row + request.outputs - 1


class Batching:
    """Composes iterations. A prompt is an iteration of its own, before others go on decoding.

    Args:
        scheduler: says who takes a free slot. batch: slots, how many requests may run at a time.
    """

    def __init__(self, scheduler: Scheduler, batch: int) -> None:
        self.scheduler = scheduler
        self.batch = batch
        self.n_running = 0
        self._running: list[Running] = []
        self._later: deque[list[Range]] = deque()  # passes of the step that runs
        self._n_later = 0
        self._shares_out = scheduler.shares_out
        self.listens = scheduler.listens
        self.owed_s = 0.0  # for sharing out the step whose first pass is next

    def next(self, now_s: float) -> list[Range] | float | None:
        """The ranges of the next iteration, the time of the next arrival to wait for, or None: nobody is left."""
        if self._n_later:
            self._n_later -= 1
            return self._later.popleft()
        if self.n_running < self.batch and self.scheduler.waiting:
            request = self._picked(now_s)
            if request is not None:
                return self._prefill(request)
        if self.n_running:
            return self._decode()
        return self._wait(now_s)

    def served(self, complete: Sequence[RequestInfo], now_s: float) -> None:
        """These requests are complete."""
        self.scheduler.served(complete, now_s)

    def _picked(self, now_s: float) -> RequestInfo | None:
        """Whom the scheduler picks; it waits no longer. Raises IllegalDecision where it may not be picked."""
        scheduler = self.scheduler
        request = scheduler.pick(now_s)
        if request is None:
            return None
        try:
            if not scheduler.arrived(request, now_s):
                raise ValueError
            scheduler.take(request)
        except (AttributeError, TypeError, ValueError):
            raise IllegalDecision(
                f"pick of scheduler {scheduler.name}, got {request!r}: nobody who waits and is there; answer one of "
                "self.arrived_by(now_s), or None"
            ) from None
        scheduler.started(request)
        return request

    def _wait(self, now_s: float) -> float | None:
        """When somebody comes, where nobody runs; None where nobody will."""
        at_s = self.scheduler.next_arrival_s(now_s)
        if at_s is None and self.scheduler.waiting:
            raise IllegalDecision(
                f"pick of scheduler {self.scheduler.name}, got None: nobody runs, {len(self.scheduler.waiting)} wait, "
                "and nobody else will come; pick one of them"
            )
        return at_s

    def _prefill(self, request: RequestInfo) -> list[Range]:
        """The whole prompt."""
        if request.outputs > 1:
            self._running.append(Running(request))
            self.n_running += 1
        return [Range(request, request.first_row, request.first_row + request.prompt_len, PREFILL, 0)]

    def _decode(self) -> list[Range]:
        """The next token of every request that runs; those whose last it is make room."""
        ranges = []
        over = False
        for running in self._running:
            row = running.row
            ranges.append(Range(running.request, row, row + 1, DECODE, row - running.request.first_row))
            running.row = row + 1
            if row + 1 == running.stop_row:
                over = True
        if over:
            self._running = [running for running in self._running if running.row < running.stop_row]
            self.n_running = len(self._running)
        return self._first_pass(ranges) if self._shares_out and len(ranges) > 1 else ranges

    def _first_pass(self, ranges: list[Range]) -> list[Range]:
        """The first pass of a decode step; `next` gives out the others."""
        passes = self.scheduler.passes(ranges)
        if not shares_out(passes, ranges):
            raise IllegalDecision(f"passes, got {passes!r}: every token of a decode step runs in one pass")
        self._later.extend([list(one) for one in passes])
        self._n_later = len(self._later) - 1
        self.owed_s = self.scheduler.sharing_out_s if self._n_later else 0.0
        return self._later.popleft()


def shares_out(passes: list[list[Range]], ranges: list[Range]) -> bool:
    """Whether passes hold every range of a step once."""
    try:
        found = [r for one in passes for r in one]
        return all(passes) and len(found) == len(ranges) and set(found) == set(ranges)
    except (TypeError, ValueError):
        return False
