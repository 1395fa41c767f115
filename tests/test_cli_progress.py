"""Progress bars: who sees one, when, and what it says."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from sim.cli import calibrate, progress
from sim.cli.progress import Bar, bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def watched(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal on standard error; called by the test itself, since pytest replaces what a fixture has set."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("sys.stderr", shown := Terminal())
    return shown


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [100.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    return now_s


def test_a_bar_appears_once_a_second_has_gone_by(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    terminal = watched(monkeypatch)
    with Bar("reading") as shown:
        assert shown.progress is not None
        clock[0] += 0.9
        shown.progress(1, 4)
        assert terminal.getvalue() == ""
        clock[0] += 0.2
        shown.progress(3, 4)
    assert "reading" in terminal.getvalue()
    assert "75%" in terminal.getvalue()


def test_nothing_is_shown_where_nobody_looks(capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
    with Bar("reading") as shown, bar("writing") as told:
        clock[0] += 2.0
        assert shown.progress is None
        shown.update(1, 2)
        told(1, 2)
    assert capsys.readouterr().err == ""


def test_calibration_names_probe_and_point(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    terminal = watched(monkeypatch)
    with Bar("starting") as shown:
        told = calibrate.told_on(False, shown)
        clock[0] += 2.0
        told.probe("copy", 0)
        assert "round 1: copy" in terminal.getvalue()
        told.point("copy", {"bytes": 4096, "kind": "pinned"}, 0.25)
    assert "round 1: copy 4096 pinned" in terminal.getvalue() and "25%" in terminal.getvalue()


def test_recording_counts_requests_and_rows(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    terminal = watched(monkeypatch)
    from sim.cli import record

    recorder = pytest.importorskip("traces.record.recorder")

    def recorded(*args: Any) -> Any:
        clock[0] += 2.0
        args[3](3, 12, 4567)
        return recorder.Recorded(args[0].out, args[0].out, 12, fresh=False)

    monkeypatch.setattr(recorder, "record", recorded)
    record.command.main(["mixtral-8x7b-small", "--out", "t.safetensors"], standalone_mode=False)
    assert "recorded 3 of 12 requests, 4,567 rows" in terminal.getvalue()
