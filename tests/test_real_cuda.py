"""The CUDA lanes without a device: a stand-in that runs streams late and in any order that its events allow.

What is shown: whatever may happen on a device that keeps to stream order and event waits, nothing runs before what it
names has ended, and a wait is never for an event that was not recorded (which CUDA would silently let pass).
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import deque
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from grids import few_each_time  # noqa: E402
from one_card import OneCard  # noqa: E402
from real_world import carried_out  # noqa: E402
from test_real import in_parts  # noqa: E402

from sim.base.device_faults import DeviceFault  # noqa: E402
from sim.machine.protocol import DEMAND, SPECULATIVE  # noqa: E402
from sim.real.devices.cuda import CudaDevice  # noqa: E402
from sim.real.devices.lanes import Lanes  # noqa: E402
from sim.real.devices.work import COMPUTE, D2H, H2D, POOL, Work  # noqa: E402


class FakeDevice(OneCard):
    """`torch.cuda` as far as the lanes use it. With `late`, streams are run by `step` in an order drawn from a seed."""

    def __init__(self, late: bool = False, seed: int = 0) -> None:
        self.late, self.rng, self.lock = late, random.Random(seed), threading.RLock()
        self.streams: list[FakeStream] = []
        self.local = threading.local()  # torch's current stream is a thread's own
        self.clock_s = 0.0
        self.lost = self.frozen = False
        device = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing
                self.recorded, self.at_s = False, None

            def record(self, stream: FakeStream) -> None:
                self.recorded = True
                stream.give(self._reach)

            def _reach(self) -> None:
                self.at_s = device.clock_s

            def query(self) -> bool:
                if device.late and self.at_s is None and device.rng.random() < 0.3:
                    device.step()
                return self.at_s is not None

            def synchronize(self) -> None:
                assert self.recorded, "waiting for an event that was never recorded"
                if device.lost:
                    raise RuntimeError("CUDA error: device-side assert triggered")
                while self.at_s is None:
                    if not device.step():
                        time.sleep(0)  # another thread is about to hand work over

            def elapsed_time(self, end: Event) -> float:
                return (end.at_s - self.at_s) * 1e3

        self.Event = Event

    def Stream(self, device: int) -> FakeStream:
        self.streams.append(FakeStream(self))
        return self.streams[-1]

    def get_device_properties(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(name="Fake GPU")

    @property
    def current(self) -> list[FakeStream]:
        return self.local.__dict__.setdefault("streams", [])

    def current_stream(self) -> FakeStream:
        return self.current[-1] if self.current else FakeStream(self)

    def keep(self, tensor, stream) -> None:
        pass

    @contextlib.contextmanager
    def stream(self, lane):
        self.current.append(lane)
        yield
        self.current.pop()

    def step(self) -> bool:
        """Run the next entry of a stream drawn at random among those that may go on."""
        with self.lock:
            able = [stream for stream in self.streams if stream.able()]
            if not able or self.frozen:
                return False
            self.rng.choice(able).run()
            return True

    def synchronize(self) -> None:
        if self.lost:
            raise RuntimeError("CUDA error: device-side assert triggered")
        while self.step():
            pass

    def empty_cache(self) -> None:
        pass


class FakeStream:
    """What a stream was given, in order: functions, and events to wait for."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.given: deque = deque()

    def give(self, entry) -> None:
        with self.device.lock:
            self.given.append(entry)
            if not self.device.late:
                while self.able():
                    self.run()

    def wait_event(self, event) -> None:
        assert event.recorded, "a stream that waits for an event not recorded yet does not wait at all"
        self.give(event)

    def synchronize(self) -> None:
        while self.given and self.device.step():
            pass

    def able(self) -> bool:
        return bool(self.given) and (callable(self.given[0]) or self.given[0].at_s is not None)

    def run(self) -> None:
        entry = self.given.popleft()
        self.device.clock_s += 1e-6
        if callable(entry):
            entry()


def lanes_on(device: FakeDevice) -> Lanes:
    return Lanes(CudaDevice("cuda:0", cuda=device, place="cpu"))


@pytest.mark.parametrize("seed", range(25))
def test_nothing_runs_before_what_it_names(seed):
    """Random programs of all lanes, priorities, promotions and cancellations on a device that runs late."""
    rng, device = random.Random(seed), FakeDevice(late=True, seed=seed)
    lanes, ran, made, names = lanes_on(device), [], [], {}
    lock = threading.Lock()

    def call(number, lane):
        def ran_now():
            with lock:
                ran.append(number)

        return ran_now if lane == POOL else lambda: device.current[-1].give(ran_now)

    try:
        for number in range(60):
            lane = rng.choice((COMPUTE, COMPUTE, H2D, H2D, H2D, D2H, POOL))
            behind = [work for work in made[-12:] if not work.cancelled]
            if lane == POOL:  # on the host: it names copies down, as the machine's experts on the CPU do
                behind = [work for work in behind if work.lane == D2H]
            after = tuple(rng.sample(behind, min(len(behind), rng.randrange(3))))
            priority = SPECULATIVE if lane == H2D and rng.random() < 0.6 else DEMAND
            work = Work(lane, str(number), call(number, lane), after, priority=priority)
            names[number] = [int(before.op) for before in after]
            lanes.submit(work)
            made.append(work)
            if rng.random() < 0.2:
                other = rng.choice([w for w in made if w.lane == H2D] or [work])
                if other.lane == H2D:
                    if rng.random() < 0.5:
                        lanes.promote(other)
                    elif lanes.cancel(other):
                        assert other.cancelled
            if rng.random() < 0.15:
                lanes.wait(rng.choice([w for w in made if not w.cancelled]))
            if rng.random() < 0.3:
                device.step()
        lanes.settle()
        for work in made:
            if not work.cancelled:
                lanes.wait(work)
        cancelled = {int(work.op) for work in made if work.cancelled}
        assert sorted(ran) == sorted(set(range(60)) - cancelled), "each once, and nothing that was withdrawn"
        place = {number: i for i, number in enumerate(ran)}
        for number, before in names.items():
            if number in place:
                assert all(place[b] < place[number] for b in before if b not in cancelled), (number, before)
        compute = [place[int(work.op)] for work in made if work.lane == COMPUTE]
        assert compute == sorted(compute), "a stream keeps its order"
        stamped = lanes.finished
        assert {work.op for work in stamped} == {str(n) for n in place}
        assert all(work.start_s <= work.end_s for work in stamped)
    finally:
        lanes.close()


