"""`moesim compare`: one row per policy, ranked, on equal terms."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_help import called
from tiny_traces import tiny_trace

from sim.cli import main
from sim.figures import Statistic
from sim.policy.registry import policies
from sim.results.sampling import Sample
from sim.studies.compare import Comparison
from sim.studies.rows import Group, Row

LEVELS = {"weights", "scores", "token_ids", "embeddings", "tasks"}


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("compare") / "t.safetensors"
    return tiny_trace(path, 32, 8, 2, n_requests=4, prompt=4, outputs=4, levels=LEVELS)


def call(capsys, *args: str) -> tuple[int, str, str]:
    return called(capsys, main, "compare", *args)


def test_it_ranks_systems_and_lists_bounds_beside_them(capsys, trace):
    code, out, _ = call(
        capsys,
        "--hw",
        "rtx3090",
        "--trace",
        str(trace),
        "--policy",
        "lru",
        "--policy",
        "lru scope=global",
        "--policy",
        "belady",
        "--policy",
        "gpu_only",
        "--json",
    )
    runs = json.loads(out)["runs"]
    assert code == 0
    assert sorted(run["applied_as"] for run in runs) == ["belady", "gpu_only", "lru", "lru scope=global"]
    times = [run["tpot_s"]["mean"] for run in runs]
    assert times == sorted(times)
    assert runs[0]["applied_as"] == "gpu_only"
    assert len({run["cache_capacity_bytes"][0] for run in runs if run["applied_as"] != "gpu_only"}) == 1


def row(label: str, tpot_s: float, *labels: str, times: tuple[float, ...] = ()) -> Row:
    sample = Sample(dict(enumerate(times or (tpot_s, tpot_s))))
    said = SimpleNamespace(
        tpot_s=Statistic(tpot_s, None, None, None, 2),
        caveats=list(labels),
        model="m",
        hw="easy",
        overrides={},
        slo=None,
        energy=None,
    )
    said.time_s = lambda _: said.tpot_s
    return Row(label, said, sample)


def verdict(rows: list[Row]) -> str:
    return Comparison(Group(rows), [], "").answer()


def test_ranks_leave_open_what_requests_do():
    rows = [
        row("o", 0.5, "oracle"),
        row("a", 1.0, times=(1.0, 1.0)),
        row("b", 2.0, times=(0.9, 3.1)),
        row("c", 3.0, times=(3.0, 3.0)),
    ]
    _, a, b, c = rows
    assert Group(rows).ranks == {a: (1, 2, [b]), b: (1, 3, [a, c]), c: (2, 3, [b])}
    assert Group([row("a", 1.0, times=(1.0,)), row("b", 2.0, times=(2.0,))]).ranks == {}


def test_all_ranks_what_can_run_and_lists_the_rest(capsys, trace):
    args = ("--hw", "rtx3090", "--trace", str(trace), "--requests", "1", "--policy", "all", "--policy", "lru")
    code, out, err = call(capsys, *args, "--json")
    found = json.loads(out)
    ran, missing = (
        [run["applied_as"] for run in found["runs"]],
        {entry["applied_as"]: entry["reason"] for entry in found["not_run"]},
    )
    assert (code, err) == (0, "")
    assert sorted([*ran, *missing]) == list(policies())
    assert {"lru", "fine_moe", "belady"} <= set(ran)
    assert "it needs at least 64 whole experts" in missing["emoe"]
    assert "next_scores_1" in missing["mixtral_offloading"]


@pytest.mark.parametrize("name", ["emoe", "mixtral_offloading"])  # found out while running, and while setting up
def test_a_named_policy_that_cannot_run_is_listed_and_the_rest_ranked(capsys, trace, name):
    args = ("--hw", "rtx3090", "--trace", str(trace), "--requests", "1", "--policy", "lru", "--policy", name)
    code, out, err = call(capsys, *args)
    assert (code, err) == (0, "")
    assert out.startswith("lru: ")
    assert f"not run: {name}: " in out


def test_none_can_run(capsys, trace, monkeypatch):
    monkeypatch.setattr("sim.policy.registry.policies", lambda: {"lru": policies()["lru"], "fifo": policies()["fifo"]})
    code, out, err = call(capsys, "--hw", "rtx3091", "--trace", str(trace), "--policy", "all")
    assert (code, out) == (2, "")
    assert "did you mean 'rtx3090'" in err and err.count("\n") == 1
    two = ("--policy", "emoe", "--policy", "mixtral_offloading")  # found out while running, and while setting up
    code, out, err = call(capsys, "--hw", "rtx3090", "--trace", str(trace), "--requests", "1", *two)
    assert (code, out) == (2, "")
    assert [line.split(":")[:2] for line in err.splitlines()[:2]] == [["not run", f" {name}"] for name in two[1::2]]
    assert err.splitlines()[2].startswith("error: --policy, got 2 policies: none of them can run here")


def test_a_named_policy_that_breaks_a_rule_is_named(capsys, trace, monkeypatch):
    def forgets(self, gate, view):
        return ()

    monkeypatch.setattr(policies()["fifo"], "gate_done", forgets)
    named = ("--policy", "lru", "--policy", "fifo scope=global", "--policy", "lfu")
    code, out, err = call(capsys, "--hw", "rtx3090", "--trace", str(trace), *named)
    assert (code, err) == (1, "")
    assert "not run: fifo scope=global: " in out and "every needed expert" in out
    code, out, err = call(capsys, "--hw", "rtx3090", "--trace", str(trace), *named[2:4])
    assert (code, out) == (1, "")
    assert err.startswith("error: policy fifo scope=global: ") and "every needed expert must run once" in err


def test_equal_runs_are_shown_once(capsys, trace):
    names = ("accelerate", "LRU", "lru scope=layer", "on_demand", "lru", "lru scope=global")
    args = ("--hw", "rtx3090", "--trace", str(trace), *(word for name in names for word in ("--policy", name)))
    code, out, err = call(capsys, *args, "--json")
    assert code == 0
    assert sorted(run["applied_as"] for run in json.loads(out)["runs"]) == ["LRU", "accelerate", "lru scope=global"]
    assert err.splitlines() == [
        "note: lru scope=layer is the same run as LRU; it is shown once",
        "note: on_demand is the same run as accelerate; it is shown once",
        "note: lru is the same run as LRU; it is shown once",
    ]


def test_each_row_has_the_bound_of_its_own_inputs(capsys, trace):
    """One bound served two machines, so that a policy on the faster link beat what none can beat."""
    own = (
        "lfu",
        "lfu hw.h2d.bandwidth_bytes_per_s=5e10",
        "lru",
        "lfu engine.per_layer_s=1e-2",
        "lru model.norm_bias=true",
    )
    args = ("--hw", "rtx3090", "--trace", str(trace), *(word for name in own for word in ("--policy", name)))
    _, out, _ = call(capsys, *args, "--json")
    runs = {run["applied_as"]: run for run in json.loads(out)["runs"]}
    for name in own:
        policy, *settings = name.split()
        with pytest.raises(SystemExit):
            main(
                [
                    "run",
                    "--policy",
                    policy,
                    "--hw",
                    "rtx3090",
                    "--trace",
                    str(trace),
                    "--json",
                    *(word for pair in settings for word in ("--set", pair)),
                ]
            )
        alone = json.loads(capsys.readouterr().out)
        assert runs[name]["lower_bound"] == alone["lower_bound"], name
        assert (runs[name]["name"], runs[name]["overrides"]) == (alone["name"], alone["overrides"])
    assert all(run["lower_bound"]["above_frac"] >= 0 for run in runs.values())
    assert len({run["name"] for run in runs.values()}) == len(own)

    code, out, _ = call(capsys, *args[:8], "--vram", "20GB")
    lines = out.splitlines()
    assert code == 0
    assert " on rtx3090 with vram=20GB over 2 requests, " in lines[0]
    assert lines[1].endswith("2 requests; prompts of 4 tokens, outputs of 4 tokens; longest context 8 tokens")
    assert [line.startswith("lower bound: ") for line in lines].count(True) == 1
    assert "(with this link and room, hw.h2d.bandwidth_bytes_per_s=5e10)" in " ".join(map(str.strip, lines))
    slowed = [f"lru engine.copy_efficiency_frac={frac}" for frac in (0.9, 0.5)]
    out = call(capsys, *args[:4], "--policy", slowed[0], "--policy", slowed[1])[1]
    assert "(with this link and room, engine.copy_efficiency_frac=0.9)" in " ".join(map(str.strip, out.splitlines()))


def test_one_bound_is_beside_all_rows_and_each_run_keeps_its_own(capsys, trace):
    """`above bound` of a policy that uses the CPU and of one that does not were of two bounds, so the slower looked
    nearer to the best that there is."""
    names = ("lru", "fiddler", "lfu hw.h2d.bandwidth_bytes_per_s=5e10", "belady", "gpu_only")
    args = ("--hw", "rtx3090", "--trace", str(trace), *(word for name in names for word in ("--policy", name)))
    found = json.loads(call(capsys, *args, "--json")[1])
    here = [run for run in found["runs"] if run["applied_as"] != "gpu_only"]  # that has another memory
    least_s = min(run["lower_bound"]["tpot_s"] for run in here)
    assert found["common_bound"]["tpot_s"] == least_s
    assert len({run["lower_bound"]["tpot_s"] for run in here}) == 3
    for run in here:
        assert run["above_common_bound_frac"] == run["tpot_s"]["mean"] / least_s - 1 >= 0
        assert run["lower_bound"]["above_frac"] == run["tpot_s"]["mean"] / run["lower_bound"]["tpot_s"] - 1
    assert [run["above_common_bound_frac"] for run in found["runs"] if run["applied_as"] == "gpu_only"] == [None]
    out = call(capsys, *args)[1]
    shown = {line.split()[0]: line for line in out.splitlines() if " copy link" in line or " cpu" in line}
    for run in here:
        if " " not in run["applied_as"]:
            assert f" {100 * run['above_common_bound_frac']:.0f} % " in shown[run["applied_as"]]


def test_a_baseline_stands_at_one_and_all_else_is_relative_to_it(capsys, trace, tmp_path):
    args = (
        "--hw",
        "rtx3090",
        "--trace",
        str(trace),
        "--policy",
        "fiddler",
        "--policy",
        "on_demand",
        "--policy",
        "lcp",
    )
    code, out, _ = call(capsys, *args, "--against", "lfu")  # which --policy does not name
    assert code == 0
    assert re.match(r"against lfu \([\d.]+ m?s per token on rtx3090 over 2 requests\): \w+ [\d.]+x as fast", out)
    assert re.search(r"^lfu +\S+ +[\d.]+ m?s +1\.00x ", out, re.MULTILINE)
    found = json.loads(call(capsys, *args, "--against", "lfu", "--json")[1])
    base = next(run for run in found["runs"] if run["applied_as"] == found["against"] == "lfu")
    for run in found["runs"]:
        assert run["times_as_fast"] == base["tpot_s"]["mean"] / run["tpot_s"]["mean"]
        assert run["times_as_fast_ttft"] == base["ttft_s"]["mean"] / run["ttft_s"]["mean"]
        if run["applied_as"] != "lfu":
            said = re.search(rf"{run['applied_as']} ([\d.]+)x", found["answer"].split("): ")[1])
            assert float(said[1]) == pytest.approx(run["times_as_fast"], rel=5e-3)
    (tmp_path / "c.json").write_text(json.dumps(found), encoding="utf-8")
    page = called(capsys, main, "report", tmp_path / "c.json", "--json").json
    ranking = next(block for block in page["sections"][0]["blocks"] if block["kind"] == "table")
    at = [column["title"] for column in ranking["columns"]].index("vs lfu")
    assert {row[0]: row[at] for row in ranking["rows"]} == {r["applied_as"]: r["times_as_fast"] for r in found["runs"]}
    # The same run under another name is the baseline, too.
    found = json.loads(call(capsys, *args, "--policy", "lru", "--against", "lru scope=layer", "--json")[1])
    assert [run["times_as_fast"] for run in found["runs"] if run["applied_as"] == found["against"] == "lru"] == [1.0]
    code, out, err = call(capsys, *args, "--scheduler", "fcfs,sjf", "--against", "lfu")
    assert (code, out) == (2, "")
    assert "--against 'lfu, fcfs'" in err and err.count("\n") == 1


def test_a_row_equals_the_run_alone(capsys, trace):
    _, out, _ = call(capsys, "--hw", "rtx3090", "--trace", str(trace), "--policy", "lfu reset_on_evict=true", "--json")
    both = json.loads(out)["runs"][0]
    with pytest.raises(SystemExit):
        main(
            [
                "run",
                "--policy",
                "lfu",
                "--set",
                "reset_on_evict=true",
                "--hw",
                "rtx3090",
                "--trace",
                str(trace),
                "--json",
            ]
        )
    alone = json.loads(capsys.readouterr().out)
    assert both.pop("applied_as") == "lfu reset_on_evict=true"
    assert (both.pop("rank"), both.pop("tied_with")) == ([1, 1], [])
    assert both.pop("above_common_bound_frac") == both["lower_bound"]["above_frac"]
    assert {**both, "wall_s": 0} == {**alone, "wall_s": 0}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "--policy is missing"),
        (["--policy", "lrv"], "did you mean 'lru'?"),
        (["--policy", "lru", "--set", "scope=layer"], "which policy's?"),
        (["--policy", "lru scope=sideways"], "not a choice"),
        (["--policy", "lru scope"], "--policy lru, got 'scope': not NAME=VALUE; write e.g. distance=3"),
        (["--policy", " "], "got an empty name"),
        (["--policy", "lru", "--hw", "a6000"], "--hw, got it twice"),
        (["--policy", "lru", "--workers", "0"], "not in the range"),
    ],
)
def test_refusals_are_one_line(capsys, trace, args, message):
    code, out, err = call(capsys, "--hw", "rtx3090", "--trace", str(trace), *args)
    assert (code, out) == (2, "")
    assert message in err and err.count("\n") == 1


def test_out_keeps_what_report_reads(capsys, trace, tmp_path):
    args = ("--hw", "rtx3090", "--trace", str(trace), "--requests", "1", "--policy", "lru", "--policy", "lfu")
    kept = tmp_path / "new" / "kept"
    code, out, _ = call(capsys, *args, "--out", str(kept), "--json")
    assert code == 0
    assert json.loads((kept / "answer.json").read_text(encoding="utf-8")) == json.loads(out)
    code, page, _ = called(capsys, main, "report", str(kept), "--json")
    assert (code, json.loads(page)["verdict"]) == (0, json.loads(out)["answer"])
    code, out, err = call(capsys, *args, "--out", str(kept))
    assert (code, out) == (2, "")
    assert "it holds answer.json; name a new folder" in err
