"""The one queue before a copy stream: copies that can still be overtaken and withdrawn.

A stream's order cannot be changed, so a copy is given to it as late as the device allows. Of copies that are ready,
demand goes before speculation, then as asked.

On a device whose streams are threads, a copy is handed over when the one before it has ended: every mark calls back.
Other streams work on their own and call nobody. There a demand copy is handed over at once, behind the marks of what it
waits for; a speculative one when the stream is idle (a feeder thread waits for that) or when somebody needs it.
"""

from __future__ import annotations

import threading
from typing import Protocol

from sim.machine.protocol import DEMAND
from sim.policy.tickets import UNKNOWN_S
from sim.real.devices.protocol import Device
from sim.real.devices.threads import nothing
from sim.real.devices.work import POOL, Work


class Issuer(Protocol):
    """What the queue asks of the lanes it belongs to."""

    device: Device
    changed: threading.Condition  # held by whoever changes the queue or gives work to a stream

    def now_s(self) -> float:
        """The machine's clock."""
        ...

    def issue(self, work: Work) -> None:
        """Give work to its stream; a copy is taken out of the queue then."""
        ...

    def failed(self, error: BaseException) -> None:
        """Keep a fault for the thread that drives. Takes no lock."""
        ...


def over(work: Work) -> bool:
    """Whether nothing needs to wait for it any more."""
    return work.cancelled or work.end_s != UNKNOWN_S or (work.issued and bool(work.mark.query()))


class CopyQueue:
    """Copies of one GPU that its copy stream has not been given yet, in the order of asking."""

    def __init__(self, lanes: Issuer) -> None:
        self._lanes, self.changed = lanes, lanes.changed
        self.pending: list[Work] = []
        self.last: Work | None = None  # the last copy that the stream was given
        self.version = 0  # counts what was asked for
        self.feeder = None if lanes.device.threaded else Feeder(self, lanes)

    def submit(self, work: Work) -> None:
        with self.changed:
            if self.feeder is not None and work.priority == DEMAND and can_wait_on_stream(work):
                self._lanes.issue(work)
                return
            self.pending.append(work)
            self.version += 1
            if self.feeder is not None:
                self.changed.notify_all()
        self.poke()

    def poke(self) -> None:
        """Something was asked for or has ended: a copy may go now."""
        if self.feeder is not None:
            self.feeder.news.set()  # no lock is taken here: whoever waits for an expert on the CPU may hold it
        elif self.pending:
            self._go_on()

    def _go_on(self) -> None:
        with self.changed:
            if (self.last is None or over(self.last)) and (work := self.best()) is not None:
                self._lanes.issue(work)
            else:
                self.changed.notify_all()  # whoever waits for the queue may find a fault instead

    def best(self) -> Work | None:
        """The copy to go next; None where none is ready."""
        ready = (work for work in self.pending if all(map(over, work.after)))
        return min(ready, key=lambda work: work.priority, default=None)

    def handed_over(self, work: Work) -> None:
        """The stream has been given a copy."""
        self.last = work
        if work in self.pending:
            self.pending.remove(work)

    def promote(self, work: Work) -> bool:
        """Make a queued speculative copy a demand copy, behind the others; False when it is on the stream."""
        with self.changed:
            if work not in self.pending:
                return False
            if work.priority != DEMAND:
                self.pending.remove(work)
                work.priority = DEMAND
                self.submit(work)
            return True

    def withdraw(self, work: Work) -> bool:
        """Take a speculative copy out; False when it is demanded or on the stream."""
        with self.changed:
            if work.priority == DEMAND or work not in self.pending:
                return False
            self.pending.remove(work)
            work.cancelled = True
            work.end_s = self._lanes.now_s()
            work.after, work.call = (), nothing
            self._release(work)
            self.changed.notify_all()
            return True

    def give_up(self) -> None:
        """Nothing can be copied any more: nobody is to wait for what is queued."""
        with self.changed:
            for work in self.pending:
                work.cancelled = True
            self._clear()

    def stop(self) -> None:
        with self.changed:
            self._clear()
        if self.feeder is not None:
            self.feeder.stop()

    def _clear(self) -> None:
        pending, self.pending = self.pending, []
        for work in pending:
            self._release(work)
        self.changed.notify_all()

    def _release(self, work: Work) -> None:
        """A thread may wait for its mark, which no stream will pass."""
        if work.mark is not None:
            work.mark.set()


def can_wait_on_stream(work: Work) -> bool:
    """False while something it waits for runs on the host, where no stream of a device can wait for it."""
    return all(before.lane != POOL or over(before) for before in work.after)


class Feeder:
    """Gives queued copies to the idle copy stream of a device that does not say when it is idle."""

    def __init__(self, queue: CopyQueue, lanes: Issuer) -> None:
        self._queue, self._lanes, self._changed = queue, lanes, queue.changed
        self.news = threading.Event()  # something was queued, or an expert on the CPU is ready
        self._stop = False
        self._thread = threading.Thread(target=self._serve, name="lane-feeder", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        queue = self._queue
        self._lanes.device.bind_thread()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stop or bool(queue.pending))
                if self._stop:
                    return
                last = queue.last
            try:
                if last is not None and not over(last):
                    last.mark.synchronize()  # outside the lock: a demand copy may be issued meanwhile
                    continue
                self._await(*self._hand_over(last))
            except BaseException as error:
                self._lanes.failed(error)
                queue.give_up()
                return

    def _hand_over(self, last: Work | None) -> tuple[Work | None, int]:
        """Issue the best copy that is ready; else work to wait for (None: there is none), and the version seen."""
        queue = self._queue
        with self._changed:
            if queue.last is not last or not queue.pending:
                return None, queue.version
            if (work := queue.best()) is not None:
                self._lanes.issue(work)
                return None, queue.version
            for work in queue.pending:
                for before in work.after:
                    if before.issued and not over(before):
                        return before, queue.version
            self._lanes.issue(queue.pending[0])  # waits only for copies that are queued behind it
            return None, queue.version

    def _await(self, before: Work | None, version: int) -> None:
        """Until it has ended. An expert on the CPU takes long: what is queued meanwhile must not wait for it."""
        if before is None:
            return
        if before.lane != POOL:
            before.mark.synchronize()
            return
        self.news.clear()
        while not (self._stop or before.mark.query() or self._queue.version != version):
            self.news.wait()
            self.news.clear()

    def stop(self) -> None:
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        self.news.set()
        self._thread.join(timeout=30)
