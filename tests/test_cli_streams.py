"""What the commands do to whoever reads them: help by itself, a reader that leaves, a disk that is full."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cli_help import mixtral_shaped, moesim
from grids import few_each_time

from sim.base import compiled
from sim.base.errors import BadInput
from sim.base.files import must_be_writable
from sim.cli import main

DEV_FULL = pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
POSIX = pytest.mark.skipif(os.name != "posix", reason="closed pipes are another error here")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    trace = mixtral_shaped(tmp_path_factory.mktemp("streams"))
    code = "from sim.cli import main; main()"
    return [sys.executable, "-c", code, "run", "--policy", "lru", "--hw", "rtx3090", "--trace", str(trace)]


@pytest.mark.parametrize(("outdated", "terminal"), [(True, True), (True, False), (False, True)])
def test_a_terminal_is_told_that_edited_sources_run(
    monkeypatch: pytest.MonkeyPatch, outdated: bool, terminal: bool
) -> None:
    stderr = io.StringIO()
    stderr.isatty = lambda: terminal  # type: ignore[method-assign]
    monkeypatch.setattr(compiled, "outdated", outdated)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(sys, "argv", ["moesim", "--version"])
    before = signal.getsignal(signal.SIGINT)  # a process that ends here would not be interrupted any more
    try:
        with pytest.raises(SystemExit):
            main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert ("hatch_build.py" in stderr.getvalue()) == (outdated and terminal)


@pytest.mark.parametrize("encoding", few_each_time(["latin-1", "cp1252"], ["latin-1"]))
def test_an_output_in_another_encoding(run: list[str], encoding: str, tmp_path: Path) -> None:
    """Rules of tables and names of files hold characters that it may have no letters for."""
    trace = tmp_path / "tracé-\U0001f600.safetensors"
    trace.write_bytes(Path(run[-1]).read_bytes())
    env = os.environ | {"PYTHONIOENCODING": encoding}
    command = [*run[:3], "compare", "--policy", "lru", "--hw", "rtx3090", "--trace", str(trace)]
    wide = subprocess.run(command, capture_output=True, check=True)
    done = subprocess.run(command, capture_output=True, check=False, env=env)
    assert (done.returncode, done.stderr) == (0, b"")
    expected = wide.stdout.decode().replace("─", "-").replace("\U0001f600", "\\ud83d\\ude00")
    assert done.stdout.decode(encoding) == expected
    done = subprocess.run([*command, "--json"], capture_output=True, check=False, env=env)
    assert json.loads(done.stdout.decode(encoding))["runs"][0]["trace"] == "tracé-\U0001f600"


@DEV_FULL
@pytest.mark.parametrize("json", [[], ["--json"]])
def test_a_full_disk_is_one_line(run: list[str], json: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*run, *json], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line == "error: No space left on device: the output is not complete; make room, or name another place"


@POSIX
def test_a_reader_that_leaves_is_not_a_failed_check(run: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(run, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(write)
    assert done.returncode == 141
    assert done.stderr == ""


class TestPlacesThatCannotBeWritten:
    """A folder that is a file stands for one without permission: tests may run as root, whom nothing is forbidden."""

    @pytest.mark.parametrize(
        "words",
        [
            ("traces", "synth", "SOURCE", "--out"),
            ("traces", "compose", "SOURCE", "--arrivals", "poisson:1", "--out"),
            ("reproduce", "--rows", "FM-12", "--out"),
            ("train", "duoserve", "--trace", "SOURCE", "--out"),
            ("validate", "--policy", "lru", "--hw", "rtx3090", "--out"),
        ],
    )
    def test_one_line(self, capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...]) -> None:
        if words[0] == "train":
            pytest.importorskip("torch")
        (tmp_path / "file").write_text("in the way")
        source = mixtral_shaped(tmp_path)
        said = moesim(capsys, *(source if word == "SOURCE" else word for word in words), tmp_path / "file" / "x")
        assert said.code == 2, said.err
        last = said.err.splitlines()[-1]
        assert last.startswith("error: ")
        assert str(tmp_path / "file") in last
        assert "Traceback" not in said.err

    def test_before_the_work_and_without_a_trace_of_it(self, tmp_path: Path) -> None:
        must_be_writable(tmp_path / "new" / "x.json")
        assert not (tmp_path / "new").exists()
        (tmp_path / "new").mkdir()
        with pytest.raises(BadInput, match="it is a folder"):
            must_be_writable(tmp_path / "new")


@pytest.mark.parametrize(
    "words",
    [
        ("validate", "--policy", "lru", "--hw", "a", "--hw", "b"),
        ("calibrate", "--device", "cpu", "--device", "cpu"),
        ("record", "m", "--out", "a", "--out", "b"),
        ("reproduce", "--rows", "FM-12", "--engine", "a", "--engine", "b"),
        ("train", "duoserve", "--trace", "a", "--trace", "b", "--out", "c"),
        ("train", "emoe", "--trace", "a", "--trace", "b", "--out", "c"),
        ("traces", "synth", "a", "--seed", 1, "--seed", 2),
        ("traces", "convert", "a", "--out", "b", "--out", "c"),
        ("traces", "compose", "a", "--out", "b", "--arrivals", "poisson:1", "--arrivals", "poisson:2"),
    ],
)
def test_an_option_given_twice_is_refused(capsys: pytest.CaptureFixture[str], words: tuple[object, ...]) -> None:
    assert "got it twice: one value per option" in moesim(capsys, *words).error
