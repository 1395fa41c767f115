"""`moesim bench`: what commands and replays take, as ratios to something bare that runs in turns with them.

Every row is a child process. Its figure is the processor time that it takes, its own children's too, unless the row
counts something else. Seconds depend on the machine and on what else it does; ratios hardly do.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import click

from sim.base.errors import BadInput, CheckFailed, did_you_mean
from sim.base.tables import fold
from sim.cli.bench_work import synthetic_trace
from sim.cli.unique_options import UniqueOptions
from traces.synth.chat_lengths import write_drawn_log

Told = dict[str, Any]
LONG_S = 10.0  # a row runs again until it has taken as much
SHORT_S = 1.0  # what another stands beside runs in turns with it if it takes less
N_LOGGED = 10_000  # requests of the long load


class Row(NamedTuple):
    """One figure. `runs` is a command, or Python that may set `found` (`sim.cli.bench_work.Facts`).

    `at_most` and `at_least` bound the ratio to the row `beside`, or the figure itself where it stands alone. `first`
    is a command that makes what the row reads.
    """

    name: str
    runs: str
    beside: str = ""
    at_most: float | None = None
    at_least: float | None = None
    unit: str = "s"  # also s/token (of output tokens), B (of the file written), or what `found["value"]` counts
    most_bytes: float | None = None  # of memory
    first: str = ""


LRU = "--policy lru --set scope=global --hw rtx3090"
LINKS = "hw.h2d.bandwidth_bytes_per_s=" + ",".join(str(10**10 + i * 10**9) for i in range(64))
KEPT = "simulate --policy fine_moe --hw rtx3090 --requests 4 --set out.spans=on --out {folder}/kept"
LOGGED = "--arrivals {log} --requests"
COMPOSE = f"moesim traces compose mixtral-8x7b-small -o {{folder}}/load.safetensors --lengths arrivals {LOGGED} 200"
LOAD = f"simulate {LRU} --batch 4 --trace {{folder}}/load.safetensors --set arrivals.scale=0.001 --json {LOGGED}"
WORK = "from sim.cli import bench_work; found = bench_work."
NEVER_DRAWN = "import platformdirs; platformdirs.user_cache_dir = lambda *_, **__: f'{folder}/{os.getpid()}'"
GLM = f"{NEVER_DRAWN}; from sim.cli import simulate; simulate('--policy lru --hw h200-sxm --model glm-4.6 --requests 1'"
ROWS = (
    Row("imports", "import numpy, click"),
    Row("help", "simulate --help", "imports", 1.5),
    Row("ten tokens", f"simulate {LRU} --trace {{folder}}/ten.safetensors --json", "imports", 5.0),
    Row("simulate lru", "simulate --policy lru --hw rtx3090", "imports", 2.5),
    Row("main job", "simulate --policy fine_moe --hw rtx3090", "imports", 8.0, most_bytes=500e6),
    Row("first run of a drawn trace", f"{GLM}.split())", "imports", 50.0),
    Row("compare, two requests", "moesim compare --policy all --hw rtx3090 --requests 2", "imports", 88.0),
    Row("compare, all requests", "moesim compare --policy all --hw rtx3090", "imports", 470.0),
    Row("bound of 810,000 tokens", f"{WORK}bound(folder, 810_000, 810)", "imports", 50.0),
    Row("one link", f"simulate {LRU} --cache 48experts"),
    Row("64 links", f"moesim sweep {LRU} --cache 48experts --workers 1 --set {LINKS}", "one link", 3.0),
    Row("a page", "moesim report {folder}/kept -o {folder}/page.html", "", 1.5e6, unit="B", first=KEPT),
    Row("bare SimPy", f"{WORK}timeouts()", unit="timeouts/s"),
    *(
        Row(name, f"{WORK}replay(folder, {words})", "bare SimPy", at_least=least, unit="layers/s")
        for name, words, least in (
            ("lru, Mixtral-8x7B's shape", "'lru', 0, 2000, set={'scope': 'global'}", 2.0),
            ("lru, Qwen3-30B-A3B's shape", "'lru', 0, 600, model='qwen3-30b-a3b', set={'scope': 'global'}", 1.5),
            ("a plain-Python policy, Mixtral's shape", "bench_work.PLAIN, 0, 2000", 0.4),
            ("fine_moe, 1,000 maps, Mixtral's shape", "'fine_moe', 1000, 400, set={'capacity': 1000}", 0.1),
        )
    ),
    *(
        Row(f"by both engines: {name}", f"{WORK}both(folder, {words})", unit="tokens/s")
        for name, words in (
            ("lru", "'lru', set={'scope': 'global'}"),
            ("fine_moe", "'fine_moe'"),
            ("ktransformers, CPU", "'ktransformers'"),
            ("mixtral_offloading, copies back", "'mixtral_offloading', set={'guesses': 0}"),
            ("fine_moe, 2 GPUs", "'fine_moe', gpus=2"),
        )
    ),
    Row("half of the long load", f"{LOAD} {N_LOGGED // 2}", unit="s/token", first=COMPOSE),
    Row("long load", f"{LOAD} {N_LOGGED}", "half of the long load", 1.15, unit="s/token", most_bytes=1e9),
)

_CHILD = """
import json, os, sys, time
folder, *words = sys.argv[1:]
found = {{}}
try:
    {code}
