"""A drive writes what it reads to host memory, which copies and the CPU read: by hand, and as a law of conservation."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import easy_numbers
import msgspec
import pytest
import random_worlds
import tiered_worlds
from easy_numbers import EXPERT_BYTES, figure
from test_shared_memory import watch_pools
from tiny_traces import from_rows

from policies.lru import Lru
from sim.machine.lanes import OWED
from sim.machine.shared_memory import HostMemory
from sim.profiles.hardware import Contention
from sim.setup.third_tier import ThirdTier
from traces.format.reader import Trace

M = 80.0
"""Bytes per second of host memory: two links of 40, up and down."""


def test_a_copy_beside_a_read_pays_and_the_read_owes() -> None:
    # 100 B/s in all. A read of 10 s at 60 starts at 0, a copy of 6 s at 60 at 2: 120 asked for, 1.2 times.
    memory = HostMemory(100.0, 1, -1.0, -1.0, has_drive=True)
    assert memory.place(3, 0.0, 10.0, 60.0) == 10.0
    assert memory.place(1, 2.0, 6.0, 60.0) == pytest.approx(9.2)
    assert memory.paid_s(3, 10.0) == pytest.approx(11.2)


def test_terms_of_copies_say_nothing_of_reads() -> None:
    # Copies by a term of 0, off: 2..8. A read of 10 s from 4 on, by the law 1.2 times as long until 8: 10/3 s done.
    memory = HostMemory(100.0, 1, 0.5, 0.0, has_drive=True)
    memory.place(1, 2.0, 6.0, 60.0)
    assert memory.place(3, 4.0, 10.0, 60.0) == pytest.approx(8 + 20 / 3)
    assert memory.paid_s(1, 8.0) == 8.0


@pytest.mark.parametrize(("engine", "overlap_s", "read_s"), [("simpy", 1.5, 7.5), ("core", 4 / 3, 7.0)])
def test_a_read_and_a_copy_share_host_memory_by_hand(
    engine: str, overlap_s: float, read_s: float, tmp_path: Path
) -> None:
    # attention 0..1. Reads of 2 s each, there 3 s later: 1..3, 3..5 and 5..7, alone. Copy 0 from 6 on, 4 s alone: for
    # one second both ask for 80 + 40 of 80 B/s, so take 1.5 times as long.
    #   dynamic: the read ends at 7.5; the copy has done 1 s by then and ends at 10.5, half a second late
    #   static: the read was told to end at 7; the copy has done 2/3 s by then and ends at 10 1/3
    # Copies 1 and 2 follow at once, expert 2 after them takes 2 s, the head 1.
    with Trace(from_rows(tmp_path / "easy.safetensors", [[[0, 1, 2]]], 4)) as trace:
        made = easy_numbers.setup(Lru(), trace, 3, copy_s=4.0)
        cpu = msgspec.structs.replace(made.hw.cpu, total_bandwidth_bytes_per_s=figure(M))
        drive = tiered_worlds.drive(M, latency_s=3.0)
        made = replace(
            made,
            hw=msgspec.structs.replace(made.hw, drive=drive, cpu=cpu, contention=Contention()),
            tier=ThirdTier("easy", 4, EXPERT_BYTES),
            host_bytes=4 * EXPERT_BYTES,
            spec=msgspec.structs.replace(made.spec, sim_simulator=engine, sim_contention=True),
        )
        seen = easy_numbers.execute_easy(made)
    assert seen.lane("nvme")[2][2] == pytest.approx(read_s)
    ends_s = [end_s for _, _, end_s in seen.lane("h2d")]
    assert ends_s == pytest.approx([9 + overlap_s, 13 + overlap_s, 17 + overlap_s])
    assert seen.end_s == pytest.approx(20 + overlap_s)
    found = seen.result.contention
    assert found.h2d.added_s == pytest.approx(overlap_s - 1)
    assert (found.nvme.added_s if found.nvme else 0.0) == pytest.approx(read_s - 7)


def crowded(seed: int, folder: Path, engine: str | None) -> Any:
    """A tiered world whose host memory has less than everything asks for, and what it has."""
    of, rng = tiered_worlds.tiered(seed, folder), Random(f"crowded {seed}")
    hw = of.facts["hw"]
    links = of.facts["spec"].gpus * hw.h2d.bandwidth_bytes_per_s.value + hw.d2h.bandwidth_bytes_per_s.value
    asked = links + hw.drive.bandwidth_bytes_per_s.value
    rate = asked * rng.choice((0.3, 0.7, 0.95)) if math.isfinite(asked) else 1e3
    cpu = msgspec.structs.replace(hw.cpu, total_bandwidth_bytes_per_s=figure(rate))
    hw = msgspec.structs.replace(hw, cpu=cpu, contention=Contention())
    spec = msgspec.structs.replace(of.facts["spec"], sim_contention=True, sim_simulator=engine)
    of.facts |= {"hw": hw, "spec": spec}
    return of


@pytest.mark.parametrize("at", range(3))
def test_static_shares_take_the_time_that_their_bytes_need(at: int, tmp_path: Path) -> None:
    """Reads, copies and experts on the CPU: bytes over the time in which any of these lanes is busy, but for a debt."""
    slowed = 0
    for seed in range(20 * at, 20 * at + 20):
        of = crowded(seed, tmp_path, None)
        seen = random_worlds.run(of, random_worlds.by_engine)
        assert not seen.crash
        if seen.error:
            continue
        size = of.facts["model"].expert_bytes(of.facts["spec"].precision)
        hw, n_gpus = of.facts["hw"], of.facts["spec"].gpus
        links = n_gpus * hw.h2d.bandwidth_bytes_per_s.value + hw.d2h.bandwidth_bytes_per_s.value
        there = max(hw.cpu.total_bandwidth_bytes_per_s.value, links)
        n_bytes, covered_s, until_s, longest_s = 0.0, 0.0, 0.0, 0.0
        for lane, op, _, _, _, moved, start_s, end_s in sorted(seen.spans, key=lambda span: span[-2:]):
            if lane in ("cpu", "nvme") or lane.startswith("h2d"):
                n_bytes += 0 if op == OWED else size if lane == "cpu" else moved
                covered_s += max(0.0, end_s - max(start_s, until_s))
                until_s = max(until_s, end_s)
                longest_s = max(longest_s, end_s - start_s)
        if math.isfinite(there):
            assert n_bytes <= there * (covered_s + longest_s) * (1 + 1e-9), of
        slowed += (seen.result.get("contention") or {}).get("nvme") is not None
    assert slowed


def test_dynamic_shares_are_never_more_than_all_above_a_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pools, slowed = watch_pools(monkeypatch), 0
    for seed in range(12):
        seen = random_worlds.run(crowded(seed, tmp_path, "simpy"), random_worlds.by_engine)
        assert not seen.crash
        slowed += not seen.error and (seen.result.get("contention") or {}).get("nvme") is not None
    assert pools
    assert slowed
