"""What goes wrong in a real run: one line, memory and threads given back, what was measured kept. Each is injected."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from cli_help import simulated  # noqa: E402
from real_world import LAYERS, TOP_K, tiny_setup  # noqa: E402

from sim.base.device_faults import DeviceFault  # noqa: E402
from sim.real.devices.cpu import CpuDevice  # noqa: E402

TESTS = Path(__file__).parent
AFTER = 60  # experts computed before something goes wrong; the first iteration has at most LAYERS x 4


def words(setup):
    """The command line of a real run of a setup."""
    said = "--policy lru --hw rtx3090 --real=cpu --cache 8experts --model"
    return [*said.split(), setup.spec.model, "--trace", setup.spec.trace]


@pytest.fixture
def buffers(monkeypatch):
    """Weak references to every buffer that the lanes have handed out."""
    made, touched = [], CpuDevice._touched

    def spied(self, n_bytes):
        raw = touched(self, n_bytes)
        made.append(weakref.ref(raw.untyped_storage()))
        made.append(weakref.ref(raw))
        return raw

    monkeypatch.setattr(CpuDevice, "_touched", spied)
    return made


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lane-")]


def breaks_with(fail):
    """A machine whose experts fail after `AFTER` of them, on the lane that computes."""

    def prepared(machine):
        ffn, count = machine.decoder.ffn, [0]

        def counted(x, matrices):
            count[0] += 1
            if count[0] > AFTER:
                fail()
            return ffn(x, matrices)

        machine.decoder.ffn = counted

    return prepared


def lost():
    raise RuntimeError("CUDA error: unspecified launch failure")


@pytest.mark.parametrize(
    ("fail", "said"),
    [
        (
            lambda: torch.empty(1 << 60),
            "out of memory while running on the CPU backend",
        ),  # the allocator really refuses
        (lost, "the device was lost while running on the CPU backend"),
    ],
)
def test_a_fault_under_way_keeps_what_was_measured(tmp_path, buffers, fail, said):
    from real_world import lanes_and_weights

    from sim.real.run import measure

    setup = tiny_setup(tmp_path, "lru", 8)
    with lanes_and_weights(setup) as (lanes, weights):
        done = measure(setup, lanes, weights, prepared=breaks_with(fail))
    setup.close()
    assert said in done.fault
    n_out = sum(times.request.outputs for times in done.report.requests)
    assert 1 < n_out < 12
    assert n_out >= (AFTER - 4 * LAYERS) // (TOP_K * LAYERS)
    assert done.result.tpot_s.mean > 0
    assert f"stopped early, after {n_out} of 12 tokens" in done.result.caveats
    done.result.to_json()
    assert threads() == []
    assert len(buffers) >= 2
    del done, lanes, weights, setup
    gc.collect()
    assert [ref for ref in buffers if ref() is not None] == [], "memory is given back"


def test_on_the_command_line_a_fault_is_one_line_and_exit_1(tmp_path, capsys, monkeypatch):
    from sim.real import run

    run_real = run.run_real

    def broken(setup, engine, machine, *rest, **loop):
        breaks_with(lost)(machine)
        return run_real(setup, engine, machine, *rest, **loop)

    monkeypatch.setattr(run, "run_real", broken)
    setup = tiny_setup(tmp_path, "lru", 8)
    setup.close()
    said = simulated(capsys, *words(setup), "--out", tmp_path / "out")
    assert said.code == 1
    assert said.err.startswith("error: the device was lost while running on the CPU backend (CUDA error: ")
    assert said.err.endswith("what was measured until then is above\n")
    assert "note: stopped early, after " in said.out
    kept = json.loads((tmp_path / "out" / "result.json").read_text())
    assert kept["measured"]["fault"].startswith("the device was lost")
    assert "Traceback" not in said.out + said.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="here page-locking works")
def test_torch_itself_refuses_page_locked_memory_without_a_gpu():
    from test_real_cuda import FakeDevice, lanes_on

    lanes = lanes_on(FakeDevice())
    try:
        lanes.device.on_host.__self__._pin = True
        with pytest.raises(DeviceFault, match=r"page-locked memory was refused.* 4096 bytes"):
            lanes.device.on_host(4096)
    finally:
        lanes.close()


# -- in processes of their own -----------------------------------------------------------------------------------------

INTERRUPTED = """
import os, signal, sys, threading, time
from sim.real.machine.machine import RealMachine
from sim.cli import simulate
end, seen = RealMachine.end, [0]
def counted(self):
    end(self)
    seen[0] += 1
    if seen[0] == {at}:  # a little later, wherever the run is by then
        threading.Thread(target=lambda: (time.sleep(0.001), os.kill(os.getpid(), signal.SIGINT))).start()
RealMachine.end = counted
simulate({args!r})
"""
SHORT_OF_MEMORY = """
import resource, torch
from sim.cli import simulate
import sim.real.run, sim.real.devices.cpu, sim.real.devices.lanes, sim.cli.run_real, sim.real.devices.environment
with open("/proc/self/statm") as file:
    now = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + 400_000_000,) * 2)
simulate(["--policy", "lru", "--hw", "rtx3090", "--real=cpu", "--model", "cpu-small", "--requests", "1"])
"""


def started(code):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=TESTS.parent,
        env={**os.environ, "PYTHONPATH": str(TESTS.parent)},
    )


@pytest.mark.thorough
@pytest.mark.skipif(os.name != "posix", reason="needs SIGINT")
def test_ctrl_c_keeps_what_was_measured(tmp_path):
    setup = tiny_setup(tmp_path, "lru", 8, trace={"outputs": 200})
    setup.close()
    args = [*words(setup), "--json", "--out", str(tmp_path / "out")]
    said = started(INTERRUPTED.format(at=9, args=args))
    assert said.returncode == 130, said.stderr
    result = json.loads(said.stdout)
    assert result["measured"]["fault"] == "interrupted"
    assert result["requests"] == 1
    assert result["decode_tokens"] >= 6, "of eight that were over or about to be"
    assert result["tpot_s"]["mean"] > 0
    assert any(label.startswith("stopped early, after ") for label in result["caveats"])
    assert json.loads((tmp_path / "out" / "result.json").read_text())["run_id"] == result["run_id"]
    assert "Traceback" not in said.stderr


@pytest.mark.skipif(os.name != "posix", reason="needs SIGINT")
def test_ctrl_c_before_the_first_token_is_just_that(tmp_path):
    setup = tiny_setup(tmp_path, "lru", 8)
    setup.close()
    code = INTERRUPTED.format(at=-1, args=words(setup))
    at_once = "begin = RealMachine.begin\n"
    at_once += "RealMachine.begin = lambda *a: (os.kill(os.getpid(), signal.SIGINT), begin(*a))"
    code = code.replace("RealMachine.end = counted", at_once)
    said = started(code)
    assert said.returncode == 130, said.stderr
    assert said.stderr.endswith("interrupted\n")
    assert "Traceback" not in said.stderr


@pytest.mark.thorough
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's limit on address space")
def test_memory_that_is_not_there_is_one_line():
    said = started(SHORT_OF_MEMORY)
    assert said.returncode == 2, said.stderr
    (line,) = said.stderr.splitlines()
    assert line.startswith("error: out of memory while "), line
    assert "lower --cache" in line
