"""First come, first served."""

from __future__ import annotations

from sim.workload.iterations import RequestInfo
from sim.workload.scheduler import Scheduler


class FirstCome(Scheduler):
    """In order of arrival; of those that come at the same time, in the order of the file."""

    name = "fcfs"
    in_order = True

    def pick(self, now_s: float) -> RequestInfo | None:
        return next(self.arrived_by(now_s), None)
