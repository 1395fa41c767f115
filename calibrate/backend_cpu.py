"""CPU stand-in for a device: a thread per lane, an arena for "device" memory, real memcpy between the two sides.

Nothing sleeps: compute is torch on the lane's own thread, a copy is a memcpy on the copy thread, and every figure is a
time that this machine really needed.
"""

from __future__ import annotations

import gc
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch as _torch

from sim.base.interrupts import held, wait_for
from sim.real.devices import environment

_TILE_BYTES = 4 * 1024 * 1024


class _Stamp:
    """A mark: the time at which a lane's thread passed it."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.at_s = 0.0

    def set(self) -> None:
        self.at_s = time.perf_counter()
        self.reached.set()


class ThreadLane:
    """A thread that runs what it is given, in order; the first exception is kept and raised by `drain`."""

    def __init__(self, name: str, n_threads: int) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._n_threads = n_threads
        self._thread = threading.Thread(target=self._serve, name=f"lane-{name}", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        _torch.set_num_threads(self._n_threads)
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except BaseException as error:  # handed to the thread that settles
                self._error = self._error or error

    def put(self, job: Callable[[], object]) -> None:
        self._jobs.put(job)

    def drain(self) -> None:
        """Wait until the lane is idle. Raises what a job raised."""
        stamp = _Stamp()
        self._jobs.put(stamp.set)
        wait_for(stamp.reached)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def stop(self) -> None:
        self._jobs.put(None)
        self._thread.join(timeout=10)


class CpuBackend:
    """The host playing both sides; `l2_bytes` is what a rotated working set must exceed."""

    kind = "cpu"

    def __init__(self, device: str = "cpu", *, l2_bytes: int = 32 * 1024 * 1024,
                 max_copy_bytes: int = 64 * 1024 * 1024) -> None:  # fmt: skip
        self.torch: Any = _torch
        self.device, self.title = "cpu", "CPU backend"
        self.l2_bytes, self.max_copy_bytes = l2_bytes, max_copy_bytes
        self.total_bytes = environment.host_memory_bytes()  # the arena that stands for device memory lies there
        self.device_bytes = 1 << 30
        self.n_sms, self.uuid = 1, ""
        self.dtype, self.int4 = "float32", False
        with held():
            self.compute, self.h2d, self.d2h = (ThreadLane(name, 1) for name in ("compute", "h2d", "d2h"))

    def on_device(self, shape: tuple[int, ...], dtype: str) -> Any:
        kind = getattr(_torch, dtype)
        tensor = _torch.empty(shape, dtype=kind)
        if not kind.is_floating_point:
            return tensor.fill_(1)
        flat = tensor.view(-1)
        tile = _torch.empty(min(flat.numel(), _TILE_BYTES), dtype=kind).normal_(0.0, 0.02)
        for at in range(0, flat.numel(), tile.numel()):
            part = flat[at : at + tile.numel()]
            part.copy_(tile[: part.numel()])
        return tensor

    def on_host(self, n_bytes: int, *, pinned: bool) -> Any:
        return _torch.full((n_bytes,), 7, dtype=_torch.uint8)

    def block(self, lane: ThreadLane, call: Callable[[], object], n: int) -> float:
        def run() -> None:
            with _torch.inference_mode():  # a property of the thread that computes
                for _ in range(n):
                    call()

        start_s = time.perf_counter()
        lane.put(run)
        return time.perf_counter() - start_s

    def spin(self, lane: ThreadLane, duration_s: float) -> None:
        """Nothing to hold: a lane's thread gets a whole block at once, so no host gap can open inside it."""

    def mark(self, lane: ThreadLane) -> _Stamp:
        stamp = _Stamp()
        lane.put(stamp.set)
        return stamp

    def wait(self, lane: ThreadLane, mark: _Stamp) -> None:
        lane.put(mark.reached.wait)

    def done(self, mark: _Stamp) -> bool:
        return mark.reached.is_set()

    def elapsed_s(self, start: _Stamp, end: _Stamp) -> float:
        return end.at_s - start.at_s

    def join(self, lane: ThreadLane) -> None:
        lane.drain()

    def settle(self) -> None:
        for lane in (self.compute, self.h2d, self.d2h):
            lane.drain()

    def free(self) -> None:
        gc.collect()

    def close(self) -> None:
        with held():
            for lane in (self.compute, self.h2d, self.d2h):
                lane.stop()
