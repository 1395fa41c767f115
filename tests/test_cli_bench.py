"""`moesim bench`, with short cases: the numbers themselves belong to a quiet machine."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from cli_help import moesim

from sim.cli import bench, bench_profile
from sim.cli.bench_cases import synthetic_trace
from sim.engine.engine import Engine
from traces.format.check import check_trace
from traces.format.reader import Trace


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [case._replace(n_store=min(case.n_store, 5), n_test=6) for case in bench.CASES]
    monkeypatch.setattr(bench, "CASES", cases)
    monkeypatch.setattr(bench, "N_TIMEOUTS", 2000)
    monkeypatch.setattr(bench, "main_job", lambda: {"command": "-", "exit": 0, "wall_s": 1.0, "peak_bytes": 1,
                                                    "error": None, "ok": True})  # fmt: skip


@pytest.mark.usefixtures("short")
def test_ratios_are_tokens_times_layers_over_timeouts(capsys: pytest.CaptureFixture[str]) -> None:
    result = moesim(capsys, "bench", "--repeat", 1, "--json").json
    layers = {"mixtral-8x7b": 32, "qwen3-30b-a3b": 48}
    assert len(result["cases"]) == 3
    for case in result["cases"]:
        ratio = case["tokens_per_s"] * layers[case["model"]] / result["bare_timeouts_per_s"]
        assert case["ratio"] == pytest.approx(ratio)
        assert case["ok"] == (case["ratio"] >= case["floor"])


@pytest.mark.usefixtures("short")
def test_check_fails_below_the_floor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "CASES", [bench.CASES[0]._replace(floor=1e9)])
    said = moesim(capsys, "bench", "--repeat", 1, "--check")
    assert said.code == 1
    assert "too slow" in said.out
    assert said.err.startswith("error: bench")


def test_clock_counts_decode_only() -> None:
    times = iter([10.0, 13.5])
    clock = bench._Clock(lambda: next(times))
    for done in (1, 2, 3, 4):
        clock.tick(done, 4)
    assert clock.elapsed_s == 3.5


def test_synthetic_traces_are_sound(tmp_path: Path) -> None:
    synthetic_trace(tmp_path / "t.safetensors", (3, 8, 2), 4, 5)
    with Trace(tmp_path / "t.safetensors") as trace:
        assert check_trace(trace) == []
        assert trace.header.labels == ("synthetic",)
        assert [request.outputs for request in trace.requests] == [5, 6]


def test_main_job_is_measured_in_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "MAIN_JOB", ("policies",))
    facts: dict[str, Any] = bench.main_job()
    assert facts["ok"]
    assert facts["peak_bytes"] is None or 5e6 < facts["peak_bytes"] < 3e8
    monkeypatch.setattr(bench, "MAIN_JOB", ("run",))
    facts = bench.main_job()
    assert (facts["exit"], facts["ok"], facts["wall_s"]) == (2, False, None)
    assert "--policy" in facts["error"]


def test_files_belong_to_parts() -> None:
    root = bench_profile.ROOT
    assert bench_profile.part_of(str(root / "policies" / "lru.py")) == "the policy"
    assert bench_profile.part_of(str(root / "sim" / "lanes.py")) == "the machine: lanes and prices"
    parts = {bench_profile.part_of(inspect.getfile(kind)) for kind in Engine.__mro__[:-1]}
    assert parts == {"the engine: decisions, cache, counts"}
    assert bench_profile.part_of(bench_profile.signal.__file__) is None


@pytest.mark.skipif(not hasattr(bench_profile.signal, "setitimer"), reason="no interval timers on this system")
@pytest.mark.usefixtures("short")
def test_profile_shares_add_up(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_profile, "CASES", [bench.CASES[0]._replace(n_test=400)])
    (found,) = moesim(capsys, "bench", "--profile", "--json").json
    assert found["samples"] > 0
    assert sum(found["shares"].values()) == pytest.approx(1.0)
    assert {"the policy", "the flat loop"} & set(found["shares"])
