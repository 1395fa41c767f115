"""A file in the Trace Event Format: slices, arrows between them and counters, one process per run."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from sim.base.lanes import LANES

_ORDER = ("iterations", "host", *(lane.name for lane in LANES if lane.name != "host"))
_PER_US = 1024  # Binary fractions: whoever adds `dur` to `ts`, or makes nanoseconds of them, gets what begins next.


def microseconds(time_s: float) -> float:
    """As the format wants times, on a grid of about a nanosecond, so that what touches does not overlap."""
    return round(time_s * 1e6 * _PER_US) / _PER_US


class Document:
    """The file, written event by event."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        self._n_processes = self._n_events = self._n_arrows = 0

    def __enter__(self) -> Document:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()

    def close(self) -> None:
        """Complete the document."""
        self._file.write("\n]}\n")
        self._file.close()

    def process(self, title: str) -> Process:
        """Another run, shown below those before it."""
        self._n_processes += 1
        return Process(self, self._n_processes, title)

    def event(self, event: dict[str, Any]) -> None:
        """Write an event."""
        self._file.write((",\n" if self._n_events else "\n") + json.dumps(event, allow_nan=False))
        self._n_events += 1

    def new_arrow(self) -> int:
        """A number that no other arrow of the file has."""
        self._n_arrows += 1
        return self._n_arrows


class Process:
    """One run in the file: a thread per lane."""

    def __init__(self, document: Document, pid: int, title: str) -> None:
        self._document, self._pid = document, pid
        self._threads: dict[str, int] = {}
        self._meta("process_name", {"name": title})
        self._meta("process_sort_index", {"sort_index": pid})

    def slice(self, lane: str, name: str, kind: str, start_s: float, end_s: float, facts: dict[str, Any]) -> None:
        """What a lane did."""
        tid, start_us = self._thread(lane), microseconds(start_s)
        duration_us = microseconds(end_s) - start_us
        self._event("X", tid, start_us, {"name": name, "cat": kind, "dur": duration_us, "args": facts})

    def arrow(self, kind: str, lane: str, start_s: float, to_lane: str, to_start_s: float) -> None:
        """From the slice that begins on `lane` at `start_s` to the one that begins on `to_lane` at `to_start_s`."""
        same = {"name": kind, "cat": "arrow", "id": self._document.new_arrow()}
        self._event("s", self._thread(lane), microseconds(start_s), same)
        self._event("f", self._thread(to_lane), microseconds(to_start_s), {**same, "bp": "e"})

    def counter(self, name: str, time_s: float, values: dict[str, int]) -> None:
        """What is counted has these values from now on."""
        self._event("C", 0, microseconds(time_s), {"name": name, "args": values})

    def _event(self, phase: str, tid: int, time_us: float, rest: dict[str, Any]) -> None:
        self._document.event({"ph": phase, "pid": self._pid, "tid": tid, "ts": time_us, **rest})

    def _meta(self, name: str, facts: dict[str, Any], tid: int = 0) -> None:
        self._document.event({"ph": "M", "pid": self._pid, "tid": tid, "name": name, "args": facts})

    def _thread(self, lane: str) -> int:
        """The lane's thread, named and put in order when it first appears."""
        if lane not in self._threads:
            family = lane.rstrip("0123456789") if lane not in _ORDER else lane
            place = _ORDER.index(family) if family in _ORDER else len(_ORDER)
            thread = self._threads[lane] = 1 + len(self._threads)
            self._meta("thread_name", {"name": lane}, thread)
            self._meta("thread_sort_index", {"sort_index": place}, thread)
        return self._threads[lane]
