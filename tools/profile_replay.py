"""Where a replay's time goes: shares of processor time by part of the program, sampled.

    python -m tools.profile_replay [POLICY ...] [--model NAME] [--tokens N]

Machine code has no frames: what it takes is found where it was called from. MOESIM_PURE=1 tells its parts apart.
"""

from __future__ import annotations

import signal
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

import click

EVERY_S = 0.001
ROOT = Path(__file__).resolve().parents[1]
ENGINE = "the engine: decisions, residency, counts"
PARTS = (
    ("sim/cli/bench_policy.py", "the policy"),
    ("policies/", "the policy"),
    ("sim/workload/", "reading the trace"),
    ("traces/", "reading the trace"),
    ("sim/engine/", ENGINE),
    ("sim/policy/", ENGINE),
    ("sim/machine/cost.py", "prices"),
    ("sim/profiles/", "prices"),
    ("sim/machine/", "the machine: lanes"),
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
        self._before = signal.signal(signal.SIGPROF, self._look)  # Linux and macOS have it
        signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, self._before)


def profile(policy: str, model: str, tokens: int) -> Counter[str]:
    """Samples by part while so many tokens of random routing are decoded; learning and the prefill are not counted."""
    from sim.cli.bench_work import prepared
    from sim.run import execute

    sampler = Sampler()
    with (
        tempfile.TemporaryDirectory() as folder,
        prepared(folder, policy, 1000, tokens, model=model) as setup,
        ExitStack() as stack,
    ):

        def over(done: int, _: int) -> None:
            if done == 1:
                stack.enter_context(sampler)

        execute(setup, progress=over, bounds=False)
    return sampler.samples


@click.command(help=__doc__)
@click.argument("policies", nargs=-1)
@click.option("--model", default="mixtral-8x7b", show_default=True)
@click.option("--tokens", default=2000, show_default=True)
def main(policies: tuple[str, ...], model: str, tokens: int) -> None:
    """One table, a column for each policy."""
    from sim.base.tables import render, table
    from sim.cli.bench_work import PLAIN

    found = {name: profile(name, model, tokens) for name in policies or ("lru", PLAIN, "fine_moe")}
    rows = table("part", *(Path(name).stem for name in found))
    for part in dict.fromkeys(part for samples in found.values() for part in samples):
        rows.add_row(part, *(f"{samples[part] / max(1, samples.total()):.1%}" for samples in found.values()))
    click.echo(render(rows), nl=False)


if __name__ == "__main__":
    main()
