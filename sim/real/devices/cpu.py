"""The CPU backend: a thread per lane, an arena as "device" memory, real memcpy between the two sides.

Nothing sleeps and nothing is made up: compute is torch on the compute lane's thread, a copy is a memcpy on the copy
lane's thread, and a stream that waits waits for the event of the work it needs.
"""

from __future__ import annotations

import contextlib
import gc
import queue
import sys
import threading
import time
from collections import deque
from typing import Any

from sim.base.device_faults import DeviceFault, fault_of
from sim.base.interrupts import held, wait_for
from sim.machine.protocol import DEMAND
from sim.real.devices.environment import cpu_quota, usable_cores
from sim.real.devices.work import COMPUTE, DOWN, LANES, POOL, UP, Work

SWITCH_INTERVAL_S = 2e-5
"""How long a thread may keep the interpreter while another wants it; the default of 5 ms exceeds most operations."""


def cores() -> int:
    """Cores this process may use: a container may see many and be given the time of few."""
    return min(len(usable_cores()), cpu_quota())


class CpuLanes:
    """Host, compute and copy thread have a core each where there are enough; the pool gets what is left.

    Whoever hands work over holds Ctrl-C back (`sim.base.interrupts`): it is heard while waiting for a lane.

    Args:
        pool_threads: cores of one expert on the CPU; None: those that host, compute and copies leave.
        n_gpus: compute lanes and copy engines, each with an arena that stands for a GPU's memory.
    """

    def __init__(self, device: str = "cpu", pool_threads: int | None = None, n_gpus: int = 1) -> None:
        import torch

        self.torch: Any = torch
        self.device, self.title = "cpu", "CPU backend"
        self.n_gpus = n_gpus
        self.pool_threads = pool_threads or max(1, cores() - 1 - 2 * n_gpus)
        self.finished: deque[Work] = deque()
        self._base_s = time.perf_counter()
        self._threads_before = torch.get_num_threads()
        self._switch_before_s = sys.getswitchinterval()
        torch.set_num_threads(1)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._fault: BaseException | None = None
        with held():
            self._up = [CopyThread(self) for _ in range(n_gpus)]
            self._in_order: dict[tuple[int, int], OrderedThread] = {}  # by lane and GPU, once they have work
            self._lane(COMPUTE, 0)

    def used_here(self, tensor: Any) -> None:
        """Nothing to do: memory lives as long as its tensor."""

    def now_s(self) -> float:
        return time.perf_counter() - self._base_s

    def restart_clock(self) -> None:
        self._base_s = time.perf_counter()

    def on_device(self, n_bytes: int) -> Any:
        return self._touched(n_bytes)

    def on_host(self, n_bytes: int) -> Any:
        return self._touched(n_bytes)

    def host_buffers(self, n: int, each_bytes: int) -> list[Any]:
        raw = self._touched(n * each_bytes)
        return [raw[i * each_bytes : (i + 1) * each_bytes] for i in range(n)]

    def upload(self, tensor: Any) -> Any:
        """The tensor itself: the device's arena lies in host memory."""
        return tensor

    def _touched(self, n_bytes: int) -> Any:
        """Memory whose pages exist, from a page boundary on."""
        try:
            raw = self.torch.zeros(n_bytes + 4096, dtype=self.torch.uint8)
        except (RuntimeError, MemoryError) as error:
            raise fault_of(error, f"allocating {n_bytes} bytes") from None
        raw[::4096] = 0
        skip = -raw.data_ptr() % 4096
        return raw[skip : skip + n_bytes]

    def submit(self, work: Work) -> None:
        work.mark = threading.Event()
        work.submit_s = self.now_s()
        if work.lane == UP:
            self._up[work.gpu].submit(work)
            return
        work.issued = True
        self._lane(work.lane, work.gpu).put(work)

    def _lane(self, lane: int, gpu: int) -> OrderedThread:
        if (lane, gpu) not in self._in_order:
            self._in_order[lane, gpu] = OrderedThread(self, lane, self.pool_threads if lane == POOL else 1)
        return self._in_order[lane, gpu]

    def promote(self, work: Work) -> None:
        self._up[work.gpu].promote(work)

    def cancel(self, work: Work) -> bool:
        return self._up[work.gpu].cancel(work)

    def over(self, work: Work) -> bool:
        return bool(work.mark.is_set())

    def wait(self, work: Work) -> None:
        wait_for(work.mark)
        self._check()

    def settle(self) -> None:
        for lane in (COMPUTE, DOWN, POOL, UP, COMPUTE):
            if lane == UP:
                for up in self._up:
                    up.drain()
            for thread in [thread for (kind, _), thread in self._in_order.items() if kind == lane]:
                last = Work(lane, "settle", lambda: None)
                last.mark = threading.Event()
                thread.put(last)
                wait_for(last.mark)
        self._check()

    def completed(self, work: Work) -> None:
        """Called on a lane's thread."""
        if work.op != "settle":
            self.finished.append(work)
        work.mark.set()
        for up in self._up:
            up.poke()

    def failed(self, work: Work, error: BaseException) -> None:
        """Keep the first fault for the host; nothing waits for ever on work that failed."""
        work.failed = True
        self._fault = self._fault or error

    def _check(self) -> None:
        if self._fault is not None:
            raise fault_of(self._fault, "running on the CPU backend") from self._fault

    def close(self) -> None:
        with held():
            for stop in (*(thread.stop for thread in self._in_order.values()), *(up.stop for up in self._up)):
                with contextlib.suppress(Exception):
                    stop()
            self.finished.clear()
            self.torch.set_num_threads(self._threads_before)
            sys.setswitchinterval(self._switch_before_s)
            gc.collect()


