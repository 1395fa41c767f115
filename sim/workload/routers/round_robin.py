"""Round robin: each replica in turn, whatever is there."""

from __future__ import annotations

from sim.workload.iterations import RequestInfo
from sim.workload.router import Router


class RoundRobin(Router):
    """The first request goes to replica 0, the next to replica 1, and so on around."""

    name = "round_robin"
    _next = 0

    def choose(self, request: RequestInfo) -> int:
        chosen = self._next
        self._next = (chosen + 1) % len(self.replicas)
        return chosen
