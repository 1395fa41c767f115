"""One replica as a SimPy process: an iteration is an event that lasts what the engine says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from simpy.events import Event, EventPriority

from sim.machine.events.clock import Clock, Steps

if TYPE_CHECKING:
    from sim.engine.run_loop import Loop
    from sim.workload.iterations import RequestInfo

# Within an instant iterations end first (`ENDS`); then requests come and are sent somewhere; then replicas begin what
# is next, so that whoever comes as another ends may take its place.
ARRIVES = EventPriority(2)
BEGINS = EventPriority(3)


class Replica:
    """A loop over iterations with its own engine, cache and policy, to which requests are sent as it runs.

    The engine works an iteration out when it begins, on a clock of its own that is ahead of everybody's until the event
    of its end. Nothing in between can change it: requests wait for the next one.

    Args:
        answered: told of every request that is complete, when it is.
    """

    def __init__(self, loop: Loop, clock: Clock, answered: Callable[[RequestInfo], None]) -> None:
        self.batch = loop.batching.batch
        self.n_there = 0
        self._loop = loop
        self._clock = clock
        self._answered = answered
        self._bell: Event | None = None  # what it waits for while nobody is there

    @property
    def n_waiting(self) -> int:
        """Requests whose prompt has not begun."""
        return len(self._loop.batching.scheduler.waiting)

    def send(self, request: RequestInfo) -> None:
        """A request comes, now."""
        self.n_there += 1
        self._loop.batching.scheduler.add(request)
        if self._bell is not None:
            bell, self._bell = self._bell, None
            bell.succeed()

    def serve(self) -> Steps:
        """Run what is there, iteration by iteration, for ever."""
        loop, clock = self._loop, self._clock
        while True:
            yield clock.at(max(loop.machine.now(), clock.now), BEGINS)  # its host may have worked on after a last token
            composed = loop.next()
            if isinstance(composed, list):
                complete = loop.run(composed)
                yield clock.at(loop.end_s)
                for request in complete or ():
                    self.n_there -= 1
                    self._answered(request)
            else:
                self._bell = clock.event()
                yield self._bell
                yield clock.at(clock.now, BEGINS)
                loop.wait(clock.now)
