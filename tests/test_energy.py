"""Joules: worked out by hand, their laws, what they say where watts are not known, and what they change: nothing."""

from __future__ import annotations

import math
from dataclasses import replace as with_fields
from pathlib import Path
from typing import Any

import easy_numbers
import msgspec
import pytest
import tiered_worlds
from cli_help import simulated
from easy_numbers import EXPERT_BYTES, figure
from hypothesis import given, settings
from hypothesis import strategies as st
from test_contention import tiny as tiny
from test_shared_memory import run
from tiny_traces import from_rows

from policies.lru import Lru
from sim.base.errors import BadInput
from sim.options import RunSpec
from sim.profiles.drives import DrivePower
from sim.profiles.hardware import COUNTED, WATTS, CpuPower, GpuPower, Hardware, load_hardware
from sim.results.energy import Spent, parts
from sim.results.text import render
from sim.run import prepare
from sim.setup.third_tier import ThirdTier
from traces.format.reader import Trace

replace = msgspec.structs.replace
BOTH = pytest.mark.parametrize("engine", ["core", "simpy"])
POWERED = ["rtx3090", "rtx4090", "rtx4090-5955wx", "rtx5090", "a100-80g-sxm", "h100-sxm", "h200-sxm"]


def powered(hw: Hardware) -> Hardware:
    """Easy watts, and host memory that gives an expert a second."""
    return replace(
        hw,
        gpu=replace(
            hw.gpu,
            power=GpuPower(waiting_w=figure(100.0), memory_bound_w=figure(300.0), compute_bound_w=figure(500.0)),
        ),
        cpu=replace(
            hw.cpu,
            total_bandwidth_bytes_per_s=figure(float(EXPERT_BYTES)),
            power=CpuPower(
                waiting_w=figure(50.0),
                busy_w=figure(200.0),
                memory_waiting_w=figure(10.0),
                memory_busy_w=figure(30.0),
                rest_w=figure(40.0),
            ),
        ),
        drive=replace(
            tiered_worlds.drive(32.0, latency_s=3.0, alone_bytes_per_s=32.0),
            power=DrivePower(waiting_w=figure(2.0), busy_w=figure(7.0)),
        ),
    )


# -- by hand -----------------------------------------------------------------------------------------------------------


@BOTH
def test_a_token_of_two_experts_by_hand(tmp_path: Path, engine: str) -> None:
    """The run of 21 s in test_nvme: two experts of 160 bytes are read for 5 s and copied for 4 s each.

    GPU: attention 1 s, two experts of 2 s, head 1 s: 6 s at 300 W, 15 s at 100 W: 3,300 J. CPU: 21 s at 50 W: 1,050 J.
    Host memory: 320 bytes read into it and 320 copied out of it, at 160 bytes a second: 4 s at 30 W, 17 s at 10 W:
    290 J. Drive: 10 s at 7 W, 11 s at 2 W: 92 J. The rest: 21 s at 40 W: 840 J. In all 5,572 J, for one token.
    """
    with Trace(from_rows(tmp_path / "easy.safetensors", [[[0, 1]]], 4)) as trace:
        made = easy_numbers.setup(Lru(), trace, 2, copy_s=4.0)
        made = with_fields(
            made,
            hw=powered(made.hw),
            tier=ThirdTier("easy", depth=2, block_bytes=EXPERT_BYTES),
            host_bytes=2 * EXPERT_BYTES,
            spec=replace(made.spec, sim_simulator=engine, sim_energy="machine"),
        )
        seen = easy_numbers.execute_easy(made)
    assert seen.end_s == 21
    found = seen.result.energy
    of_host = {"cpu_waiting": 1050.0, "memory_waiting": 170.0, "memory_busy": 120.0, "rest": 840.0}
    of_others = {"gpu_waiting": 1500.0, "gpu_memory_bound": 1800.0, "drive_waiting": 22.0, "drive_busy": 70.0}
    assert {lane: lane_j for lane, lane_j in found.lanes_j.items() if lane_j} == of_host | of_others
    assert (found.energy_j, found.joules_per_token) == (5572.0, 5572.0)
    assert found.mean_w == pytest.approx(5572 / 21)
    assert found.provenance.figures[0].figure == "gpu.power.memory_bound_w"
    assert found.provenance.figures[0].share == pytest.approx(1800 / 5572)


