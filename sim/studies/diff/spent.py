"""Where the time of every request went: told from iteration to iteration, while a run is replayed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from sim.base.lanes import WAITED_FOR
from sim.workload.iterations import PREFILL

if TYPE_CHECKING:
    from sim.engine.drive import Clockwork, RequestTimes, Step

OTHERS = "others"
PARTS = (*WAITED_FOR, OTHERS)
"""What a request's time goes to: what GPU 0 did or waited for in iterations of its own, and all other iterations."""
ROUNDING = 1e-9  # of a time: sums of the same numbers in two orders differ by less


class Shares(NamedTuple):
    """A time of one request and its parts, in the order of `PARTS`, which sum to it."""

    time_s: float
    parts_s: tuple[float, ...]


class Spent:
    """Iterations of every request, with what GPU 0 did or waited for in them."""

    def __init__(self, clockwork: Clockwork) -> None:
        self._clockwork = clockwork
        self._before_s = {name: phase.parts_s for name, phase in clockwork.phases.items()}
        self._own_s: dict[tuple[int, bool], list[float]] = {}

    def take(self, step: Step) -> None:
        """One more iteration is over."""
        phase = step.iteration.phase
        before_s, after_s = self._before_s[phase], self._clockwork.phases[phase].parts_s
        self._before_s[phase] = after_s
        for one in step.iteration.ranges:
            own_s = self._own_s.setdefault((one.request.index, phase == PREFILL), [0.0] * len(WAITED_FOR))
            for cause in range(len(WAITED_FOR)):
                own_s[cause] += after_s[cause] - before_s[cause]

    def ttft(self, times: RequestTimes) -> Shares:
        """Time to the first token: the iteration of its prompt, and waiting for that to begin."""
        return self._shares(times.request.index, True, times.first_token_s - times.start_s, 1)

    def tpot(self, times: RequestTimes) -> Shares | None:
        """Time per further token: its decode iterations, and those of others in between; None without any."""
        further = times.request.outputs - 1
        whole_s = times.last_token_s - times.first_token_s
        return self._shares(times.request.index, False, whole_s, further) if further else None

    def _shares(self, request: int, prefill: bool, whole_s: float, over: int) -> Shares:
        own_s = self._own_s.get((request, prefill), [0.0] * len(WAITED_FOR))
        others_s = whole_s - math.fsum(own_s)
        if abs(others_s) <= ROUNDING * whole_s:
            others_s = 0.0
        return Shares(whole_s / over, tuple(part_s / over for part_s in (*own_s, others_s)))
