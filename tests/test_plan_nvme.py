"""Plans above a drive say what trying every host memory and drive says."""

from __future__ import annotations

from typing import Any

import pytest
from cli_help import mixtral_shaped, moesim

import moesim as face

HOSTS, DRIVES, POLICIES = (30e9, 60e9), ("gen3x4", "gen5x4"), ("lru", "lfu")


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What all points have in common: a trace of two requests, in this process."""
    return {"trace": mixtral_shaped(tmp_path_factory.mktemp("drive")), "workers": 1}


@pytest.fixture(scope="module")
def brute(fixed: dict[str, Any]) -> list[dict[str, Any]]:
    """Every point, the smallest setting first."""
    axes = {"ram": [int(host) for host in HOSTS], "drive": list(DRIVES)}
    rows = face.sweep(POLICIES, "rtx3090", **axes, **fixed).to_dict("records")
    return sorted(rows, key=lambda row: (row["ram_bytes"], DRIVES.index(row["drive"])))


def test_each_host_memory_and_drive_has_a_bound_of_its_own(brute: list[dict[str, Any]], fixed: dict[str, Any]) -> None:
    """Bounds are shared by points that differ in the policy alone; a run that shares none says the same."""
    least = {(row["ram_bytes"], row["drive"]): row["lower_bound.tpot_s"] for row in brute}
    assert {row["lower_bound.tpot_s"] for row in brute} == set(least.values())
    assert least[30e9, "gen3x4"] > max(least[60e9, "gen3x4"], least[30e9, "gen5x4"])
    alone = face.simulate("lfu", "rtx3090", ram=30 * 10**9, drive="gen3x4", trace=fixed["trace"])
    assert alone.lower_bound.tpot_s == least[30e9, "gen3x4"]


def test_figures_of_the_drive_are_set_in_a_plan(fixed: dict[str, Any]) -> None:
    axes = {"ram": int(30e9), "drive": "gen3x4:depth=8", "goal": "tpot_s.mean <= 1ms", **fixed}
    slow, fast = (
        face.plan(policy="lfu", hw="rtx3090", set={"hw.drive.bandwidth_bytes_per_s": rate}, no_suggestions=True, **axes)
        for rate in (2e9, 9e9)
    )
    seconds = [frame.attrs["plan"]["candidates"][0]["bounds"][0]["value"] for frame in (slow, fast)]
    assert seconds[0] > 2 * seconds[1]


@pytest.mark.parametrize("factor", [0.9, 1.2, 2.5])
def test_the_smallest_host_memory_and_drive_that_reach_a_goal(
    factor: float, brute: list[dict[str, Any]], fixed: dict[str, Any]
) -> None:
    goal_s = factor * min(row["tpot_s.mean"] for row in brute)
    axes = {"ram": [int(host) for host in HOSTS], "drive": list(DRIVES)}
    frame = face.plan(
        f"tpot_s.mean <= {goal_s}", POLICIES, "rtx3090", no_suggestions=True, all_machines=True, **axes, **fixed
    )
    best = frame.attrs["plan"]["best"]
    reaching = [row for row in brute if row["tpot_s.mean"] <= goal_s]
    if not reaching:
        assert best is None
    else:
        first = [
            row
            for row in reaching
            if (row["ram_bytes"], row["drive"]) == (reaching[0]["ram_bytes"], reaching[0]["drive"])
        ]
        fastest = min(first, key=lambda row: row["tpot_s.mean"])
        assert (best["ram_bytes"], best["drive"]) == (fastest["ram_bytes"], fastest["drive"])
        assert (best["policy"], best["figures"][0]["value"]) == (fastest["label"], fastest["tpot_s.mean"])
    met = {(row["ram_bytes"], row["drive"], row["label"]): row["tpot_s.mean"] <= goal_s for row in brute}
    assert len(frame) == len(brute)
    for one in frame.to_dict("records"):
        assert one["tpot_s.mean.bound"] <= goal_s or one["state"] == "excluded_by_bound"
        if one["state"] == "excluded_by_bound":
            assert not met[one["ram_bytes"], one["drive"], one["policy"]]


def test_what_a_faster_drive_or_more_host_memory_would_do(capsys: Any, fixed: dict[str, Any]) -> None:
    words = ("--hw", "rtx3090", "--policy", "lfu", "--drive", "gen4x4", "--ram", "40GB", "--trace")
    goal = ("--goal", "tpot_s.mean <= 1s", "--workers", "1")
    status, out, _ = moesim(capsys, "plan", *words, fixed["trace"], "--model", "mixtral-8x7b", *goal)
    assert status == 1
    assert "rtx3090 and 40.0 GiB of host memory above gen4x4" in " ".join(out.split())
    assert "drives: reads=direct and start=cold by default, since engine bare maps no file" in " ".join(out.split())
    assert any(line.split()[:2] == ["drive", "bandwidth"] for line in out.splitlines())
    assert any(line.split()[:2] == ["host", "memory"] for line in out.splitlines())
