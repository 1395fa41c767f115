"""Task affinity: requests of a task go where that task is served, unless too many are there.

The rule is LARD's: Pai et al., "Locality-Aware Request Distribution in Cluster-based Network Servers", ASPLOS 1998,
without replication, with a task in the place of a file and a replica's experts in the place of a server's cache.
Its low mark is the load below which a server is likely to have idle resources: fewer requests than run together here.
Its high mark is a number of its servers; twice as many as run together, so that a whole batch waits, is assumed.
"""

from __future__ import annotations

from collections.abc import Sequence

from sim.workload.iterations import RequestInfo
from sim.workload.router import Replica, Router


class TaskAffinity(Router):
    """A task that is new goes to the least loaded replica, and stays there. It moves to the least loaded one when
    its replica has more than the high mark while another has less than the low one, or twice the high mark."""

    name = "task_affinity"

    def __init__(self, replicas: Sequence[Replica]) -> None:
        super().__init__(replicas)
        self._serves: dict[str, int] = {}  # task -> replica

    def choose(self, request: RequestInfo) -> int:
        home = self._serves.get(request.task)
        if home is None or self._overflows(self.replicas[home]):
            home = self._serves[request.task] = self.least_loaded()
        return home

    def _overflows(self, home: Replica) -> bool:
        low, high = home.batch, 2 * home.batch
        idle = any(other.n_there < low for other in self.replicas)
        return (home.n_there > high and idle) or home.n_there >= 2 * high
