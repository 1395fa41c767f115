"""Hardware profiles: every figure has an origin, ranges hold, wrong units and typing slips are refused in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cli_help import moesim, simulated

from sim.base.errors import BadInput
from sim.base.files import bundled
from sim.base.quantities import quantities
from sim.machine.cost import Cost
from sim.profiles.hardware import CPUS, GPUS, Hardware, load_hardware
from sim.profiles.models import load_model
from sim.profiles.stack import load_stack

IDS = sorted(bundled(GPUS, ".yaml"))
CPU_IDS = sorted(bundled(CPUS, ".yaml"))
H2D = "h2d.bandwidth_bytes_per_s"
# Machines whose CPU experts and copies were measured alone and together (GB/s): FreeToken #232 and #436.
TOGETHER = {
    "rtx4090-5955wx": ("tr-pro-5955wx", 63.8, 54.0, 24.9, 23.9),
    "pro4000-epyc7302": ("epyc-7302", 29.97, 21.89, 13.09, 8.41),
}


@pytest.fixture
def rtx3090() -> Hardware:
    return load_hardware("rtx3090")


def write(tmp_path: Path, change: Any = None) -> Path:
    """A copy of the RTX 3090's profile, changed in place by `change`."""
    data = msgspec.to_builtins(load_hardware("rtx3090"))
    if change:
        change(data)
    path = tmp_path / "own.yaml"
    path.write_text(json.dumps(data))
    return path


def test_every_gpu_is_there() -> None:
    assert set(IDS) == {
        "rtx3090",
        "rtx4090",
        "rtx5090",
        "rtx3080ti",
        "rtx4060ti",
        "rtx5060ti",
        "a5000",
        "a6000",
        "quadro-rtx-6000",
        "a100-40g-pcie",
        "a100-80g-pcie",
        "a100-40g-sxm",
        "a100-80g-sxm",
        "h100-pcie",
        "h100-sxm",
        "h200-sxm",
        "l4",
        "l40s",
        "t4",
        "rtx3060",
        "rtx2080",
        "rtx4070ti",
        "gtx1080ti",
        "quadro-rtx-4000",
        "pro2000-laptop",
        "rtx5080",
        "rtx5070ti",
        "rtx5070",
        "rtx4080",
        "rtx4070",
        "rtx4060",
        "rtx3080",
        "rtx3070",
        "rtx2080ti",
        "rtx-pro-6000",
        "a10",
        "l40",
        "v100-32g-pcie",
        "b200-sxm",
        "gb10",
        *TOGETHER,
    }


def test_within_one_memory_nothing_is_copied(capsys: pytest.CaptureFixture[str]) -> None:
    """What keeps every expert runs on a DGX Spark; what would copy is refused, before a trace is drawn for it."""
    told = "CPU and GPU have one memory there, so that no expert is copied or left to the CPU; take gpu_only or"
    for policy, model in (("lru", "mixtral-8x7b"), ("fiddler", "qwen3-235b-a22b"), ("belady", "mixtral-8x7b")):
        said = simulated(capsys, "--policy", policy, "--hw", "dgx-spark", "--model", model, "--precision", "q4_k_m")
        assert (said.code, said.out) == (2, "")
        assert said.err.startswith(f"error: policy {policy} on gb10: {told}")
        assert "drawing" not in said.err
    every = [
        simulated(capsys, "--policy", name, "--hw", "gb10", "--requests", 1, "--json")
        for name in ("gpu_only", "llama_cpp")
    ]
    assert [one.code for one in every] == [0, 0]
    kept, fit = (json.loads(one.out) for one in every)
    assert kept["tpot_s"] == fit["tpot_s"]
    assert kept["h2d_bytes"] == fit["ram_peak_bytes"] == 0
    all_of_it = simulated(
        capsys, "--policy", "llama_cpp", "--hw", "gb10", "--model", "qwen3-235b-a22b", "--precision", "q8_0"
    )
    assert all_of_it.code == 2
    assert "policy llama_cpp on gb10" in all_of_it.err
    assert "with room for every expert (a lower --precision, no --vram, no cap)" in all_of_it.err
    beside = simulated(
        capsys, "--policy", "llama_cpp", "--hw", "gb10", "--model", "qwen3.8-flash-next", "--precision", "q6_k"
    )
    assert beside.code == 2
    assert re.search(
        r"of tables beside it needs 1\d\d GB of 130 GB, which is all of its memory; take a lower", beside.err
    )
    swap = ("--batch", 2, "--kv-memory", "500MB", "--set", "kv.preempt=swap")
    assert (
        "--set kv.preempt, got 'swap' on gb10: within one memory it frees nothing"
        in simulated(capsys, "--policy", "gpu_only", "--hw", "gb10", *swap).err
    )


