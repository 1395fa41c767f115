"""What every scheduler stands on: who waits, who runs, and the ranges of the next iteration made from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from sim.base.errors import IllegalDecision
from sim.workload.iterations import DECODE, PREFILL, Range, RequestInfo
from sim.workload.profiled import Profiled

Split = Callable[[list[Range]], list[list[Range]]]


class Running:
    """A request whose prompt is done: the row of its next decode token, and where its rows end."""

    __slots__ = ("request", "row", "stop_row")

    def __init__(self, request: RequestInfo) -> None:
        self.request = request
        self.row = request.first_row + request.prompt_len
        self.stop_row = self.row + request.outputs - 1


class Scheduler:
    """Decides which requests run in the next iteration; a scheduler is a subclass that answers `compose`.

    Prompts and decode tokens never share an iteration, and a prompt is one iteration: its phase is one, too.

    Args:
        requests: in order of arrival. batch: how many may run at a time. open_loop: honour arrival times instead of
            starting at once. split: shares a decode step out over passes that run one after the other
            (`Policy.split_step`). clients: of a closed loop: so many ask at once, and each asks again when it has been
            answered; 0: requests come by themselves. profiled: what is known of requests before they run.
    """

    name: ClassVar[str] = ""
    in_order: ClassVar[bool] = False
    """Whether requests start in order of arrival, so that arrivals do not decide who is served when."""

    needs: ClassVar[tuple[str, ...]] = ()
    """What of `Profiled` it cannot do without: `outputs`, `deadlines`."""

    def __init__(
        self,
        requests: Sequence[RequestInfo],
        batch: int,
        open_loop: bool = False,
        split: Split | None = None,
        clients: int = 0,
        profiled: Profiled | None = None,
    ) -> None:
        first = requests[:clients] if clients else requests
        self.waiting = deque(first)  # in order of arrival
        self.profiled = profiled or Profiled()
        self._to_come = deque(requests[len(first) :])  # of clients that wait for an answer
        self.n_running = 0
        self.batch = batch
        self._open_loop = open_loop
        self._split = split
        self._running: list[Running] = []
        self._later: deque[list[Range]] = deque()  # passes of the step that runs
        self._n_later = 0

    def compose(self, now_s: float) -> list[Range] | float | None:
        """The ranges of the next iteration, the time of the next arrival to wait for, or None at the end."""
        raise NotImplementedError

    # -- what a subclass composes with -----------------------------------------------------------------------------

    def arrived(self, request: RequestInfo, now_s: float) -> bool:
        """Whether a request that waits is there."""
        return not self._open_loop or request.arrival_s is None or request.arrival_s <= now_s

    def arrived_by(self, now_s: float) -> Iterator[RequestInfo]:
        """All requests that wait and are there, in order of arrival."""
        for request in self.waiting:
            if not self.arrived(request, now_s):
                return
            yield request

    def next_arrival_s(self) -> float | None:
        """When the first of those that wait comes, or has come; None when nobody will."""
        return self.waiting[0].arrival_s if self.waiting else None

    def prefill(self, request: RequestInfo) -> list[Range]:
        """Start a request that waits: its prompt, all of it."""
        if self.waiting[0] is request:
            self.waiting.popleft()
        else:
            self.waiting.remove(request)
        if request.outputs > 1:
            self._running.append(Running(request))
            self.n_running += 1
        return [Range(request, request.first_row, request.first_row + request.prompt_len, PREFILL, 0)]

    def decode(self) -> list[Range]:
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
        return ranges

    # -- what the loop asks ----------------------------------------------------------------------------------------

    def served(self, n: int, now_s: float) -> None:
        """So many requests are complete: in a closed loop each of those who asked asks again."""
        for _ in range(min(n, len(self._to_come))):
            self.waiting.append(self._to_come.popleft()._replace(arrival_s=now_s))

    def next(self, now_s: float) -> list[Range] | float | None:
        """What `compose` says, a decode step pass by pass where the policy splits it."""
        if self._n_later:
            self._n_later -= 1
            return self._later.popleft()
        composed = self.compose(now_s)
        if self._split is None or not isinstance(composed, list) or len(composed) < 2:
            return composed
        return self._passes(composed)

    def _passes(self, ranges: list[Range]) -> list[Range]:
        assert self._split is not None
        passes = self._split(ranges)
        if not shares_out(passes, ranges):
            raise IllegalDecision(f"split_step, got {passes!r}: every token of a decode step runs in one pass")
        self._later.extend([list(one) for one in passes])
        self._n_later = len(self._later) - 1
        return self._later.popleft()


def shares_out(passes: list[list[Range]], ranges: list[Range]) -> bool:
    """Whether passes hold every range of a step once."""
    try:
        found = [r for one in passes for r in one]
        return all(passes) and len(found) == len(ranges) and set(found) == set(ranges)
    except (TypeError, ValueError):
        return False
