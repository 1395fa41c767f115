"""`calibrate` as a command: a short real run on the CPU backend, its files, refits and refusals."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch")

from cli_help import moesim
from test_calibrate_fit import gathered

from calibrate.derive import Table, link
from calibrate.in_situ_fit import judged
from calibrate.profile import build, doubts, write
from calibrate.store import Record, Store
from sim.base.errors import BadInput
from sim.cli.calibrate import main
from sim.profiles.hardware import load_hardware
from sim.real.devices import environment
from sim.results.provenance import span


def run(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        main(list(args))
    return stop.value.code, capsys.readouterr()


def test_a_short_run_on_the_cpu_writes_a_profile_that_loads(tmp_path, capsys):
    # Two probes and a budget they cannot exhaust: what a loaded machine measures late must not be skipped.
    words = "--device cpu --model cpu-small --name ci --quiet --probe host --probe copy --out"
    args = (*words.split(), str(tmp_path))
    code, out = run(capsys, *args, "--minutes", "2", "--rounds", "1")
    assert code == 0, out.err
    assert "wrote " in out.out and "h2d" in out.out
    hardware = load_hardware(tmp_path / "ci.yaml")
    assert hardware.h2d.bandwidth_bytes_per_s.source == "measured"
    assert 1e8 < hardware.h2d.bandwidth_bytes_per_s.value < 1e12
    assert hardware.h2d.bandwidth_bytes_per_s.n >= 9 and hardware.h2d.bandwidth_bytes_per_s.iqr is not None
    assert {p.name for p in tmp_path.iterdir()} == {"ci.yaml", "ci.samples.jsonl.gz", "ci.environment.json"}
    assert json.loads((tmp_path / "ci.environment.json").read_text())["kind"] == "cpu"
    assert [r for r in Store.load(tmp_path / "ci.samples.jsonl.gz") if r.status == "failed"] == []

    before = (tmp_path / "ci.yaml").read_bytes()
    code, _ = run(capsys, "--fit-only", "--name", "ci", "--out", str(tmp_path))
    assert code == 0 and (tmp_path / "ci.yaml").read_bytes() == before

    ok = {r.ident: r.samples_s for r in Store.load(tmp_path / "ci.samples.jsonl.gz") if r.status == "ok"}
    code, _ = run(capsys, *args, "--minutes", "0.02", "--rounds", "1", "--resume")
    again = {r.ident: r.samples_s for r in Store.load(tmp_path / "ci.samples.jsonl.gz") if r.status == "ok"}
    assert code == 0 and ok.items() <= again.items()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--device", "tpu"], "device, got 'tpu': cpu, or cuda:0"),
        (["--device", "cuda:x"], "write cuda:0"),
        (["--device", "cpu", "--name", "Bad Name"], "lower-case letters"),
        (["--device", "cpu", "--probe", "copies"], "did you mean 'copy'?"),
        (["--device", "cpu", "--model", "mixtrel-8x7b", "--name", "x"], "mixtral-8x7b"),
        ([], "--device is missing"),
        (["--fit-only", "--name", "absent"], "cannot be read"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_2(args, message, capsys):
    code, out = run(capsys, *args)
    assert code == 2 and message in out.err and out.err.count("\n") == 1


def facts(**changes):
    plain = {
        "id": "none",
        "name": "Nothing",
        "kind": "cuda",
        "dtype": "bfloat16",
        "cpu_dtype": "bfloat16",
        "threads": [1],
        "vram_bytes": 80e9,
        "n_sms": 1,
        "l2_bytes": 1,
        "bus": (5, 16),
        "command": "calibrate",
        "machine": environment.machine(),
    }
    return plain | changes


def test_a_profile_without_any_sample_says_that_all_is_assumed_and_loads(tmp_path):
    write(tmp_path / "none.yaml", build(Table([]), facts()))
    hardware = load_hardware(tmp_path / "none.yaml")
    assert hardware.h2d.latency_s.source == "assumed" and "not measured" in hardware.h2d.latency_s.note
    assert hardware.gpu.link.theoretical_bytes_per_s == pytest.approx(63.0e9, rel=1e-3)


def test_a_profile_holds_the_pair_of_cpu_and_gathered_copies_and_leaves_the_rest_to_the_law(tmp_path):
    write(tmp_path / "pair.yaml", build(Table(gathered()), facts(id="pair", threads=[8])))
    hw = load_hardware(tmp_path / "pair.yaml")
    terms = {name: round(figure.value, 3) for name, figure in hw.contention.stated.items()}
    assert terms == {"cpu_slowdown_by_h2d": 1.0, "h2d_slowdown_by_cpu": 0.25}
    assert hw.cpu.shared_by_all.value == pytest.approx(2e10)
    assert "alone 4.0 and 20.0, together 2.0 and 16.0" in hw.cpu.shared_by_all.note


def copied(scatter: float, noise: float) -> list[Record]:
    """Page-locked copies at 20 GB/s, each size off a line by `scatter`, up or down; samples that spread by `noise`."""
    records = []
    for at in range(8):
        n_bytes = 4 ** (at + 8)
        middle_s = (1e-5 + n_bytes / 2e10) * (1 + scatter) ** (1 if at % 2 else -1)
        samples_s = [middle_s * (1 + noise * part) for part in (0.0, 0.0, 0.0, 0.0, 0.5, 1.0, 1.0, 1.0)]
        key = {"direction": "h2d", "memory": "pinned", "pattern": "queued", "n_bytes": n_bytes}
        records.append(Record("copy", key, 0, "ok", "fake", 1, samples_s, {}))
    return records


@pytest.mark.parametrize(
    ("scatter", "noise", "source"),
    [(0.0, 0.01, "measured"), (0.3, 0.01, "measured"), (4.0, 0.01, "assumed"), (0.0, 40.0, "assumed")],
)
def test_a_fit_that_is_bad_is_no_measurement_and_one_that_is_rough_has_its_residual_for_a_range(
    tmp_path, scatter, noise, source
):
    data = build(Table(copied(scatter, noise)), facts())
    write(tmp_path / "rough.yaml", data)
    hw = load_hardware(tmp_path / "rough.yaml")
    fit = link(Table(copied(scatter, noise)), "h2d", "pinned").fit
    told = list(doubts(data, "calibrate --device cuda:0 --name x"))
    for name in ("latency_s", "bandwidth_bytes_per_s"):
        figure = getattr(hw.h2d, name)
        assert figure.source == source
        low, high = span(figure)
        assert high / figure.value >= 1 + fit.median_off_frac - 1e-3
        assert figure.value / low >= 1 + fit.median_off_frac - 1e-3
        if source == "assumed":
            (line,) = [line for line in told if line.startswith(f"h2d.{name}:")]
            assert "no measurement (probe copy)" in line and "--resume --probe copy" in line and "quiet machine" in line
    assert bool(told) is (source == "assumed")
    if scatter == 0.0 and noise < 0.1:
        assert hw.h2d.latency_s.low is None  # as every measurement


def test_means_of_lanes_that_scatter_around_nothing_are_assumed():
    good = {"value": 1e-4, "source": "measured", "ref": "lanes", "iqr": 9e-5, "n": 4000}
    data = {
        "host": {"sync_s": good, "copy_launch_s": {**good, "iqr": 2e-3}},
        "gpu": {"x_s": {**good, "ref": "samples"}},
    }
    told = judged(data)
    assert (told["host"]["sync_s"], told["gpu"]) == (good, data["gpu"])
    launch = told["host"]["copy_launch_s"]
    assert launch["source"] == "assumed" and "IQR is 20.0 times the value" in launch["note"]
    assert launch["low"] < launch["value"] < launch["high"] == pytest.approx(1.1e-3)


def test_a_device_without_a_bus_gets_none(tmp_path, capsys):
    facts = {
        "id": "none",
        "name": "Nothing",
        "kind": "cpu",
        "dtype": "float32",
        "cpu_dtype": "float32",
        "threads": [1],
        "vram_bytes": 80e9,
        "n_sms": 1,
        "l2_bytes": 1,
        "bus": None,
        "command": "calibrate",
        "machine": environment.machine(),
    }
    write(tmp_path / "none.yaml", build(Table([]), facts))
    assert load_hardware(tmp_path / "none.yaml").gpu.link is None
    page = moesim(capsys, "hw", tmp_path / "none.yaml").out.splitlines()[1]
    assert page.startswith("PCIe not known, 1 SM, ")


def test_a_throttled_busy_or_slow_card_is_flagged_once_each():
    readings = [
        {"when": "before copy", "throttle": ["thermal (hardware)"], "other_processes": 2},
        {"when": "copying", "throttle": ["thermal (hardware)"], "pcie_gen": 3, "pcie_width": 16},
    ]
    found = environment.warnings({"pcie_gen_max": 5, "pcie_width_max": 16}, readings)
    assert [line.split(",")[0] for line in found[:1]] == ["throttled (thermal (hardware))"]
    assert len(found) == 3 and "PCIe gen 3 of 5 under load" in found[2]
    assert environment.throttle_reasons(0x44) == ["power cap", "thermal (hardware)"]
    assert environment.throttle_reasons(0x1) == []


def test_samples_of_another_device_are_not_continued(tmp_path):
    from calibrate.session import CalibrationRequest, calibrate

    request = CalibrationRequest("cpu", ["cpu-small"], "x", tmp_path, 1.0, resume=True)
    Store(request.samples_path).save()
    state = {
        "kind": "cuda",
        "device": "cuda:0",
        "models": [],
        "machine": environment.machine(),
        "card": {},
        "threads": [1],
        "dtype": "bfloat16",
        "cpu_dtype": "float32",
        "n_sms": 82,
        "l2_bytes": 6 << 20,
        "total_bytes": 24 << 30,
    }
    request.environment_path.write_text(json.dumps({**state, "title": "RTX 3090"}))
    with pytest.raises(BadInput, match="samples of 'RTX 3090': this device is 'CPU backend'"):
        calibrate(request)
