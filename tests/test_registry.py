"""Third-party policies that cannot be used are told of and left out; everything else goes on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from cli_help import mixtral_shaped, moesim, simulated

from sim.policy import registry
from sim.policy.registry import GROUP, find, policies, unusable

GOOD = "policies.lru:Lru"  # known already: found twice is found once
THEIRS = {
    "good": GOOD,
    "broken": "no_such_package_of_theirs:Policy",
    "number": "math:pi",
    "twin": "clash_of_names:Lru",
}


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    (tmp_path / "clash_of_names.py").write_text("from sim.policy import Policy\nclass Lru(Policy):\n    name = 'lru'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    entries = [EntryPoint(name, value, GROUP) for name, value in THEIRS.items()]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: entries if group == GROUP else [])
    registry._scan.cache_clear()
    yield
    monkeypatch.undo()
    registry._scan.cache_clear()


@pytest.mark.usefixtures("theirs")
def test_others_go_on() -> None:
    assert find("lru").__module__ == "policies.lru"
    assert list(unusable()) == ["broken", "number", "twin"]
    assert not set(unusable()) & set(policies())


@pytest.mark.usefixtures("theirs")
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("broken", r"no_such_package_of_theirs:Policy', got ModuleNotFoundError .*: repair or uninstall that package"),
        ("number", r"number = math:pi: must name a sim.policy.Policy with a name"),
        ("twin", r"'lru', got it from policies.lru and again from clash_of_names: names are unique; rename the latter"),
    ],
)
def test_what_is_left_out_is_said(capsys: pytest.CaptureFixture[Any], tmp_path: Path, name: str, why: str) -> None:
    trace = mixtral_shaped(tmp_path)
    assert re.search(why, simulated(capsys, "--policy", name, "--hw", "rtx3090").error)
    listed = moesim(capsys, "policies")
    assert listed.code == 0
    assert re.search(why, listed.err)
    several = moesim(
        capsys, "compare", "--policy", "all", "--hw", "rtx3090", "--trace", trace, "--requests", 1, "--experts", 100
    )
    assert several.code == 0
    assert name in several.out
    ran = simulated(capsys, "--policy", "lru", "--hw", "rtx3090", "--trace", trace, "--requests", 1)
    assert (ran.code, ran.err) == (0, "")
