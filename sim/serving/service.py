"""A service of several replicas: requests come to one door, a router sends each to a replica, clients ask again."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from simpy.events import Event
from simpy.resources.store import Store

from sim.base.errors import IllegalDecision
from sim.machine.events.clock import Clock, Steps
from sim.serving.replica import ARRIVES, Replica

if TYPE_CHECKING:
    from sim.engine.run_loop import Loop
    from sim.workload.iterations import RequestInfo
    from sim.workload.router import Router


class Service:
    """The processes around the replicas: `_arrivals` or so many `_client`s, and `_route`.

    Args:
        loops: of the replicas, with nobody there. router: of which kind one is made.
        requests: in order of arrival. clients: of a closed loop; 0: requests come at their own times.
    """

    def __init__(
        self, loops: Sequence[Loop], router: type[Router], requests: Sequence[RequestInfo], clients: int = 0
    ) -> None:
        self.clock = clock = Clock()
        self.replicas = [Replica(loop, clock, self._answer) for loop in loops]
        self.sent_to: dict[int, int] = {}  # request -> replica
        self._router = router(self.replicas)
        self._door = Store(clock)
        self._to_come = deque(requests)
        self._asked: dict[int, Event] = {}  # request of a client -> that it is complete
        self._failure: BaseException | None = None
        comes = [self._client() for _ in range(clients)] if clients else [self._arrivals()]
        for steps in (*comes, self._route(), *(replica.serve() for replica in self.replicas)):
            clock.process(self._watched(steps))

    def run(self) -> None:
        """Serve every request."""
        try:
            self.clock.run()
        except BaseException as error:
            # SimPy raises a copy of what a process raised, without its attributes and its traceback.
            raise self._failure or error from None
        if self._to_come:
            raise RuntimeError("requests are left that nobody serves (a bug in the service)")

    def _watched(self, steps: Steps) -> Steps:
        try:
            yield from steps
        except GeneratorExit:  # nothing is left to do
            raise
        except BaseException as error:
            self._failure = error
            raise

    def _arrivals(self) -> Steps:
        """Requests come at their own times."""
        while self._to_come:
            request = self._to_come.popleft()
            at_s = request.arrival_s
            if at_s is not None and at_s > self.clock.now:
                yield self.clock.at(at_s, ARRIVES)
            yield self._door.put(request)

    def _client(self) -> Steps:
        """One client: it asks, and asks again as soon as it has been answered."""
        clock = self.clock
        while self._to_come:
            request = self._to_come.popleft()._replace(arrival_s=clock.now)
            answered = self._asked[request.index] = clock.event()
            yield self._door.put(request)
            yield answered
            yield clock.at(clock.now, ARRIVES)

    def _route(self) -> Steps:
        """Each request is sent on as it comes through the door, in no time."""
        while True:
            request: RequestInfo = yield self._door.get()
            chosen: Any = self._router.choose(request)  # a plug-in's
            if not isinstance(chosen, int | np.integer) or not 0 <= chosen < len(self.replicas):
                wrong = IllegalDecision(
                    f"choose of router {self._router.name}, got {chosen!r}: it answers with the number of a replica, "
                    f"0 to {len(self.replicas) - 1}"
                )
                wrong.located = True  # it is no policy's
                raise wrong
            self.sent_to[request.index] = int(chosen)
            self.replicas[chosen].send(request)

    def _answer(self, request: RequestInfo) -> None:
        if request.index in self._asked:
            self._asked.pop(request.index).succeed()
