"""`moesim bench`: replay speed as ratios to a bare SimPy loop timed in the same run, and what the main job takes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sim.base.tables import fold
from sim.cli.bench_cases import CASES, Case, written

if TYPE_CHECKING:
    from simpy.events import Event

N_TIMEOUTS = 200_000
MAIN_JOB = ("run", "--policy", "fine_moe", "--hw", "rtx3090", "--json")
MAX_MAIN_BYTES = 500_000_000


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--repeat", type=click.IntRange(min=1), default=3, show_default=True, help="Take the best of N.")
@click.option("--check", is_flag=True, help="Exit 1 when a ratio, or the main job's memory, misses its bound.")
@click.option("--profile", "profiled", is_flag=True, help="Say instead where each replay spends its time.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(repeat: int, check: bool, profiled: bool, as_json: bool) -> None:
    """Time the replay of decode tokens against bare SimPy timeouts on this machine, one core.

    A ratio of 1 would mean that simulating one layer of one token costs as much as one bare env.timeout.
    """
    if profiled:
        from sim.cli import bench_profile

        found = bench_profile.profiles()
        click.echo(json.dumps(found) if as_json else fold(bench_profile.text(found)), nl=as_json)
        return
    result = measure(repeat)
    click.echo(json.dumps(result) if as_json else fold(_text(result)), nl=as_json)
    if check and not result["ok"]:
        from sim.base.errors import CheckFailed

        raise CheckFailed("bench: a ratio or the main job's memory misses its bound; close other programs and repeat")


def measure(repeat: int) -> dict[str, Any]:
    """All cases; bare timeouts are timed around them, and the best of all counts (the hardest comparison)."""
    bare_per_s = [bare_timeouts_per_s() for _ in range(repeat)]
    found = []
    with tempfile.TemporaryDirectory(prefix="moesim-bench-") as folder:
        for case in CASES:
            found.append((case, *_best(case, Path(folder), repeat)))
            bare_per_s.append(bare_timeouts_per_s())
    best_per_s = max(bare_per_s)
    cases = []
    for case, tokens_per_s, n_layers, hit_rate in found:
        ratio = tokens_per_s * n_layers / best_per_s
        cases.append({"title": case.title, "policy": case.policy, "model": case.model, "decode_tokens": case.n_test,
                      "hit_rate": hit_rate, "tokens_per_s": tokens_per_s, "ratio": ratio, "floor": case.floor,
                      "ok": ratio >= case.floor})  # fmt: skip
    main = main_job()
    ok = all(case["ok"] for case in cases) and main["ok"]
    return {"bare_timeouts_per_s": best_per_s, "cases": cases, "main_job": main, "ok": ok}


def bare_timeouts_per_s(n: int = N_TIMEOUTS) -> float:
    """Timeouts that one SimPy process waits for, one after the other, per second of wall time."""
    import simpy

    env = simpy.Environment()

    def wait() -> Generator[Event, Any, None]:
        for _ in range(n):
            yield env.timeout(1.0)

    env.process(wait())
    began_s = time.perf_counter()
    env.run()
    return n / (time.perf_counter() - began_s)


def _best(case: Case, folder: Path, repeat: int) -> tuple[float, int, float | None]:
    """(decode tokens per second, layers, hit rate); learning and prefill are not counted."""
    from sim.run import execute, prepare

    spec, best, n_layers, hit_rate = written(case, folder), 0.0, 0, None
    for _ in range(repeat):
        setup, clock = prepare(spec), _Clock(time.perf_counter)
        n_layers = setup.model.n_moe_layers
        hit_rate = execute(setup, progress=clock.tick, bounds=False).result["hit_rate"]
        setup.close()
        best = max(best, case.n_test / clock.elapsed_s)
    return best, n_layers, hit_rate


class _Clock:
    """From the end of the first iteration, which is the prefill, to the end of the last."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._first_s: float | None = None
        self.elapsed_s = 0.0

    def tick(self, done: int, total: int) -> None:
        if self._first_s is None:
            self._first_s = self._now()
        elif done == total:
            self.elapsed_s = self._now() - self._first_s


# What the child runs: the command, then its own peak on standard error (a parent's view of it would start at the
# parent's own size).
_CHILD = """
import sys
from sim.cli import main
from sim.cli.bench import peak_bytes
try:
    main(sys.argv[1:])
finally:
    sys.stderr.write(f"\\npeak_bytes={peak_bytes()}")
"""


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


def main_job() -> dict[str, Any]:
    """Wall seconds and peak memory of the main job in a process of its own; null where they cannot be had."""
    began_s = time.perf_counter()
    words = [sys.executable, "-c", _CHILD, *MAIN_JOB]
    process = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603 - our own words
    wall_s, done = time.perf_counter() - began_s, process.returncode == 0
    message, _, peak = process.stderr.rpartition("\npeak_bytes=")
    peak_b = int(peak) if done and peak.isdigit() else None
    ok = done and (peak_b is None or peak_b <= MAX_MAIN_BYTES)
    return {"command": f"moesim {' '.join(MAIN_JOB)}", "exit": process.returncode, "wall_s": wall_s if done else None,
            "peak_bytes": peak_b, "error": None if done else message.strip(), "ok": ok}  # fmt: skip


def _text(result: dict[str, Any]) -> str:
    from sim.base.tables import render, table
    from sim.base.units import show_bytes, show_frac, show_seconds

    lines = [f"bare SimPy: {result['bare_timeouts_per_s']:,.0f} timeouts per second", ""]
    rows = table("replay", "tokens/s", "ratio", "at least", "hit rate", "")
    for case in result["cases"]:
        rows.add_row(case["title"], f"{case['tokens_per_s']:,.0f}", f"{case['ratio']:.3f}", f"{case['floor']:g}",
                     show_frac(case["hit_rate"]), "" if case["ok"] else "too slow")  # fmt: skip
    main = result["main_job"]
    if main["error"] is not None:
        tail = f"main job failed: {main['error']}"
    else:
        memory = "memory unknown" if main["peak_bytes"] is None else f"{show_bytes(main['peak_bytes'])} at its peak"
        tail = f"main job: {show_seconds(main['wall_s'])}, {memory} ({main['command']})"
    note = "ratio: tokens/s x layers / bare timeouts per second; decode of a synthetic trace, best of the repeats"
    return "\n".join(lines) + "\n" + render(rows) + f"\n{tail}\n{note}\n"