finally:
    cpu_s = time.process_time() + sum(os.times()[2:4])
    from sim.cli.bench_work import peak_bytes
    sys.stderr.write("\\n" + json.dumps({{"value": cpu_s, "cpu_s": cpu_s, "peak_bytes": peak_bytes(), **found}}))
"""
LOG = click.Path(path_type=Path, dir_okay=False, exists=True)


@click.command(cls=UniqueOptions)
@click.option("--repeat", type=click.IntRange(min=1), default=3, show_default=True, help="Take the best of N.")
@click.option("--check", is_flag=True, help="Exit 1 when a row misses its bound, or engines differ.")
@click.option("--only", multiple=True, metavar="NAME", help="Rows whose name begins so, and what they stand beside.")
@click.option("--log", type=LOG, metavar="FILE", help="Of the long load, as for --arrivals; default: a drawn one.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
def command(repeat: int, check: bool, only: tuple[str, ...], log: Path | None, as_json: bool) -> None:
    """Time commands and replays on this machine, one after the other, as ratios to bare imports and bare SimPy."""
    names = [row.name for row in ROWS]
    for start in only:
        if not any(name.startswith(start) for name in names):
            raise BadInput(f"--only, got {start!r}: no row begins so; {did_you_mean(start, names)}")
    kept = {row.name for row in ROWS if not only or row.name.startswith(only)}
    kept |= {row.beside for row in ROWS if row.name in kept}
    result = measure(repeat, [row for row in ROWS if row.name in kept], log)
    click.echo(json.dumps(result) if as_json else fold(_text(result)), nl=as_json)
    if check and not result["ok"]:
        raise CheckFailed("bench: a row misses its bound, or failed; see above")


def measure(repeat: int, rows: list[Row], log: Path | None = None) -> Told:
    """What `--json` prints; `log`: arrivals of the long load, one of the user's."""
    told: list[Told] = []
    found: dict[str, tuple[Row, Told]] = {}
    with tempfile.TemporaryDirectory(prefix="moesim-bench-") as made:
        folder, source = Path(made), log or Path(made, "azure.csv")
        synthetic_trace(folder / "ten.safetensors", (32, 8, 2), 0, 9)
        if log is None:
            write_drawn_log(source, N_LOGGED)
        for row in rows:
            ours, theirs = _in_turns(row, found.get(row.beside), repeat, folder, source)
            found[row.name] = row, ours
            told.append(judged(row, ours, theirs))
    drawn = "drawn from published quantiles"
    return {"compiled": compiled(), "log": log.name if log else drawn, "rows": told, "ok": all(r["ok"] for r in told)}


def compiled() -> bool:
    """Whether the engine that replays is compiled."""
    said = getattr(importlib.import_module("sim.engine"), "compiled", None)
    return said is not None and bool(said())


