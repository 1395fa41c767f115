"""The CUDA backend: a stream per lane, events as marks, page-locked host memory, experts on the CPU on a thread.

A stream can only wait for an event that has been recorded, and what a stream has been given cannot be overtaken. So a
demand copy is handed to the copy stream at once, a speculative one stays in a queue of our own until the stream is idle
(a feeder thread waits for that) or until somebody needs it. Compute waits for copies on the device, by `wait_event`;
before it is launched, whatever it waits for is made sure to have been handed over.

The streams are torch's, which the default stream neither waits for nor holds up: what runs there (placing experts
before a run, reading hidden rows after the head) is synchronised by itself.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import deque
from functools import partial
from threading import Condition, RLock
from typing import Any

from sim.base.device_faults import fault_of
from sim.base.errors import BadInput
from sim.base.interrupts import heard, held
from sim.machine.protocol import DEMAND
from sim.policy.tickets import UNKNOWN_S
from sim.real.devices.clock import DeviceClock
from sim.real.devices.cpu import SWITCH_INTERVAL_S, cores, nothing
from sim.real.devices.memory import CudaMemory
from sim.real.devices.threads import Feeder, Pool, over
from sim.real.devices.work import COMPUTE, DOWN, LANES, POOL, UP, Work


class CudaLanes:
    """Lanes of one CUDA device. Without one, a test passes a stand-in for `torch.cuda` and the `place` of tensors."""

    def __init__(self, device: str = "cuda:0", *, cuda: Any = None, place: str | None = None) -> None:
        import torch

        self.torch: Any = torch
        self._cuda: Any = torch.cuda if cuda is None else cuda
        index = int(device.partition(":")[2] or 0)
        if not self._cuda.is_available() or index >= self._cuda.device_count():
            raise BadInput(f"--device, got {device!r}: torch sees no such CUDA device; give --device cpu")
        self.bind_thread = partial(self._cuda.set_device, index)  # the device of the moment is each thread's own
        self.bind_thread()
        self.device = place or f"cuda:{index}"
        self.title = str(self._cuda.get_device_properties(index).name)
        self.pool_threads = max(1, cores() - 2)  # the host and the feeder keep a core each
        self._streams = {lane: self._cuda.Stream(device=index) for lane in (COMPUTE, UP, DOWN)}
        memory = CudaMemory(torch, self._cuda, self.device, list(self._streams.values()), pin=place is None)
        self.on_device, self.on_host, self.host_buffers = memory.on_device, memory.on_host, memory.host_buffers
        self.upload, self._memory = memory.upload, memory
        self.issued: dict[int, deque[Work]] = {lane: deque() for lane in (COMPUTE, UP, DOWN, POOL)}
        self._done: deque[Work] = deque()
        self._fault: BaseException | None = None
        self.changed = Condition(RLock())
        self._free_s = [0.0] * len(LANES)  # end of the last work of each lane
        self.feeder, self._pool = Feeder(self), Pool(self, self.pool_threads)
        self._threads_before, self._switch_before_s = torch.get_num_threads(), sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._clock = DeviceClock(self._cuda, self._streams[COMPUTE])
        self.now_s = self._clock.now_s
        with held():
            self.feeder.start()
            self._pool.start()

    def used_here(self, tensor: Any) -> None:
        """Keep the allocator from handing a tensor's memory out while the current stream reads it."""
        self._memory.keep(tensor, self._cuda.current_stream())

    def restart_clock(self) -> None:
        self._clock.restart()
        self._free_s = [0.0] * len(LANES)

    # -- handing work over ------------------------------------------------------------------------------------------

    def submit(self, work: Work) -> None:
        self._check()
        work.submit_s = self.now_s()
        if work.lane == POOL:
            self._pool.put(work)
        elif work.lane == UP and (work.priority != DEMAND or not self._can_issue(work)):
            self.feeder.put(work)
        else:
            self.issue(work)

    def _can_issue(self, work: Work) -> bool:
        """False while something it waits for runs on the host, where no stream can wait for it."""
        return all(before.lane != POOL or over(before) for before in work.after)

    def issue(self, work: Work) -> None:
        """Put work on its stream, behind the events of what it waits for."""
        with self.changed:
            if work.issued or work.cancelled:
                return
            if work in self.feeder.queue:
                self.feeder.queue.remove(work)
            for before in work.after:
                self._ensure_issued(before)
            stream = self._streams[work.lane]
            try:
                with self.torch.inference_mode(), self._cuda.stream(stream):
                    for before in work.after:
                        # Work of this very stream is in order anyway; what the host has seen the end of is over.
                        if before.lane not in (POOL, work.lane) and not before.cancelled and before.end_s == UNKNOWN_S:
                            stream.wait_event(before.mark)
                    work.begun = self._cuda.Event(enable_timing=True)
                    work.begun.record(stream)
                    work.call()
                    work.mark = self._cuda.Event(enable_timing=True)
                    work.mark.record(stream)
            except Exception as error:
                self.failed(error)
                self.changed.notify_all()
                raise fault_of(error, f"launching {work.op}") from error
            work.call = nothing
            work.issued = True
            self.issued[work.lane].append(work)
            if work.lane == UP:
                self.feeder.last = work
            self.changed.notify_all()

    def _ensure_issued(self, work: Work) -> None:
        """What is to be waited for on the device must be there to be waited for; CPU results are waited for here."""
        if work.cancelled:
            return
        if work.lane == POOL:
            work.mark.synchronize()
        elif not work.issued:
            work.priority = DEMAND
            self.issue(work)

    def promote(self, work: Work) -> None:
        with self.changed:
            if work in self.feeder.queue and work.priority != DEMAND:
                work.priority = DEMAND
                if self._can_issue(work):
                    self.issue(work)

    def cancel(self, work: Work) -> bool:
        return self.feeder.withdraw(work)

    # -- what has ended ---------------------------------------------------------------------------------------------

    @property
    def finished(self) -> deque[Work]:
        """Work that is over, harvested now; the reader takes from the left."""
        self._harvest()
        return self._done

    def _harvest(self) -> None:
        with self.changed:
            for issued in self.issued.values():
                while issued and issued[0].mark.query():
                    self._stamp(issued[0])
                    self._done.append(issued.popleft())

    def _stamp(self, work: Work) -> None:
        """Read when a piece of work started and ended, and what it waited for last."""
        if work.ready_s != UNKNOWN_S:
            return  # as something that other work waited for
        if work.end_s == UNKNOWN_S:
            self._clock.place(work, self._free_s[work.lane])
            self._free_s[work.lane] = work.end_s
            work.begun = None
        work.ready_s = work.submit_s
        for before in work.after:
            if before.end_s == UNKNOWN_S and before.issued and before.mark.query():
                self._stamp_up_to(before)
            if before.end_s > work.ready_s:
                work.ready_s, work.waited_for = before.end_s, before.cause
        work.after = ()

    def _stamp_up_to(self, work: Work) -> None:
        """Stamp a lane's work in its order, so that each starts when the one before it has ended."""
        for earlier in self.issued[work.lane]:
            if earlier.end_s == UNKNOWN_S:
                self._stamp(earlier)
            if earlier is work:
                return

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
            if work.mark is None:  # withdrawn when the feeder failed
                self._check()
            work.mark.synchronize()
        except BadInput:
            raise
        except Exception as error:
            raise fault_of(error, f"waiting for {work.op}") from error
        heard()
        self._harvest()
        self._check()

    def settle(self) -> None:
        with self.changed:
            self.changed.wait_for(lambda: not self.feeder.queue or self._fault is not None)
        self._check()
        try:
            if self._pool.last is not None:
                self._pool.last.mark.synchronize()
            self._cuda.synchronize()
        except Exception as error:
            raise fault_of(error, "waiting for the device") from error
        heard()
        self._harvest()
        self._check()

    def failed(self, error: BaseException) -> None:
        """Keep the first fault for the thread that drives. Takes no lock: whoever holds it may wait for the caller."""
        self._fault = self._fault or error

    def _check(self) -> None:
        if self._fault is not None:
            raise fault_of(self._fault, f"running on {self.device}") from self._fault

    def close(self) -> None:
        with held():
            self._close()

    def _close(self) -> None:
        self.feeder.stop()
        self._pool.stop()
        with contextlib.suppress(Exception):  # a lost device answers nothing any more
            self._cuda.synchronize()
        for issued in self.issued.values():
            issued.clear()
        self._done.clear()
        sys.setswitchinterval(self._switch_before_s)
        self.torch.set_num_threads(self._threads_before)
        gc.collect()
        with contextlib.suppress(Exception):
            self._memory.give_back()
