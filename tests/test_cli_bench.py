"""`moesim bench`, with short cases: the numbers themselves belong to a quiet machine."""

from __future__ import annotations

import inspect
import subprocess
from pathlib import Path

import pytest
from cli_help import mixtral_shaped, moesim

from sim.cli import bench, bench_engines, bench_load, bench_profile, bench_starts, bench_sweep
from sim.cli.bench_cases import PLAIN, synthetic_trace, ten_tokens
from sim.cli.bench_policy import Plain
from sim.machine.events.copies import Copy, CopyEngine
from sim.policy.registry import find
from traces.format.check import check_trace
from traces.format.reader import Trace


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [case._replace(n_store=min(case.n_store, 5), n_test=6) for case in bench.CASES]
    monkeypatch.setattr(bench, "CASES", cases)
    monkeypatch.setattr(bench, "N_TIMEOUTS", 2000)
    monkeypatch.setattr(bench_engines, "PAIRS", bench_engines.PAIRS[:1])
    monkeypatch.setattr(bench_engines, "N_TEST", 4)
    swept = {"points": 2, "run_s": 0.5, "sweep_s": 1.0, "ratio": 2.0}
    monkeypatch.setattr(bench_sweep, "measure", lambda: swept)
    load = bench_load.failed(10, "-", "not run")
    monkeypatch.setattr(bench_load, "measure", lambda folder, log: load)
    monkeypatch.setattr(bench, "starts", lambda folder: {"imports": {"command": "-", "wall_s": 1.0}, "processes": []})


@pytest.mark.usefixtures("short")
def test_ratios_are_tokens_times_layers_over_timeouts(capsys: pytest.CaptureFixture[str]) -> None:
    result = moesim(capsys, "bench", "--repeat", 1, "--json").json
    layers = {"mixtral-8x7b": 32, "qwen3-30b-a3b": 48}
    assert len(result["cases"]) == 4
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
    assert said.out.count("compiled") == 1
    assert said.out.startswith(f"engine compiled: {'yes' if bench.compiled() else 'no'}\n")
    assert said.err.startswith("error: bench")


def test_engines_are_compared_key_by_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_engines, "N_TEST", 4)
    found = bench_engines.measure()
    assert all(one["ok"] and one["keys"] > 50 and min(one["tokens_per_s"].values()) > 0 for one in found)
    assert {"lru", "fine_moe", "ktransformers"} <= {one["policy"] for one in found}
    # One that differs must be told: a copy engine that takes a little longer.
    real = CopyEngine.submit

    def slower(self: CopyEngine, copy: Copy) -> None:
        copy.duration_s *= 1 + 1e-9
        real(self, copy)

    monkeypatch.setattr(CopyEngine, "submit", slower)
    monkeypatch.setattr(bench_engines, "PAIRS", bench_engines.PAIRS[:1])
    (wrong,) = bench_engines.measure()
    assert not wrong["ok"] and "tpot_s" in wrong["unequal"] and "h2d_bytes" not in wrong["unequal"]
    assert "differ in" in bench_engines.told([wrong])[0]


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


@pytest.mark.parametrize("said", [True, False, None])
def test_it_asks_the_engine_whether_it_is_compiled(monkeypatch: pytest.MonkeyPatch, said: bool | None) -> None:
    monkeypatch.setattr("sim.engine.compiled", None if said is None else lambda: said, raising=False)
    assert bench.compiled() is bool(said)


def test_the_plain_policy_answers_three_questions_and_one_hook() -> None:
    hooks = {name for name, value in vars(Plain).items() if inspect.isfunction(value)} - {"bind", "stats"}
    assert hooks == {"accessed", "victim", "evicted", "layer_done"}
    assert find(PLAIN).name == Plain.name


@pytest.mark.thorough
def test_a_sweep_is_told_beside_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ["--trace", str(mixtral_shaped(tmp_path)), "--policy", "lru", "--hw", "rtx3090", "--experts", "48"]
    monkeypatch.setattr(bench_sweep, "RUN", run)
    monkeypatch.setattr(bench_sweep, "N_LINKS", 2)
    monkeypatch.setattr(bench_sweep, "REPEATS", 1)
    found = bench_sweep.measure()
    assert found["ratio"] == found["sweep_s"] / found["run_s"] > 0
    assert "on 2 links" in bench_sweep.told(found)
    monkeypatch.setattr(bench_sweep, "RUN", [*run, "--experts", "none"])
    assert "a process failed" in bench_sweep.told(bench_sweep.measure())


