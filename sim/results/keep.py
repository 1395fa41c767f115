"""Where a run is kept beside its result."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from sim.base.errors import BadInput
from sim.base.units import parse_seconds

TIMELINE_ITERATIONS = 20


class TimelineStart(NamedTuple):
    """The first iteration that a timeline shows: its number, or the one that is under way at a time of the run."""

    text: str = "the first iteration"  # as an error begins
    iteration: int = 0
    time_s: float | None = None


FIRST = TimelineStart()


def timeline_start(text: str, what: str = "timeline.from") -> TimelineStart:
    """Read `120`, or a time with its unit, `2.5s`. Raises BadInput."""
    if text.strip().isdecimal():
        return TimelineStart(f"{what}, got {text}", int(text))
    try:
        time_s = parse_seconds(text) if text.strip()[-1:].isalpha() else None
    except BadInput:
        time_s = None
    if time_s is None:
        raise BadInput(f"{what}, got {text!r}: neither an iteration's number nor a time; write 120, or 2.5s")
    return TimelineStart(f"{what}, got {text}", 0, time_s)


class Keep(msgspec.Struct, frozen=True):
    """Tables go to the folder `out`, trace events of some iterations to the file `timeline`; None: to neither.

    Spans, which take far more room than all other tables, are kept `with_spans` only. `overwrite` replaces
    what is there.
    """

    out: Path | None = None
    with_spans: bool = False
    overwrite: bool = False
    timeline: Path | None = None
    timeline_iterations: int = TIMELINE_ITERATIONS
    timeline_from: TimelineStart = FIRST

    def __bool__(self) -> bool:
        return self.out is not None or self.timeline is not None
