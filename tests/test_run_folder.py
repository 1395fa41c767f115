"""What `--out` and `--overwrite` may replace, what is known before the work, and where finished work goes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click
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
    """`--overwrite` replaces what the manifest of a run lists, as it was written; names alone make none."""

    def test_a_folder_that_is_called_like_a_file_of_a_run(self, simulate: Any, tmp_path: Path) -> None:
        (tmp_path / "a" / "config.yaml").mkdir(parents=True)
        (tmp_path / "a" / "config.yaml" / "thesis.tex").write_text("precious")
        line = refused(simulate("--out", tmp_path / "a", "--overwrite"))
        assert "it holds 'config.yaml' and no manifest.json of a run" in line
        assert (tmp_path / "a" / "config.yaml" / "thesis.tex").read_text() == "precious"

    def test_a_table_beside_a_result_that_anybody_could_write(self, simulate: Any, tmp_path: Path) -> None:
        (tmp_path / "result.json").write_text('{"run_id": "x"}')
        (tmp_path / "requests.parquet").write_text("mine")
        assert "'requests.parquet' and no manifest.json of a run" in refused(simulate("--out", tmp_path, "--overwrite"))
        assert (tmp_path / "requests.parquet").read_text() == "mine"

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "{}",
            "[]",
            '{"sha256": []}',
            '{"sha256": {"thesis.tex": "x"}}',
            '{"sha256": {"a": 1}}',
            "[" * 100_000,
            "{",
        ],
        ids=range(8),
    )
    def test_a_manifest_of_something_else(self, simulate: Any, tmp_path: Path, text: str) -> None:
        (tmp_path / "manifest.json").write_text(text)
        (tmp_path / "thesis.tex").write_text("precious")
        assert "no manifest.json of a run" in refused(simulate("--out", tmp_path, "--overwrite"))
        assert (tmp_path / "thesis.tex").read_text() == "precious"

    def kept(self, folder: Path) -> Path:
        with sinks.new_folder(folder, force=False) as new:
            (new / "result.json").write_text("{}")
        return folder

    @pytest.mark.parametrize("name", ["requests.parquet", "config.yaml", "thesis.tex"])
    def test_what_a_run_has_not_written_beside_its_files(self, simulate: Any, tmp_path: Path, name: str) -> None:
        (self.kept(tmp_path / "a") / name).write_text("mine")
        assert f"{name!r}, which is no part of a run" in refused(simulate("--out", tmp_path / "a", "--overwrite"))
        assert (tmp_path / "a" / name).read_text() == "mine"

    def test_a_file_that_was_changed_since(self, simulate: Any, tmp_path: Path) -> None:
        (self.kept(tmp_path / "a") / "result.json").write_text("mine")
        assert "its 'result.json' has been changed since the run" in refused(
            simulate("--out", tmp_path / "a", "--overwrite")
        )
        assert (tmp_path / "a" / "result.json").read_text() == "mine"

    @LINKS
    def test_a_link_among_a_runs_files(self, simulate: Any, tmp_path: Path) -> None:
        path = self.kept(tmp_path / "a") / "result.json"
        path.rename(tmp_path / "result.json")
        path.symlink_to(tmp_path / "result.json")
        assert "'result.json', which is no part" in refused(simulate("--out", tmp_path / "a", "--overwrite"))


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
    for more in ((), ("--overwrite", "--seed", 1)):
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


PLACES = ("out", "timeline")
"""Fields of `sim.options.Output` that name a place."""


def outputs() -> list[tuple[list[str], click.Parameter]]:
    """Every command with each place that it writes to by name."""
    from sim.cli.output_place import outputs_of
    from sim.cli.spec_options import RowOption
    from sim.cli.verbs import moesim

    found: list[tuple[list[str], click.Parameter]] = []

    def walk(command: click.Command, words: list[str]) -> None:
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                one = command.get_command(context, name)
                assert one is not None
                walk(one, [*words, name])
        found.extend((words, param) for param in outputs_of(command))
        rows = [param for param in command.params if isinstance(param, RowOption) and param.row.field in PLACES]
        found.extend((words, param) for param in rows)

    walk(moesim, [])
    return found


def test_every_option_that_names_an_output_is_known() -> None:
    """One of another type would be found out after the work."""
    from sim.cli.verbs import moesim

    known = {(*words, param.name) for words, param in outputs()}
    assert len(known) >= 20
    for words, name in [(["run"], "timeline"), (["traces", "squeeze"], "out"), (["check"], "junit")]:
        assert (*words, name) in known

    def walk(command: click.Command, words: list[str]) -> None:
        if isinstance(command, click.Group):
            for name in command.list_commands(click.Context(command)):
                one = command.get_command(click.Context(command), name)
                assert one is not None
                walk(one, [*words, name])
        for param in command.params:
            if param.name in ("out", "output", "timeline", "junit", "markdown") or {"-o", "--output"} & set(param.opts):
                assert (*words, param.name) in known, (words, param.name)

    walk(moesim, [])


@pytest.mark.parametrize("place", ["file/x", "folder or file", "a name that is much too long"])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, place: str
) -> None:
    """Whatever else is asked: the option is read before a command begins."""
    from sim.cli.output_place import OutputFolder
    from sim.cli.verbs import guarded, moesim

    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder").mkdir()
    for words, param in outputs():
        folder = isinstance(param.type, OutputFolder) or param.metavar == "DIR"
        wrong = "file" if folder else "folder"
        path = tmp_path / {"file/x": "file/x", "folder or file": wrong}.get(place, "x" * 300)
        given = [param.opts[0], str(path)] if isinstance(param, click.Option) else ["trace", str(path)]
        with pytest.raises(SystemExit) as left:
            guarded(moesim, [*words, *given], "moesim")
        said = capsys.readouterr()
        assert left.value.code == 2, (words, param.name)
        assert said.out == "" and said.err.count("\n") == 1 and f"{path}" in said.err.replace("'", ""), said.err
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "precious"
