"""Parts of the CUDA backend that need no device: clocks held together, page-locked pieces, faults by their texts."""

from __future__ import annotations

import random
import struct
import threading
import time
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from test_real_cuda import FakeDevice, lanes_on  # noqa: E402

from sim.base.device_faults import DeviceFault, fault_of  # noqa: E402
from sim.machine.protocol import DEMAND, SPECULATIVE  # noqa: E402
from sim.policy.tickets import UNKNOWN_S  # noqa: E402
from sim.profiles.models import load_model  # noqa: E402
from sim.real.devices.clock import WINDOW_S, DeviceClock  # noqa: E402
from sim.real.devices.memory import CudaMemory, pinned_pieces  # noqa: E402
from sim.real.devices.work import COMPUTE, H2D, POOL, Work  # noqa: E402

# -- the clock


class Device:
    """Events of a device whose oscillator drifts, read as a driver gives them: milliseconds in float32."""

    LAUNCH_S, SYNC_S = 4e-6, 7e-6

    def __init__(self, drift: float, offset_s: float) -> None:
        self.true_s, self.drift, self.offset_s = 0.0, drift, offset_s
        device = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.at_s = 0.0

            def record(self, stream: object) -> None:
                self.at_s = device.own(device.true_s + device.LAUNCH_S)

            def synchronize(self) -> None:
                device.true_s += device.LAUNCH_S + device.SYNC_S

            def elapsed_time(self, end: Event) -> float:
                assert end.at_s >= self.at_s, "an anchor that is later than the work it serves"
                return struct.unpack("f", struct.pack("f", 1e3 * (end.at_s - self.at_s)))[0]

        self.Event = Event

    def own(self, true_s: float) -> float:
        return self.offset_s + true_s * (1 + self.drift)

    def event(self, true_s: float):
        found = self.Event()
        found.at_s = self.own(true_s)
        return found

    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize("drift", [0.0, 50e-6, -50e-6])
def test_device_times_stay_beside_the_host_s_for_minutes(drift):
    """100 s of kernels of 20 us and reads back: no start and end further off than the windows' drift allows."""
    device, rng = Device(drift, 12345.678), random.Random(1)
    clock = DeviceClock(device, None, now=lambda: device.true_s)
    zero_s, worst_s, busy_s, n = device.true_s - clock.now_s(), 0.0, 0.0, 0
    while device.true_s < 100.0:
        device.true_s += rng.uniform(1e-3, 30e-3)
        work = Work(COMPUTE, "expert", lambda: None)
        work.submit_s = clock.now_s()
        begins_s = device.true_s + device.LAUNCH_S
        ends_s = begins_s + 20e-6
        work.begun, work.mark = device.event(begins_s), device.event(ends_s)
        device.true_s = ends_s + device.SYNC_S  # the host reads the result back
        clock.place(work, 0.0)
        for told_s, true_s in ((work.start_s, begins_s - zero_s), (work.end_s, ends_s - zero_s)):
            worst_s = max(worst_s, abs(told_s - true_s))
        assert work.submit_s <= work.start_s <= work.end_s <= clock.now_s()
        busy_s, n = busy_s + work.end_s - work.start_s, n + 1
    assert worst_s < 2 * WINDOW_S * abs(drift) + 10e-6
    assert busy_s / n == pytest.approx(20e-6, rel=0.1), "one anchor for all would be off by the rounding of float32"


def test_what_other_work_waited_for_keeps_its_own_waiting_time():
    """Stamped as something that was waited for, a piece of work is not stamped again when its turn comes."""

    class InRealTime(FakeDevice):
        clock_s = property(lambda self: time.perf_counter(), lambda self, value: None)

    lanes = lanes_on(InRealTime(late=True))  # which runs nothing before somebody waits
    try:
        first = Work(COMPUTE, "gate", lambda: None)
        lanes.submit(first)
        second = Work(H2D, "demand", lambda: None, (first,))
        lanes.submit(second)
        third = Work(COMPUTE, "expert", lambda: None, (second,))
        lanes.submit(third)
        lanes.wait(third)
        assert [work.op for work in lanes.finished].count("demand") == 1
        assert second.ready_s == first.end_s > second.submit_s
        assert third.ready_s == second.end_s > third.submit_s
        assert UNKNOWN_S not in (first.ready_s, second.ready_s, third.ready_s)
    finally:
        lanes.close()


