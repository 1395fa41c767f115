"""Clocks of a machine: the host's, and one that tells on it when events of a CUDA device happened."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.real.devices.work import Work

WINDOW_S = 0.25
"""How far an anchor serves. Events tell milliseconds in float32: to 30 ns at a quarter second, 4 us after a minute."""
ROUNDS = 16


@dataclass
class Anchor:
    """An event that is over, where it is put on the host's clock, and since when the host knows that it is over."""

    event: Any
    at_s: float
    known_s: float


def place_by_thread(work: Work, base_s: float) -> None:
    """Set start and end of work of a thread, whose marks have looked at the host's clock."""
    work.start_s, work.end_s = work.begun.at_s - base_s, work.mark.at_s - base_s


class HostClock:
    """Of a device whose streams are all threads; its zero is the last `restart`."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self.base_s = now()

    def now_s(self) -> float:
        return self._now() - self.base_s

    def restart(self) -> None:
        self.base_s = self._now()

    def place(self, work: Work, free_s: float) -> None:
        place_by_thread(work, self.base_s)


class DeviceClock:
    """Places work of a device on the host's clock, whose zero is the last `restart`.

    Events measure time only from each other, and the device's oscillator drifts from the host's by some microseconds a
    second. Two things are certain: nothing starts on the device before the host launched it, and nothing ends after the
    host saw its end. The offset between the clocks is moved as far as these demand, no further; durations stay.

    Args:
        cuda: `torch.cuda`, or a stand-in. stream: where restarting records its events. now: the host's clock.
    """

    def __init__(self, cuda: Any, stream: Any, now: Callable[[], float] = time.perf_counter) -> None:
        self._cuda, self._stream, self._now = cuda, stream, now
        self.base_s = 0.0
        self._anchors: list[Anchor] = []
        self.restart()

    def now_s(self) -> float:
        return self._now() - self.base_s

    def restart(self) -> None:
        """Wait for the device, set the clock to 0 and align the two: the quickest of some round trips tells best."""
        self._cuda.synchronize()
        best_s, middle_s, event = math.inf, 0.0, None
        for _ in range(ROUNDS):
            mark = self._cuda.Event(enable_timing=True)
            before_s = self._now()
            mark.record(self._stream)
            mark.synchronize()
            after_s = self._now()
            if event is None or after_s - before_s < best_s:
                best_s, middle_s, event = after_s - before_s, 0.5 * (before_s + after_s), mark
        self.base_s = middle_s
        self._anchors = [Anchor(event, 0.0, 0.0)]

    def place(self, work: Work, free_s: float) -> None:
        """Set start and end of work that the host has just seen to be over; the lane was busy until `free_s`."""
        seen_s = self.now_s()
        anchor = self._before(work.submit_s)
        start_s, end_s = (anchor.at_s + 1e-3 * float(anchor.event.elapsed_time(e)) for e in (work.begun, work.mark))
        shift_s = min(max(0.0, work.submit_s - start_s), seen_s - end_s)
        anchor.at_s += shift_s
        work.end_s = end_s + shift_s
        # Anchors differ by a little: what was put after other work of the lane still starts after it.
        work.start_s = min(max(start_s + shift_s, free_s), work.end_s)
        if anchor is self._anchors[-1] and work.end_s - anchor.at_s > WINDOW_S:
            self._anchors.append(Anchor(work.mark, work.end_s, seen_s))

    def _before(self, time_s: float) -> Anchor:
        """The last anchor that was known to be over when work was handed over: it is over before that work begins."""
        return next((a for a in reversed(self._anchors) if a.known_s <= time_s), self._anchors[0])
