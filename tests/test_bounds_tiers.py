"""The lower bound above a drive and with drafts: by hand, and below every run of drawn worlds, on either engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import easy_numbers
import msgspec
import pytest
import random_worlds
import tiered_worlds
from easy_numbers import EXPERT_BYTES
from tiny_traces import from_rows

from policies.llama_cpp import LlamaCpp
from policies.lru import Lru
from sim.bounds.time_bound import lower_bound
from sim.options import RunSpec
from sim.policy.registry import policies
from sim.results.text import render
from sim.run import execute, prepare
from sim.setup.third_tier import ThirdTier
from traces.format.reader import Trace

DRIVE = tiered_worlds.drive(32.0, latency_s=3.0, alone_bytes_per_s=32.0)
"""An expert of 160 bytes keeps it busy for 5 s and is there 3 s later, where two are asked for at a time."""


def above(policy: Any, trace: Trace, room: int, host: int, **machine: float) -> Any:
    made = easy_numbers.setup(policy, trace, room, **machine)
    hw = msgspec.structs.replace(made.hw, drive=DRIVE)
    return replace(made, hw=hw, tier=ThirdTier("easy", 2, EXPERT_BYTES), host_bytes=host * EXPERT_BYTES)


def test_reads_that_nobody_can_avoid_by_hand(tmp_path: Path) -> None:
    # A prompt of one token, then 0, 1, ... 7 in turn, one a token. Together GPU and host memory hold 3, one of
    # them whoever runs.
    #   0 is there, 1 and 2 cross its step: 5 are read, of which 2 may be under way when the window begins, one on the
    #   lane and one in its last 3 s.
    #   3 x 5 s, 3 s until the last is there, a part of an expert and the head, one kernel's floor each
    # Computation: each token takes attention and gate 1, two kernels of an expert 2, the head 1: 4, so 32 s for 8.
    rows = [[[0]], *([[e]] for e in range(8))]
    with Trace(from_rows(tmp_path / "turn.safetensors", rows, 8, [(1, 9)])) as trace:
        with_drive = lower_bound(above(Lru(), trace, room=1, host=2, copy_s=0.1))
        without = lower_bound(easy_numbers.setup(Lru(), trace, 1, copy_s=0.1))
        fast = lower_bound(above(Lru(), trace, room=1, host=2, copy_s=0.1, kernel_s=0.01))
        fast_alone = lower_bound(easy_numbers.setup(Lru(), trace, 1, copy_s=0.1, kernel_s=0.01))
        on_cpu = lower_bound(above(LlamaCpp(), trace, 1, 2, copy_s=0.1, kernel_s=0.01, cpu_s=0.1))
    assert with_drive.tpot_s == without.tpot_s == pytest.approx(4.0)
    # With kernels a hundred times as fast it is the drive: 15 + 3 + 0.01 + 0.01 s.
    assert fast.tpot_s == pytest.approx(18.02 / 8)
    assert fast_alone.tpot_s < 0.2
    # Whoever computes them, they are read; no step needs room for a copy, so as many stay.
    assert on_cpu.tpot_s == pytest.approx(18.01 / 8, rel=0.01)


def test_drafting_takes_its_time_by_hand() -> None:
    """The host waits for each draft before the pass: a launch, the drafts, a read. Copies may go on meanwhile."""
    spec: dict[str, Any] = {"policy": "gpu_only", "hw": "h200-sxm", "requests": 1, "precision": "fp8"}
    found = {}
    for each in ("", ",draft_s=0.01"):
        made = prepare(RunSpec(**spec, draft=f"k=2,acceptance=1{each}"))
        found[each] = execute(made)
        made.close()
    plain, drafted = (found[each].result for each in ("", ",draft_s=0.01"))
    launches, steps = found[""].report.lanes.figures.cost.launches, drafted.draft.steps
    drafted_s = 0.01 * drafted.draft.drafted + steps * (launches.kernel_s + launches.sync_s)
    n_tokens = drafted.decode_tokens
    assert (drafted.lower_bound.tpot_s - plain.lower_bound.tpot_s) * n_tokens == pytest.approx(drafted_s, rel=1e-6)
    assert drafted.lower_bound.tpot_s <= drafted.tpot_s.mean


LOSSLESS = sorted(name for name, kind in policies().items() if "lossy" not in kind.traits)


def stays_below(seed: int, folder: Path, engine: str | None) -> float:
    """The bound of a drawn world above a drive over what it took, or 0 where nothing can be said."""
    of = tiered_worlds.tiered(seed, folder, LOSSLESS[seed % len(LOSSLESS)])
    of.facts["spec"] = msgspec.structs.replace(of.facts["spec"], sim_simulator=engine)
    with Trace(of.trace) as trace:
        try:
            made = random_worlds.setup_of(of, trace)
            least = lower_bound(made)
        except random_worlds.MoesimError:
            return 0.0
        seen = random_worlds.run(of, random_worlds.by_engine)
    if seen.error or least is None or "lossy" in made.policy.traits:
        return 0.0
    for key in ("tpot_s", "ttft_s"):
        took_s, bound_s = seen.result[key]["mean"], getattr(least, key)
        assert took_s is None or bound_s <= took_s, (of, key)
    return least.tpot_s or 0.0


@pytest.mark.parametrize("engine", ["core", "simpy"])
def test_the_bound_knows_the_drive_and_stays_one(engine: str, tmp_path: Path) -> None:
    assert sum(stays_below(seed, tmp_path, engine) > 0 for seed in range(24)) > 8


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["core", "simpy"])
@pytest.mark.parametrize("at", range(8))
def test_the_bound_stays_one_in_many_worlds(at: int, engine: str, tmp_path: Path) -> None:
    for seed in range(100 + 50 * at, 150 + 50 * at):
        stays_below(seed, tmp_path, engine)


def test_a_band_that_begins_below_the_bound_says_why() -> None:
    made = prepare(RunSpec(policy="gpu_only", hw="h200-sxm", requests=2))
    try:
        result = execute(made).result
    finally:
        made.close()
    assert result.uncertainty.tpot_s[0] < result.lower_bound.tpot_s <= result.tpot_s.mean
    said = "it begins below the lower bound of"
    assert said in render(result, 400)
    assert "is of these figures and requests: with better ones it is lower, too" in render(result, 400)
    above = msgspec.structs.replace(result, lower_bound=msgspec.structs.replace(result.lower_bound, tpot_s=1e-9))
    assert said not in render(above, 400)