def test_a_second_of_a_published_machine_by_hand() -> None:
    """An RTX 3090 beside a Threadripper PRO 3955WX for 10 s: kernels ran 3 s, 1 s of them bound by arithmetic, the CPU
    computed experts for 4 s, and 84.9 GB were copied.

    GPU: 7 s at 130 W, 2 s at 334 W, 1 s at 330 W: 1,908 J. CPU: 6 s at 50 W, 4 s at 210 W: 1,140 J. Host memory gives
    84.9 GB/s: a second for the copies, and of the CPU's 4 s, at 64 GB/s, 3.01531: 4.01531 s at 32 W and 5.98469 s at
    16 W: 224.245 J. In all 3,272.245 J.
    """
    hw = load_hardware("rtx3090")
    drawn = list(parts(hw, "machine", Spent(10.0, 2.0, 1.0, 10.0, 4.0, 0.0, 84_900_000_000)))
    by_part: dict[str, float] = {}
    for one in drawn:
        part = one.lane.partition("_")[0]
        by_part[part] = by_part.get(part, 0.0) + one.joules
    assert by_part == pytest.approx({"gpu": 1908.0, "cpu": 1140.0, "memory": 224.245}, abs=1e-3)


def test_the_range_of_the_3090_holds_a_mixture_of_experts_that_was_measured() -> None:
    """Qwen3.6-35B-A3B on one RTX 3090 (club-3090, HARDWARE.md): 136.84 tokens/s at 0.386 tokens/s per watt, so 2.591 J
    a token, and 354.5 W. Kernels take all of its 7.308 ms: at 334 W 2.441 J, at 277 to 363 W 2.02 to 2.65 J. The row is
    no part of the figure.
    """
    watts = load_hardware("rtx3090").gpu.power.memory_bound_w
    measured_j, each_s = 1 / 0.386, 1 / 136.84
    assert watts.value * each_s == pytest.approx(2.441, abs=1e-3)
    assert watts.low * each_s < measured_j < watts.high * each_s


# -- laws --------------------------------------------------------------------------------------------------------------

SECONDS = st.floats(0.0, 1e5)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.sampled_from(POWERED), st.sampled_from(COUNTED), SECONDS, SECONDS, SECONDS, SECONDS, st.integers(0, 10**15))
def test_more_work_takes_more_joules_and_waiting_is_the_least(
    name: str, counted: str, memory_s: float, compute_s: float, cpu_s: float, idle_s: float, n_bytes: int
) -> None:
    hw = load_hardware(name)
    whole_s = memory_s + compute_s + max(cpu_s, idle_s)
    time = Spent(whole_s, memory_s, compute_s, whole_s, cpu_s, 0.0, n_bytes)

    def joules(time: Spent) -> float:
        drawn = list(parts(hw, counted, time))
        of_gpu_s = math.fsum(one.seconds for one in drawn if one.lane.startswith("gpu"))
        assert of_gpu_s == pytest.approx(whole_s)  # the states of a part are all of its time, and none twice
        assert all(one.seconds >= 0 for one in drawn)
        return math.fsum(one.joules for one in drawn)

    waiting_w = hw.gpu.power.waiting_w.value
    if counted == "machine":
        waiting_w += hw.cpu.power.waiting_w.value + hw.cpu.power.memory_waiting_w.value
    found_j = joules(time)
    assert found_j >= waiting_w * whole_s * (1 - 1e-12)
    spare_s = whole_s - memory_s - compute_s
    assert joules(time._replace(memory_bound_s=memory_s + spare_s / 2)) >= found_j * (1 - 1e-12)
    assert joules(time._replace(copied_bytes=n_bytes + 10**12)) >= found_j * (1 - 1e-12)
    assert joules(time._replace(cpu_s=cpu_s / 2)) <= found_j * (1 + 1e-12)


