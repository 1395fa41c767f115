"""`moesim.compare` says what `moesim compare --json` says, as a DataFrame."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_help import mixtral_shaped, moesim

import moesim as face
from sim.figures import numbers


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixtral_shaped(tmp_path_factory.mktemp("traces"))


def test_the_same_rows(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    policies = ["lru", "lfu scope=layer", "belady", "llama_cpp"]
    asked = [word for policy in policies for word in ("--policy", policy)]
    told = moesim(capsys, "compare", *asked, "--hw", "rtx3090", "--trace", trace, "--vram", "20GB", "--json").json
    table = face.compare(policies, "rtx3090", trace=trace, vram="20GB")
    assert list(table["applied_as"]) == [run["applied_as"] for run in told["runs"]]
    assert table.attrs["answer"] == told["answer"]
    assert table.attrs["realism"] == told["realism"]
    for (_, row), run in zip(table.iterrows(), told["runs"], strict=True):
        run.pop("by_layer")
        own = dict(numbers(run))
        assert len(own) > 100
        for key, value in own.items():
            if key.startswith(("params.", "overrides.")) or key == "wall_s":
                continue
            assert (row[key] != row[key] or row[key] is None) if value is None else row[key] == value, key
        for key in ("applied_as", "run_id", "caveats", "rank", "tied_with", "params", "overrides"):
            assert row[key] == run[key], key
    assert table["tpot_s.mean"].dtype == "float64"
    assert table["demand_copies.n"].dtype == "int64"


def test_a_class_and_what_cannot_run(trace: Path, tmp_path: Path) -> None:
    from policies.lru import Lru

    alone = face.compare(Lru, "rtx3090", trace=trace, requests=1)
    assert alone["tpot_s.mean"][0] == face.simulate(Lru, "rtx3090", trace=trace, requests=1).tpot_s.mean
    few = face.compare(["lru scope=global", "all"], "rtx3090", trace=trace, requests=1, gpus=2, cache="40experts")
    assert "duoserve" in few.attrs["not_run"]
    assert set(few["applied_as"]).isdisjoint(few.attrs["not_run"])
