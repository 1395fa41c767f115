"""The first iterations as trace events, one thread per lane: opens in Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sim.base.lanes import LANES

if TYPE_CHECKING:
    from sim.engine.drive import Step

_ORDER = ("iterations", "host", *(lane.name for lane in LANES if lane.name != "host"))


class Timeline:
    """Writes the Trace Event Format; times in microseconds, as it wants them.

    Args:
        title: names the process. n_iterations: spans that begin after this many iterations are left out.
    """

    def __init__(self, path: Path, title: str, n_iterations: int) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._left = n_iterations
        self._end_s: float | None = None  # known once the last wanted iteration is over
        self._threads: dict[str, int] = {}
        self._file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        self._file.write(json.dumps({"ph": "M", "pid": 1, "name": "process_name", "args": {"name": title}}))

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()

    def close(self) -> None:
        """Complete the document."""
        self._file.write("\n]}\n")
        self._file.close()

    def span(
        self, lane: str, op: str, layer: int, expert: int, n_tokens: int, n_bytes: int, start_s: float, end_s: float
    ) -> None:
        """Take one span; the same signature as the engine's."""
        if self._end_s is not None and start_s >= self._end_s:
            return
        facts = {"layer": layer, "expert": expert, "tokens": n_tokens or -1, "bytes": n_bytes or -1}
        name = op + (f" L{layer}" if layer >= 0 else "") + (f" E{expert}" if expert >= 0 else "")
        self._complete(lane, name, op, start_s, end_s, {key: value for key, value in facts.items() if value >= 0})

    def step(self, step: Step) -> None:
        """Take the end of an iteration."""
        if self._left <= 0:
            return
        self._left -= 1
        iteration = step.iteration
        facts = {"tokens": iteration.n_tokens, "requests": len(iteration.ranges)}
        name = f"{iteration.phase} {iteration.index}"
        self._complete("iterations", name, iteration.phase, step.start_s, step.end_s, facts)
        if self._left == 0:
            self._end_s = step.end_s

    def _complete(self, lane: str, name: str, kind: str, start_s: float, end_s: float, facts: dict[str, Any]) -> None:
        self._event(
            {
                "ph": "X",
                "pid": 1,
                "tid": self._thread(lane),
                "name": name,
                "cat": kind,
                "ts": start_s * 1e6,
                "dur": (end_s - start_s) * 1e6,
                "args": facts,
            }
        )

    def _thread(self, lane: str) -> int:
        """The lane's thread, named and put in order when it first appears."""
        if lane not in self._threads:
            family = lane.rstrip("0123456789") if lane not in _ORDER else lane
            place = _ORDER.index(family) if family in _ORDER else len(_ORDER)
            thread = self._threads[lane] = 1 + len(self._threads)
            for name, facts in (("thread_name", {"name": lane}), ("thread_sort_index", {"sort_index": place})):
                self._event({"ph": "M", "pid": 1, "tid": thread, "name": name, "args": facts})
        return self._threads[lane]

    def _event(self, event: dict[str, Any]) -> None:
        self._file.write(",\n" + json.dumps(event, allow_nan=False))