@pytest.mark.parametrize(
    "world",
    [{}, {"gpus": 2}, {"replicas": 2, "arrivals": "poisson:0.1"}, {"drive": "gen4x4", "ram": 60 * 10**9}],
)
def test_a_run_draws_what_its_lanes_draw(tiny: Path, world: dict[str, Any]) -> None:
    outcome = run(tiny, "llama_cpp_lru", hw="rtx3090", sim_energy="machine", **world)
    result, hw, n_replicas = outcome.result, outcome.setup.hw, world.get("replicas", 1)
    found, makespan_s = result.energy, result.simulated_s
    assert found.energy_j == pytest.approx(math.fsum(found.lanes_j.values()))
    assert found.joules_per_token == found.energy_j / result.n_outputs
    assert found.mean_w == found.energy_j / makespan_s
    least_j = (
        makespan_s * n_replicas * (world.get("gpus", 1) * hw.gpu.power.waiting_w.value + hw.cpu.power.waiting_w.value)
    )
    assert found.energy_j > least_j
    low, high = found.range_joules_per_token
    assert low < found.joules_per_token < high
    assert math.fsum(found.provenance.by_source().values()) == pytest.approx(1.0)
    assert math.fsum(one.share for one in found.provenance.figures) == pytest.approx(1.0)
    assert ("drive_busy" in found.lanes_j) is ("drive" in world)
    gpu_s = math.fsum(
        found.lanes_j[lane] / watts.value
        for lane, watts in (
            ("gpu_waiting", hw.gpu.power.waiting_w),
            ("gpu_memory_bound", hw.gpu.power.memory_bound_w),
            ("gpu_compute_bound", hw.gpu.power.compute_bound_w),
        )
    )
    assert gpu_s == pytest.approx(makespan_s * n_replicas * world.get("gpus", 1))


def test_the_range_leaves_time_without_requests_as_it_is(tiny: Path) -> None:
    """A board that waits for requests draws 115 to 144 W (130) for as long, however fast it serves."""
    crowded, seldom = (
        run(tiny, "lru", hw="rtx3090", sim_energy="gpu", arrivals=f"poisson:{rate}").result for rate in (100.0, 1e-5)
    )
    low, high = (end / seldom.energy.joules_per_token for end in seldom.energy.range_joules_per_token)
    assert (low, high) == pytest.approx((115 / 130, 144 / 130), rel=1e-3)
    low, high = (end / crowded.energy.joules_per_token for end in crowded.energy.range_joules_per_token)
    assert low < 0.99 * 115 / 130 and high > 144 / 130
    alone = run(tiny, "lru", hw="rtx3090", sim_energy="gpu").result
    watts, factor = alone.energy.lanes_j, alone.uncertainty.low_factor
    least = factor * (115 / 130 * watts["gpu_waiting"] + 277 / 334 * watts["gpu_memory_bound"])
    assert watts["gpu_compute_bound"] == 0.0
    assert alone.energy.range_joules_per_token[0] * alone.n_outputs == pytest.approx(least)


@pytest.mark.parametrize("policy", ["lru", "llama_cpp"])
def test_engines_count_alike(tiny: Path, policy: str) -> None:
    found = [
        run(tiny, policy, hw="rtx3090", sim_energy="machine", sim_contention=False, sim_simulator=engine).result.energy
        for engine in ("core", "simpy")
    ]
    assert found[0].lanes_j == found[1].lanes_j


