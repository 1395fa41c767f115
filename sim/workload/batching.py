"""What runs together: the iterations that are composed of the requests a scheduler picks.

Continuous batching (Yu et al., "Orca", OSDI 2022): requests join and leave between two iterations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from sim.base.errors import IllegalDecision
from sim.workload.iterations import DECODE, PREFILL, Range, RequestInfo
from sim.workload.kv_memory import KvMemory
from sim.workload.scheduler import Scheduler


class Running:
    """A request that has a slot: the row of its next token, where its prefill ends, and where its rows end."""

    __slots__ = ("prompt_stop", "request", "row", "stop_row")

    def __init__(self, request: RequestInfo) -> None:
        self.request = request
        self.row = request.first_row
        self.prompt_stop = self.row + request.prompt_len
        self.stop_row = self.prompt_stop + request.outputs - 1

    @property
    def next_tokens(self) -> int:
        """Whose keys and values it needs room for in its next iteration; of a prompt, for all of it."""
        return max(self.row + 1, self.prompt_stop) - self.request.first_row

    def start_over(self) -> None:
        """Its keys and values are lost: what it has put out is part of its prompt, from which the next token comes."""
        self.prompt_stop = max(self.row + 1, self.prompt_stop)
        self.row = self.request.first_row


class Batching:
    """Composes iterations. A prompt is an iteration of its own, before others go on decoding.

    Args:
        scheduler: says who takes a free slot. batch: slots, how many requests may run at a time. kv: pages for keys and
            values, without which nobody starts or goes on; None: there are always enough.
    """

    def __init__(self, scheduler: Scheduler, batch: int, kv: KvMemory | None = None) -> None:
        self.scheduler = scheduler
        self.batch = batch
        self.n_running = 0
        self._running: list[Running] = []
        self._later: deque[list[Range]] = deque()  # passes of the step that runs
        self._n_later = 0
        self._shares_out = scheduler.shares_out
        self.listens = scheduler.listens
        self.owed_s = 0.0  # for sharing out the step whose first pass is next
        self.kv = kv
        self._ending: list[RequestInfo] = []  # whose last row is in the iteration that runs: then their pages are free

    def next(self, now_s: float) -> list[Range] | float | None:
        """The ranges of the next iteration, the time of the next arrival to wait for, or None: nobody is left."""
        if self._n_later:
            self._n_later -= 1
            return self._later.popleft()
        kv = self.kv
        if kv is not None:
            self._free_pages(now_s)
            if kv.away and not kv.pool.swaps:
                back = kv.back(self.n_running)
                if back is not None:
                    return self._prefill(back)
        if self.n_running < self.batch and self.scheduler.waiting and (kv is None or not kv.away):
            request = self._picked(now_s)
            if request is not None:
                return self._prefill(Running(request))
        if kv is not None:
            self._make_room()
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
            if self.kv is not None:
                if not self.kv.fits(request.prompt_len, self.n_running):
                    return None  # nor does anybody who comes after it
                self.kv.hold(request, request.prompt_len)
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

    def _free_pages(self, now_s: float) -> None:
        """Those whose last row has run need their pages no longer."""
        assert self.kv is not None
        self.kv.step(now_s)
        for request in self._ending:
            self.kv.free(request)
        self._ending.clear()

    def _make_room(self) -> None:
        """A page for the next token of all that run: some may have to go, and if none does some may come back."""
        assert self.kv is not None
        running = self.kv.make_room(self._running)
        if self.kv.pool.swaps and not self.kv.left:
            while (back := self.kv.back(len(running))) is not None:
                running.append(back)
        self._running = running
        self.n_running = len(running)

    def _prefill(self, one: Running) -> list[Range]:
        """The whole prompt."""
        request, start_row = one.request, one.row
        one.row = one.prompt_stop
        if one.row < one.stop_row:
            self._running.append(one)
            self.n_running += 1
        elif self.kv is not None:
            self._ending.append(request)
        return [Range(request, start_row, one.row, PREFILL, start_row - request.first_row)]

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
            if self.kv is not None:
                self._ending += [running.request for running in self._running if running.row == running.stop_row]
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
