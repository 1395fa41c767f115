"""Ctrl-C at the moments at which Python loses it or breaks over it: each is brought about, none is waited for.

`python tests/interrupt_hunt.py real 200` interrupts at random moments instead, for as long as one likes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from cli_help import mixtral_shaped

from sim.base import interrupts

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs SIGINT as POSIX has it")

TESTS = Path(__file__).parent
# The main thread waits for an event and is about to take its lock again, which the thread that sets it may hold:
# an exception from here on releases a lock that is not its own, and both threads fail.
IN_THE_LOCK = """
import os, signal, sys, threading
restore, seen = threading.Condition._acquire_restore, [0]
def callers(frame):
    while frame is not None:
        yield frame.f_code.co_name
        yield os.path.basename(frame.f_code.co_filename)
        frame = frame.f_back
def interrupted(self, state):
    if threading.current_thread() is threading.main_thread() and {waiter!r} in callers(sys._getframe()):
        seen[0] += 1
        if seen[0] == {at}:
            signal.raise_signal(signal.SIGINT)
    restore(self, state)
if __name__ == "__main__":
    from sim.cli import main
    import {module}
    threading.Condition._acquire_restore = interrupted
    main({args!r})
"""
IN_AN_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder())
from sim.cli import main
main({args!r})
"""
LOST = """
import os, signal
import sim.run
class Careless:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
prepare = sim.run.prepare
def prepared(*args):
    Careless()
    return prepare(*args)
sim.run.prepare = prepared
from sim.cli import main
main({args!r})
"""


# Ctrl-C comes in an import (`IN_AN_IMPORT`) that takes long, and the command is over before anybody looks again; or in
# the middle of something whose caller drops or catches whatever it raises.
LOST_OTHERWISE = {
    "an import that is the last thing done": """
def call():
    import importlib.util
    class Loader:
        def create_module(self, spec): return None
        def exec_module(self, module): signal.raise_signal(signal.SIGINT)
    class Finder:
        def find_spec(self, name, path=None, target=None):
            return importlib.util.spec_from_loader(name, Loader()) if name == "no_such_module" else None
    sys.meta_path.append(Finder())
    import no_such_module
""",
    "the end of a hold, under an exception that a caller catches": """
def call():
    try:
        with held():
            signal.raise_signal(signal.SIGINT)
            raise ValueError
    except ValueError:
        pass
""",
    "the closing of a generator that holds": """
def steps():
    with held():
        yield 1
        yield 2
def call():
    made = steps()
    next(made)
    signal.raise_signal(signal.SIGINT)
    made.close()
""",
    "a generator that nobody closes": """
def steps():
    with held():
        yield 1
        yield 2
def call():
    made = steps()
    next(made)
    signal.raise_signal(signal.SIGINT)
    del made
""",
    "a callback from C, whose exceptions are dropped": """
import ctypes
def call():
    ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(signal.SIGINT))()
""",
    "something that catches everything": """
def call():
    try:
        signal.raise_signal(signal.SIGINT)
    except BaseException:
        pass
""",
    "C code that clears every exception": """
class Key:
    def __hash__(self):
        signal.raise_signal(signal.SIGINT)
        return 1
def call():
    import ctypes
    made, key = {}, ctypes.py_object(Key())
    ctypes.pythonapi.PyDict_GetItem(ctypes.py_object(made), key)
    import time
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        pass
    sys.stderr.write("nobody heard it\\n")
""",
    "an error that it was turned into": """
def call():
    try:
        signal.raise_signal(signal.SIGINT)
    except BaseException as error:
        raise ImportError("numpy failed to import") from error
""",
    "the end of the process by something else": """
def call():
    try:
        signal.raise_signal(signal.SIGINT)
    except BaseException:
        sys.exit(0)
""",
}
IN_A_COMMAND = """
import os, signal, sys
from sim.base.interrupts import held, run_command
{call}
run_command(call, {process})
"""
ON_THE_WAY = """
import os, signal, sys
import moesim  # whose finder comes first
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder())
from moesim.commands import main
main()
"""


def ran(code: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"  # a file: processes of a pool import what started them
    script.write_text(code)
    return subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(TESTS.parent)},
    )


def interrupted(said: subprocess.CompletedProcess[str]) -> bool:
    assert "Traceback" not in said.stderr, said.stderr
    assert "Exception ignored" not in said.stderr, said.stderr
    assert said.stderr.strip().splitlines()[-1] == "interrupted", said.stderr
    return said.returncode == 130


