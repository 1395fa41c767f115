"""The device protocol: what every device keeps to, and that one with no more than the protocol carries out a run."""

from __future__ import annotations

import threading
import time

import pytest

torch = pytest.importorskip("torch")

from real_world import ALL, carried_out  # noqa: E402
from test_real_cuda import FakeDevice  # noqa: E402

from sim.base.device_faults import DeviceFault  # noqa: E402
from sim.machine.protocol import SPECULATIVE  # noqa: E402
from sim.real.devices.clock import HostClock  # noqa: E402
from sim.real.devices.cpu import CpuDevice  # noqa: E402
from sim.real.devices.cuda import CudaDevice  # noqa: E402
from sim.real.devices.lanes import Lanes  # noqa: E402
from sim.real.devices.protocol import Device, Facts, Mark, Stream  # noqa: E402
from sim.real.devices.work import COMPUTE, D2H, H2D, POOL, Work  # noqa: E402


class AtOnce:
    """A mark of a stream that has done everything by the time it is asked."""

    def __init__(self) -> None:
        self.at_s = None

    def query(self) -> bool:
        return self.at_s is not None

    def synchronize(self) -> None:
        assert self.at_s is not None, "waiting for a mark that no stream was given"


class PlainStream:
    """Makes every call where it is enqueued."""

    def enqueue(self, call, n=1, begun=None, ended=None):
        start_s = time.perf_counter()
        if begun is not None:
            begun.at_s = start_s
        with torch.inference_mode():
            for _ in range(n):
                call()
        end_s = time.perf_counter()
        if ended is not None:
            ended.at_s = end_s
        return end_s - start_s

    def mark(self):
        mark = AtOnce()
        mark.at_s = time.perf_counter()
        return mark

    def wait(self, mark) -> None:
        assert mark.query(), "a stream here cannot wait for what is still to come"

    def synchronize(self) -> None:
        pass

    def hold(self, duration_s) -> None:
        pass


