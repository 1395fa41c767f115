"""What a long load costs: 10,000 requests as a public chat log has them, in processor time and memory of a process.

No log is bundled. Without one of the user's, a log in Azure's format is written from the published quantiles of its
lengths and its mean gap (traces/synth/chat_lengths.yaml), and said to be drawn. Its rate is scaled down to what the
card serves; requests of its lengths are spliced from the bundled trace, and drawn with replacement where more come.
"""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sim.cli.bench_starts import environment

if TYPE_CHECKING:
    from sim.cli.bench_told import LoadTold

N = 10_000
N_SPLICED = 200  # requests of the log's lengths, from which all are drawn
SOURCE = "mixtral-8x7b-small"
RATE_SCALE = 0.001  # of the log's 5.5 requests per second: some three quarters of what is served
RUN = ("--policy", "lru", "--set", "scope=global", "--hw", "rtx3090", "--batch", "4", "--json")
MOST_S = 120.0
MOST_BYTES = 1_000_000_000
MOST_RATIO = 1.15
"""Of what a token costs in twice as many: above, cost does not grow linearly in them."""
BEGINS = datetime(2023, 11, 16, 18, 0, 0)

_CHILD = """
import sys, time
from moesim import commands
try:
    getattr(commands, sys.argv[1])(sys.argv[2:])
finally:
    from sim.cli.bench_starts import peak_bytes
    sys.stderr.write(f"\\ncpu_s={time.process_time()} {peak_bytes()}")
"""


class Ran(NamedTuple):
    """A process that ended well."""

    tokens: int
    cpu_s: float
    peak_bytes: int | None
    stable: bool


def measure(folder: Path, log: Path | None = None, n: int = N, spliced: int = N_SPLICED) -> LoadTold:
    """Half of the requests, and all of them.

    Args:
        log: one of the user's, in Azure's, Mooncake's or BurstGPT's format; None: drawn.
    """
    source = folder / "azure.csv" if log is None else log
    if log is None:
        drawn_log(source, n)
    trace = folder / "load.safetensors"
    compose = ["main", "traces", "compose", SOURCE, "-o", str(trace), "--force", "--arrivals", str(source)]
    error = _run([*compose, "--lengths", "arrivals", "--requests", str(min(n, spliced))], folder)[1]
    ran: list[Ran] = []
    for asked in (n // 2, n) if not error else ():
        words = ["simulate", *RUN, "--trace", str(trace), "--arrivals", str(source)]
        found, error = _ran([*words, "--rate-scale", str(RATE_SCALE), "--requests", str(asked)], folder)
        if found is None:
            break
        ran.append(found)
    log_name = "drawn from published quantiles" if log is None else log.name
    if len(ran) < 2:
        return failed(n, log_name, error)
    half, whole = ran
    per_token = (whole.cpu_s / whole.tokens) / (half.cpu_s / half.tokens)
    little = whole.peak_bytes is None or whole.peak_bytes <= MOST_BYTES
    return failed(n, log_name, None) | {
        "tokens": whole.tokens,
        "cpu_s": whole.cpu_s,
        "peak_bytes": whole.peak_bytes,
        "per_token_ratio": per_token,
        "more_tokens": whole.tokens / half.tokens,
        "stable": whole.stable,
        "ok": whole.cpu_s <= MOST_S and little and per_token <= MOST_RATIO,
    }


def failed(n: int, log: str, error: str | None) -> LoadTold:
    """What is told where no process ended well."""
    return {
        "log": log,
        "requests": n,
        "tokens": None,
        "cpu_s": None,
        "most_s": MOST_S,
        "peak_bytes": None,
        "most_bytes": MOST_BYTES,
        "per_token_ratio": None,
        "more_tokens": None,
        "stable": None,
        "error": error,
        "ok": False,
    }


def drawn_log(path: Path, n: int) -> None:
    """So many requests in Azure's format: lengths by straight lines between the quantiles, independent gaps."""
    import numpy as np

    from traces.synth.chat_lengths import load_lengths

    published, rng = load_lengths(), np.random.default_rng(0)
    at_s = np.cumsum(rng.exponential(published.mean_gap_s, n)).tolist()
    lengths = [
        np.rint(np.interp(rng.random(n), published.shares, tokens)).astype(int).tolist()
        for tokens in (published.prompt_tokens, published.output_tokens)
    ]
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for seconds, prompt, outputs in zip(at_s, *lengths, strict=True):
        lines.append(f"{BEGINS + timedelta(seconds=seconds):%Y-%m-%d %H:%M:%S.%f},{prompt},{outputs}")
    path.write_text("\n".join(lines) + "\n", encoding="ascii")


def _run(words: list[str], folder: Path) -> tuple[str, str, str]:
    """What a process printed, why it failed, and what it says of itself."""
    command = [sys.executable, "-c", _CHILD, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment(folder))  # noqa: S603 - our own words
    message, _, facts = done.stderr.rpartition("\ncpu_s=")
    return done.stdout, message.strip() if done.returncode else "", facts


def _ran(words: list[str], folder: Path) -> tuple[Ran | None, str]:
    out, error, facts = _run(words, folder)
    if error or not facts:
        return None, error or "it ended without a word"
    told = json.loads(out)
    cpu_s, _, peak = facts.partition(" ")
    tokens = told["decode_tokens"] + told["requests"]
    return Ran(tokens, float(cpu_s), int(peak) if peak.isdigit() else None, told["load"]["stable"]), ""


def text(found: LoadTold) -> str:
    """In a few lines."""
    from sim.base.units import show_bytes, show_seconds

    head = f"load: {found['requests']:,} requests of a log ({found['log']}), lru, Mixtral-8x7B's shape, batch 4"
    if found["cpu_s"] is None or found["per_token_ratio"] is None or found["more_tokens"] is None:
        return f"{head}: a process failed: {found['error']}"
    peak = "-" if found["peak_bytes"] is None else show_bytes(found["peak_bytes"])
    lines = [
        f"{head}: {show_seconds(found['cpu_s'])} of processor time (at most {show_seconds(found['most_s'])}), "
        f"{peak} (at most {show_bytes(found['most_bytes'])}) for {found['tokens']:,} output tokens; "
        f"{found['more_tokens']:.2f} times as many tokens cost {found['per_token_ratio']:.2f} times as much each"
    ]
    if not found["stable"]:
        lines.append("its queue is unstable: give a log of a lower rate")
    return "\n".join([*lines, *([] if found["ok"] else ["too much"])])