def perform(lanes: CpuLanes, work: Work) -> None:
    """Run one piece of work on the calling lane's thread."""
    ready_s = work.submit_s
    for before in work.after:
        if before.end_s > ready_s:
            ready_s, work.waited_for = before.end_s, before.cause
    work.ready_s = ready_s
    work.start_s = lanes.now_s()
    try:
        work.call()
    except BaseException as error:
        lanes.failed(work, error)
    work.end_s = lanes.now_s()
    work.after = ()
    work.call = nothing  # let go of tensors
    lanes.completed(work)


def nothing() -> None:
    """What is left of work that is over."""


class OrderedThread:
    """Runs what it is given in order, each after the work it names."""

    def __init__(self, lanes: CpuLanes, lane: int, n_threads: int) -> None:
        self._lanes, self._n_threads = lanes, n_threads
        self._jobs: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self.put = self._jobs.put
        self._thread = threading.Thread(target=self._serve, name=f"lane-{LANES[lane]}", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        torch = self._lanes.torch
        torch.set_num_threads(self._n_threads)
        with torch.inference_mode():
            while (work := self._jobs.get()) is not None:
                for before in work.after:
                    before.mark.wait()
                perform(self._lanes, work)

    def stop(self) -> None:
        self._jobs.put(None)
        self._thread.join(timeout=30)


class CopyThread:
    """One copy engine: serves one copy at a time, of those that are ready demand before speculative, then as asked."""

    def __init__(self, lanes: CpuLanes) -> None:
        self._lanes = lanes
        self._queue: list[Work] = []
        self._changed = threading.Condition()
        self._stalled = False  # something is queued, nothing of it ready
        self._busy = False
        self._stop = False
        self._thread = threading.Thread(target=self._serve, name="lane-h2d", daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> None:
        with self._changed:
            self._queue.append(work)
            self._changed.notify_all()

    def promote(self, work: Work) -> None:
        with self._changed:
            if work in self._queue and work.priority != DEMAND:
                self._queue.remove(work)
                work.priority = DEMAND
                self._queue.append(work)
                self._changed.notify_all()

    def cancel(self, work: Work) -> bool:
        with self._changed:
            if work.priority == DEMAND or work not in self._queue:
                return False
            self._queue.remove(work)
        work.cancelled = True
        work.end_s = self._lanes.now_s()
        work.after = ()
        work.call = nothing
        work.mark.set()
        self.poke()
        return True

    def poke(self) -> None:
        """Something has ended: what was not ready may be now."""
        if self._stalled:
            with self._changed:
                self._changed.notify_all()

    def drain(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: (not self._queue and not self._busy) or self._lanes._fault is not None)

    def _next(self) -> Work | None:
        best: Work | None = None
        for work in self._queue:
            if (best is None or work.priority < best.priority) and all(b.mark.is_set() for b in work.after):
                best = work
        return best

    def _serve(self) -> None:
        self._lanes.torch.set_num_threads(1)
        with self._lanes.torch.inference_mode():
            while True:
                with self._changed:
                    self._busy = False
                    while True:
                        # Set before looking: an end between the look and the wait then finds it and pokes.
                        self._stalled = bool(self._queue)
                        if self._stop and (not self._queue or self._lanes._fault is not None):
                            return
                        if (work := self._next()) is not None:
                            break
                        if not self._queue:
                            self._changed.notify_all()
                        self._changed.wait()
                    self._stalled = False
                    self._busy = True
                    self._queue.remove(work)
                    work.issued = True
                perform(self._lanes, work)

    def stop(self) -> None:
        with self._changed:
            self._stop = True
            for work in self._queue:
                work.mark.set()
            self._queue.clear()
            self._changed.notify_all()
        self._thread.join(timeout=30)


__all__ = ["CpuLanes", "DeviceFault", "cores"]