class PlainDevice:
    """A device of the protocol's methods and nothing else, as somebody with other hardware would begin."""

    place, n_gpus, busy_cores, threaded = "cpu", 1, 0, False
    facts = Facts("plain", "Plain device", 1 << 30, 1 << 20, 1, "float32", int4=False)

    def __init__(self) -> None:
        self.torch = torch
        self.failed = lambda error: None
        self.streams = {lane: PlainStream() for lane in (COMPUTE, H2D, D2H)}

    def stream(self, lane, gpu=0):
        return self.streams[lane]

    def mark(self):
        return AtOnce()

    def elapsed_s(self, start, end):
        return end.at_s - start.at_s

    def settle(self) -> None:
        pass

    def clock(self):
        return HostClock()

    def bind_thread(self) -> None:
        pass

    def on_device(self, n_bytes):
        return torch.zeros(n_bytes, dtype=torch.uint8)

    def on_host(self, n_bytes, pinned=True):
        return torch.zeros(n_bytes, dtype=torch.uint8)

    def host_buffers(self, n, each_bytes):
        return [self.on_host(each_bytes) for _ in range(n)]

    def upload(self, tensor):
        return tensor

    def used_here(self, tensor) -> None:
        pass

    def free_bytes(self):
        return 1 << 30

    def free(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture(params=["cpu", "cuda", "plain"])
def device(request):
    made = {
        "cpu": CpuDevice,
        "plain": PlainDevice,
        "cuda": lambda: CudaDevice("cuda:0", cuda=FakeDevice(), place="cpu"),
    }[request.param]()
    yield made
    made.close()


def methods(protocol: type) -> set[str]:
    return {name for name, value in vars(protocol).items() if callable(value) and not name.startswith("_")}


def test_the_plain_device_has_the_protocol_s_methods_and_no_more():
    for protocol, kind in ((Device, PlainDevice), (Stream, PlainStream), (Mark, AtOnce)):
        assert methods(kind) == methods(protocol)


@pytest.mark.parametrize("policy", ["lru", "moepic", "llama_cpp", "mixtral_offloading"])
def test_a_device_of_the_protocol_alone_carries_out_a_run(tmp_path, policy):
    """Bytes are proved by `carried_out`; what is computed is what the resident model computes on the CPU backend."""
    resident = carried_out(tmp_path, "lru", ALL)
    done = carried_out(tmp_path, policy, 8, Lanes(PlainDevice(), pool_threads=1))
    assert done.result.device == "Plain device"
    assert done.result.h2d_bytes > 0
    for mine, theirs in zip(done.machine.output.hidden, resident.machine.output.hidden, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_streams_keep_their_order_and_wait_for_marks(device):
    ran = []
    one, other = device.stream(COMPUTE), device.stream(H2D)
    assert device.stream(COMPUTE) is one
    begun, ended = device.mark(), device.mark()
    spent_s = one.enqueue(lambda: (time.sleep(0.01), ran.append("first")), 3, begun, ended)
    assert spent_s >= 0.0
    other.wait(one.mark())
    other.enqueue(lambda: ran.append("second"))
    last = other.mark()
    device.settle()
    assert ran == ["first"] * 3 + ["second"]
    assert begun.query() and ended.query() and last.query()
    last.synchronize()
    assert device.elapsed_s(begun, ended) > 0.0


def test_a_thread_s_marks_lie_close_to_the_calls():
    device = CpuDevice()
    try:
        begun, ended = device.mark(), device.mark()
        device.stream(COMPUTE).enqueue(lambda: time.sleep(0.02), 2, begun, ended)
        device.settle()
        assert device.elapsed_s(begun, ended) >= 0.04
    finally:
        device.close()


def test_what_a_call_raises_is_raised_once_when_the_device_settles():
    device, ran = CpuDevice(), []
    try:
        device.stream(COMPUTE).enqueue(lambda: 1 / 0)
        device.stream(COMPUTE).enqueue(lambda: ran.append("after"))
        with pytest.raises(ZeroDivisionError):
            device.settle()
        device.settle()
        assert ran == ["after"], "a probe that fails does not take the next ones with it"
    finally:
        device.close()


def test_lanes_take_a_device_s_faults(device):
    lanes = Lanes(device)
    try:

        def fail():
            raise RuntimeError("CUDA error: out of memory")

        with pytest.raises(DeviceFault, match="out of memory while"):
            lanes.submit(work := Work(COMPUTE, "expert", fail))
            lanes.wait(work)
        with pytest.raises(DeviceFault, match="out of memory while running on the"):
            lanes.settle()
    finally:
        lanes.close()


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_compute_that_waits_for_a_copy_is_let_go_when_the_copy_is_withdrawn(kind):
    """A stream that is a thread waits for the mark of a copy still queued; nobody would set it any more."""
    made = CpuDevice() if kind == "cpu" else CudaDevice("cuda:0", cuda=FakeDevice(), place="cpu")
    lanes, gate = Lanes(made), threading.Event()
    try:
        lanes.submit(busy := Work(POOL, "expert", gate.wait))
        lanes.submit(waits := Work(H2D, "prefetch", lambda: None, (busy,), priority=SPECULATIVE))
        assert lanes.cancel(waits)
        lanes.submit(after := Work(COMPUTE, "expert", lambda: None, (waits,)))
        lanes.wait(after)
        assert lanes.over(waits) and not lanes.over(busy)
        gate.set()
        lanes.settle()
    finally:
        gate.set()
        lanes.close()


def test_closing_lets_go_of_whoever_waits_for_a_queued_copy():
    lanes, gate, n_threads = Lanes(CpuDevice()), threading.Event(), threading.active_count()
    lanes.submit(busy := Work(POOL, "expert", lambda: gate.wait(20)))
    lanes.submit(queued := Work(H2D, "demand", lambda: None, (busy,)))
    lanes.submit(after := Work(COMPUTE, "expert", lambda: None, (queued,)))
    assert not lanes.over(after)
    closing = threading.Thread(target=lanes.close)
    closing.start()
    after.mark.synchronize()  # before the expert on the CPU has ended
    assert not busy.mark.query()
    gate.set()
    closing.join(20)
    assert not closing.is_alive() and threading.active_count() < n_threads