# -- memory


def power(n_bytes: int) -> int:
    return 1 << (n_bytes - 1).bit_length()


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen1.5-moe-a2.7b", "deepseek-moe-16b", "phi-3.5-moe", "cpu-small"])
def test_rounding_to_powers_of_two_costs_page_locked_memory_little(name):
    model = load_model(name)
    n, size = model.n_moe_layers * model.n_experts, model.expert_bytes("bf16")
    pieces = pinned_pieces(n, size)
    assert sum(pieces) == n
    locked = sum(power(held * size) for held in pieces)
    assert locked <= 1.03 * n * size + (1 << 30)
    if name == "mixtral-8x7b":  # 84 GiB: in one piece it would lock 128
        assert power(n * size) == 128 << 30
        assert locked < 87 << 30


def test_every_size_and_count_is_held():
    rng = random.Random(0)
    for _ in range(300):
        n, size = rng.randrange(1, 400), rng.randrange(1, 1 << rng.randrange(1, 31))
        pieces = pinned_pieces(n, size)
        assert sum(pieces) == n and min(pieces) >= 1


def test_host_buffers_do_not_overlap():
    memory = CudaMemory(torch, SimpleNamespace(), "cpu", [], pin=False)
    buffers = memory.host_buffers(7, 5000)
    for number, buffer in enumerate(buffers):
        buffer.fill_(number)
    assert [int(b.min()) for b in buffers] == [int(b.max()) for b in buffers] == list(range(7))


def test_refused_page_locked_memory_says_so_whatever_the_driver_says():
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    memory = CudaMemory(SimpleNamespace(empty=refuse, uint8=None), SimpleNamespace(), "cuda:0", [], pin=True)
    with pytest.raises(DeviceFault, match=r"page-locked memory was refused: 64 bytes \(CUDA error: out of memory\)"):
        memory.on_host(64)


# -- faults


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB", "out of memory"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "out of memory"),
        ("CUDA error: an illegal memory access was encountered", "the device was lost"),
        ("CUDA error: unspecified launch failure", "the device was lost"),
        ("CUDA error: uncorrectable ECC error encountered", "the device was lost"),
        ("CUDA driver error: device not ready", "the device was lost"),
        ("Cannot pin memory: pin_memory refused", "page-locked memory was refused"),
    ],
)
def test_faults_by_what_torch_says(text, kind):
    found = fault_of(RuntimeError(text), "launching expert")
    assert isinstance(found, DeviceFault) and str(found).startswith(kind)


def test_a_bug_that_mentions_cuda_is_not_a_lost_device():
    error = RuntimeError("Expected all tensors to be on the same device, but found two devices, cuda:0 and cpu!")
    assert fault_of(error, "launching expert") is error


# -- threads


def test_a_prefetch_does_not_wait_for_an_expert_on_the_cpu():
    """The result of a slow expert on the CPU waits in the queue; a prefetch asked for meanwhile must overtake it."""
    device, release = FakeDevice(), threading.Event()
    lanes = lanes_on(device)
    try:
        pool = Work(POOL, "expert", lambda: release.wait(20))
        back = Work(H2D, "activations", lambda: None, (pool,), priority=DEMAND)
        for work in (pool, back):
            lanes.submit(work)
        queue = lanes.queues[0]
        while not queue.feeder.news.is_set() and queue.version < 1:
            threading.Event().wait(0.001)
        threading.Event().wait(0.02)  # the feeder waits for the pool by now
        prefetch = Work(H2D, "prefetch", lambda: None, priority=SPECULATIVE)
        lanes.submit(prefetch)
        for _ in range(2000):
            if prefetch.issued:
                break
            threading.Event().wait(0.001)
        assert prefetch.issued and not back.issued
        release.set()
        lanes.settle()
        assert back.issued
    finally:
        release.set()
        lanes.close()


