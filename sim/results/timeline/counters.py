"""One counter of a timeline: values from a time on, the first of them when the window opens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sim.results.timeline.document import Process
    from sim.results.timeline.window import Window


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
