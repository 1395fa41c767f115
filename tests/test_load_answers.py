"""Queues and promises in every answer over several runs: sweep, compare, check, diff, and the timeline."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from cli_help import mixtral_shaped, moesim, simulated

import moesim as face
from sim.base.errors import BadInput
from sim.studies.sweep.grid_file import read_grid

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


def test_a_grid_file_promises(tmp_path: Path) -> None:
    """As text or by task; options stand over it; what is wrong is named with its place."""
    path = tmp_path / "grid.yaml"
    path.write_text(
        "list:\n- {policy: lru, hw: rtx3090, slo: 'ttft_s <= 2s'}\n"
        "- {policy: lru, hw: rtx3090, slo: {code: {tpot_s: 50ms}}}\n- {policy: lru, hw: rtx3090}\n"
    )
    from sim.studies.sweep.grid import Block, given

    blocks = read_grid(path)
    assert [block.slo for block in blocks] == [{"*": {"ttft_s": 2.0}}, {"code": {"tpot_s": 0.05}}, {}]
    over = given((), {"slo": {"*": {"e2e_s": 3.0}}}, ())
    assert [point.spec.slo for block in blocks for point in block.over(over).points()] == [{"*": {"e2e_s": 3.0}}] * 3
    assert [point.spec.slo for block in blocks for point in block.over(Block()).points()] == [b.slo for b in blocks]
    path.write_text("grid: {policy: lru, hw: rtx3090, slo: 'ttfs_s <= 2s'}\n")
    with pytest.raises(BadInput, match=r"grid\.yaml: grid\.slo, got 'ttfs_s'"):
        read_grid(path)


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


def test_an_attainment_is_expected_by_either_name(load: tuple[object, ...], capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("slo.attained_frac", "slo_attainment"):
        assert simulated(capsys, "--policy", "lru", *load, "--expect", f"{name} >= 1%").code == 0
        assert simulated(capsys, "--policy", "lru", *load, "--expect", f"{name} >= 99%").code == 1


def test_diff_tells_both_parts_of_the_ttft_and_what_became_of_promises(
    load: tuple[object, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    found = moesim(capsys, "diff", "lru scope=global", "lfu scope=global", *load, "--json").json
    a, b = found["a"]["result"], found["b"]["result"]
    parts = {part["part"]: part for part in found["ttft_s"]["parts"]}
    for side, result in (("a_s", a), ("b_s", b)):
        assert parts["queue"][side] == pytest.approx(result["queue_s"]["mean"], rel=1e-12)
        served = sum(part[side] for name, part in parts.items() if name != "queue")
        assert served == pytest.approx(result["service_s"]["mean"], rel=1e-9)
    assert all(part["a_s"] == part["b_s"] == 0 for part in found["tpot_s"]["parts"] if part["part"] == "queue")
    keys = {row["key"] for row in found["figures"]}
    assert {"slo.attained_frac", "slo.violations.queue", "queue_s.mean", "load.requests_waiting"} <= keys
    said = moesim(capsys, "diff", "lru scope=global", "lfu scope=global", *load).out
    line = next(one for one in said.splitlines() if one.startswith("SLO, broken, queue"))
    counts = a["slo"]["violations"]["queue"], b["slo"]["violations"]["queue"]
    assert line.split()[3:] == [str(counts[0]), str(counts[1]), str(counts[1] - counts[0])]
    kept = f"{100 * b['slo']['attained_frac']:.1f} % keep their SLO against {100 * a['slo']['attained_frac']:.1f} %"
    assert kept in said
    other = moesim(capsys, "diff", "lru", "lru slo=ttft_s<=1us", *load[:-2], "--slo", SLO).out
    assert "keep their SLO against" not in other  # of another promise


def test_a_run_without_arrivals_says_nothing_of_load(
    load: tuple[object, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    args = ("--hw", "rtx3090", "--trace", load[3], "--requests", 2)
    for verb in (("compare", "--policy", "lru", "--policy", "lfu"), ("sweep", "--policy", "lru", "--policy", "lfu")):
        said = moesim(capsys, *verb, *args).out
        assert "queue" not in said
        assert "SLO" not in said
    assert "requests over time" not in moesim(capsys, "diff", "lru", "lfu", *args).out


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
