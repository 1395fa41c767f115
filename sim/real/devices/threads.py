"""Host threads of the CUDA backend: one feeds speculative copies to the idle copy stream, one computes experts."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol

from sim.machine.protocol import DEMAND, UNKNOWN_S
from sim.real.devices.cpu import nothing
from sim.real.devices.work import POOL, Work


class Served(Protocol):
    """What the threads ask of the lanes they serve."""

    torch: Any
    changed: threading.Condition  # held by whoever changes a queue
    issued: dict[int, deque[Work]]  # by lane: handed over, and not known to be over
    feeder: Feeder

    def bind_thread(self) -> None:
        """Make the device this thread's own."""
        ...

    def now_s(self) -> float:
        """The machine's clock."""
        ...

    def issue(self, work: Work) -> None:
        """Put work on its stream."""
        ...

    def failed(self, error: BaseException) -> None:
        """Keep a fault for the thread that drives. Takes no lock."""
        ...


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


def over(work: Work) -> bool:
    """Whether nothing needs to wait for it any more."""
    return work.cancelled or work.end_s != UNKNOWN_S or (work.issued and bool(work.mark.query()))


class Feeder:
    """Copies that are not on the stream yet, best first: they can be overtaken and withdrawn.

    Whoever changes the queue, or hands a copy to the stream, holds `changed`. `last` is the last copy handed over.
    """

    def __init__(self, lanes: Served) -> None:
        self._lanes = lanes
        self.changed = lanes.changed
        self.queue: list[Work] = []
        self.last: Work | None = None
        self._version = 0  # counts what was put into the queue
        self.news = threading.Event()  # something was queued, or an expert on the CPU is ready
        self._stop = False
        self._thread = threading.Thread(target=self._serve, name="lane-feeder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, work: Work) -> None:
        with self.changed:
            self.queue.append(work)
            self._version += 1
            self.changed.notify_all()
        self.news.set()

    def withdraw(self, work: Work) -> bool:
        """Take a speculative copy out; False when it is demanded or on the stream."""
        with self.changed:
            if work.priority == DEMAND or work not in self.queue:
                return False
            self.queue.remove(work)
            work.cancelled = True
            work.end_s = self._lanes.now_s()
            work.after, work.call = (), nothing
            self.changed.notify_all()
            return True

    def _serve(self) -> None:
        """Hand queued copies to the idle copy stream, one at a time."""
        self._lanes.bind_thread()
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self._stop or bool(self.queue))
                if self._stop:
                    return
                last = self.last
            try:
                if last is not None and not over(last):
                    last.mark.synchronize()  # outside the lock: a demand copy may be issued meanwhile
                    continue
                self._await(*self._hand_over(last))
            except BaseException as error:
                self._lanes.failed(error)
                self._give_up()
                return

    def _hand_over(self, last: Work | None) -> tuple[Any, int]:
        """Issue the best copy that is ready; else a mark to wait for (None: there is none), and the version seen."""
        with self.changed:
            if self.last is not last or not self.queue:
                return None, self._version
            for work in sorted(self.queue, key=lambda work: work.priority):
                if all(map(over, work.after)):
                    self._lanes.issue(work)
                    return None, self._version
            for work in self.queue:
                for before in work.after:
                    if before.issued and not over(before):
                        return before.mark, self._version
            self._lanes.issue(self.queue[0])  # waits only for copies that are queued behind it
            return None, self._version

    def _await(self, mark: Any, version: int) -> None:
        """Until the mark is reached. An expert on the CPU takes long: what is queued meanwhile must not wait for it."""
        if isinstance(mark, HostMark):
            self.news.clear()
            while not (self._stop or mark.query() or self._version != version):
                self.news.wait()
                self.news.clear()
        elif mark is not None:
            mark.synchronize()

    def _give_up(self) -> None:
        with self.changed:
            for work in self.queue:
                work.cancelled = True
            self.queue.clear()
            self.changed.notify_all()

    def stop(self) -> None:
        with self.changed:
            self._stop = True
            self.queue.clear()
            self.changed.notify_all()
        self.news.set()
        if self._thread.is_alive():
            self._thread.join(timeout=30)


class Pool:
    """One expert on the CPU at a time, on `n_threads` cores."""

    def __init__(self, lanes: Served, n_threads: int) -> None:
        self._lanes, self._n_threads = lanes, n_threads
        self._jobs: SimpleQueue[Work | None] = SimpleQueue()
        self._put: Callable[[Work | None], None] = self._jobs.put
        self.last: Work | None = None
        self._thread = threading.Thread(target=self._serve, name="lane-cpu", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, work: Work) -> None:
        work.mark, work.issued, self.last = HostMark(), True, work
        self._put(work)

    def _serve(self) -> None:
        lanes = self._lanes
        lanes.bind_thread()
        lanes.torch.set_num_threads(self._n_threads)
        with lanes.torch.inference_mode():
            while (work := self._jobs.get()) is not None:
                try:
                    for before in work.after:
                        before.mark.synchronize()
                    work.start_s = lanes.now_s()
                    work.call()
                except BaseException as error:
                    lanes.failed(error)
                work.end_s = lanes.now_s()
                work.call = nothing
                lanes.issued[POOL].append(work)
                work.mark.set()
                lanes.feeder.news.set()  # no lock is taken here: whoever waits for the next expert may hold it

    def stop(self) -> None:
        self._put(None)
        if self._thread.is_alive():
            self._thread.join(timeout=30)