def test_a_demand_overtakes_speculation_that_is_not_on_the_stream():
    device = FakeDevice(late=True)
    lanes, ran = lanes_on(device), []
    try:

        def copy(name, priority):
            work = Work(H2D, name, lambda: device.current[-1].give(lambda: ran.append(name)), priority=priority)
            lanes.submit(work)
            return work

        device.frozen = True  # the flying copy stays on the stream: nothing else gets there
        flying = copy("flying", SPECULATIVE)
        while not flying.issued:
            time.sleep(0)
        one, two, three = (copy(name, SPECULATIVE) for name in ("one", "two", "three"))
        demand = copy("demand", DEMAND)
        assert demand.issued, "at once"
        assert not lanes.cancel(flying), "in flight"
        lanes.promote(three)
        assert lanes.cancel(two)
        device.frozen = False
        lanes.settle()
        lanes.wait(one)
        assert ran == ["flying", "demand", "three", "one"]
    finally:
        lanes.close()


def test_compute_waits_on_the_device_for_a_copy_that_was_still_queued():
    device = FakeDevice(late=True)
    lanes, ran = lanes_on(device), []
    try:
        device.frozen = True
        first, second = (
            Work(H2D, name, lambda name=name: device.current[-1].give(lambda: ran.append(name)), priority=SPECULATIVE)
            for name in ("first", "second")
        )
        lanes.submit(first)
        lanes.submit(second)
        lanes.submit(
            expert := Work(COMPUTE, "expert", lambda: device.current[-1].give(lambda: ran.append("expert")), (second,))
        )
        assert second.issued, "an event must be recorded before anything can wait for it"
        assert lanes.over(expert) is False
        device.frozen = False
        lanes.settle()
        assert ran.index("second") < ran.index("expert")
    finally:
        lanes.close()


@pytest.mark.parametrize("name", few_each_time(["lru", "fine_moe", "belady", "pregated", "moe_infinity"], ["fine_moe"]))
def test_the_whole_machine_computes_the_same_on_either_backend(tmp_path, name):
    on_cpu = carried_out(tmp_path, name, 8)
    device = FakeDevice()
    on_fake = carried_out(tmp_path, name, 8, lanes=lanes_on(device))
    assert on_fake.machine.output.digest == on_cpu.machine.output.digest
    assert on_fake.result.device == "Fake GPU"
    assert on_fake.result.decode_tokens == on_cpu.result.decode_tokens


@pytest.mark.parametrize("late", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_experts_in_parts_compute_the_same_on_either_backend(tmp_path, late):
    on_cpu, _ = in_parts(tmp_path, 1, 1)
    on_fake, log = in_parts(tmp_path, 1, 1, lanes_on(FakeDevice(late, seed=3)))
    assert log.count("part") > 30
    assert on_fake.output.digest == on_cpu.output.digest


def test_waiting_for_an_expert_on_the_cpu_is_no_launching(tmp_path):
    """A block is launched when the experts on the CPU before it have been computed: that wait is no work."""

    def slow(machine):
        fast = machine.decoder.ffn

        def ffn(x, matrices):
            if threading.current_thread() is not threading.main_thread():
                time.sleep(0.02)
            return fast(x, matrices)

        machine.decoder.ffn = ffn

    done = carried_out(tmp_path, "llama_cpp", 8, lanes=lanes_on(FakeDevice()), prepared=slow, requests=1)
    ledger = done.machine.ledger
    n_on_cpu = ledger.by_op["cpu", "expert"].n
    assert ledger.by_op["cpu", "expert"].total_s > 0.02 * n_on_cpu > 0.2
    launching_s = sum(spent.total_s for verb, spent in ledger.host_by.items() if verb != "sync")
    assert launching_s < 0.5 * 0.02 * n_on_cpu


def test_attention_builds_no_plan_for_each_length():
    """cuDNN's does; the choice is torch's again when the device is closed, also where two were open."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        first, second = (lanes_on(FakeDevice()) for _ in range(2))
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        second.close()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        first.close()
        assert torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_a_lost_device_is_a_fault_and_closing_survives_it():
    device = FakeDevice()
    lanes = lanes_on(device)
    work = Work(COMPUTE, "expert", lambda: None)
    lanes.submit(work)
    device.lost = True
    with pytest.raises(DeviceFault, match="the device was lost while waiting for expert"):
        lanes.wait(work)
    with pytest.raises(DeviceFault, match="device was lost"):
        lanes.settle()
    lanes.close()


def test_a_refused_launch_is_a_fault():
    lanes = lanes_on(FakeDevice())
    try:

        def refuse():
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")

        with pytest.raises(DeviceFault, match="out of memory while launching attention"):
            lanes.submit(Work(COMPUTE, "attention", refuse))
    finally:
        lanes.close()
