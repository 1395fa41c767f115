"""`moesim policies`."""

from __future__ import annotations

import pytest
from cli_help import moesim

from sim.policy.registry import policies


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
