"""`moesim compare`: one row per policy, ranked, on equal terms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_traces import tiny_trace

from sim.cli import main

LEVELS = {"weights", "scores", "token_ids", "embeddings", "tasks"}


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("compare") / "t.safetensors"
    return tiny_trace(path, 32, 8, 2, n_requests=4, prompt=4, outputs=5, levels=LEVELS)


def call(capsys, *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["compare", *args])
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


def test_it_ranks_systems_and_lists_bounds_beside_them(capsys, trace):
    code, out, _ = call(
        capsys, "--hw", "rtx3090", "--trace", str(trace), "--policy", "lru", "--policy", "lru scope=layer", "--policy",
        "belady", "--policy", "gpu_only", "--json",
    )  # fmt: skip
    runs = json.loads(out)["runs"]
    assert code == 0
    assert sorted(run["as"] for run in runs) == ["belady", "gpu_only", "lru", "lru scope=layer"]
    times = [run["tpot_s"]["mean"] for run in runs]
    assert times == sorted(times)
    assert runs[0]["as"] == "gpu_only"
    assert len({run["expert_budget_bytes"][0] for run in runs if run["as"] != "gpu_only"}) == 1


def test_the_verdict_names_the_fastest_system_not_a_bound(capsys, trace):
    names = ("gpu_only", "lfu", "on_demand")
    args = ("--hw", "rtx3090", "--trace", str(trace), *(word for name in names for word in ("--policy", name)))
    code, out, _ = call(capsys, *args)
    assert code == 0
    assert out.startswith("lfu: ") and "faster than on_demand" in out.splitlines()[0]
    assert "does not fit" in out


def test_a_row_equals_the_run_alone(capsys, trace):
    _, out, _ = call(capsys, "--hw", "rtx3090", "--trace", str(trace), "--policy", "lfu reset_on_evict=true", "--json")
    both = json.loads(out)["runs"][0]
    with pytest.raises(SystemExit):
        main(["run", "--policy", "lfu", "--set", "reset_on_evict=true", "--hw", "rtx3090", "--trace", str(trace),
              "--json"])  # fmt: skip
    alone = json.loads(capsys.readouterr().out)
    assert {**both, "wall_s": 0, "as": 0} == {**alone, "wall_s": 0, "as": 0}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "--policy is missing"),
        (["--policy", "lrv"], "did you mean 'lru'?"),
        (["--policy", "lru", "--set", "scope=layer"], "which policy's?"),
        (["--policy", "lru scope=sideways"], "not a choice"),
        (["--policy", "lru scope"], "not key=value"),
    ],
)
def test_refusals_are_one_line(capsys, trace, args, message):
    code, out, err = call(capsys, "--hw", "rtx3090", "--trace", str(trace), *args)
    assert (code, out) == (2, "")
    assert message in err and err.count("\n") == 1