@pytest.mark.thorough
def test_in_the_lock_of_a_real_runs_lane(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from real_world import tiny_setup

    setup = tiny_setup(tmp_path, "lru", 8, trace={"outputs": 40})
    setup.close()
    args = [
        "run",
        "--policy",
        "lru",
        "--hw",
        "rtx3090",
        "--real=cpu",
        "--cache",
        "8experts",
        "--model",
        setup.spec.model,
        "--trace",
        setup.spec.trace,
    ]
    said = ran(IN_THE_LOCK.format(at=30, waiter="sync", module="torch", args=args), tmp_path)
    assert "Traceback" not in said.stderr, said.stderr
    assert said.stderr.strip().splitlines()[-1] == "error: interrupted; what was measured until then is above"
    assert said.returncode == 130


@pytest.mark.thorough
def test_in_the_lock_of_a_calibrations_lane(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    args = ["calibrate", "--device", "cpu", "--model", "cpu-small", "--minutes", "1", "--probe", "copy"]
    assert interrupted(ran(IN_THE_LOCK.format(at=5, waiter="synchronize", module="torch", args=args), tmp_path))


def test_in_the_lock_of_a_comparisons_pool(tmp_path: Path) -> None:
    trace = mixtral_shaped(tmp_path, n_requests=2, prompt=5, outputs=200)
    args = ["compare", "--policy", "lru", "--policy", "lfu", "--hw", "rtx3090", "--trace", str(trace), "--workers", "2"]
    code = IN_THE_LOCK.format(at=1, waiter="_base.py", module="sim.studies.runner.processes", args=args)
    assert interrupted(ran(code, tmp_path))


@pytest.mark.parametrize("name", ["click", "difflib", "sim.base.errors"])
def test_in_an_import(tmp_path: Path, name: str) -> None:
    trace = mixtral_shaped(tmp_path, n_requests=2, prompt=5, outputs=1500)
    args = ["run", "--policy", "lru", "--hw", "rtx3090", "--trace", str(trace), "--out", str(tmp_path / "out")]
    said = ran(IN_AN_IMPORT.format(name=name, args=args), tmp_path)
    assert interrupted(said)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("process", [True, False])
@pytest.mark.parametrize("way", LOST_OTHERWISE)
def test_none_is_lost(tmp_path: Path, way: str, process: bool) -> None:
    assert interrupted(ran(IN_A_COMMAND.format(call=LOST_OTHERWISE[way], process=process), tmp_path))


@pytest.mark.parametrize("name", ["sim", "sim.base.compiled", "hashlib", "sim.cli", "sim.base.interrupts"])
def test_before_a_command_listens(tmp_path: Path, name: str) -> None:
    """From the import of a console script on."""
    assert interrupted(ran(ON_THE_WAY.format(name=name), tmp_path))


def test_importing_the_commands_leaves_ctrl_c_as_it_was() -> None:
    code = "import signal\nimport moesim.commands\nassert signal.getsignal(2) is signal.default_int_handler"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=TESTS.parent)


def test_in_a_finaliser_where_it_would_be_lost(tmp_path: Path) -> None:
    trace = mixtral_shaped(tmp_path, n_requests=2, prompt=5, outputs=1500)
    args = ["run", "--policy", "lru", "--hw", "rtx3090", "--trace", str(trace)]
    assert interrupted(ran(LOST.format(args=args), tmp_path))


def press() -> None:
    signal.raise_signal(signal.SIGINT)


class TestHeld:
    @pytest.fixture(autouse=True)
    def fresh(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(interrupts, "_heard_s", float("-inf"))
        monkeypatch.setattr(interrupts, "_noted_s", None)

    def test_it_waits_for_the_end(self) -> None:
        done = []
        with pytest.raises(KeyboardInterrupt), interrupts.held():
            with interrupts.held():
                press()
                done.append("inner")
            done.append("outer")
        assert done == ["inner", "outer"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_it_is_heard_while_waiting_for_a_thread_that_never_answers(self) -> None:
        never = threading.Event()
        late = threading.Timer(10.0, never.set)  # if nobody heard it, the test fails and does not hang
        late.start()
        with pytest.raises(KeyboardInterrupt), interrupts.held():
            threading.Timer(0.05, press).start()
            interrupts.wait_for(never)
        late.cancel()

    def test_it_is_raised_in_place_of_what_is_under_way(self) -> None:
        with pytest.raises(KeyboardInterrupt) as raised, interrupts.held():
            press()
            raise ValueError
        assert isinstance(raised.value.__context__, ValueError)

    def test_twice_at_once_is_once(self) -> None:
        with interrupts.held():
            press()
            with pytest.raises(KeyboardInterrupt):
                interrupts.heard()
            press()  # by a wrapper that passes on what the terminal has sent as well
            interrupts.heard()

    def test_again_after_a_while_is_not_held_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now_s = [100.0]
        monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
        with interrupts.held():
            press()
            now_s[0] += interrupts.PATIENCE_S + 1
            with pytest.raises(KeyboardInterrupt):
                press()

    def test_somebody_elses_handler_stays(self) -> None:
        seen: list[int] = []
        before = signal.signal(signal.SIGINT, lambda *_: seen.append(1))
        try:
            with interrupts.held():
                press()
            assert seen == [1]
        finally:
            signal.signal(signal.SIGINT, before)


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["real", "calibrate", "compare", "record"])
def test_at_random_moments(what: str) -> None:
    if what != "compare":
        pytest.importorskip("torch")
    from interrupt_hunt import hunt

    assert hunt(what, 3, seed=11) == []
