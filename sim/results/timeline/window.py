"""Which part of a run a timeline shows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sim.base.errors import BadInput
from sim.base.units import show_count, show_seconds

if TYPE_CHECKING:
    from sim.engine.run_loop import Step
    from sim.results.keep import TimelineStart


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
