"""Where a replay's time goes: shares of wall time by part of the program, sampled."""

from __future__ import annotations

import signal
import sys
import tempfile
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from sim.base.errors import BadInput
from sim.cli.bench_cases import CASES, Case, written

if TYPE_CHECKING:
    from sim.cli.bench_told import ProfileTold

EVERY_S = 0.001
ENOUGH, MAX_RUNS = 1000, 10  # samples of a case, or replays
ROOT = Path(__file__).resolve().parents[2]
ENGINE = "the engine: decisions, residency, counts"
PARTS = (
    ("policies/", "the policy"),
    ("sim/workload/", "reading the trace"),
    ("traces/", "reading the trace"),
    ("sim/engine/", ENGINE),
    ("sim/policy/", ENGINE),
    ("sim/machine/cost.py", "prices"),
    ("sim/profiles/", "prices"),
    ("sim/machine/", "the machine: lanes"),
    # Machine code has no frames: what it takes is found where it was called from.
    ("sim/", "engine and machine, compiled"),
)


def part_of(path: str) -> str | None:
    """Which part of the program a file belongs to; None for files of others."""
    try:
        inside = Path(path).resolve().relative_to(ROOT).as_posix()
    except (ValueError, OSError):
        return None
    return next((name for start, name in PARTS if inside.startswith(start)), None)


class Sampler:
    """Counts, every millisecond of processor time, which part is at work: the innermost frame that is ours."""

    def __init__(self) -> None:
        self.samples: Counter[str] = Counter()
        self._known: dict[str, str | None] = {}

    def _look(self, _: int, frame: FrameType | None) -> None:
        while frame is not None:
            path = frame.f_code.co_filename
            if path not in self._known:
                self._known[path] = part_of(path)
            part = self._known[path]
            if part is not None:
                self.samples[part] += 1
                return
            frame = frame.f_back

    def __enter__(self) -> Sampler:
        if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
            raise BadInput(f"bench --profile, got {sys.platform}: it needs the interval timers of Linux or macOS")
        self._before = signal.signal(signal.SIGPROF, self._look)
        signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, self._before)

    def shares(self) -> dict[str, float]:
        """Part -> share of the samples, largest first."""
        total = sum(self.samples.values())
        return {part: n / total for part, n in self.samples.most_common()} if total else {}


def profile(case: Case, folder: Path) -> ProfileTold:
    """Replay a case under the sampler; learning is not counted."""
    from sim.run import execute, prepare

    spec, sampler, runs = written(case, folder), Sampler(), 0
    while sum(sampler.samples.values()) < ENOUGH and runs < MAX_RUNS:
        setup, runs = prepare(spec), runs + 1
        with ExitStack() as stack:
            stack.callback(setup.close)
            execute(setup, progress=_Begin(sampler, stack).tick, bounds=False)
    return {"title": case.title, "shares": sampler.shares(), "samples": sum(sampler.samples.values())}


class _Begin:
    """Begins to sample when the first iteration, the prefill, is over: learning is not counted."""

    def __init__(self, sampler: Sampler, stack: ExitStack) -> None:
        self._sampler, self._stack = sampler, stack

    def tick(self, done: int, _: int) -> None:
        if done == 1:
            self._stack.enter_context(self._sampler)


def profiles() -> list[ProfileTold]:
    """Every case of the bench."""
    found = []
    for case in CASES:
        with tempfile.TemporaryDirectory(prefix="moesim-bench-") as folder:
            found.append(profile(case, Path(folder)))
    return found


def text(found: list[ProfileTold]) -> str:
    """A table: parts by cases."""
    from sim.base.tables import render, table
    from sim.base.units import show_frac

    rows = table("part", *(case["title"] for case in found))
    parts = dict.fromkeys(part for case in found for part in case["shares"])
    for part in parts:
        rows.add_row(part, *(show_frac(case["shares"].get(part)) for case in found))
    return render(rows) + "shares of processor time while decoding, sampled\n"
