"""First come, first served: continuous batching in order of arrival."""

from __future__ import annotations

from sim.workload.iterations import Range
from sim.workload.scheduler import Scheduler


class FirstCome(Scheduler):
    """A free slot is filled by the next request's prefill, which runs as an iteration of its own (prefill first, as
    vLLM does without chunked prefill); else all requests that run decode."""

    name = "fcfs"
    in_order = True

    def compose(self, now_s: float) -> list[Range] | float | None:
        if self.waiting and self.n_running < self.batch:
            first = self.waiting[0]
            if self.arrived(first, now_s):
                return self.prefill(first)
            if not self.n_running:
                return first.arrival_s
        return self.decode() if self.n_running else None
