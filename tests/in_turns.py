"""A scheduler in a file of its own: every other token of a decode step in a first pass, the others in a second."""

from __future__ import annotations

from sim.workload.iterations import Range, RequestInfo
from sim.workload.scheduler import Scheduler


class InTurns(Scheduler):
    """As `fcfs`, a decode step in two passes."""

    name = "in_turns"
    in_order = True

    def pick(self, now_s: float) -> RequestInfo | None:
        return next(self.arrived_by(now_s), None)

    def passes(self, ranges: list[Range]) -> list[list[Range]]:
        return [ranges[0::2], ranges[1::2]]
