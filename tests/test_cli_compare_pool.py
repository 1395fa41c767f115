"""`moesim compare` on several processes: the same answers, and nothing left behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cli_help import mixtral_shaped, moesim
from grids import few_each_time

from sim.base.errors import CheckFailed
from sim.studies.runner.pool import answers
from sim.studies.runner.processes import standing


def test_the_number_of_workers_changes_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = mixtral_shaped(tmp_path)
    names = ("lru", "lfu scope=layer", "fiddler", "gpu_only", "perfect_prefetch")
    args = ("compare", "--hw", "rtx3090", "--trace", trace, *(word for name in names for word in ("--policy", name)))

    def timeless(said: Any) -> str:
        runs = said.json["runs"]
        assert len(runs) == len(names)
        return json.dumps([{**run, "wall_s": 0} for run in runs])

    one, two = (moesim(capsys, *args, "--json", "--workers", n) for n in (1, 2))
    assert timeless(one) == timeless(two)


@pytest.mark.parametrize("workers", [1, 2])
def test_every_call_is_answered(workers: int) -> None:
    calls = [(pow, (2, n)) for n in range(7)]
    assert sorted(answers(calls, workers)) == [(n, 2**n) for n in range(7)]


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_a_call_is_raised(workers: int) -> None:
    with pytest.raises(ZeroDivisionError):
        list(answers([(divmod, (1, 0)), (pow, (2, 2))], workers))
    assert not multiprocessing.active_children()


def test_a_mistake_of_a_policys_own_leaves_the_others(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It is told in a line, with its file, and the status says that something is broken."""
    code = "from policies.lru import Lru\n\n\nclass Broken(Lru):\n    name = 'broken'\n\n"
    mine = tmp_path / "mine.py"
    mine.write_text(code + "    def iteration_start(self, iteration, view):\n        raise KeyError('mine')\n", "utf-8")
    trace = mixtral_shaped(tmp_path)
    said = moesim(capsys, "compare", "--hw", "rtx3090", "--trace", trace, "--policy", "lru", "--policy", mine, "--json")
    assert said.code == 1
    answer = json.loads(said.out)
    assert [run["policy"] for run in answer["runs"]] == ["lru"]
    (other,) = answer["not_run"]
    assert "mine.py" in other["reason"] and "KeyError" in other["reason"]


def test_a_process_that_dies_is_reported() -> None:
    with pytest.raises(CheckFailed, match="ended without an answer"):
        list(answers([(os._exit, (1,)), (pow, (2, 2))], 2))


def test_whoever_stops_early_leaves_no_process() -> None:
    began = time.monotonic()
    with closing(answers([(pow, (2, 2)), (time.sleep, (60,)), (time.sleep, (60,))], 2)) as stream:
        assert next(stream) == (0, 4)
    assert not multiprocessing.active_children()
    assert time.monotonic() - began < 45


@pytest.mark.skipif(sys.platform == "win32", reason="signal masks of POSIX")
@pytest.mark.parametrize("ends", [None, KeyError])
def test_processes_stay_for_the_next_calls_and_none_after_them(ends: type[Exception] | None) -> None:
    """However the study ends."""

    def asked() -> set[int]:
        return {pid for _, pid in answers([(os.getpid, ())] * 4, 2)}

    there = set(multiprocessing.active_children())
    seen: set[int] = set()
    try:
        with standing():
            for _ in range(3):
                seen |= asked()
            if ends is not None:
                raise ends
    except KeyError:
        pass
    assert 1 <= len(seen) <= 2
    assert os.getpid() not in seen
    assert set(multiprocessing.active_children()) <= there
    assert not asked() & seen


def test_ctrl_c_while_processes_start_is_heard_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = ProcessPoolExecutor.submit

    def interrupted(*arguments: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return submit(*arguments)

    monkeypatch.setattr(ProcessPoolExecutor, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(answers([(time.sleep, (60,)), (time.sleep, (60,))], 2))
    assert not multiprocessing.active_children()


@pytest.fixture
def at_work(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A comparison on two processes, in a group of its own, that has a minute of work to do."""
    if sys.platform == "win32":
        pytest.skip("process groups of POSIX")
    trace = mixtral_shaped(tmp_path, n_requests=2, prompt=5, outputs=8000)
    named = [word for name in ("promoe", "fine_moe", "moepic") for word in ("--policy", name)]
    words = ["compare", *named, "--hw", "rtx3090", "--trace", str(trace), "--workers", "2"]
    process = subprocess.Popen([sys.executable, "-m", "sim", *words], stdout=-1, stderr=-1, start_new_session=True)
    deadline = time.monotonic() + 60
    while len(_group(process.pid)) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    yield process
    deadline = time.monotonic() + 30
    while left := _group(process.pid):
        assert time.monotonic() < deadline, f"left running: {left}"
        time.sleep(0.02)


@pytest.mark.parametrize("after_s", few_each_time([0.0, 0.2, 1.5], [0.2]))
def test_ctrl_c_ends_all_of_them_with_one_line(at_work: subprocess.Popen[bytes], after_s: float) -> None:
    time.sleep(after_s)
    os.killpg(at_work.pid, signal.SIGINT)  # as a terminal does: to every process of the command
    stdout, stderr = at_work.communicate(timeout=60)
    assert (at_work.returncode, stdout, stderr.decode().strip()) == (130, b"", "interrupted")


@pytest.mark.thorough
def test_processes_end_with_the_one_that_started_them(at_work: subprocess.Popen[bytes]) -> None:
    time.sleep(1.5)
    at_work.kill()
    at_work.communicate(timeout=60)


def _group(pgid: int) -> list[str]:
    """Processes of a group."""
    listed = subprocess.run(["ps", "-eo", "pid,pgid,stat"], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listed.splitlines()[1:]]
    return [pid for pid, group, stat in rows if group == str(pgid) and not stat.startswith("Z")]
