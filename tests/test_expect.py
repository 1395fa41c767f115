"""`simulate --expect`: a figure of the result that does not keep to its bound is exit 1, and says what it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_help import mixtral_shaped, simulated

from sim.base.errors import BadInput
from sim.results.expectations import judged, parsed

RESULT = {
    "hit_rate": 0.25,
    "h2d_bytes": 4_000_000,
    "tpot_s": {"mean": 0.5, "p95": None},
    "caveats": ["lossy"],
    "prefetch": {"useful": {"n": 3}},
    "real": True,
    "policy": "lru",
}


def verdict(text: str) -> tuple[bool, str]:
    (only,) = judged(parsed((text,)), RESULT)
    return only.held, only.line


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("hit_rate >= 0.25", True),
        ("hit_rate>0.25", False),
        ("hit_rate <= 0.25", True),
        ("hit_rate<0.25", False),
        ("hit_rate==0.25", True),
        ("hit_rate == 0.26", False),
        (" tpot_s.mean < 6e-1 ", True),
        ("tpot_s.mean>1", False),
        ("h2d_bytes <= 4MB", True),
        ("h2d_bytes < 4MB", False),
        ("h2d_bytes > 3 MiB", True),
        ("prefetch.useful.n >= 3", True),
        ("tpot_s.p95 < 1e9", False),
        ("tpot_s.p95 > -1", False),
        ("hit_rate >= 25%", True),
        ("hit_rate > 25 %", False),
        ("tpot_s.mean <= 500ms", True),
        ("tpot_s.mean < 0.5s", False),
        ("tpot_s.mean < 1min", True),
        ("hit_rate > -1", True),
    ],
)
def test_comparisons(text: str, held: bool) -> None:
    assert verdict(text)[0] is held


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hit_rate",
        "hit_rate => 1",
        "hit_rate >",
        "> 1",
        "hit_rate > x",
        "hit_rate > nan",
        "hit_rate > 1 > 2",
        "hit_rate >= inf",
        "tpot_s.mean < 5MB",
        "h2d_bytes < 5MX",
        "tpot_s.mean < 5%",
        "hit_rate > 650ms",
        "prefetch.useful.n > 30%",
    ],
)
def test_what_is_no_comparison_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match=r"--expect, got"):
        parsed((text,))


@pytest.mark.parametrize(
    ("key", "way_out"),
    [
        ("hitrate", "'hit_rate'"),
        ("tpot_s", "one of tpot_s.mean, tpot_s.n, tpot_s.p50, tpot_s.p90, tpot_s.p95"),
        ("caveats", "known: "),
        ("policy", "known: "),
        ("real", "known: "),
    ],
)
def test_only_figures_can_be_expected(key: str, way_out: str) -> None:
    with pytest.raises(BadInput) as refused:
        verdict(f"{key} > 0")
    assert way_out in str(refused.value)


def test_a_figure_that_has_to_be_asked_for_says_how() -> None:
    with pytest.raises(
        BadInput, match=r"'energy\.joules_per_token': the run was not asked for it; add --set sim.energy=gpu"
    ):
        verdict("energy.joules_per_token <= 100")
    (only,) = judged(parsed(("energy.mean_w <= 100",)), {**RESULT, "energy": {"mean_w": 90.0}})
    assert only.held
    with pytest.raises(BadInput, match=r"did you mean 'energy\.mean_w'"):
        judged(parsed(("energy.mean <= 100",)), {**RESULT, "energy": {"mean_w": 90.0}})


def test_the_exit_status_of_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = ("--policy", "lru", "--hw", "rtx3090", "--trace", mixtral_shaped(tmp_path), "--json")
    met = simulated(capsys, *run, "--expect", "requests == 2", "--expect", "miss_rate >= 0")
    assert met.code == 0
    assert met.err.splitlines()[0] == "met: requests == 2: it is 2"
    told = json.loads(met.out)["expectations"]
    assert told[0] == {"key": "requests", "sign": "==", "bound": 2.0, "written": "2", "value": 2, "met": True}
    missed = simulated(capsys, *run, "--expect", "requests == 2", "--expect", "miss_rate < 0")
    assert missed.code == 1
    out = json.loads(missed.out)  # the result is still the only thing on standard output
    assert (out["requests"], [one["met"] for one in out["expectations"]]) == (2, [True, False])
    assert missed.err.splitlines()[1].startswith("not met: miss_rate < 0: it is ")


def test_it_is_read_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert "not KEY >= NUMBER" in simulated(capsys, "--policy", "lru", "--hw", "nothing", "--expect", "hit").error
    misspelt = simulated(capsys, "--policy", "lru", "--hw", "nothing", "--expect", "hit_rat >= 1")
    assert (misspelt.code, misspelt.out) == (2, "")
    assert "no figure of a result" in misspelt.error
    assert "did you mean 'hit_rate'?" in misspelt.error
    real = simulated(capsys, "--policy", "lru", "--hw", "rtx3090", "--real", "--expect", "hit_rate > 0")
    assert "measured figures differ" in real.error
