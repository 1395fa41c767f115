"""CUDA: a stream per lane, events as marks, page-locked host memory.

The streams are torch's, which the default stream neither waits for nor holds up: what runs there (placing experts
before a run, reading hidden rows after the head) is synchronised by itself. A stream can only wait for an event that
has been recorded, and what it has been given cannot be overtaken: see `sim.real.devices.queue`.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from typing import Any

from sim.base.errors import BadInput
from sim.real.devices.clock import DeviceClock
from sim.real.devices.memory import CudaMemory
from sim.real.devices.protocol import Call, Facts
from sim.real.devices.work import COMPUTE, D2H, H2D

SPIN_HZ = 1.98e9
"""Cycles per second that `_sleep` is asked in; a slower clock only holds the stream longer, which is harmless."""
L2_BYTES = 64 * 1024 * 1024
"""Assumed where the driver does not say."""


class CudaStream:
    """One stream of torch's."""

    def __init__(self, torch: Any, cuda: Any, index: int) -> None:
        self._torch, self._cuda = torch, cuda
        self.raw: Any = cuda.Stream(device=index)

    def enqueue(self, call: Call, n: int = 1, begun: Any = None, ended: Any = None) -> float:
        """Launches here and now; raises what a launch raises."""
        with self._torch.inference_mode(), self._cuda.stream(self.raw):
            if begun is not None:
                begun.record(self.raw)
            start_s = time.perf_counter()
            for _ in range(n):
                call()
            spent_s = time.perf_counter() - start_s
            if ended is not None:
                ended.record(self.raw)
        return spent_s

    def mark(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record(self.raw)
        return event

    def wait(self, mark: Any) -> None:
        self.raw.wait_event(mark)

    def synchronize(self) -> None:
        self.raw.synchronize()

    def hold(self, duration_s: float) -> None:
        with self._cuda.stream(self.raw):
            self._cuda._sleep(int(duration_s * SPIN_HZ))


class CudaDevice:
    """A CUDA device. Without one, a test passes a stand-in for `torch.cuda` and the `place` of tensors."""

    threaded = False
    n_gpus = 1
    busy_cores = 1  # the feeder's

    def __init__(self, device: str = "cuda:0", *, cuda: Any = None, place: str | None = None) -> None:
        import torch

        self.torch: Any = torch
        self._cuda: Any = torch.cuda if cuda is None else cuda
        if not self._cuda.is_available():
            raise BadInput(f"device, got {device!r}: torch sees no CUDA device; name cpu, or install another torch")
        self._index, count = int(device.partition(":")[2] or 0), self._cuda.device_count()
        if self._index >= count:
            raise BadInput(
                f"device, got {device!r}: torch sees no such CUDA device, {count} are here; name cpu, or cuda:0 to "
                f"cuda:{count - 1}"
            )
        self.bind_thread()
        # cuDNN's attention builds a plan for each length of context (pytorch #155958): 40 ms of the host on an H200.
        self._builds_plans = bool(self.torch.backends.cuda.cudnn_sdp_enabled())
        self.torch.backends.cuda.enable_cudnn_sdp(False)
        self.place = place or f"cuda:{self._index}"
        self.facts = self._facts(real=place is None)
        self.failed: Callable[[BaseException], None] = _not_here
        self._streams = {lane: CudaStream(torch, self._cuda, self._index) for lane in (COMPUTE, H2D, D2H)}
        raw = [stream.raw for stream in self._streams.values()]
        self._memory = CudaMemory(torch, self._cuda, self.place, raw, pin=place is None)
        self.on_device, self.on_host = self._memory.on_device, self._memory.on_host
        self.host_buffers, self.upload = self._memory.host_buffers, self._memory.upload

    def _facts(self, real: bool) -> Facts:
        found = self._cuda.get_device_properties(self._index)
        ampere = int(getattr(found, "major", 8)) >= 8  # older ones emulate bf16, slowly
        return Facts(
            "cuda",
            str(found.name),
            int(getattr(found, "total_memory", 0)),
            int(getattr(found, "L2_cache_size", 0)) or L2_BYTES,
            int(getattr(found, "multi_processor_count", 1)),
            "bfloat16" if ampere else "float16",
            real and ampere and hasattr(self.torch.ops.aten, "_weight_int4pack_mm"),
            str(getattr(found, "uuid", "")),
        )

    def stream(self, lane: int, gpu: int = 0) -> CudaStream:
        return self._streams[lane]

    def mark(self) -> Any:
        return self._cuda.Event(enable_timing=True)

    def elapsed_s(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) * 1e-3

    def settle(self) -> None:
        self._cuda.synchronize()

    def clock(self) -> DeviceClock:
        return DeviceClock(self._cuda, self._streams[COMPUTE].raw)

    def bind_thread(self) -> None:
        """The device of the moment is each thread's own."""
        self._cuda.set_device(self._index)

    def used_here(self, tensor: Any) -> None:
        """Keep the allocator from handing a tensor's memory out while the current stream reads it."""
        self._memory.keep(tensor, self._cuda.current_stream())

    def free_bytes(self) -> int:
        return int(self._cuda.mem_get_info(self._index)[0])

    def free(self) -> None:
        gc.collect()
        self._cuda.empty_cache()

    def close(self) -> None:
        self.torch.backends.cuda.enable_cudnn_sdp(self._builds_plans)
        with contextlib.suppress(Exception):  # a lost device answers nothing any more
            self._cuda.synchronize()
        gc.collect()
        with contextlib.suppress(Exception):
            self._memory.give_back()


def _not_here(error: BaseException) -> None:
    """A launch raises on the thread that launches."""
