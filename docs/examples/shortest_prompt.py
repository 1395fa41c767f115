"""Shortest prompt first: of those that wait, the one with the fewest input tokens."""

from sim.workload.iterations import RequestInfo
from sim.workload.scheduler import Scheduler


class ShortestPrompt(Scheduler):
    """A long prompt may wait as long as shorter ones come."""

    name = "shortest_prompt"

    def pick(self, now_s: float) -> RequestInfo | None:
        return min(self.arrived_by(now_s), key=lambda request: request.prompt_len, default=None)
