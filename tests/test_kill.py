"""A process that is killed leaves the whole file or none under the final name, and nothing beside it for ever."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from cli_help import mixtral_shaped
from tiny_traces import tiny_arrays, tiny_header

from sim.base.errors import BadInput
from sim.base.files import owned_prefix, replacing
from sim.results import sinks
from sim.results.run_folder import TABLES
from sim.results.sinks import FILES
from traces.format.check import check_trace
from traces.format.reader import Trace
from traces.format.writer import TraceWriter

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL, and a way to ask whether a process lives")

TESTS = Path(__file__).parent
MOMENTS = random.Random(20)

WRITE_TRACES = """
import sys
sys.path[:0] = [{tests!r}]
from pathlib import Path
from tiny_traces import tiny_trace
for round_ in range(10_000):
    tiny_trace(Path({target!r}), n_requests=40, seed=round_ % 3)
"""
SIMULATE = """
import sys
from sim.cli import simulate
for round_ in range(10_000):
    try:
        simulate(["--policy", "lru", "--hw", "rtx3090", "--trace", {trace!r}, "--overwrite", *{out!r}])
    except SystemExit as stop:
        assert not stop.code, stop.code
"""


def started(code: str, folder: Path) -> subprocess.Popen[bytes]:
    """A process that writes into `folder`; comes back once it has begun to."""
    before = set(folder.iterdir())
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=TESTS.parent
    )
    deadline_s = time.monotonic() + 60
    while set(folder.iterdir()) <= before and process.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.001)
    return process


def killed(process: subprocess.Popen[bytes], delay_s: float) -> None:
    time.sleep(delay_s)
    alive = process.poll() is None
    process.kill()
    _, said = process.communicate(timeout=30)
    assert alive, said.decode()
    assert process.returncode == -signal.SIGKILL


def hidden(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def kill_often(code: str, folder: Path, times: int, within_s: float, whole: Callable[[], bool]) -> None:
    """Kill at random moments after the process's first file; what is there under the final name is whole each time."""
    for _ in range(times):
        killed(started(code, folder), MOMENTS.uniform(0, within_s))
        whole()


def test_a_killed_trace_writer(tmp_path: Path) -> None:
    target = tmp_path / "t.safetensors"

    def whole() -> bool:
        if not target.exists():
            return False
        with Trace(target) as trace:
            assert check_trace(trace) == []
            assert trace.n_requests == 40
        return True

    code = WRITE_TRACES.format(tests=str(TESTS), target=str(target))
    kill_often(code, tmp_path, 4, 0.1, whole)
    write_one(target)  # and whatever the killed ones left is gone
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def write_one(target: Path) -> None:
    with TraceWriter(target, tiny_header(3, 4, 2)) as writer:
        writer.add_request(2, experts=tiny_arrays(5, 3, 4, 2, 0)["experts"])


@pytest.mark.thorough
def test_a_killed_run_with_tables_and_timeline(tmp_path: Path) -> None:
    trace = mixtral_shaped(tmp_path)
    folder = tmp_path / "results"
    folder.mkdir()
    out, timeline = folder / "a", folder / "t.json"

    def whole() -> bool:
        if timeline.exists():
            assert json.loads(timeline.read_text())["traceEvents"]
        if not out.exists():
            return False
        assert {path.name for path in out.iterdir()} == FILES
        assert json.loads((out / "result.json").read_text())["policy"] == "lru"
        for name in TABLES:
            assert len(pd.read_parquet(out / f"{name}.parquet"))
        return True

    code = SIMULATE.format(
        trace=str(trace), out=["--out", str(out), "--set", "out.spans=on", "--timeline", str(timeline)]
    )
    kill_often(code, folder, 3, 0.6, whole)
    assert (
        subprocess.run(
            [sys.executable, "-c", code.replace("10_000", "1")], cwd=TESTS.parent, capture_output=True
        ).returncode
        == 0
    )
    assert whole()
    assert hidden(folder) == []


LRU = ["--policy", "lru", "--hw", "rtx3090", "--requests", "1"]
WRITERS = {  # a command, and what goes on with it or does it again
    "sweep": (["sweep", *LRU, "--workers", "1", "--out", "s"], ["--resume"]),
    "run": (["run", *LRU, "--out", "r", "--set", "out.spans=on", "--timeline", "t.json"], ["--overwrite"]),
    "curve": (["curve", *LRU[:2], *LRU[4:], "--out", "s"], []),
    "ways": (["plan", *LRU[2:], "--workers", "1", "--no-suggestions", "--out", "p"], ["--resume"]),
    "check": (["check", "b.json", "--update", "--junit", "j.xml", "--markdown", "m.md"], []),
    "saturate": (["saturate", *LRU[:4], "--requests", "3", "--workers", "1", "--out", "s"], ["--resume"]),
    "synth": (["traces", "synth", "--requests", "2", "-o", "t.safetensors"], ["--overwrite"]),
}