def test_boards_alone_are_part_of_the_machine(tiny: Path) -> None:
    whole = run(tiny, "lru", hw="rtx3090", sim_energy="machine").result.energy
    boards = run(tiny, "lru", hw="rtx3090", sim_energy="gpu").result.energy
    assert boards.lanes_j == {lane: lane_j for lane, lane_j in whole.lanes_j.items() if lane.startswith("gpu")}
    assert boards.energy_j < whole.energy_j


# -- what nobody asked for, and what is not known ----------------------------------------------------------------------


def identity(**rest: Any) -> str:
    made = prepare(RunSpec(policy="lru", requests=1, **rest))
    made.close()
    return made.run_id


def test_watts_tell_runs_apart_that_count_them_and_no_others(tmp_path: Path) -> None:
    """The profile without watts has the run_id that it had before there were any."""
    plain = load_hardware("rtx3090").without(WATTS)
    assert not any(path.endswith("_w") for path in msgspec.to_builtins(plain)["gpu"])
    assert "clubp2" not in plain.sources and "cc" not in plain.sources and "devb" in plain.sources
    bare = tmp_path / "rtx3090.yaml"
    bare.write_bytes(msgspec.yaml.encode(plain))
    assert identity(hw="rtx3090") == identity(hw=str(bare))
    counted = {identity(hw="rtx3090", sim_energy=word) for word in COUNTED}
    counted.add(identity(hw="rtx3090", sim_energy="gpu", set={"hw.gpu.power.waiting_w": 100.0}))
    assert len(counted | {identity(hw="rtx3090")}) == 4


def test_energy_changes_nothing_else(tiny: Path) -> None:
    without, asked = (
        run(tiny, "lru", hw="rtx3090", **rest).result.to_dict() for rest in ({}, {"sim_energy": "machine"})
    )
    assert "energy" not in without
    of_itself = ("energy", "run_id", "name", "wall_s")
    assert {k: v for k, v in asked.items() if k not in of_itself} == {
        k: v for k, v in without.items() if k not in of_itself
    }


def test_where_watts_are_lacking_there_is_no_number(tiny: Path) -> None:
    result = run(tiny, "lru", hw="rtx3060", sim_energy="machine").result
    assert result.energy.missing == ["gpu.power", "cpu.power"]
    assert result.to_dict()["energy"]["energy_j"] is None
    assert "not known: rtx3060 has no hw.gpu.power and hw.cpu.power" in render(result)
    other = run(tiny, "lru", hw="rtx3090", set={"hw.cpu": "epyc-9355"}, sim_energy="machine").result
    assert other.energy.missing == ["cpu.power"]
    assert run(tiny, "lru", hw="rtx3090", set={"hw.cpu": "epyc-9355"}, sim_energy="gpu").result.energy.energy_j > 0


# -- words in and out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"sim_energy": "board"}, "--set sim.energy, got 'board': no such value"),
        (
            {"set": {"hw.gpu.power.waiting_w": 90}},
            "without --set sim.energy: watts decide nothing else; add --set sim.energy=gpu",
        ),
        (
            {"sim_energy": "gpu", "set": {"hw.gpu.power.waiting_w": 400}},
            "memory_bound_w, got 334: less than waiting_w, 400",
        ),
        (
            {"hw": "rtx3060", "sim_energy": "gpu", "set": {"hw.gpu.power.waiting_w": 60}},
            "missing required field `memory_bound_w`; give all of waiting_w, memory_bound_w, compute_bound_w",
        ),
        ({"sim_energy": "gpu", "set": {"hw.gpu.power.waiting_w": -1}}, "from 0 to 10,000; the unit is watts"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(BadInput) as refused:
        prepare(RunSpec(**{"policy": "lru", "hw": "rtx3090", **fields}))
    assert text in str(refused.value)


def test_a_real_run_measures_no_watts(capsys: Any) -> None:
    words = ("--policy", "lru", "--hw", "rtx3090", "--model", "cpu-small", "--requests", 1, "--real=cpu")
    said = simulated(capsys, *words, "--set", "sim.energy=gpu").error
    assert "--set sim.energy, got 'gpu' with --real" in said
