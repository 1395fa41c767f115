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
    "five": "declared_wrongly:Five",
    "aliases": "declared_wrongly:Aliases",
    "property": "declared_wrongly:Property",
    "raising": "declared_wrongly:Raising",
    "escapes": "declared_wrongly:Escapes",
    "traits": "declared_wrongly:Traits",
    "interrupting": "raises_on_import:Policy",
}
DECLARED_WRONGLY = """
from policies.lru import Lru
class Five(Lru):
    name = 5
class Aliases(Lru):
    name, aliases = "aliases", 5
class Property(Lru):
    name = "property"
    title = property(lambda self: 1 / 0)
class Meta(type(Lru)):
    @property
    def title(cls):
        raise RuntimeError("no title today")
class Raising(Lru, metaclass=Meta):
    name = "raising"
class Escapes(Lru):
    name = "a\\x1b[31mb"
class Traits(Lru):
    name, traits = "traits", 7
"""


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    (tmp_path / "clash_of_names.py").write_text("from sim.policy import Policy\nclass Lru(Policy):\n    name = 'lru'\n")
    (tmp_path / "declared_wrongly.py").write_text(DECLARED_WRONGLY)
    (tmp_path / "raises_on_import.py").write_text("raise KeyboardInterrupt\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    entries = [EntryPoint(name, value, GROUP) for name, value in THEIRS.items()]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: entries if group == GROUP else [])
    registry._scan.cache_clear()
    yield
    monkeypatch.undo()
    registry._scan.cache_clear()


def test_every_policy_of_ours_loads() -> None:
    """Each file and folder of `policies/` is one or several policies; one that fails at import would go unseen."""
    assert unusable() == {}
    here = Path(registry.__file__).parents[2] / "policies"
    found = {kind.__module__.split(".")[1] for kind in policies().values() if kind.__module__.startswith("policies.")}
    places = {place.stem for place in here.iterdir() if place.suffix == ".py" or (place / "__init__.py").is_file()}
    assert places - {"__init__", "common"} == found


@pytest.mark.usefixtures("theirs")
def test_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find("lru").__module__ == "policies.lru"
    monkeypatch.setattr(registry, "pressed", lambda error: False)  # outside a command, nobody could tell
    assert list(unusable()) == list(THEIRS)[1:]
    assert not set(policies()) & {"broken", "number", "twin", "five", "property"}


@pytest.mark.usefixtures("theirs")
@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("broken", r"no_such_package_of_theirs:Policy', got ModuleNotFoundError .*: repair or uninstall that package"),
        ("number", r"number = math:pi, got float 3.14.*: it must name a class derived from sim.policy.Policy"),
        ("twin", r"'lru', got it from policies.lru and again from clash_of_names: names are unique; rename the latter"),
        ("five", r"declared_wrongly:Five, got name 5: a text that can be printed; repair or uninstall that package"),
        ("aliases", r"got aliases 5: a tuple of texts"),
        ("property", r"got title <property object at .*: a text"),
        ("raising", r"got RuntimeError \(no title today\)"),
        ("escapes", r"got name 'a\\x1b\[31mb': a text that can be printed"),
        ("traits", r"got traits 7: a set of texts"),
        ("interrupting", r"raises_on_import:Policy', got KeyboardInterrupt"),
    ],
)
def test_what_is_left_out_is_said(capsys: pytest.CaptureFixture[Any], tmp_path: Path, name: str, why: str) -> None:
    trace = mixtral_shaped(tmp_path)
    assert re.search(why, simulated(capsys, "--policy", name, "--hw", "rtx3090").error)
    listed = moesim(capsys, "policies")
    assert listed.code == 0
    assert re.search(why, listed.err)
    several = moesim(
        capsys,
        "compare",
        "--policy",
        "all",
        "--hw",
        "rtx3090",
        "--trace",
        trace,
        "--requests",
        1,
        "--cache",
        "100experts",
    )
    assert several.code == 0
    assert name in several.out
    ran = simulated(capsys, "--policy", "lru", "--hw", "rtx3090", "--trace", trace, "--requests", 1)
    assert (ran.code, ran.err) == (0, "")
