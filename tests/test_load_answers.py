"""Queues and promises in every answer over several runs: sweep, compare, check, diff, and the timeline."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from cli_help import mixtral_shaped, moesim, simulated

import moesim as face

SLO = "ttft_s <= 4500ms, tpot_s <= 10s"
RATE = 0.08  # some requests wait for others, and the queue is stable


@pytest.fixture
def load(tmp_path: Path) -> tuple[object, ...]:
    """Ten requests of Mixtral's shape, some of which wait for others."""
    path = mixtral_shaped(tmp_path, n_requests=20)
    shared = ("--hw", "rtx3090", "--trace", path, "--arrivals", f"poisson:{RATE}", "--requests", 10)
    return (*shared, "--slo", SLO)


def test_a_sweep_has_the_figures_of_its_runs(
    load: tuple[object, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Policies by schedulers, under one SLO: attainment and goodput are those of single runs; text and Python agree."""
    args = ("--policy", "lru", "--policy", "lfu", "--scheduler", "fcfs,sjf", *load, "--workers", 1)
    swept = moesim(capsys, "sweep", *args, "--json", "--columns", "all").json
    found = {(row["policy"], row["scheduler"]): row for row in swept["rows"]}
    assert len(found) == 4
    for (policy, scheduler), row in found.items():
        one = simulated(capsys, "--policy", policy, "--scheduler", scheduler, *load, "--json").json
        assert 0 < one["slo"]["met"] < one["slo"]["requests"]
        assert row["run_id"] == one["run_id"]
        assert row["slo.attained_frac"] == one["slo"]["attained_frac"]
        assert row["slo.goodput_requests_per_s"] == one["slo"]["goodput_requests_per_s"]
        assert row["queue_s.mean"] == one["queue_s"]["mean"] > 0
    for group in swept["groups"]:
        best = max((row for row in found.values() if row["scheduler"] == group["settings"]["scheduler"]), key=_kept)
        assert group["keeps_slo_most"] == best["run_id"]
    said = moesim(capsys, "sweep", *args).out
    assert "SLO, kept" in said
    assert "most keep their SLO under" in said
    path = load[3]
    frame = face.sweep(
        ["lru", "lfu"],
        "rtx3090",
        trace=path,
        arrivals=f"poisson:{RATE}",
        requests=10,
        scheduler=["fcfs", "sjf"],
        slo=SLO,
    )
    assert sorted(frame["slo.attained_frac"]) == sorted(row["slo.attained_frac"] for row in found.values())


def _kept(row: dict[str, float]) -> tuple[float, float]:
    return row["slo.attained_frac"], row["slo.goodput_requests_per_s"]


def test_compare_ranks_policies_under_several_schedulers(
    load: tuple[object, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("--policy", "lru", "--policy", "lfu", "--scheduler", "fcfs,sjf", *load)
    found = moesim(capsys, "compare", *args, "--json").json
    runs = {run["applied_as"]: run for run in found["runs"]}
    assert set(runs) == {"lru, fcfs", "lru, sjf", "lfu, fcfs", "lfu, sjf"}
    assert runs["lru, sjf"]["lower_bound"] is None  # who is next depends on time, so there is no future to bound it by
    assert runs["lru, fcfs"]["lower_bound"] is not None
    best = max(runs.values(), key=lambda run: (run["slo"]["attained_frac"], run["slo"]["goodput_requests_per_s"]))
    assert f"most keep their SLO under {best['applied_as']}: " in found["answer"]
    assert f"{100 * best['slo']['attained_frac']:.1f} %" in found["answer"]
    refused = moesim(capsys, "compare", "--policy", "lru", "--scheduler", "fcfs,", *load)
    assert (refused.code, "empty name in the list" in refused.error) == (2, True)


def test_check_holds_runs_to_what_was_promised(
    load: tuple[object, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = simulated(capsys, "--policy", "lru", *load, "--json").json
    kept, p50 = one["slo"]["attained_frac"], one["queue_s"]["p50"]
    path = tmp_path / "baseline.yaml"
    figures = "{slo.attained_frac: %r, queue_s.p50: %r, slo.goodput_requests_per_s: %r, slo.violations.queue: %r}"
    good = one["slo"]["goodput_requests_per_s"]
    text = (
        f"schema: 2\nruns:\n- policy: lru\n  hw: rtx3090\n  trace: {load[3]}\n  arrivals: poisson:{RATE}\n"
        f"  requests: 10\n  slo: '{SLO}'\n  figures: {figures}\n"
    )
    held = (kept, p50, good, one["slo"]["violations"]["queue"])
    path.write_text(text % held)
    assert moesim(capsys, "check", path).code == 0
    for worse in ((kept + 0.01, *held[1:]), (kept, p50 - 1.0, *held[2:]), (kept, p50, good * 1.1, held[3])):
        path.write_text(text % worse)
        found = moesim(capsys, "check", path, "--json")
        verdicts = [row["verdict"] for row in json.loads(found.out)["runs"][0]["figures"]]
        assert (found.code, sorted(verdicts)) == (1, ["same", "same", "same", "worse"])
    path.write_text(text % (kept - 0.01, p50 + 1.0, good * 0.9, held[3] + 1))
    verdicts = [row["verdict"] for row in moesim(capsys, "check", path, "--json").json["runs"][0]["figures"]]
    assert verdicts == ["better"] * 4


@pytest.mark.parametrize("how", [f"poisson:{RATE}", "closed:3"])
def test_a_timeline_counts_who_is_there(
    load: tuple[object, ...], how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The counter along time gives the run's own averages: who is there, and who of them waits."""
    path = tmp_path / "t.json"
    args = ("--hw", "rtx3090", "--trace", load[3], "--arrivals", how, "--requests", 9, "--batch", 2)
    drawn = ("--timeline", path, "--set", "timeline.iterations=10000", "--json")
    told = simulated(capsys, "--policy", "lru", *args, *drawn).json["load"]
    events = json.loads(path.read_text())["traceEvents"]
    come = [(event["ts"] / 1e6, event["args"]) for event in events if event["name"] == "requests"]
    assert come[-1][1] == {"running": 0, "waiting": 0}
    spent = {"running": 0.0, "waiting": 0.0}
    for (start_s, n), (end_s, _) in pairwise(come):
        for name in spent:
            spent[name] += n[name] * (end_s - start_s)
    span_s = come[-1][0] - come[0][0]
    assert spent["waiting"] / span_s == pytest.approx(told["requests_waiting"], rel=1e-5)
    assert sum(spent.values()) / span_s == pytest.approx(told["requests_in_system"], rel=1e-5)
    assert told["requests_waiting"] > 0.1
