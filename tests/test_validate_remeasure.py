"""The script that measures the CPU backend anew: its commands are valid, parts fit together, the table is pasted."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
import yaml

pytest.importorskip("torch")

from sim.base.files import bundled
from sim.real.comparison import read
from sim.real.validate_text import kept_text
from tools.validation import remeasure, repredict

KEPT = read(bundled("reports.validation", ".json")["cpu-backend"])


def stand_in(folder, model, said):
    """A `moesim` that writes what a comparison would have kept."""

    def run(words):
        said.append(words[0])
        if words[0] == "validate":
            part = {
                **KEPT,
                "profile": Path(words[words.index("--hw") + 1]).stem,
                "load": [1.0, 2.0, 3.0],
                "wrong": [f"wrong {len(said)}"],
            }
            Path(words[words.index("--out") + 1]).write_text(json.dumps(part))
        return 1 if words[0] == "validate" else 0

    return run


def test_parts_are_put_together(tmp_path):
    said = []
    data = remeasure.measure(tmp_path, remeasure.PLANS, stand_in(tmp_path, "m", said), lambda _: None)
    assert said == ["calibrate", "validate"] * 2
    assert {path.name for path in tmp_path.iterdir()} == {"cpu-backend.json"}
    assert data["profile"] == "cpu-backend, cpu-backend-medium"
    assert len(data["comparisons"]) == 2 * len(KEPT["comparisons"])
    assert data["wrong"] == ["wrong 2", "wrong 4"]
    assert data["tpot_s_worst_error_frac"] == KEPT["tpot_s_worst_error_frac"]
    assert json.loads(json.dumps(read(tmp_path / "cpu-backend.json"))) == json.loads(json.dumps(data))
    with pytest.raises(click.ClickException, match="calibrate for cpu-small ended with 2"):
        remeasure.measure(tmp_path, remeasure.PLANS, lambda _: 2, lambda _: None)


def test_the_table_takes_the_place_of_the_old_one(tmp_path):
    page = tmp_path / "validate.md"
    head = "<!-- output of: moesim validate --table cpu-backend -->\n```text\n"
    page.write_text(f"before\n{head}old\ntable\n```\nafter\n```\n")
    remeasure.refresh(page, kept_text([KEPT]))
    assert page.read_text() == f"before\n{head}{kept_text([KEPT]).rstrip()}\n```\nafter\n```\n"
    page.write_text("nothing of the kind")
    with pytest.raises(click.ClickException, match="no block that begins with"):
        remeasure.refresh(page, "x")


@pytest.mark.thorough
def test_a_prediction_knows_that_copies_up_and_down_slow_each_other(monkeypatch, tmp_path):
    """Terms that only SimPy knows count in `validate`, too: where both are 0.6, this is 10 % less without them."""
    case = next(one for one in repredict.kept_cases() if one["policy"] == "mixtral_offloading" and one["experts"] == 64)
    found = repredict.again(case)
    assert found.now_s == pytest.approx(found.then_s, rel=0.04)  # policy code is charged evenly, not as it ran
    profile = yaml.safe_load((repredict.HERE / f"{case['hw']}.yaml").read_text(encoding="utf-8"))
    for term in ("h2d_slowdown_by_d2h", "d2h_slowdown_by_h2d"):
        profile["contention"][term]["value"] = 0.6
    (tmp_path / f"{case['hw']}.yaml").write_text(yaml.safe_dump(profile), encoding="utf-8")
    monkeypatch.setattr(repredict, "HERE", tmp_path)
    assert repredict.again(case, contention=False).now_s < 0.95 * repredict.again(case).now_s


@pytest.mark.thorough
def test_todays_predictions_are_no_worse_than_the_kept_ones():
    """But for policy code, which is charged evenly here and as it ran there: half a point."""
    median, worst = repredict.errors(repredict.again(case) for case in repredict.kept_cases())
    assert median <= KEPT["tpot_s_median_error_frac"] + 0.005
    assert worst <= KEPT["tpot_s_worst_error_frac"] + 0.005
