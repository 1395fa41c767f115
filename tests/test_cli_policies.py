"""`moesim policies`."""

from __future__ import annotations

import re

import pytest
from cli_help import moesim

from sim.policy.registry import policies


def test_every_policy_is_listed_on_one_line_and_what_is_known_from_notes_under_a_heading(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = moesim(capsys, "policies").out.splitlines()
    heading = next(at for at, line in enumerate(lines) if line.startswith("Known from third parties' notes"))
    above, below = ([line.split()[0] for line in part] for part in (lines[2 : heading - 1], lines[heading + 4 : -1]))
    notes = [name for name, kind in policies().items() if kind.from_notes]
    assert below == notes
    assert above == [name for name in policies() if name not in notes]
    assert lines[-1].startswith(f"{len(policies())} policies.")


def test_a_source_says_of_notes_what_the_policy_declares() -> None:
    partly = {"moe_lightning"}  # the paper was read, too
    said = {name for name, kind in policies().items() if "notes" in kind.source}
    assert said - partly == {name for name, kind in policies().items() if kind.from_notes}


@pytest.mark.parametrize("name", policies())
def test_a_page_shows_every_parameter(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    kind, page = policies()[name], moesim(capsys, "policies", name).out
    assert kind.source in page
    for param in kind.params:
        assert any(line.startswith(f"{param.name} ") for line in page.splitlines()), param.name
    assert max(len(line) for line in page.splitlines()) <= 100


def test_aliases_and_near_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert moesim(capsys, "policies", "vllm").out.startswith("gpu_only:")
    assert "did you mean 'belady'" in moesim(capsys, "policies", "beladi").error


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert [entry["name"] for entry in moesim(capsys, "policies", "--json").json] == list(policies())
    page = moesim(capsys, "policies", "fine_moe", "--json").json
    capacity = next(param for param in page["params"] if param["name"] == "capacity")
    assert capacity["default"] == 1000
    assert capacity["low"] == 1
    assert page["needs"] == ["embeddings", "experts", "scores"]


def test_an_unknown_verb_has_a_near_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'policies'" in moesim(capsys, "polices").error


def test_lists_and_formulas_of_a_docstring_keep_their_lines(capsys: pytest.CaptureFixture[str]) -> None:
    page = moesim(capsys, "policies", "moe_infinity").out.splitlines()
    items = [number for number, line in enumerate(page) if line.startswith("- `variant=")]
    assert len(items) == 3
    for first, following in zip(items, [*items[1:], page.index("", items[-1])], strict=True):
        assert all(line.startswith("  ") for line in page[first + 1 : following])
    assert not any("   " in line.strip() for line in page[: page.index("", items[-1])])
    assert "    1 / (1/3 x 2/16 + 2/3 x 1/10) = 9.23 by this arithmetic." in moesim(capsys, "policies", "floe").out


def test_ranges_read_as_people_write_them(capsys: pytest.CaptureFixture[str]) -> None:
    pages = {name: moesim(capsys, "policies", name).out for name in ("random", "duoserve")}
    assert re.search(r"^seed +0 +from 0 ", pages["random"], re.MULTILINE)
    assert not any("e+" in page for page in pages.values())
