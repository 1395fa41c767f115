"""Shortest job first: of those that wait, the one whose task is expected to put out the fewest tokens."""

from __future__ import annotations

from sim.workload.iterations import RequestInfo
from sim.workload.scheduler import Scheduler


class ShortestFirst(Scheduler):
    """As `fcfs` with another choice. How much a request will put out is not known beforehand: its task's mean over the
    store split stands for it, and of equal ones the first to come goes first. A long one may wait for ever."""

    name = "sjf"
    needs = ("outputs",)

    def pick(self, now_s: float) -> RequestInfo | None:
        return min(self.arrived_by(now_s), key=self.profiled.outputs_of, default=None)