def test_a_log_is_drawn_as_the_published_one(tmp_path: Path) -> None:
    """Read as Azure's own: its rate, and its lengths by their quantiles."""
    from traces.synth.arrivals import arrivals
    from traces.synth.chat_lengths import load_lengths

    bench_load.drawn_log(tmp_path / "azure.csv", 4000)
    found, published = arrivals(str(tmp_path / "azure.csv"), 4000), load_lengths()
    assert found[-1].at_s / (len(found) - 1) == pytest.approx(published.mean_gap_s, rel=0.05)
    for lengths, tokens in (
        ([one.prompt_len or 0 for one in found], published.prompt_tokens),
        ([one.outputs or 0 for one in found], published.output_tokens),
    ):
        middle = sorted(lengths)[len(lengths) // 2]
        assert middle == pytest.approx(tokens[published.shares.index(0.5)], rel=0.05)
        assert tokens[0] <= min(lengths) <= max(lengths) <= tokens[-1]


@pytest.mark.thorough
def test_a_long_load_is_told_beside_half_of_it(tmp_path: Path) -> None:
    found = bench_load.measure(tmp_path, n=8, spliced=3)
    assert (found["error"], found["requests"]) == (None, 8)
    assert found["tokens"] > found["tokens"] / found["more_tokens"] > 8
    assert found["cpu_s"] > 0 and found["per_token_ratio"] > 0
    assert found["peak_bytes"] is None or 1e7 < found["peak_bytes"] < 1e9
    assert "8 requests of a log (drawn from published quantiles)" in bench_load.text(found)
    log = tmp_path / "mine.csv"
    log.write_text("nothing\n")
    wrong = bench_load.measure(tmp_path, log, n=8)
    assert (wrong["log"], wrong["ok"], wrong["cpu_s"]) == ("mine.csv", False, None)
    assert "mine.csv" in wrong["error"]
    assert "a process failed" in bench_load.text(wrong)


def test_processes_are_measured_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = [process._replace(repeats=1) for process in bench_starts.PROCESSES[1:]]
    wrong = bench_starts.Process("wrong", "simulate --policy", 9.0, 1)
    monkeypatch.setattr(bench_starts, "PROCESSES", [*few, wrong])
    monkeypatch.setattr(bench_starts, "REPEATS", 1)
    monkeypatch.setattr(bench_starts, "IMPORTS", "pass")
    found = bench_starts.starts(tmp_path)
    of_help, ten, failed = found["processes"]
    for process in (of_help, ten):
        assert (process["exit"], process["error"]) == (0, None)
        assert process["ratio"] == pytest.approx(process["wall_s"] / found["imports"]["wall_s"])
    assert ten["peak_bytes"] is None or 1e7 < ten["peak_bytes"] < 5e8
    assert (failed["exit"], failed["ok"], failed["wall_s"]) == (2, False, None)
    assert "--policy" in failed["error"]


@pytest.mark.parametrize(
    ("wall_s", "imports_s", "ok"),
    [
        (0.4, 0.5, True),
        (0.6, 0.5, False),
        (0.6, 0.7, True),
        (5.0, 10.0, True),
        (0.4, 0.1, True),
        (0.6, 0.59, False),
    ],
)
def test_a_slower_machine_takes_longer_for_both(wall_s: float, imports_s: float, ok: bool) -> None:
    done = subprocess.CompletedProcess([], 0, "", "\npeak_bytes=1000")
    row = bench_starts._row(bench_starts.Process("-", "simulate", 0.5, 3), [(wall_s, done)], imports_s)
    assert (row["ok"], row["most_ratio"], row["peak_bytes"]) == (ok, 1.0, 1000)


def test_ten_tokens_are_ten(tmp_path: Path) -> None:
    with Trace(ten_tokens(tmp_path)) as trace:
        assert [request.outputs for request in trace.requests] == [10]


def test_files_belong_to_parts() -> None:
    root = bench_profile.ROOT
    assert bench_profile.part_of(str(root / "policies" / "lru.py")) == "the policy"
    parts = {name: bench_profile.part_of(str(root / "sim" / name)) for name in ("engine/copies.py", "policy/view.py")}
    assert set(parts.values()) == {bench_profile.ENGINE}
    assert bench_profile.part_of(str(root / "sim" / "machine" / "lanes.py")) == "the machine: lanes"
    assert bench_profile.part_of(str(root / "sim" / "run.py")) == "engine and machine, compiled"
    assert bench_profile.part_of(bench_profile.signal.__file__) is None


@pytest.mark.thorough
@pytest.mark.skipif(not hasattr(bench_profile.signal, "setitimer"), reason="no interval timers on this system")
@pytest.mark.usefixtures("short")
def test_profile_shares_add_up(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_profile, "CASES", [bench.CASES[0]._replace(n_test=8000)])
    (found,) = moesim(capsys, "bench", "--profile", "--json").json
    assert found["samples"] > 0
    assert sum(found["shares"].values()) == pytest.approx(1.0)
    assert set(found["shares"]) & {"engine and machine, compiled", bench_profile.ENGINE}
