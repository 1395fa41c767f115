"""Shortest job first: of those that wait, the one whose task is expected to put out the fewest tokens."""

from __future__ import annotations

from sim.workload.iterations import Range
from sim.workload.scheduler import Scheduler


class ShortestFirst(Scheduler):
    """As `fcfs` with another choice. How much a request will put out is not known beforehand: its task's mean over the
    store split stands for it, and of equal ones the first to come goes first. A long one may wait for ever."""

    name = "sjf"
    needs = ("outputs",)

    def compose(self, now_s: float) -> list[Range] | float | None:
        if self.n_running < self.batch:
            chosen = min(self.arrived_by(now_s), key=self.profiled.outputs_of, default=None)
            if chosen is not None:
                return self.prefill(chosen)
        return self.decode() if self.n_running else self.next_arrival_s()