def test_an_expert_on_the_cpu_that_fails_blocks_nobody():
    lanes = lanes_on(FakeDevice())
    try:

        def broken() -> None:
            raise RuntimeError("CUDA error: unspecified launch failure")

        pool = Work(POOL, "expert", broken)
        lanes.submit(pool)
        with pytest.raises(DeviceFault, match="device was lost"):
            lanes.submit(Work(COMPUTE, "attention", lambda: None, (pool,)))
            lanes.wait(pool)
    finally:
        lanes.close()


# -- devices of tensors


class FakeTensors:
    """A device whose tensors say that they lie elsewhere: torch then refuses to mix them with the host's."""

    place = "meta"

    def __init__(self) -> None:
        self.torch = torch

    def on_host(self, n_bytes: int):
        return torch.empty(n_bytes, dtype=torch.uint8)

    def host_buffers(self, n: int, each_bytes: int):
        return [self.on_host(each_bytes) for _ in range(n)]

    def on_device(self, n_bytes: int):
        return torch.zeros(n_bytes, dtype=torch.uint8, device=self.place)

    def upload(self, tensor):
        return tensor.to(self.place, non_blocking=True)


@pytest.mark.parametrize("name", ["cpu-small", "qwen1.5-moe-a2.7b", "deepseek-moe-16b", "deepseek-v2-lite"])
@pytest.mark.parametrize("rows", [[(7, 0)], [(1, 6), (1, 3), (1, 11)]], ids=["prompt", "batch"])
def test_no_operation_mixes_host_and_device(name, rows):
    """Every operation of a pass, on the geometries to be validated, but for their numbers of layers and experts."""
    import msgspec
    from torch._subclasses.fake_tensor import FakeTensorMode

    from sim.real.machine.decoder import Decoder, Span
    from sim.real.weights.random_weights import random_weights

    model = load_model(name)
    dense = tuple(i for i in model.dense_layers if i < 3)
    model = msgspec.structs.replace(model, n_layers=3, dense_layers=dense, vocab_size=512)
    with FakeTensorMode(), torch.inference_mode():
        device = FakeTensors()
        weights = random_weights(model, "bf16", device, 0, model.expert_bytes("bf16") * model.n_experts)
        decoder = Decoder(model, weights, torch, device.place, 64)
        at = 0
        for n, context in rows:
            decoder.spans.append(Span(at, n, context, *decoder.cache(32)))
            at += n
        decoder.embed(device.upload(torch.zeros(at, dtype=torch.int64)))
        for number in range(3):
            decoder.attention(number)
            if number in dense:
                decoder.dense_ffn(number)
                continue
            decoder.gate(number)
            picked = device.upload(torch.arange(at))
            matrices = weights.experts[0][0].view(weights.dtype).view(3, weights.rows, model.hidden_size)
            out = decoder.ffn(decoder.normed.index_select(0, picked), device.upload(matrices))
            if model.shared_intermediate_size:
                out = out + decoder.shared(number)
            decoder.hidden = decoder.hidden.index_add(0, picked, out)
        decoder.head()
        assert decoder.hidden.device.type == decoder.out[0].device.type == "meta"
        assert decoder.hidden.dtype == torch.bfloat16 and decoder.out[1].shape == (len(rows),)
        assert decoder.top[1].dtype == torch.int64, "what is read back without a conversion"
        with pytest.raises(Exception, match="device"):
            decoder.ffn(decoder.normed, matrices)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            RuntimeError("CUDA error: an illegal memory access was encountered"),
            r"the device was lost while recording .* --resume keeps finished requests",
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "memory, ran out while recording"),
        (RuntimeError("size mismatch"), "^size mismatch$"),
    ],
)
def test_a_gpu_that_is_lost_while_recording_is_one_line(error, text):
    from sim.base.errors import BadInput
    from traces.record.load import memory_errors

    kind = RuntimeError if "mismatch" in text else BadInput
    with pytest.raises(kind, match=text), memory_errors("recording requests 0 to 3", "a smaller --batch"):
        raise error
