"""`moesim bench`: replay speed as ratios to a bare SimPy loop timed in the same run, and what whole processes take."""

from __future__ import annotations

import importlib
import json
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sim.base.tables import fold
from sim.cli import bench_engines, bench_load, bench_sweep
from sim.cli.bench_cases import CASES, Case, written
from sim.cli.bench_starts import starts

if TYPE_CHECKING:
    from simpy.events import Event

    from sim.cli.bench_told import BenchTold, ReplayTold

N_TIMEOUTS = 200_000


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--repeat", type=click.IntRange(min=1), default=3, show_default=True, help="Take the best of N.")
@click.option("--check", is_flag=True, help="Exit 1 when a ratio or a process misses its bound, or engines differ.")
@click.option(
    "--log",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    metavar="FILE",
    help="An Azure, Mooncake or BurstGPT log for the long load; default: drawn from published quantiles.",
)
@click.option("--profile", "profiled", is_flag=True, help="Say instead where each replay spends its time.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(repeat: int, check: bool, log: Path | None, profiled: bool, as_json: bool) -> None:
    """Time the replay of decode tokens against bare SimPy timeouts on this machine, one core.

    A ratio of 1 would mean that simulating one layer of one token costs as much as one bare env.timeout.
    """
    if profiled:
        from sim.cli import bench_profile

        found = bench_profile.profiles()
        click.echo(json.dumps(found) if as_json else fold(bench_profile.text(found)), nl=as_json)
        return
    result = measure(repeat, log)
    click.echo(json.dumps(result) if as_json else fold(_text(result)), nl=as_json)
    if check and not result["ok"]:
        from sim.base.errors import CheckFailed

        raise CheckFailed("bench: a ratio, a process's time or memory misses its bound, or engines differ; see above")


def measure(repeat: int, log: Path | None = None) -> BenchTold:
    """All cases; bare timeouts are timed around them, and the best of all counts (the hardest comparison).

    Args:
        log: of the long load.
    """
    bare_per_s = [bare_timeouts_per_s() for _ in range(repeat)]
    found = []
    with tempfile.TemporaryDirectory(prefix="moesim-bench-") as folder:
        for case in CASES:
            found.append((case, *_best(case, Path(folder), repeat)))
            bare_per_s.append(bare_timeouts_per_s())
        processes = starts(Path(folder))
        load = bench_load.measure(Path(folder), log)
    best_per_s = max(bare_per_s)
    cases: list[ReplayTold] = []
    for case, tokens_per_s, n_layers, hit_rate in found:
        ratio = tokens_per_s * n_layers / best_per_s
        cases.append(
            {
                "title": case.title,
                "policy": case.policy,
                "model": case.model,
                "decode_tokens": case.n_test,
                "hit_rate": hit_rate,
                "tokens_per_s": tokens_per_s,
                "ratio": ratio,
                "floor": case.floor,
                "ok": ratio >= case.floor,
            }
        )
    engines = bench_engines.measure()
    ok = all(one["ok"] for one in (*cases, *processes["processes"], *engines, load))
    return {
        "compiled": compiled(),
        "bare_timeouts_per_s": best_per_s,
        "cases": cases,
        **processes,
        "engines": engines,
        "sweep": bench_sweep.measure(),
        "load": load,
        "ok": ok,
    }


def compiled() -> bool:
    """Whether the engine that replays is compiled."""
    said = getattr(importlib.import_module("sim.engine"), "compiled", None)
    return said is not None and bool(said())


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
        hit_rate = execute(setup, progress=clock.tick, bounds=False).result.hit_rate
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


def _text(result: BenchTold) -> str:
    from sim.base.tables import render, table
    from sim.base.units import show_bytes, show_frac, show_seconds

    lines = [
        f"engine compiled: {'yes' if result['compiled'] else 'no'}",
        f"bare SimPy: {result['bare_timeouts_per_s']:,.0f} timeouts per second",
    ]
    rows = table("replay", "tokens/s", "ratio", "at least", "hit rate", "")
    for case in result["cases"]:
        rows.add_row(
            case["title"],
            f"{case['tokens_per_s']:,.0f}",
            f"{case['ratio']:.3f}",
            f"{case['floor']:g}",
            show_frac(case["hit_rate"]),
            "" if case["ok"] else "too slow",
        )
    processes = table("process", "time", "beside imports", "at most", "memory", "")
    for process in result["processes"]:
        processes.add_row(
            process["title"],
            "-" if process["wall_s"] is None else show_seconds(process["wall_s"]),
            "-" if process["ratio"] is None else f"{process['ratio']:.2f}",
            f"{show_seconds(process['most_s'])} or {process['most_ratio']:.2f}",
            "-" if process["peak_bytes"] is None else show_bytes(process["peak_bytes"]),
            process["error"] or ("" if process["ok"] else "too much"),
        )
    notes = [
        "ratio: tokens/s x layers / bare timeouts per second; decode of a synthetic trace, best of the repeats",
        f"beside imports: time / that of {result['imports']['command']}, {show_seconds(result['imports']['wall_s'])}",
        *(f"{process['title']}: {process['command']}" for process in result["processes"]),
    ]
    engines, note = bench_engines.told(result["engines"])
    sweep = bench_sweep.told(result["sweep"])
    return (
        "\n".join(
            [*lines, "", render(rows), render(processes), engines, *notes, note, sweep, bench_load.text(result["load"])]
        )
        + "\n"
    )
