"""Least loaded: the replica with the fewest requests, which is to join the shortest queue.

Winston, "Optimality of the Shortest Line Discipline", Journal of Applied Probability 14(1), 1977.
"""

from __future__ import annotations

from sim.workload.iterations import RequestInfo
from sim.workload.router import Router


class LeastLoaded(Router):
    """Those that wait count like those that run; of equal replicas the first is taken."""

    name = "least_loaded"

    def choose(self, request: RequestInfo) -> int:
        return self.least_loaded()
