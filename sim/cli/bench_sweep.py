"""What a sweep over hardware costs beside one run: whole processes, in seconds of processor time."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from sim.cli.bench_starts import environment

if TYPE_CHECKING:
    from sim.cli.bench_told import SweepTold

N_LINKS = 64
RUN = ["--policy", "lru", "--set", "scope=global", "--hw", "rtx3090", "--experts", "48"]
LINK = "hw.h2d.bandwidth_bytes_per_s"
REPEATS = 2  # the first start of a process may write byte code

_CHILD = """
import sys, time
from moesim import commands
try:
    getattr(commands, sys.argv[1])(sys.argv[2:])
finally:
    sys.stderr.write(f"\\ncpu_s={time.process_time()}")
"""


def measure() -> SweepTold:
    """A cache on so many links, whose decisions are made once, and the same on one."""
    links = ",".join(str(10**10 + i * 10**9) for i in range(N_LINKS))
    with tempfile.TemporaryDirectory(prefix="moesim-bench-") as folder:
        one_s = _least_s(["simulate", *RUN], Path(folder))
        all_s = _least_s(["main", "sweep", *RUN, "--workers", "1", "--set", f"{LINK}={links}"], Path(folder))
    ratio = None if one_s is None or all_s is None else all_s / one_s
    return {"points": N_LINKS, "run_s": one_s, "sweep_s": all_s, "ratio": ratio}


def _least_s(words: list[str], folder: Path) -> float | None:
    """Of several processes; None where one ends otherwise than well."""
    found = []
    for _ in range(REPEATS):
        command = [sys.executable, "-c", _CHILD, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment(folder))  # noqa: S603 - our own words
        if done.returncode:
            return None
        found.append(float(done.stderr.rpartition("\ncpu_s=")[2]))
    return min(found)


def told(found: SweepTold) -> str:
    """In a line."""
    from sim.base.units import show_seconds

    if found["ratio"] is None or found["sweep_s"] is None or found["run_s"] is None:
        return f"{found['points']} links: a process failed; run moesim sweep by itself"
    return (
        f"lru on {found['points']} links in one sweep: {show_seconds(found['sweep_s'])} of processor time, "
        f"{found['ratio']:.1f} times one simulate ({show_seconds(found['run_s'])})"
    )
