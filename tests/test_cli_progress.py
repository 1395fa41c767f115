"""Progress bars: who sees one, when, and what it says."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from sim.cli import calibrate, progress
from sim.cli.progress import Bar, TrainingBar, bar


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


def test_a_title_holds_until_the_next_one(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    terminal = watched(monkeypatch)
    with Bar("starting") as shown:
        shown.update(0, 2, "first")  # too early to be seen
        clock[0] += 2.0
        shown.update(1, 2)
    assert "first" in terminal.getvalue() and "starting" not in terminal.getvalue()


def test_nothing_is_shown_where_nobody_looks(capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
    with Bar("reading") as shown, bar("writing") as told:
        clock[0] += 2.0
        assert shown.progress is None
        shown.update(1, 2)
        told(1, 2)
    assert capsys.readouterr().err == ""


def test_training_says_so_line_by_line_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    with TrainingBar() as shown:
        for done in range(1, 41):
            shown.told(done, 40, 0.5)
    assert len(lines := capsys.readouterr().err.splitlines()) == 10
    assert lines[0] == "4 of 40 steps, loss 0.5000"


def test_training_shows_a_bar_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watched(monkeypatch)
    with TrainingBar() as shown:
        assert "training" in terminal.getvalue()
        shown.told(20, 40, 0.25)
    assert "loss 0.2500" in terminal.getvalue() and "steps" not in terminal.getvalue()


def test_calibration_names_probe_and_point(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    terminal = watched(monkeypatch)
    with Bar("starting") as shown:
        told = calibrate.told_on(False, shown)
        clock[0] += 2.0
        told.probe("copy", 0)
        assert "round 1: copy" in terminal.getvalue()
        told.point("copy", {"bytes": 4096, "kind": "pinned"}, 0.25)
    assert "round 1: copy 4096 pinned" in terminal.getvalue() and "25%" in terminal.getvalue()


def test_a_probe_without_points_is_named_too(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    terminal = watched(monkeypatch)
    with Bar("starting") as shown:
        told = calibrate.told_on(False, shown)
        told.probe("copy", 0)
        told.point("copy", {"bytes": 4096}, 1.5)
        clock[0] += 2.0
        told.probe("lanes, cpu-small: gate", 0)
    assert "round 1: lanes, cpu-small: gate" in terminal.getvalue() and "100%" in terminal.getvalue()


def test_calibration_in_a_log_is_a_line_per_probe(capsys: pytest.CaptureFixture[str]) -> None:
    for quiet in (True, False):
        told = calibrate.told_on(quiet, Bar("starting"))
        told.probe("copy", 0)
        told.point("copy", {"bytes": 4096}, 0.25)
    assert capsys.readouterr().err == "  round 1: copy\n"


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
