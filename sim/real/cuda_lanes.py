"""The CUDA backend: a stream per lane, events as marks, page-locked host memory, experts on the CPU on a thread.

A stream can only wait for an event that has been recorded, and what a stream has been given cannot be overtaken. So a
demand copy is handed to the copy stream at once, a speculative one stays in a queue of our own until the stream is idle
(a feeder thread waits for that) or until somebody needs it. Compute waits for copies on the device, by `wait_event`;
before it is launched, whatever it waits for is made sure to have been handed over.
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

from sim.errors import BadInput
from sim.machine import DEMAND, UNKNOWN_S
from sim.real.cpu_lanes import SWITCH_INTERVAL_S, cores, nothing
from sim.real.faults import fault_of
from sim.real.work import COMPUTE, DOWN, POOL, UP, Work


class HostMark:
    """An event of the host that answers as a CUDA event does."""

    def __init__(self) -> None:
        self._set = threading.Event()

    def set(self) -> None:
        self._set.set()

    def query(self) -> bool:
        return self._set.is_set()

    def synchronize(self) -> None:
        self._set.wait()


class CudaLanes:
    """Lanes of one CUDA device. Without one, a test passes a stand-in for `torch.cuda` and the `place` of tensors."""

    def __init__(self, device: str = "cuda:0", *, cuda: Any = None, place: str | None = None) -> None:
        import torch

        self.torch: Any = torch
        self._cuda: Any = torch.cuda if cuda is None else cuda
        index = int(device.partition(":")[2] or 0)
        if not self._cuda.is_available() or index >= self._cuda.device_count():
            raise BadInput(f"--device, got {device!r}: torch sees no such CUDA device; give --device cpu")
        self._cuda.set_device(index)
        self._pin = place is None
        self.device = place or f"cuda:{index}"
        self.title = str(self._cuda.get_device_properties(index).name)
        self.pool_threads = max(1, cores() - 2)  # the host and the feeder keep a core each
        self._streams = {lane: self._cuda.Stream(device=index) for lane in (COMPUTE, UP, DOWN)}
        self._issued: dict[int, deque[Work]] = {lane: deque() for lane in (COMPUTE, UP, DOWN, POOL)}
        self._done: deque[Work] = deque()
        self._fault: BaseException | None = None
        self._changed = threading.Condition(threading.RLock())
        self._queue: list[Work] = []  # speculative copies that are not on the stream yet
        self._last_up: Work | None = None
        self._stop = False
        self._pool_jobs: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=run, name=f"lane-{name}", daemon=True)
                         for name, run in (("feeder", self._feed), ("cpu", self._compute_on_cpu))]  # fmt: skip
        self._switch_before_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self.restart_clock()
        for thread in self._threads:
            thread.start()

    # -- memory and clock -------------------------------------------------------------------------------------------

    def on_device(self, n_bytes: int) -> Any:
        try:
            return self.torch.zeros(n_bytes, dtype=self.torch.uint8, device=self.device)
        except (RuntimeError, MemoryError) as error:
            raise fault_of(error, f"allocating {n_bytes} bytes on {self.device}") from None

    def on_host(self, n_bytes: int) -> Any:
        try:
            return self.torch.empty(n_bytes, dtype=self.torch.uint8, pin_memory=self._pin)
        except (RuntimeError, MemoryError) as error:
            raise fault_of(error, f"page-locking {n_bytes} bytes of host memory") from None

    def used_here(self, tensor: Any) -> None:
        """Keep the allocator from handing a tensor's memory out while the current stream reads it."""
        if tensor.is_cuda:
            tensor.record_stream(self._cuda.current_stream())

    def now_s(self) -> float:
        return time.perf_counter() - self._base_s

    def restart_clock(self) -> None:
        self._cuda.synchronize()
        self._base = self._cuda.Event(enable_timing=True)
        self._base.record(self._streams[COMPUTE])
        self._base.synchronize()
        self._base_s = time.perf_counter()

    # -- handing work over ------------------------------------------------------------------------------------------

    def submit(self, work: Work) -> None:
        self._check()
        work.submit_s = self.now_s()
        if work.lane == POOL:
            work.mark, work.issued = HostMark(), True
            self._pool_jobs.put(work)
        elif work.lane == UP and (work.priority != DEMAND or not self._can_issue(work)):
            with self._changed:
                self._queue.append(work)
                self._changed.notify_all()
        else:
            self._issue(work)

    def _can_issue(self, work: Work) -> bool:
        """False while something it waits for runs on the host, where no stream can wait for it."""
        return all(before.lane != POOL or self.over(before) for before in work.after)

    def _issue(self, work: Work) -> None:
        """Put work on its stream, behind the events of what it waits for."""
        with self._changed:
            if work.issued or work.cancelled:
                return
            if work in self._queue:
                self._queue.remove(work)
            for before in work.after:
                self._ensure_issued(before)
            stream = self._streams[work.lane]
            try:
                with self.torch.inference_mode(), self._cuda.stream(stream):
                    for before in work.after:
                        if before.lane != POOL and not before.cancelled:
                            stream.wait_event(before.mark)
                    work.begun = self._cuda.Event(enable_timing=True)
                    work.begun.record(stream)
                    work.call()
                    work.mark = self._cuda.Event(enable_timing=True)
                    work.mark.record(stream)
            except Exception as error:
                self._fault = self._fault or error
                raise fault_of(error, f"launching {work.op}") from error
            work.call = nothing
            work.issued = True
            self._issued[work.lane].append(work)
            if work.lane == UP:
                self._last_up = work
            self._changed.notify_all()

    def _ensure_issued(self, work: Work) -> None:
        """What is to be waited for on the device must be there to be waited for; CPU results are waited for here."""
        if work.cancelled:
            return
        if work.lane == POOL:
            work.mark.synchronize()
        elif not work.issued:
            work.priority = DEMAND
            self._issue(work)

    def _feed(self) -> None:
        """Hand queued copies to the idle copy stream, demand first, one at a time."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stop or bool(self._queue))
                if self._stop:
                    return
                last = self._last_up
            try:
                if last is not None and not last.mark.query():
                    last.mark.synchronize()  # outside the lock: a demand copy may be issued meanwhile
                    continue
                blocker = self._hand_over(last)
                if blocker is not None:
                    blocker.synchronize()
            except BaseException as error:
                self._fault = self._fault or error
                with self._changed:
                    for work in self._queue:
                        work.cancelled = True
                    self._queue.clear()
                    self._changed.notify_all()
                return

    def _hand_over(self, last: Work | None) -> Any:
        """Issue the best copy that is ready; else return a mark to wait for, None where there is nothing to do."""
        with self._changed:
            if self._last_up is not last or not self._queue:
                return None
            ready = [w for w in self._queue if all(b.cancelled or (b.issued and b.mark.query()) for b in w.after)]
            if ready:
                self._issue(min(ready, key=lambda work: work.priority))
                return None
            for work in self._queue:
                for before in work.after:
                    if before.issued and not before.mark.query():
                        return before.mark
            self._issue(self._queue[0])  # waits only for copies that are queued behind it
            return None

    def promote(self, work: Work) -> None:
        with self._changed:
            if work in self._queue and work.priority != DEMAND:
                work.priority = DEMAND
                if self._can_issue(work):
                    self._issue(work)

    def cancel(self, work: Work) -> bool:
        with self._changed:
            if work.priority == DEMAND or work not in self._queue:
                return False
            self._queue.remove(work)
            work.cancelled = True
            work.end_s = self.now_s()
            work.after, work.call = (), nothing
            self._changed.notify_all()
            return True

    def _compute_on_cpu(self) -> None:
        """The pool's lane: one expert at a time, on `pool_threads` cores."""
        self.torch.set_num_threads(self.pool_threads)
        with self.torch.inference_mode():
            while (work := self._pool_jobs.get()) is not None:
                try:
                    for before in work.after:
                        before.mark.synchronize()
                    work.start_s = self.now_s()
                    work.call()
                except BaseException as error:
                    self._fault = self._fault or error
                work.end_s = self.now_s()
                work.call = nothing
                self._issued[POOL].append(work)
                work.mark.set()  # without the lock: whoever waits for this may hold it

    # -- what has ended ---------------------------------------------------------------------------------------------

    @property
    def finished(self) -> deque[Work]:
        """Work that is over, harvested now; the reader takes from the left."""
        self._harvest()
        return self._done

    def _harvest(self) -> None:
        with self._changed:
            for issued in self._issued.values():
                while issued and issued[0].mark.query():
                    self._stamp(issued[0])
                    self._done.append(issued.popleft())

    def _stamp(self, work: Work) -> None:
        """Read when a piece of work started and ended, and what it waited for last."""
        if work.end_s == UNKNOWN_S:
            work.start_s, work.end_s = (self._base.elapsed_time(mark) * 1e-3 for mark in (work.begun, work.mark))
        work.ready_s = work.submit_s
        for before in work.after:
            if before.end_s == UNKNOWN_S and before.issued and before.mark.query():
                self._stamp(before)
            if before.end_s > work.ready_s:
                work.ready_s, work.waited_for = before.end_s, before.cause
        work.after = ()

    def over(self, work: Work) -> bool:
        if work.cancelled:
            return True
        if not work.issued or not work.mark.query():
            return False
        if work.end_s == UNKNOWN_S:
            self._harvest()
        return True

    def wait(self, work: Work) -> None:
        self._check()
        try:
            self._ensure_issued(work)
            work.mark.synchronize()
        except BadInput:
            raise
        except Exception as error:
            raise fault_of(error, f"waiting for {work.op}") from error
        self._harvest()
        self._check()

    def settle(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._queue or self._fault is not None)
        self._check()
        try:
            self._cuda.synchronize()
        except Exception as error:
            raise fault_of(error, "waiting for the device") from error
        self._harvest()

    def _check(self) -> None:
        if self._fault is not None:
            raise fault_of(self._fault, f"running on {self.device}") from self._fault

    def close(self) -> None:
        with self._changed:
            self._stop = True
            self._queue.clear()
            self._changed.notify_all()
        self._pool_jobs.put(None)
        for thread in self._threads:
            thread.join(timeout=30)
        with contextlib.suppress(Exception):  # a lost device answers nothing any more
            self._cuda.synchronize()
        for issued in self._issued.values():
            issued.clear()
        self._done.clear()
        sys.setswitchinterval(self._switch_before_s)
        gc.collect()
        with contextlib.suppress(Exception):
            self._cuda.empty_cache()
