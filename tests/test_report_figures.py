"""No page shows a figure that its data does not hold: rates, sweeps, plans and calibrations; a planted one is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_help import mixtral_shaped, moesim
from test_report import data_of, plot, section, unfounded

ROOT = Path(__file__).resolve().parents[1]
SLO = "ttft_s <= 8s"


@pytest.fixture
def rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Two policies' rates, kept by `--out`."""
    path, trace = tmp_path / "rates", mixtral_shaped(tmp_path, n_requests=12)
    shared = ("--hw", "rtx3090", "--trace", trace, "--requests", 12, "--draws", 1, "--workers", 1)
    policies = ("--policy", "lru", "--policy", "lfu")
    assert moesim(capsys, "saturate", *policies, *shared, "--slo", SLO, "--out", path).code == 0
    return path / "answer.json"


def test_rates_of_several_policies_are_one_picture(rates: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told, page = json.loads(rates.read_text()), data_of(capsys, rates)
    assert (page["kind"], page["verdict"]) == ("saturation", told["answer"])
    for key in ("ttft_s.mean", "slo.goodput_tokens_per_s", "slo.attained_frac"):
        traces = plot(page, key)["traces"]
        assert [trace["name"] for trace in traces] == [one["name"] for one in told["policies"]]
        for trace, one in zip(traces, told["policies"], strict=True):
            assert trace["x"] == [at["arrivals_per_s"] for at in one["curve"]]
            assert trace["y"] == [at[key] for at in one["curve"]]
    rows = section(page, "most")["blocks"][1]["rows"]
    assert [row[0] for row in rows] == [one["name"] for one in told["policies"]]
    assert [row[3] for row in rows] == [one["kept_per_s"]["mean"] for one in told["policies"]]
    assert len(section(page, "rates")["blocks"][0]["rows"]) == sum(len(one["curve"]) for one in told["policies"])


def test_rates_without_a_promise_have_no_goodput(rates: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(rates.read_text())
    for one in told["policies"]:
        one["kept_per_s"] = None
        for at in one["curve"]:
            at["slo.attained_frac"] = at["slo.goodput_tokens_per_s"] = None
    rates.write_text(json.dumps(told | {"slo": {}}))
    names = [
        block["name"] for part in data_of(capsys, rates)["sections"] for block in part["blocks"] if "name" in block
    ]
    assert names == ["ttft_s.mean", "queue_s.mean", "tpot_s.mean"]  # and of 12 requests no p95


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"policies": []}, "0 policies"),
        ({"policies": [{"name": "lru"}]}, "missing required field"),
        ({"attain_frac": "all"}, "attain_frac"),
    ],
)
def test_what_are_no_rates(change: dict[str, Any], said: str, rates: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates.write_text(json.dumps(json.loads(rates.read_text()) | change))
    found = moesim(capsys, "report", rates)
    assert (found.code, said in found.error) == (2, True)


def swept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    trace = mixtral_shaped(tmp_path)
    axes = ("--policy", "lru", "--policy", "lfu", "--hw", "rtx3090", "--cache", "40experts,60experts", "--trace", trace)
    assert moesim(capsys, "sweep", *axes, "--out", tmp_path / "sweep").code == 0
    return tmp_path / "sweep"


def planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    asked = ("--trace", mixtral_shaped(tmp_path), "--hw", "rtx3090", "--policy", "lru", "--policy", "lfu")
    path = tmp_path / "plan.json"
    path.write_text(moesim(capsys, "plan", *asked, "--goal", "tpot_s.mean <= 500ms", "--json").out, encoding="utf-8")
    return path


def planned_for_a_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    asked = ("--trace", mixtral_shaped(tmp_path, n_requests=12), "--hw", "rtx3090", "--policy", "lru")
    load = ("--arrivals", "poisson:0.1", "--requests", 12, "--slo", SLO, "--goal", "slo_attainment >= 0.8")
    path = tmp_path / "plan.json"
    path.write_text(moesim(capsys, "plan", *asked, *load, "--workers", 1, "--json").out, encoding="utf-8")
    told, page = json.loads(path.read_text()), data_of(capsys, path)
    facts = {one["title"]: one["value"] for one in section(page, "best")["blocks"][0]["items"]}
    assert facts["reached up to, requests/s"] == told["up_to_rate"]["per_s"]
    assert facts["replicas"] == told["best"]["replicas"] > 1
    names = {name for trace in plot(page, "goal-1")["traces"] for name in trace["x"]}
    assert f"{told['best']['replicas']} replicas of rtx3090" in names
    return path


def calibrated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    return ROOT / "reports" / "validation" / "cpu-backend.yaml"


@pytest.mark.parametrize("made", [swept, planned, planned_for_a_load, calibrated])
def test_every_figure_is_in_its_data(made: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _held(made(tmp_path, capsys), tmp_path, capsys)


def test_every_rate_is_in_its_data(rates: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _held(rates, tmp_path, capsys)


def _held(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    assert moesim(capsys, "report", path, "-o", out).code == 0
    page = out.read_text(encoding="utf-8")
    assert unfounded(page) == []
    at = page.index("</main>")
    assert unfounded(f"{page[:at]}<p>kept by 98.7654321 %</p>{page[at:]}") == ["kept by 98.7654321 %"]
