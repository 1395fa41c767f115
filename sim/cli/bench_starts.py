"""What whole processes take, from the start of Python to its end: the main job, the help, a run of ten tokens.

A process's time depends on the machine, so each is shown beside an import of three libraries in the same minutes. A
floor is kept in seconds, or by that ratio: a slower or busier machine takes longer for both.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from sim.cli.bench_told import ProcessTold, StartsTold

IMPORTS = "import pandas, scipy, plotly"
IMPORTS_S = 0.5  # on the machine for which the floors in seconds were set
MAX_BYTES = 500_000_000
REPEATS = 10


Run = tuple[float, subprocess.CompletedProcess[str]]


class Process(NamedTuple):
    """A command and the most it may take; `{trace}` stands for a trace of ten output tokens."""

    title: str
    command: str
    most_s: float
    repeats: int


PROCESSES = (
    Process("main job", "simulate --policy fine_moe --hw rtx3090 --json", 2.5, 1),
    Process("help", "simulate --help", 0.15, REPEATS),
    Process(
        "a run of ten tokens",
        "simulate --policy lru --set scope=global --hw rtx3090 --trace {trace} --json",
        0.5,
        REPEATS,
    ),
)

# What a child runs: the command, then its own peak on standard error (a parent's view of it would start at the
# parent's own size).
_CHILD = """
import sys
from moesim.commands import simulate
try:
    simulate(sys.argv[1:])
finally:
    if sys.argv[1:] != ["--help"]:
        from sim.cli.bench_starts import peak_bytes
        sys.stderr.write(f"\\npeak_bytes={peak_bytes()}")
"""


def starts(folder: Path) -> StartsTold:
    """Every process of `PROCESSES`, and the imports beside which it is shown.

    Medians; they take turns, so that what else the machine does falls on all of them. The first start of each, which
    may write byte code, is not counted, unless one is all there is.
    """
    from sim.cli.bench_cases import ten_tokens

    trace, env = str(ten_tokens(folder)), environment(folder)
    imports = [sys.executable, "-c", IMPORTS]
    commands = [_words(process, trace) for process in PROCESSES]
    for words, process in zip(commands, PROCESSES, strict=True):
        if process.repeats > 1:
            _timed(words, env)
    _timed(imports, env)
    imports_s: list[float] = []
    runs: list[list[Run]] = [[] for _ in PROCESSES]
    for turn in range(REPEATS):
        imports_s.append(_timed(imports, env)[0])
        for words, process, found in zip(commands, PROCESSES, runs, strict=True):
            if turn < process.repeats:
                found.append(_timed(words, env))
    beside_s = statistics.median(imports_s)
    rows = [_row(process, found, beside_s) for process, found in zip(PROCESSES, runs, strict=True)]
    return {"imports": {"command": f'python -c "{IMPORTS}"', "wall_s": beside_s}, "processes": rows}


def _words(process: Process, trace: str) -> list[str]:
    given = [trace if word == "{trace}" else word for word in process.command.split()[1:]]
    return [sys.executable, "-c", _CHILD, *given]


def environment(folder: Path) -> dict[str, str] | None:
    """As it is; where this Python keeps no byte code, children keep it in a folder, as an installed package does."""
    if not sys.dont_write_bytecode:
        return None
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": str(folder / "byte code")}


def _row(process: Process, runs: list[Run], imports_s: float) -> ProcessTold:
    """What is told of a process; null where a figure cannot be had."""
    wall_s, done = statistics.median(seconds for seconds, _ in runs), runs[-1][1]
    message, _, peak = done.stderr.rpartition("\npeak_bytes=")
    peak_b = int(peak) if done.returncode == 0 and peak.isdigit() else None
    ratio, most_ratio = wall_s / imports_s, process.most_s / IMPORTS_S
    in_time = wall_s <= process.most_s or ratio <= most_ratio
    return {
        "title": process.title,
        "command": process.command.format(trace="TRACE"),
        "exit": done.returncode,
        "wall_s": wall_s if done.returncode == 0 else None,
        "most_s": process.most_s,
        "ratio": ratio if done.returncode == 0 else None,
        "most_ratio": most_ratio,
        "peak_bytes": peak_b,
        "error": None if done.returncode == 0 else message.strip(),
        "ok": done.returncode == 0 and in_time and (peak_b is None or peak_b <= MAX_BYTES),
    }


def _timed(words: list[str], env: dict[str, str] | None) -> Run:
    began_s = time.perf_counter()
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=env)  # noqa: S603 - our own words
    return time.perf_counter() - began_s, done


def peak_bytes() -> int | None:
    """The most memory this process has held, or None where the system does not tell."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        import resource
    except (OSError, ImportError):
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
