"""Requests that are there while a run under load goes on: whose prompt has not begun yet, and who runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.engine.run_loop import Step
    from sim.workload.iterations import RequestInfo


class Present:
    """Follows arrivals, beginnings and ends from iteration to iteration.

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
