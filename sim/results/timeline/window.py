"""Which part of a run a timeline shows, and what is counted in it: values from a time on, the first of them when the
window opens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sim.base.errors import BadInput
from sim.base.units import show_count, show_seconds

if TYPE_CHECKING:
    from sim.engine.run_loop import Step
    from sim.results.keep import TimelineStart
    from sim.results.timeline.document import Process
    from sim.workload.iterations import RequestInfo


class Window:
    """`n_iterations` from `start` on; from when to when that is, is known once these iterations are over."""

    def __init__(self, start: TimelineStart, n_iterations: int) -> None:
        self._start, self._left = start, n_iterations
        self._n_steps, self._end_s = 0, 0.0
        self.opens_s: float | None = None if start.iteration or start.time_s else 0.0
        self.closes_s = math.inf

    @property
    def closed(self) -> bool:
        """Whether its last iteration is over."""
        return not self._left

    def step(self, step: Step) -> None:
        """Take the end of an iteration."""
        self._n_steps, self._end_s = self._n_steps + 1, step.end_s
        if self.opens_s is None and self._begins(step):
            self.opens_s = step.start_s
        if self.opens_s is not None and self._left:
            self._left -= 1
            if not self._left:
                self.closes_s = step.end_s

    def _begins(self, step: Step) -> bool:
        time_s = self._start.time_s
        return step.iteration.index >= self._start.iteration if time_s is None else step.end_s > time_s

    def shows(self, start_s: float, end_s: float) -> bool:
        """Whether anything of this lies in the window, as far as its borders are known."""
        opens_s = self.opens_s
        return opens_s is not None and (start_s >= opens_s or end_s > opens_s) and start_s < self.closes_s

    def check(self) -> None:
        """Raises BadInput where the run was over before the window opened."""
        if self.opens_s is None:
            raise BadInput(
                f"{self._start.text}: the run has {show_count(self._n_steps, 'iteration')} in "
                f"{show_seconds(self._end_s)}; name an earlier one"
            )


class Counter:
    """Takes samples in order of time and writes one where a value has changed."""

    def __init__(self, name: str, series: tuple[str, ...]) -> None:
        self._name, self._series = name, series
        self._written: tuple[int, ...] | None = None
        self._last: tuple[float, tuple[int, ...]] = (0.0, (0,) * len(series))

    def skip(self, time_s: float, values: tuple[int, ...]) -> None:
        """A sample before the window has opened."""
        self._last = (time_s, values)

    def sample(self, process: Process, window: Window, time_s: float, values: tuple[int, ...]) -> None:
        """Values from this time on; of several at one time the last stands."""
        if time_s > self._last[0]:
            self.write(process, window)
        self._last = (time_s, values)

    def write(self, process: Process, window: Window) -> None:
        """Write the last sample, if it tells anything new."""
        time_s, values = self._last
        if window.opens_s is not None and values != self._written and time_s < window.closes_s:
            shown_s = max(time_s, window.opens_s)
            process.counter(self._name, shown_s, dict(zip(self._series, values, strict=True)))
            self._written = values


class Present:
    """Requests that are there while a run under load goes on: whose prompt has not begun yet, and who runs.

    Args:
        requests: in order of arrival. clients: of a closed loop, in which each asks again when it has been answered.
    """

    def __init__(self, requests: Sequence[RequestInfo], clients: int) -> None:
        self._come_s = [request.arrival_s or 0.0 for request in (requests[:clients] if clients else requests)]
        self._to_come = len(requests) - len(self._come_s)  # of clients that wait for an answer
        self._at = 0  # of those that come by themselves
        self._begun: set[int] = set()
        self._running = self._waiting = 0

    def step(self, step: Step) -> list[tuple[float, tuple[int, int]]]:
        """(time, (running, waiting)) of everything that happened up to the end of an iteration, in order."""
        found = self._come(step.start_s)
        for one in step.iteration.ranges:
            if one.request.index not in self._begun:
                self._begun.add(one.request.index)
                self._running, self._waiting = self._running + 1, self._waiting - 1
        found.append((step.start_s, (self._running, self._waiting)))
        found += self._come(step.end_s)
        for one in step.iteration.ranges:
            request = one.request
            if one.taken_row == request.first_row + request.prompt_len + request.outputs - 1:
                again = self._to_come > 0
                self._to_come -= again
                self._running, self._waiting = self._running - 1, self._waiting + again
        found.append((step.end_s, (self._running, self._waiting)))
        return found

    def _come(self, until_s: float) -> list[tuple[float, tuple[int, int]]]:
        found = []
        while self._at < len(self._come_s) and self._come_s[self._at] <= until_s:
            self._waiting += 1
            found.append((self._come_s[self._at], (self._running, self._waiting)))
            self._at += 1
        return found
