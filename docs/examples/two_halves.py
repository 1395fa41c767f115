"""First come, first served; each decode step in two passes, whoever came first in the first."""

from sim.workload.iterations import Range, RequestInfo
from sim.workload.scheduler import Scheduler


class TwoHalves(Scheduler):
    """What regrouping by likeness is to be held against."""

    name = "two_halves"
    in_order = True

    def pick(self, now_s: float) -> RequestInfo | None:
        return next(self.arrived_by(now_s), None)

    def passes(self, ranges: list[Range]) -> list[list[Range]]:
        half = (len(ranges) + 1) // 2
        return [ranges[:half], ranges[half:]]
