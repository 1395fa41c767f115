"""What `--out` and `--force` may replace, what is known before the work, and where finished work goes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from cli_help import Said, mixtral_shaped, simulated

from sim import run
from sim.base.errors import BadInput
from sim.results import sinks

LINKS = pytest.mark.skipif(os.name != "posix", reason="symbolic links without a privilege")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixtral_shaped(tmp_path_factory.mktemp("traces"))


@pytest.fixture
def simulate(capsys: pytest.CaptureFixture[str], trace: Path) -> Any:
    def call(*args: object) -> Said:
        return simulated(capsys, "--policy", "lru", "--hw", "rtx3090", "--trace", trace, *args)

    return call


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that begins is a failure."""

    def began(*_: object, **__: object) -> None:
        raise AssertionError("the run began")

    monkeypatch.setattr(sinks, "told", began)


def refused(said: Said) -> str:
    assert said.code == 2
    assert said.out == ""
    (line,) = said.err.splitlines()
    return line


@pytest.mark.usefixtures("no_work")
class TestNoRun:
    """`--force` replaces a run, which its result makes known; names alone make none."""

    def test_a_folder_that_is_called_like_a_file_of_a_run(self, simulate: Any, tmp_path: Path) -> None:
        (tmp_path / "a" / "config.yaml").mkdir(parents=True)
        (tmp_path / "a" / "config.yaml" / "thesis.tex").write_text("precious")
        line = refused(simulate("--out", tmp_path / "a", "--force"))
        assert "it holds 'config.yaml', which is no part of a run" in line
        assert (tmp_path / "a" / "config.yaml" / "thesis.tex").read_text() == "precious"

    def test_somebodys_own_configuration(self, simulate: Any, tmp_path: Path) -> None:
        (tmp_path / "config.yaml").write_text("mine: 1")
        assert "it holds 'config.yaml' and no result of a run" in refused(simulate("--out", tmp_path, "--force"))
        assert (tmp_path / "config.yaml").read_text() == "mine: 1"

    @pytest.mark.parametrize("text", ["", "{}", "[]", '{"run_id": 1}', "old", "[" * 100_000, '{"run_id": "a"'])
    def test_a_result_of_something_else(self, simulate: Any, tmp_path: Path, text: str) -> None:
        (tmp_path / "result.json").write_text(text)
        assert "it holds 'result.json' and no result of a run" in refused(simulate("--out", tmp_path, "--force"))
        assert (tmp_path / "result.json").read_text() == text

    @LINKS
    def test_a_link_among_a_runs_files(self, simulate: Any, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "result.json").write_text('{"run_id": "r"}')
        (tmp_path / "a" / "result.json").symlink_to(tmp_path / "result.json")
        assert "'result.json', which is no part" in refused(simulate("--out", tmp_path / "a", "--force"))


def test_what_comes_beside_a_run_while_it_is_replaced_stays(tmp_path: Path) -> None:
    with sinks.new_folder(tmp_path / "a", force=False) as folder:
        (folder / "result.json").write_text('{"run_id": "one"}')
    with pytest.raises(BadInput, match=r"'thesis\.tex', which is no part .* lies in '.*a\.1'"):  # noqa: SIM117
        with sinks.new_folder(tmp_path / "a", force=True) as folder:
            (folder / "result.json").write_text('{"run_id": "two"}')
            (tmp_path / "a" / "thesis.tex").write_text("precious")
    assert (tmp_path / "a" / "thesis.tex").read_text() == "precious"
    assert json.loads((tmp_path / "a" / "result.json").read_text())["run_id"] == "one"
    assert json.loads((tmp_path / "a.1" / "result.json").read_text())["run_id"] == "two"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.1"]


@pytest.mark.usefixtures("no_work")
class TestKnownBefore:
    @pytest.mark.parametrize(
        ("out", "timeline"),
        [
            ("tl", "tl/t.json"),
            ("tl", "tl/a/../t.json"),
            ("tl", "tl"),
            ("t.json/a", "t.json"),
            ("tl", "tl/result.json"),
        ],
    )
    def test_one_in_the_other(self, simulate: Any, tmp_path: Path, out: str, timeline: str) -> None:
        line = refused(simulate("--out", tmp_path / out, "--timeline", tmp_path / timeline))
        assert "lie in one another" in line
        assert list(tmp_path.iterdir()) == []

    @LINKS
    def test_a_link_to_itself(self, simulate: Any, tmp_path: Path) -> None:
        (tmp_path / "a").symlink_to(tmp_path / "a")
        assert "a symbolic link to itself" in refused(simulate("--out", tmp_path / "a"))


@LINKS
def test_a_link_to_a_folder_is_followed(simulate: Any, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "a").symlink_to(tmp_path / "disk")
    for more in ((), ("--force", "--seed", 1)):
        assert simulate("--out", tmp_path / "a", *more).code == 0
        assert (tmp_path / "a").is_symlink()
        assert json.loads((tmp_path / "disk" / "result.json").read_text())["run_id"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "disk"]


class TestFinishedWork:
    """Somebody takes the names while the run is under way."""

    def taken(self, monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
        def execute(*args: Any, **named: Any) -> Any:
            done = run.execute(*args, **named)
            for folder in folders:
                folder.mkdir()
                (folder / "thesis.tex").write_text("precious")
            return done

        recorded = sinks.recorded
        monkeypatch.setattr(sinks, "recorded", lambda _, *a: recorded(execute, *a))

    def test_the_folders_name(self, simulate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken(monkeypatch, tmp_path / "a")
        line = refused(simulate("--out", tmp_path / "a"))
        assert f"lies in '{tmp_path / 'a.1'}'" in line
        assert json.loads((tmp_path / "a.1" / "result.json").read_text())["run_id"]
        assert (tmp_path / "a" / "thesis.tex").read_text() == "precious"

    def test_the_timelines_name(self, simulate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The folder is put in place all the same."""
        self.taken(monkeypatch, tmp_path / "t.json")
        line = refused(simulate("--out", tmp_path / "a", "--timeline", tmp_path / "t.json"))
        assert f"lies in '{tmp_path / 't.json.1'}'" in line
        assert json.loads((tmp_path / "t.json.1").read_text())["traceEvents"]
        assert json.loads((tmp_path / "a" / "result.json").read_text())["run_id"]
