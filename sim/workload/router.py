"""What every router stands on: which replica a request goes to, decided when it comes, by what is there then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from sim.workload.iterations import RequestInfo


class Replica(Protocol):
    """A replica as a router sees it: how many requests were sent there and are not complete."""

    batch: int
    """How many may run at a time."""

    @property
    def n_there(self) -> int:
        """Requests that wait or run."""
        ...

    @property
    def n_waiting(self) -> int:
        """Requests whose prompt has not begun."""
        ...


class Router:
    """Sends each request to a replica; a router is a subclass that answers `choose`. One is made for every run, so it
    may remember what it did.

    Args:
        replicas: all of them, alike, in order of their numbers. They change as the run goes on.
    """

    name: ClassVar[str] = ""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = replicas

    def choose(self, request: RequestInfo) -> int:
        """The number of the replica that a request goes to, for good; asked once, when it comes.

        Requests that come at one instant are asked about in the order of the load, and whoever ends at that instant has
        left. How much a request will put out (`outputs`) is not known to a serving system, nor to a router.
        """
        raise NotImplementedError

    # -- what a subclass chooses with ------------------------------------------------------------------------------

    def least_loaded(self) -> int:
        """The replica with the fewest requests; of equal ones the first."""
        return min(range(len(self.replicas)), key=lambda number: self.replicas[number].n_there)