@pytest.mark.parametrize(
    ("name", "every"),
    [
        ("sweep", 6),
        *(pytest.param(name, 97 if name == "ways" else 2, marks=pytest.mark.thorough) for name in WRITERS),
    ],
)
def test_killed_at_any_step(tmp_path: Path, name: str, every: int) -> None:
    """Whatever a killed writer leaves, the next one neither refuses nor keeps."""
    first, again = WRITERS[name]
    (tmp_path / "all").mkdir()
    command = [sys.executable, str(TESTS / "kill_stages.py"), str(tmp_path / "all"), str(every)]
    done = subprocess.run(
        [*command, json.dumps(first), json.dumps([*first, *again])], cwd=TESTS.parent, capture_output=True, text=True
    )
    steps = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(steps) > 3, done.stderr
    for step in steps:
        assert step["status"] == 0, step
        assert "thesis.tex" in step["left"] and not [path for path in step["left"] if "/." in f"/{path}"], step


OLD, NEW = '{"run_id": "old"}', '{"run_id": "new"}'
REPLACE = """
import os, signal, sys
from pathlib import Path
from sim.results import sinks
calls = 0
rename = Path.rename
def deadly(self, target):
    global calls
    calls += 1
    if calls > {calls}:
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, target)
Path.rename = deadly
with sinks.new_folder(Path({out!r}), force=True) as folder:
    (folder / "result.json").write_text({new!r})
"""


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_killed_while_replacing_a_run(tmp_path: Path, calls: int) -> None:
    """Before the old run is set aside, between the two renames, and (not at all) after them."""
    out = tmp_path / "a"
    with sinks.new_folder(out, force=False) as folder:
        (folder / "result.json").write_text(OLD)
    done = subprocess.run([sys.executable, "-c", REPLACE.format(calls=calls, out=str(out), new=NEW)], cwd=TESTS.parent)
    assert done.returncode == (0 if calls == 2 else -signal.SIGKILL)
    assert out.exists() == (calls != 1)
    if calls == 2:
        assert (out / "result.json").read_text() == NEW
        return
    with pytest.raises(BadInput, match="it holds a run"), sinks.new_folder(out, force=False):
        pass
    assert (out / "result.json").read_text() == OLD
    with sinks.new_folder(out, force=True) as folder:
        (folder / "result.json").write_text(NEW)
    assert (out / "result.json").read_text() == NEW
    assert hidden(tmp_path) == []


class TestSweep:
    """What the next writer of a target removes, and what it must not."""

    @pytest.fixture
    def gone(self) -> int:
        """The number of a process that is over."""
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        return process.pid

    def leave(self, target: Path, suffix: str, pid: int, name: str = "") -> Path:
        prefix = owned_prefix(target.with_name(name or target.name)).replace(f"-{os.getpid()}-", f"-{pid}-")
        path = target.parent / f"{prefix}abc123_x{suffix}"
        path.mkdir()
        (path / "experts").write_bytes(b"half")
        return path

    def test_spools_of_the_dead_go_and_of_the_living_stay(self, tmp_path: Path, gone: int) -> None:
        target = tmp_path / "t[1].safetensors"  # a name with a pattern's characters in it
        dead = self.leave(target, ".spool", gone)
        mine, parents = self.leave(target, ".spool", os.getpid()), self.leave(target, ".spool", os.getppid())
        other_target = self.leave(target, ".spool", gone, "t2.safetensors")
        other_machine = tmp_path / f".{target.name}.00000000-{gone}-abcdefgh.spool"
        other_machine.mkdir()
        somebodys = tmp_path / f".{target.name}.abcdefgh.spool"
        somebodys.mkdir()
        write_one(target)
        assert not dead.exists()
        for kept in (mine, parents, other_target, other_machine, somebodys, target):
            assert kept.exists(), kept

    def test_two_writers_of_one_target_do_not_disturb_each_other(self, tmp_path: Path) -> None:
        target = tmp_path / "t.safetensors"
        first = TraceWriter(target, tiny_header(3, 4, 2))
        first.add_request(2, experts=tiny_arrays(5, 3, 4, 2, 0)["experts"])
        write_one(target)
        first.close()
        assert [path.name for path in tmp_path.iterdir()] == [target.name]

    def test_half_written_files_and_folders_go_too(self, tmp_path: Path, gone: int) -> None:
        file = self.leave(tmp_path / "a.json", ".tmp", gone)
        (file / "experts").rename(file.with_suffix(".part"))
        file.rmdir()
        with replacing(tmp_path / "a.json") as part:
            part.write_text("{}")
        assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
        left = self.leave(tmp_path / "run", ".part", gone)
        with sinks.new_folder(tmp_path / "run", force=False):
            assert not left.exists()

    def test_a_run_whose_replacement_was_killed_comes_back(self, tmp_path: Path, gone: int) -> None:
        run = tmp_path / "run"
        left = self.leave(run, ".old", gone)
        with sinks.new_folder(left / "run", force=False) as folder:
            (folder / "result.json").write_text(OLD)
        with pytest.raises(BadInput, match="it holds a run; add --overwrite"), sinks.new_folder(run, force=False):
            pass
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
        assert (run / "result.json").read_text() == OLD

    def test_a_link_is_removed_and_not_followed(self, tmp_path: Path, gone: int) -> None:
        (tmp_path / "precious").mkdir()
        (tmp_path / "precious" / "thesis.tex").write_text("x")
        link = self.leave(tmp_path / "a.json", ".part", gone)
        (link / "experts").unlink()
        link.rmdir()
        link.symlink_to(tmp_path / "precious")
        with replacing(tmp_path / "a.json") as part:
            part.write_text("{}")
        assert not link.is_symlink()
        assert (tmp_path / "precious" / "thesis.tex").exists()