def _in_turns(row: Row, known: tuple[Row, Told] | None, repeat: int, folder: Path, log: Path) -> tuple[Told, Told]:
    """The runs of a row, and of what it stands beside, that took least: they were disturbed least."""
    if row.first and (error := run(Row("", row.first), folder, log)["error"]):
        return {"error": error, "cpu_s": math.inf}, {}
    ours: list[Told] = []
    theirs: list[Told] = []
    while len(ours) < repeat and sum(one["cpu_s"] for one in ours) < LONG_S:
        if known is not None:
            beside, before = known
            theirs.append(run(beside, folder, log) if before["cpu_s"] < SHORT_S else before)
        ours.append(run(row, folder, log))
        if ours[-1]["error"]:
            return ours[-1], {}
    least = itemgetter("cpu_s")
    return min(ours, key=least), min(theirs, key=least, default={})


def run(row: Row, folder: Path, log: Path) -> Told:
    """What a child says of itself: value, cpu_s, peak_bytes, note, error."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if sys.dont_write_bytecode:  # children keep byte code in a folder, as an installed package does
        env["PYTHONPYCACHEPREFIX"] = str(folder / "byte code")
    code, (verb, *words) = row.runs, row.runs.split()
    if verb in ("simulate", "moesim"):
        code = f"from moesim.commands import main as moesim, simulate; {verb}(words)"
        words = [word.replace("{folder}", str(folder)).replace("{log}", str(log)) for word in words]
    asked = [sys.executable, "-c", _CHILD.format(code=code), str(folder), *words]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, env=env)  # noqa: S603 - our own words
    lines = [line for line in done.stderr.splitlines() if line]
    if done.returncode:
        said = [line for line in lines if not line.startswith('{"value"')]
        return {"error": said[-1] if said else f"exit code {done.returncode}", "cpu_s": math.inf}
    found: Told = {"note": "", "error": None, **json.loads(lines[-1])}
    if row.unit == "s/token":
        result = json.loads(done.stdout)
        tokens, load = result["decode_tokens"] + result["requests"], result["load"] or {"stable": True}
        found["value"] /= tokens
        found["note"] = f"{tokens:,} tokens" + ("" if load["stable"] else "; its queue grows: lower the rate")
    if row.unit == "B":
        found["value"] = Path(words[-1]).stat().st_size
    return found


def judged(row: Row, ours: Told, theirs: Told) -> Told:
    """A row, its figure, the ratio, and whether they keep its bounds; None where a figure cannot be had."""
    value, beside = (None if one.get("error") else one.get("value") for one in (ours, theirs))
    ratio = value / beside if value is not None and beside else None
    held, peak = ratio if row.beside else value, ours.get("peak_bytes")
    within = held is not None and (row.at_most or held) >= held >= (row.at_least or held)
    facts = {"value": value, "beside_value": beside, "ratio": ratio, "peak_bytes": peak, "error": ours["error"]}
    ok = within and not (peak and row.most_bytes and peak > row.most_bytes)
    return row._asdict() | facts | {"note": ours.get("note", ""), "ok": ok}


def _text(result: Told) -> str:
    from sim.base.tables import prose, render, table
    from sim.base.units import show_bytes, show_seconds

    def shown(value: float | None, unit: str) -> str:
        if value is None or unit == "B":
            return "-" if value is None else show_bytes(value)
        return f"{show_seconds(value)}{unit[1:]}" if unit[0] == "s" else f"{value:,.0f} {unit}"

    rows = table("row", "figure", "ratio", "bound", "memory", "beside, note")
    prose(rows, 5)
    for row in result["rows"]:
        bound, word = (row["at_most"], "<=") if row["at_most"] is not None else (row["at_least"], ">=")
        limit = f"{word} {bound:g}" if row["beside"] else f"{word} {shown(bound, row['unit'])}"
        rows.add_row(
            row["name"],
            shown(row["value"], row["unit"]),
            "-" if row["ratio"] is None else f"{row['ratio']:.3g}",
            limit if bound is not None else "",
            shown(row["peak_bytes"], "B"),
            "; ".join(filter(None, (row["beside"], row["note"], row["error"] or ("" if row["ok"] else "misses it")))),
        )
    return (
        f"engine compiled: {'yes' if result['compiled'] else 'no'}\n\n{render(rows)}\n"
        "figure: processor time of a process, unless it has another unit; ratio: to that of the row named last\n"
        f"arrivals of the long load: {result['log']}; --json says what each row runs\n"
    )
