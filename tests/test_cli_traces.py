"""`moesim traces show`, as people read it away from a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_help import moesim
from tiny_traces import tiny_trace

from sim.base.tables import IN_A_PIPE


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(IN_A_PIPE))
    folder = tmp_path / ("a_folder_with_a_long_name_" * 6)
    folder.mkdir()
    facts = {"gate_reuse_accuracy": "0.85", "popularity_accuracy": "0.28", "colour": "green"}
    path = tiny_trace(folder / "t.safetensors", n_requests=2, outputs=1, extra=facts)
    said = moesim(capsys, "traces", "show", path)
    assert said.code == 0
    assert said.out.splitlines()[0] == str(path)
    return said.out.splitlines()[1:]


def test_lines_fit_and_the_path_is_in_one_piece(shown: list[str]) -> None:
    assert max(map(len, shown)) <= IN_A_PIPE
    assert [line for line in shown if line != line.rstrip()] == []


def test_what_an_evaluation_found_is_explained(shown: list[str]) -> None:
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in shown}
    assert rows["gate_reuse_accuracy"].startswith("0.85 (share of a layer's experts which its gate also chooses")
    assert rows["popularity_accuracy"] == "0.28 (share of a layer's experts found by taking its most popular ones)"
    assert rows["colour"] == "green"


def test_one_request_is_no_requests(shown: list[str]) -> None:
    assert any("lengths chat" in line and " 1 request, " in line for line in shown)
