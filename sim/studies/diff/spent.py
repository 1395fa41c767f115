"""Where the time of every request went: told from iteration to iteration, while a run is replayed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from sim.workload.iterations import PHASES, PREFILL

if TYPE_CHECKING:
    from sim.engine.run_loop import Clockwork, RequestTimes, Step
    from sim.machine.waiting import Waiting

COPY, DEMAND, PREFETCH, QUEUE, OTHERS = "copy", "demand", "prefetch", "queue", "others"
DRIVE = "drive"
OWN = ("gpu", DEMAND, PREFETCH, "host", "cpu", "predictor", DRIVE)
"""What GPU 0 did or waited for in an iteration: copies are demanded ones, or prefetches that came late."""
PARTS = (*OWN, QUEUE, OTHERS)
"""What a request's time goes to: parts of iterations of its own, the wait until its prompt begins, and whatever else
ran before it was served. Of the drive only runs that have one tell."""
ROUNDING = 1e-10  # of a time: sums of the same numbers in two orders differ by less


class Shares(NamedTuple):
    """A time of one request and its parts, in the order of `PARTS`, which sum to it."""

    time_s: float
    parts_s: tuple[float, ...]


class Spent:
    """Iterations of every request, with what GPU 0 did or waited for in them."""

    def __init__(self, clockwork: Clockwork, waiting: Waiting) -> None:
        self._clockwork, self._waiting = clockwork, waiting
        self._before_s = {name: self._parts_s(name) for name in clockwork.phases}
        self._own_s: dict[tuple[int, bool], list[float]] = {}

    def take(self, step: Step) -> None:
        """One more iteration is over."""
        phase = step.iteration.counted
        before_s, after_s = self._before_s[phase], self._parts_s(phase)
        self._before_s[phase] = after_s
        for one in step.iteration.ranges:
            own_s = self._own_s.setdefault((one.request.index, one.phase == PREFILL), [0.0] * len(OWN))
            for cause in range(len(OWN)):
                own_s[cause] += after_s[cause] - before_s[cause]

    def _parts_s(self, phase: str) -> list[float]:
        """Seconds of a phase so far, in the order of `OWN`."""
        gpu_s, copy_s, *others_s = self._clockwork.phases[phase].parts_s[: len(OWN) - 1]
        waiting, number = self._waiting, PHASES.index(phase)
        late_s = math.fsum(waiting.seconds(number, layer)[PREFETCH] for layer in range(waiting.n_layers))
        return [gpu_s, copy_s - late_s, late_s, *others_s]

    def ttft(self, times: RequestTimes) -> Shares:
        """Time to the first token: waiting in the queue, and the iteration of its prompt."""
        return self._shares(times.request.index, True, times.first_token_s - times.start_s, 1, times.queue_s)

    def tpot(self, times: RequestTimes) -> Shares | None:
        """Time per further token: its decode iterations, and those of others in between; None without any."""
        further = times.request.outputs - 1
        whole_s = times.last_token_s - times.first_token_s
        return self._shares(times.request.index, False, whole_s, further) if further else None

    def _shares(self, request: int, prefill: bool, whole_s: float, over: int, queue_s: float = 0.0) -> Shares:
        own_s = self._own_s.get((request, prefill), [0.0] * len(OWN))
        parts_s = (*own_s, queue_s, whole_s - queue_s - math.fsum(own_s))
        return Shares(whole_s / over, tuple(s / over if abs(s) > ROUNDING * whole_s else 0.0 for s in parts_s))
