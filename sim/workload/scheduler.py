"""What every scheduler stands on: who waits, who of them is there, and what a plug-in may answer.

A scheduler says who goes next. What runs together in an iteration is composed of that elsewhere (`batching.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from sim.workload.iterations import Range, RequestInfo
from sim.workload.known_requests import Profiled


class Scheduler:
    """Decides whose prompt runs next; a scheduler is a subclass that answers `pick`.

    Args:
        requests: in order of arrival; `add` brings further ones. open_loop: honour arrival times instead of starting
            at once. clients: of a closed loop: so many ask at once, and each asks again when it has been answered; 0:
            requests come by themselves. profiled: what is known of requests before they run.
    """

    name: ClassVar[str] = ""
    in_order: ClassVar[bool] = False
    """Whether requests start in order of arrival, so that arrivals do not decide who is served when."""

    needs: ClassVar[tuple[str, ...]] = ()
    """What of `Profiled` it cannot do without: see `NEEDS`."""

    sharing_out_s: ClassVar[float] = 0.0
    """What the CPU takes to share a decode step out over several passes; the step waits for it (assumed)."""

    def __init__(
        self,
        requests: Sequence[RequestInfo],
        open_loop: bool = False,
        clients: int = 0,
        profiled: Profiled | None = None,
    ) -> None:
        first = requests[:clients] if clients else requests
        self.waiting = deque(first)  # in order of arrival
        self.profiled = profiled or Profiled()
        self._to_come = deque(requests[len(first) :])  # of clients that wait for an answer
        self._open_loop = open_loop

    # -- what a plug-in answers ------------------------------------------------------------------------------------

    def pick(self, now_s: float) -> RequestInfo | None:
        """Who of `self.arrived_by(now_s)` takes the free slot; None: nobody yet.

        Asked again for every free slot. Whoever is picked is taken out of `waiting` by the caller.
        """
        raise NotImplementedError

    def passes(self, ranges: list[Range]) -> list[list[Range]]:
        """How the tokens of a decode step of several requests are shared out over passes, one after the other.

        Asked again for the bounds beside a result, so the answer must rest on `ranges` and what was learnt alone.
        """
        return [ranges]

    def started(self, request: RequestInfo) -> None:
        """Its prompt runs from the next iteration on."""

    def finished(self, request: RequestInfo) -> None:
        """Its last token is out."""

    def ran(self, ranges: list[Range]) -> None:
        """An iteration of these ranges is over; told where a scheduler implements it."""

    def stats(self) -> dict[str, Any]:
        """What it went by, and what came of it, for the result."""
        return {}

    # -- what a plug-in answers with -------------------------------------------------------------------------------

    def arrived(self, request: RequestInfo, now_s: float) -> bool:
        """Whether a request that waits is there."""
        return not self._open_loop or request.arrival_s is None or request.arrival_s <= now_s

    def arrived_by(self, now_s: float) -> Iterator[RequestInfo]:
        """All requests that wait and are there, in order of arrival."""
        for request in self.waiting:
            if not self.arrived(request, now_s):
                return
            yield request

    # -- what batching and the loop ask ----------------------------------------------------------------------------

    @property
    def shares_out(self) -> bool:
        """Whether decode steps may take several passes."""
        return type(self).passes is not Scheduler.passes

    @property
    def listens(self) -> bool:
        """Whether it is told of every iteration."""
        return type(self).ran is not Scheduler.ran

    def add(self, request: RequestInfo) -> None:
        """A further request, no earlier than those that wait."""
        self.waiting.append(request)

    def take(self, request: RequestInfo) -> None:
        """It waits no longer. Raises ValueError where it does not wait."""
        if self.waiting and self.waiting[0] is request:
            self.waiting.popleft()
        else:
            self.waiting.remove(request)

    def next_arrival_s(self, now_s: float) -> float | None:
        """When the next of those that wait comes; None when all are there, or nobody waits."""
        for request in self.waiting:
            if not self.arrived(request, now_s):
                return request.arrival_s
        return None

    def served(self, complete: Sequence[RequestInfo], now_s: float) -> None:
        """These requests are complete: in a closed loop each of those who asked asks again."""
        for request in complete:
            self.finished(request)
            if self._to_come:
                self.add(self._to_come.popleft()._replace(arrival_s=now_s))
