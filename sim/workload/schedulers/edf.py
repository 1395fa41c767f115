"""Earliest deadline first: of those that wait, the one whose first token is wanted soonest.

Liu and Layland, "Scheduling Algorithms for Multiprogramming in a Hard-Real-Time Environment", Journal of the ACM 20(1),
1973, section 7.
"""

from __future__ import annotations

from sim.workload.iterations import RequestInfo
from sim.workload.scheduler import Scheduler


class EarliestDeadline(Scheduler):
    """As `fcfs` with another choice: by arrival plus the TTFT of the task's SLO (its `e2e_s`, where it has no other);
    who has none goes last. Nobody who has one starves: whoever comes later has the later deadline in the end."""

    name = "edf"
    needs = ("deadlines",)

    def pick(self, now_s: float) -> RequestInfo | None:
        return min(self.arrived_by(now_s), key=self.profiled.deadline_s, default=None)
