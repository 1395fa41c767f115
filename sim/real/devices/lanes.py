"""The lanes of a real machine on one device: work in, tickets out, each stamped with when it started and ended.

Compute and copies to the host go to their streams as they come, copies to the device through a queue, experts on the
CPU to a thread with cores of its own. Work starts after the marks of what it names: its stream waits for them. A
stream of a device can only wait for a mark that another stream has been given, and not for a thread of the host; so
before work is launched there, whatever it waits for is made sure to have been handed over.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import deque
from threading import Condition, RLock

from sim.base.device_faults import fault_of
from sim.base.errors import BadInput
from sim.base.interrupts import heard, held
from sim.machine.protocol import DEMAND
from sim.policy.tickets import UNKNOWN_S
from sim.real.devices import environment
from sim.real.devices.clock import place_by_thread
from sim.real.devices.protocol import Device, Stream
from sim.real.devices.queue import CopyQueue, over
from sim.real.devices.threads import HostMark, HostTime, ThreadStream, nothing
from sim.real.devices.work import COMPUTE, D2H, H2D, POOL, Work

SWITCH_INTERVAL_S = 2e-5
"""How long a thread may keep the interpreter while another wants it; the default of 5 ms exceeds most operations."""


def cores() -> int:
    """Cores this process may use: a container may see many and be given the time of few."""
    return min(len(environment.usable_cores()), environment.cpu_quota())


class Lanes:
    """Compute streams, copy engines and a pool of CPU threads over a device, which they close.

    Whoever hands work over holds Ctrl-C back (`sim.base.interrupts`): it is heard while waiting for a lane.

    Args:
        pool_threads: cores of one expert on the CPU; None: those that the host and the device's threads leave.
    """

    def __init__(self, device: Device, pool_threads: int | None = None) -> None:
        self.device, self.torch, self.title = device, device.torch, device.facts.title
        self.pool_threads = pool_threads or max(1, cores() - 1 - device.busy_cores)
        self._threads_before, self._switch_before_s = self.torch.get_num_threads(), sys.getswitchinterval()
        if device.threaded:  # the thread that drives has a core, as the streams have
            self.torch.set_num_threads(1)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._fault: BaseException | None = None
        device.failed = self.failed
        self.changed = Condition(RLock())
        keys = [(lane, gpu) for lane in (COMPUTE, H2D, D2H, POOL) for gpu in range(device.n_gpus)]
        self._issued: dict[tuple[int, int], deque[Work]] = {key: deque() for key in keys}  # not known to be over
        self._free_s = dict.fromkeys(keys, 0.0)  # end of the last work of each lane
        self._done: deque[Work] = deque()
        self._pool: ThreadStream | None = None
        self.waited_s = 0.0  # of the host, handing work over: for experts on the CPU, which no stream waits for
        self._clock = device.clock()
        self.now_s = self._clock.now_s
        with held():
            self.queues = [CopyQueue(self) for _ in range(device.n_gpus)]

    def restart_clock(self) -> None:
        """Set the machine's clock to 0, with every lane idle."""
        self._clock.restart()
        self._free_s = dict.fromkeys(self._free_s, 0.0)
        self.waited_s = 0.0

    # -- handing work over ------------------------------------------------------------------------------------------

    def submit(self, work: Work) -> None:
        """Hand work to its lane. Raises what went wrong on a lane before."""
        self._check()
        work.submit_s = self.now_s()
        if self._by_thread(work):
            work.mark = HostMark()
            work.mark.then = self._poke
        if work.lane == H2D:
            self.queues[work.gpu].submit(work)
        else:
            self.issue(work)

    def _by_thread(self, work: Work) -> bool:
        return work.lane == POOL or self.device.threaded

    def _poke(self) -> None:
        """A thread has ended some work: a copy that waited for it may go."""
        for queue in self.queues:
            queue.poke()

    def _stream(self, work: Work) -> Stream:
        if work.lane != POOL:
            return self.device.stream(work.lane, work.gpu)
        if self._pool is None:
            with held():
                self._pool = ThreadStream("cpu", self.torch, self.pool_threads, self.failed, self.device.bind_thread)
        return self._pool

    def issue(self, work: Work) -> None:
        """Give work to its stream, behind the marks of what it waits for."""
        with self.changed:
            if work.issued or work.cancelled:
                return
            stream = self._stream(work)
            if not self.device.threaded:
                for before in work.after:
                    if before.lane != POOL or work.lane != POOL:
                        self._ensure_issued(before)
            try:
                for before in work.after:
                    if self._is_ahead(before, work):
                        stream.wait(before.mark)
                work.begun = HostTime() if self._by_thread(work) else self.device.mark()
                work.mark = work.mark or self.device.mark()
                call, work.call = work.call, nothing
                stream.enqueue(call, 1, work.begun, work.mark)
            except Exception as error:
                self.failed(error)
                self.changed.notify_all()
                raise fault_of(error, f"launching {work.op}") from error
            work.issued = True
            self._issued[work.lane, work.gpu].append(work)
            if work.lane == H2D:
                self.queues[work.gpu].handed_over(work)
                self.changed.notify_all()

    def _is_ahead(self, before: Work, work: Work) -> bool:
        """Whether the stream of `work` must be told to wait: not for what is over, nor for earlier work of its own."""
        if before.cancelled or before.end_s != UNKNOWN_S or (before.lane, before.gpu) == (work.lane, work.gpu):
            return False
        return not over(before) if self._by_thread(work) else before.lane != POOL

    def _ensure_issued(self, work: Work) -> None:
        """What a device's stream is to wait for must have been handed over; experts on the CPU are waited for here."""
        if work.cancelled:
            return
        if work.lane == POOL:
            began_s = self.now_s()
            work.mark.synchronize()
            self.waited_s += self.now_s() - began_s
        elif not work.issued:
            work.priority = DEMAND
            self.issue(work)

    def promote(self, work: Work) -> bool:
        """Make a queued speculative copy a demand copy; False when it has started."""
        return self.queues[work.gpu].promote(work)

    def cancel(self, work: Work) -> bool:
        """Withdraw a queued speculative copy; False when it has started or is demanded."""
        return self.queues[work.gpu].withdraw(work)

    # -- what has ended ---------------------------------------------------------------------------------------------

    @property
    def finished(self) -> deque[Work]:
        """Work that is over, in order of completion per lane; the reader takes from the left."""
        self._harvest()
        return self._done

    def _harvest(self) -> None:
        with self.changed:
            for issued in self._issued.values():
                while issued and issued[0].mark.query():
                    self._stamp(issued[0])
                    self._done.append(issued.popleft())

    def _stamp(self, work: Work) -> None:
        """Read when a piece of work started and ended, and what it waited for last."""
        if work.ready_s != UNKNOWN_S:
            return  # as something that other work waited for
        if work.end_s == UNKNOWN_S:
            self._place(work)
        work.ready_s = work.submit_s
        for before in work.after:
            if before.end_s == UNKNOWN_S and before.issued and before.mark.query():
                self._stamp_up_to(before)
            if before.end_s > work.ready_s:
                work.ready_s, work.waited_for = before.end_s, before.cause
                work.waited_for_prefetch = before.speculative
        work.after = ()

    def _place(self, work: Work) -> None:
        if self._by_thread(work):
            place_by_thread(work, self._clock.base_s)
        else:
            self._clock.place(work, self._free_s[work.lane, work.gpu])
        self._free_s[work.lane, work.gpu] = work.end_s
        work.begun = None

    def _stamp_up_to(self, work: Work) -> None:
        """Stamp a lane's work in its order, so that each starts when the one before it has ended."""
        for earlier in self._issued[work.lane, work.gpu]:
            if earlier.end_s == UNKNOWN_S:
                self._stamp(earlier)
            if earlier is work:
                return

    def over(self, work: Work) -> bool:
        """True when the work has ended; then its `end_s` is known."""
        if work.cancelled:
            return True
        if not work.issued or not work.mark.query():
            return False
        if work.end_s == UNKNOWN_S:
            self._harvest()
        return True

    def wait(self, work: Work) -> None:
        """Block the host until the work has ended. Raises what went wrong on a lane."""
        self._check()
        try:
            if not self._by_thread(work):
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
        """Block the host until every lane is idle. Raises what went wrong on a lane."""
        with self.changed:
            self.changed.wait_for(lambda: self._fault is not None or not any(q.pending for q in self.queues))
        self._check()
        try:
            if self._pool is not None:
                self._pool.synchronize()
            self.device.settle()
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
            raise fault_of(self._fault, f"running on the {self.title}") from self._fault

    def close(self) -> None:
        """Stop threads, close the device and give all memory back; never raises."""
        with held():
            pool = [] if self._pool is None else [self._pool]
            for stop in (*(queue.stop for queue in self.queues), *(stream.stop for stream in pool)):
                with contextlib.suppress(Exception):
                    stop()
            for issued in self._issued.values():
                issued.clear()
            self._done.clear()
            sys.setswitchinterval(self._switch_before_s)
            self.torch.set_num_threads(self._threads_before)
            gc.collect()
            self.device.close()