def test_within_one_memory_neither_bound_nor_plan_leaves_anything_to_a_link_or_the_cpu(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fit = simulated(capsys, "--policy", "llama_cpp", "--hw", "gb10", "--requests", 1, "--json").json
    assert fit["lower_bound"]["resource"] == "copy"
    assert fit["lower_bound"]["tpot_s"] == pytest.approx(fit["tpot_s"]["mean"], rel=1e-3)
    goal = ("--goal", "tpot_s.mean <= 50ms", "--policy", "llama_cpp", "--requests", 1)
    said = moesim(capsys, "plan", "--hw", "gb10", *goal)
    assert re.search(r"^gb10 +130 GB +- +gb10-cpu +ruled out", said.out, re.MULTILINE)
    assert "precision" in said.out
    assert "link bandwidth" not in said.out
    assert "CPU memory" not in said.out


def test_one_memory_and_a_link_contradict_each_other(tmp_path: Path) -> None:
    path = write(tmp_path, lambda data: data.update(one_memory=True))
    with pytest.raises(BadInput, match=r"gpu\.link, got one: CPU and GPU have one memory"):
        load_hardware(path)


@pytest.mark.parametrize("name", IDS)
def test_profile_is_sound(name: str) -> None:
    hw = load_hardware(name)
    assert hw.id == name
    bus = hw.gpu.link
    if hw.one_memory:
        assert (bus, hw.cpu.memory_bytes.value) == (None, hw.vram_bytes.value)
        assert hw.gpu.memory_bandwidth_bytes_per_s.value > 2 * hw.h2d.bandwidth_bytes_per_s.value
    else:
        theory = {3: 0.985, 4: 1.969, 5: 3.938}[bus.generation] * bus.lanes * 1e9
        assert bus.theoretical_bytes_per_s == pytest.approx(theory, rel=2e-3)
        assert 0.7 * theory < hw.h2d.bandwidth_bytes_per_s.value < theory
        assert hw.gpu.memory_bandwidth_bytes_per_s.value > 5 * hw.h2d.bandwidth_bytes_per_s.value
    assert hw.h2d_pageable.bandwidth_bytes_per_s.value < hw.h2d.bandwidth_bytes_per_s.value
    assert {"bf16", "fp16", "fp32"} <= set(hw.gpu.flops_per_s)
    assert set(hw.sources) >= {key for _, figure in quantities(hw) for key in figure.refs}
    for path, figure in quantities(hw):
        if figure.source == "assumed":
            assert figure.note or figure.ref, f"{path}: an assumption needs its reason"
        else:
            assert figure.refs, f"{path}: {figure.source} by whom?"
    if name not in TOGETHER:
        assert all(figure.value == 0 and figure.source == "assumed" for _, figure in quantities(hw.contention))
    assert not re.search(r"/work|shared/|seed 0", bundled(GPUS, ".yaml")[name].read_text())


@pytest.mark.parametrize("name", TOGETHER)
def test_machines_measured_together(name: str) -> None:
    hw, (cpu, cpu_alone, cpu_beside, h2d_alone, h2d_beside) = load_hardware(name), TOGETHER[name]
    assert hw.cpu.id == cpu
    assert hw.cpu.memory_bandwidth_bytes_per_s.value == cpu_alone * 1e9
    assert hw.h2d.bandwidth_bytes_per_s.low == h2d_alone * 1e9
    slowed = hw.contention
    assert slowed.cpu_slowdown_by_h2d.value == pytest.approx(cpu_alone / cpu_beside - 1, abs=0.005)
    assert slowed.h2d_slowdown_by_cpu.value == pytest.approx(h2d_alone / h2d_beside - 1, abs=0.005)
    assert slowed.cpu_slowdown_by_h2d.source == slowed.h2d_slowdown_by_cpu.source == "measured"


@pytest.mark.parametrize("name", CPU_IDS)
def test_every_cpu_can_be_attached(name: str) -> None:
    hw = load_hardware("rtx3090", {"cpu": name})
    assert hw.cpu.id == name
    assert hw.cpu.memory_bytes.value == 128 * 1024**3
    assert hw.cpu.memory_bytes.source == "assumed"


def test_no_source_is_listed_without_use() -> None:
    for name in IDS:
        hw = load_hardware(name)
        used = {key for _, figure in quantities(hw) for key in figure.refs}
        assert set(hw.sources) - used <= {"tpu"} | {
            # Citations of a CPU file whose figure the GPU file replaced.
            key
            for key in hw.sources
            if key in ("boa", "p620")
        }


@pytest.mark.parametrize(
    ("gpu", "cpu", "memory_gib", "source"),
    [
        ("rtx3090", "tr-pro-3955wx", 480, "datasheet"),
        ("a5000", "tr-pro-3945wx", 128, "datasheet"),
        ("a6000", "xeon-8358p", 512, "datasheet"),
        ("rtx4090", "core-i9-13900k", 128, "assumed"),
        ("rtx2080", "core-i9-10900x", 64, "datasheet"),
    ],
)
def test_paper_machines(gpu: str, cpu: str, memory_gib: int, source: str) -> None:
    hw = load_hardware(gpu)
    assert hw.cpu.id == cpu
    assert hw.cpu.memory_bytes.value == memory_gib * 1024**3
    assert hw.cpu.memory_bytes.source == source


def test_measured_figures_stay_measured() -> None:
    rtx4090 = load_hardware("rtx4090").h2d.bandwidth_bytes_per_s
    assert (rtx4090.value, rtx4090.source, rtx4090.low, rtx4090.high) == (2.5e10, "measured", 2.25e10, 2.65e10)
    assert load_hardware("a5000").h2d.bandwidth_bytes_per_s.source == "assumed", "nobody published this one"
    assert load_hardware("t4").gpu.flops_per_s["bf16"].value < 0.1 * load_hardware("t4").gpu.flops_per_s["fp16"].value
    assert "fp8" not in load_hardware("a100-80g-sxm").gpu.flops_per_s


def test_an_alias_of_two_profiles_names_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a copy of a profile under another id, which keeps the aliases."""
    copy = tmp_path / "my3090.yaml"
    copy.write_text(bundled(GPUS, ".yaml")["rtx3090"].read_text().replace("id: rtx3090", "id: my3090"))

    def with_copy(package: str, suffix: str) -> dict[str, Path]:
        return bundled(package, suffix) | ({"my3090": copy} if package == GPUS else {})

    monkeypatch.setattr("sim.profiles.find.bundled", with_copy)
    assert (load_hardware("my3090").id, load_hardware("rtx3090").id) == ("my3090", "rtx3090")
    with pytest.raises(BadInput, match="'3090': an alias of rtx3090 and my3090; name one by its id"):
        load_hardware("3090")


def test_set_value_alone_drops_the_old_origin() -> None:
    figure = load_hardware("rtx4090", {f"{H2D}.value": 1e10}).h2d.bandwidth_bytes_per_s
    assert (figure.value, figure.source, figure.low) == (1e10, "assumed", None)
    kept = load_hardware("rtx4090", {H2D: {"value": 2.6e10, "source": "measured", "ref": "oxide"}}).h2d
    assert (kept.bandwidth_bytes_per_s.source, kept.bandwidth_bytes_per_s.ref) == ("measured", "oxide")


def test_set_cpu_then_refine_it() -> None:
    hw = load_hardware("rtx3090", {"cpu.flops_per_s": 8e11, "cpu": "xeon-8358p", "cpu.memory_bytes": 6.4e10})
    assert (hw.cpu.id, hw.cpu.flops_per_s.value, hw.cpu.memory_bytes.value) == ("xeon-8358p", 8e11, 6.4e10)
    part = load_hardware("rtx3090", {"cpu": {"from": "xeon-8358p", "n_cores": 4}})
    assert (part.cpu.id, part.cpu.n_cores) == ("xeon-8358p", 4)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"h2d.bandwith": 3}, r"--set hw\.h2d\.bandwith, got 3: no field 'bandwith'; did you mean 'bandwidth_bytes_"),
        ({"h2d.x": 3}, r"no field 'x'; known: bandwidth_bytes_per_s, latency_s"),
        ({"h2d.latncy_s": 3}, r"no field 'latncy_s'; did you mean 'latency_s'\?"),
        ({H2D: 25}, r"h2d\.bandwidth_bytes_per_s, got 25: from 1e6 to 1e14; did you write GB/s\? the unit is bytes"),
        ({H2D: 0}, r"got 0: from 1e6"),
        ({H2D: -1e10}, r"got -1e\+10: from 1e6"),
        ({H2D: float("nan")}, r"--set hw\.h2d\.bandwidth_bytes_per_s, got nan: a figure is finite; give a number"),
        ({H2D: "nan"}, r"--set hw\.h2d\.bandwidth_bytes_per_s, got nan: a figure is finite; give a number"),
        ({H2D: "-inf"}, r"got -inf: a figure is finite"),
        ({H2D: "8GB"}, r"got '8GB': not a number; give one in bytes per second, or e\.g\. 25GB/s"),
        ({H2D: "8 apples/s"}, r"--set hw\.h2d\.bandwidth_bytes_per_s, got '8 apples': not a size"),
        ({"vram_bytes": "8 apples"}, r"--set hw\.vram_bytes, got '8 apples': not a size; write a number with B, kB"),
        ({H2D: float("inf")}, r"got inf: a figure is finite"),
        ({"h2d.latency_s": 10}, r"h2d\.latency_s, got 10: from 0 to 1; did you write ms or us\? the unit is seconds"),
        ({"h2d.latency_s": -1e-6}, r"got -1e-06: from 0 to 1"),
        ({"h2d.latency_s": "fast"}, r"--set hw\.h2d\.latency_s, got 'fast': not a number; give one in seconds, e\.g"),
        ({"h2d.latency_s": True}, r"--set hw\.h2d\.latency_s, got True: not a number"),
        ({"h2d.latency_s": {"value": "fast"}}, r"got 'fast': not a number"),
        ({"h2d.latency_s": {"value": 1e-5, "sorce": "measured"}}, r"unknown field `sorce`; did you mean 'source'\?"),
        ({"h2d.latency_s": {"value": 1e-5, "ref": "nobody"}}, r"h2d\.latency_s\.ref, got 'nobody': not a key of"),
        ({"vram_bytes": 24}, r"vram_bytes, got 24: from 1e6 to 1e15; did you write GB\? the unit is bytes"),
        ({"gpu.flops_per_s.bf16": 72}, r"got 72: from 1e6 to 1e18; did you write TFLOPS\?"),
        ({"gpu.flops_per_s.bf17": 1e12}, r"no field 'bf17'; did you mean 'bf16'\?"),
        ({"contention.gpu_slowdown_by_h2d": 50}, r"got 50: from 0 to 10; it is the share of extra time"),
        ({"cpu": "foo"}, r"cpu, got 'foo': unknown; known: core-i9-10900x"),
        ({"cpu": {"from": 3}}, r"cpu\.from, got 3: the id of a CPU"),
        ({"cpu": ["xeon-8358p"]}, r"cpu: Expected `object`, got `array`"),
    ],
)
def test_bad_settings_are_refused(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message) as error:
        load_hardware("rtx3090", overrides)
    assert "\n" not in str(error.value)


def test_own_file_round_trips(tmp_path: Path, rtx3090: Hardware) -> None:
    assert load_hardware(write(tmp_path)) == rtx3090


def _bare_number(data: dict[str, Any]) -> None:
    data["h2d"]["latency_s"] = 1e-5


def _bare_flops(data: dict[str, Any]) -> None:
    data["gpu"]["flops_per_s"]["bf16"] = 7e13


def _no_origin(data: dict[str, Any]) -> None:
    del data["h2d"]["latency_s"]["source"]


def _outside_range(data: dict[str, Any]) -> None:
    data["h2d"]["bandwidth_bytes_per_s"]["value"] = 3e10


def _stands_still(data: dict[str, Any]) -> None:
    data["h2d"]["bandwidth_bytes_per_s"]["low"] = 0


def _gives_joules_back(data: dict[str, Any]) -> None:
    data["gpu"]["power"]["waiting_w"]["low"] = -100


def _typo(data: dict[str, Any]) -> None:
    data["contenton"] = data.pop("contention")


def _no_citation(data: dict[str, Any]) -> None:
    del data["sources"]["ninfer"]


def _cpu_from_nowhere(data: dict[str, Any]) -> None:
    data["cpu"] = "tr-pro-3999"


def _bad_sources(data: dict[str, Any]) -> None:
    data["cpu"] = "xeon-8358p"
    data["sources"] = ["tpu"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_bare_number, r"h2d\.latency_s: Expected `object`, got `float`; write \{value: NUMBER, source: measured\|"),
        (_bare_flops, r"got `float`; write \{value: NUMBER"),
        (_no_origin, r"h2d\.latency_s: Object missing required field `source`"),
        (_outside_range, r"got 3e\+10: outside its own range 2\.36e\+10 to 2\.64e\+10; correct value, low or high"),
        (_stands_still, r"h2d\.bandwidth_bytes_per_s\.low, got 0: from 1e6 to 1e14; did you write GB/s"),
        (_gives_joules_back, r"gpu\.power\.waiting_w\.low, got -100: from 0 to 10,000; the unit is watts"),
        (_typo, r"unknown field `contenton`; did you mean 'contention'\?"),
        (_no_citation, r"memory_bandwidth_bytes_per_s\.ref, got 'ninfer': not a key of `sources`; add the citation"),
        (_cpu_from_nowhere, r"own\.yaml: cpu, got 'tr-pro-3999': unknown; did you mean 'tr-pro-39"),
        (_bad_sources, r"sources, got list: a mapping of key to citation"),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message) as error:
        load_hardware(write(tmp_path, change))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("hw", "precision", "kind"),
    [
        ("t4", "int4", "fp16"),
        ("t4", "hqq2", "fp16"),
        ("quadro-rtx-6000", "int8", "fp16"),  # bf16 is emulated there
        ("t4", "bf16", "bf16"),
        ("rtx3090", "int4", "bf16"),
        ("h200-sxm", "int4_g128", "bf16"),
    ],
)
def test_unpacked_weights_are_multiplied_in_a_type_that_the_gpu_has(hw, precision, kind):
    """Their profiles say so: "no bf16 tensor cores: emulated. Use fp16". What is asked for in bf16 runs in bf16."""
    machine = load_hardware(hw)
    cost = Cost(machine, load_model("mixtral-8x7b"), load_stack("bare"), precision)
    (used,) = (figure for name, figure in cost.figures.entries if name.startswith("gpu.flops_per_s"))
    assert used is machine.gpu.flops_per_s[kind]


def test_more_channels_give_more_in_all() -> None:
    """`--set hw.cpu.memory_bandwidth_bytes_per_s` asks for other memory, of which copies have their part, too."""
    read, total = "cpu.memory_bandwidth_bytes_per_s", "cpu.total_bandwidth_bytes_per_s"
    before = load_hardware("rtx3090").cpu
    doubled = 2 * before.memory_bandwidth_bytes_per_s.value
    after = load_hardware("rtx3090", {read: doubled}).cpu
    assert after.total_bandwidth_bytes_per_s.value == 2 * before.total_bandwidth_bytes_per_s.value
    assert after.total_bandwidth_bytes_per_s.source == "assumed"
    own = load_hardware("rtx3090", {read: doubled, total: 7e10}).cpu
    assert own.total_bandwidth_bytes_per_s.value == 7e10
    slow = load_hardware("rtx3090", {read: doubled, "drive.latency_s": 1e-3}, drive="gen4x4").cpu
    assert slow.total_bandwidth_bytes_per_s == after.total_bandwidth_bytes_per_s
