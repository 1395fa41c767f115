"""What runs together: the iterations that are composed of the requests a scheduler picks.

Continuous batching (Yu et al., "Orca", OSDI 2022): requests join and leave between two iterations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sim.base.errors import IllegalDecision
from sim.workload.iterations import DECODE, PREFILL, Range, RequestInfo
from sim.workload.kv_memory import KvMemory
from sim.workload.scheduler import Scheduler

if TYPE_CHECKING:
    from sim.workload.draft_steps import Drafts

STATIC, CONTINUOUS = "static", "continuous"
KINDS = (CONTINUOUS, STATIC)


class Running:
    """A request that has a slot: the row of its next token, where its prefill ends, and where its rows end.

    Args:
        n_drafted: tokens that are drafted for each of its decode steps, as long as its answer takes so many.
    """

    __slots__ = ("n_drafted", "prompt_stop", "request", "row", "stop_row")

    def __init__(self, request: RequestInfo, n_drafted: int = 0) -> None:
        self.request = request
        self.n_drafted = n_drafted
        self.row = request.first_row
        self.prompt_stop = self.row + request.prompt_len
        self.stop_row = self.prompt_stop + request.outputs - 1

    @property
    def next_tokens(self) -> int:
        """Whose keys and values it needs room for in its next iteration; of a prompt, for all of it."""
        if self.row < self.prompt_stop:
            return self.prompt_stop - self.request.first_row
        return min(self.row + 1 + self.n_drafted, self.stop_row) - self.request.first_row

    def start_over(self) -> None:
        """Its keys and values are lost: what it has put out is part of its prompt, from which the next token comes."""
        self.prompt_stop = max(self.row + 1, self.prompt_stop)
        self.row = self.request.first_row

    def part(self, most: int) -> Range:
        """The next rows of its prompt, so many at most."""
        row, first = self.row, self.request.first_row
        stop = self.prompt_stop
        if row + most < stop:
            stop = row + most
        self.row = stop
        return Range(self.request, row, stop, PREFILL, row - first, stop == self.prompt_stop)


class Batching:
    """Composes iterations. Unless told, a prompt is an iteration of its own, before others go on decoding.

    Args:
        scheduler: says who takes a free slot. batch: slots, how many requests may run at a time. kv: pages for keys and
            values, without which nobody starts or goes on; None: there are always enough. most_tokens: at most so many
            run in an iteration: first a token of every request whose prompt is done, then prompts, in parts where they
            do not fit; 0: a prompt runs whole, and alone. static: slots are filled at once, when all of them are free.
        drafts: how many rows a decode step has, and how many of their tokens are taken; None: one, which is.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        batch: int,
        kv: KvMemory | None = None,
        most_tokens: int = 0,
        static: bool = False,
        drafts: Drafts | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.drafts = drafts
        self._n_drafted = 0 if drafts is None else drafts.k
        self.batch = batch
        self.n_running = 0
        self._most_tokens = most_tokens
        self._static = static
        self._running: list[Running] = []  # their prompts are done
        self._prompts: list[Running] = []  # not theirs
        self._later: deque[list[Range]] = deque()  # passes of the step that runs
        self._n_later = 0
        self._shares_out = scheduler.shares_out
        self.listens = scheduler.listens
        self.owed_s = 0.0  # for sharing out the step whose first pass is next
        self.kv = kv
        self._picked_before: set[int] = set()
        self._ending: list[RequestInfo] = []  # whose last row is in the iteration that runs: then their pages are free

    def next(self, now_s: float) -> list[Range] | float | None:
        """The ranges of the next iteration, the time of the next arrival to wait for, or None: nobody is left."""
        if self._n_later:
            self._n_later -= 1
            return self._later.popleft()
        if self.kv is not None:
            self._free_pages(now_s)
        if self._most_tokens:
            ranges = self._in_parts(now_s)
            return ranges if ranges else self._wait(now_s)
        ranges = self._whole(now_s)
        if ranges:
            return ranges
        if self.kv is not None:
            self._make_room()
        if self.n_running:
            return self._passes(self._decode())
        return self._wait(now_s)

    def rest(self) -> tuple[RequestInfo, int, int] | None:
        """The only request that may run, its next row, and how many are left, all of which run now one by one; None
        where anybody may come or ask in between."""
        alone = self.batch == 1 and self.n_running == 1 and not self._n_later and self.kv is None
        if not alone or self._most_tokens or self.drafts is not None or self.listens:
            return None
        running = self._running[0]
        row, running.row = running.row, running.stop_row
        self._running = []
        self.n_running = 0
        return running.request, row, running.stop_row - row

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
            if not scheduler.arrived(request, now_s) or request.index in self._picked_before:
                raise ValueError
            if self.kv is not None:
                if not self.kv.fits(request.prompt_len, self.n_running):
                    return None  # nor does anybody who comes after it
                self.kv.hold(request, request.prompt_len)
            scheduler.take(request)
            self._picked_before.add(request.index)
        except (AttributeError, TypeError, ValueError):
            raise _schedulers(
                f"pick of scheduler {scheduler.name}, got {request!r}: nobody who waits and is there; answer one of "
                "self.arrived_by(now_s), or None"
            ) from None
        scheduler.started(request)
        return request

    def _wait(self, now_s: float) -> float | None:
        """When somebody comes, where nobody runs; None where nobody will."""
        at_s = self.scheduler.next_arrival_s(now_s)
        if at_s is None and self.scheduler.waiting:
            raise _schedulers(
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
        if self.drafts is not None:
            for running in self._running:  # what was held for drafts that were rejected
                self.kv.give_back(running.request, running.row - running.request.first_row)

    def _make_room(self) -> None:
        """A page for the next token of all that run: some may have to go, and if none does some may come back."""
        assert self.kv is not None
        there = self.kv.make_room([*self._running, *self._prompts])
        if self.kv.pool.swaps and not self.kv.left:
            while (back := self.kv.back(len(there))) is not None:
                there.append(back)
        self._running = [one for one in there if one.row >= one.prompt_stop]
        self._prompts = [one for one in there if one.row < one.prompt_stop]
        self.n_running = len(there)

    def _started(self, now_s: float, n_there: int) -> Running | None:
        """Who starts beside so many others, where there is a slot: who makes a new start, before anybody new."""
        kv = self.kv
        if kv is not None and kv.away:
            return None if kv.pool.swaps else kv.back(n_there)
        if n_there >= self.batch or not self.scheduler.waiting:
            return None
        request = self._picked(now_s)
        return None if request is None else Running(request, self._n_drafted)

    def _whole(self, now_s: float) -> list[Range]:
        """The whole prompt of who comes next; of as many as there are slots, where batches are static."""
        ranges: list[Range] = []
        anew = self.kv is not None and bool(self.kv.away)  # of the batch that runs
        if self._static and self.n_running and not anew:
            return ranges
        while True:
            one = self._started(now_s, len(ranges) or self.n_running)
            if one is None:
                return ranges
            ranges.append(one.part(one.prompt_stop - one.row))
            if one.row < one.stop_row:
                self._running.append(one)
                self.n_running += 1
            elif self.kv is not None:
                self._ending.append(one.request)
            if anew or not self._static or len(ranges) == self.batch:
                return ranges

    def _in_parts(self, now_s: float) -> list[Range]:
        """A token of every request whose prompt is done; prompts under way, then new ones, in what is left."""
        if self.kv is not None:
            self._make_room()
        n_there = self.n_running  # also those whose last token it is: they have their slots until it is out
        ranges = self._decode() if self._running else []
        left = self._most_tokens
        for r in ranges:
            left -= r.stop_row - r.start_row
        unfinished: list[Running] = []
        under_way = deque(self._prompts)
        while left > 0:
            if under_way:
                one = under_way.popleft()
            else:
                started = self._started(now_s, n_there)
                if started is None:
                    break
                one = started
                n_there += 1
            part = one.part(left)
            ranges.append(part)
            left -= part.stop_row - part.start_row
            if one.row < one.prompt_stop:
                unfinished.append(one)
            elif one.row < one.stop_row:
                self._running.append(one)
            elif self.kv is not None:
                self._ending.append(one.request)
        self._prompts = [*unfinished, *under_way]
        self.n_running = len(self._running) + len(self._prompts)
        return self._passes(ranges) if ranges and ranges[len(ranges) - 1].phase == DECODE else ranges

    def _decode(self) -> list[Range]:
        """The next token of every request whose prompt is done, with what is drafted after it; those whose last comes
        out make room."""
        ranges: list[Range] = []
        over = False
        for running in self._running:
            row = running.row
            if self.drafts is None:
                ranges.append(Range(running.request, row, row + 1, DECODE, row - running.request.first_row))
                row += 1
            else:
                found = self.drafts.step(running.request, row, running.stop_row)
                ranges += found
                row = found[len(found) - 1].taken_row
            running.row = row
            if row == running.stop_row:
                over = True
        if over:
            if self.kv is not None:
                self._ending += [running.request for running in self._running if running.row == running.stop_row]
            self._running = [running for running in self._running if running.row < running.stop_row]
            self.n_running = len(self._running)
        return ranges

    def _passes(self, ranges: list[Range]) -> list[Range]:
        """The first pass of a decode step; `next` gives out the others."""
        if not self._shares_out or len(ranges) < 2:
            return ranges
        passes = self.scheduler.passes(ranges)
        if not shares_out(passes, ranges):
            raise _schedulers(
                f"passes of scheduler {self.scheduler.name}, got {passes!r}: every token of a decode step runs in one "
                "pass; answer lists of ranges"
            )
        self._later.extend([list(one) for one in passes])
        self._n_later = len(self._later) - 1
        self.owed_s = self.scheduler.sharing_out_s if self._n_later else 0.0
        return self._later.popleft()


def _schedulers(wrong: str) -> IllegalDecision:
    """A mistake that is the scheduler's, and no policy's."""
    error = IllegalDecision(wrong)
    error.located = True
    return error


def shares_out(passes: list[list[Range]], ranges: list[Range]) -> bool:
    """Whether passes are lists that hold every range of a step once."""
    try:
        if not all(isinstance(one, list | tuple) for one in (passes, *passes)):
            return False
        found = [r for one in passes for r in one]
        return all(passes) and len(found) == len(ranges) and set(found) == set(ranges)
    except (TypeError, ValueError):
        return False
