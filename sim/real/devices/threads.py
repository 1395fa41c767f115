"""Streams that are threads of the host: all lanes of the CPU backend, and experts on the CPU beside any device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from sim.base.interrupts import wait_for
from sim.real.devices.protocol import Call, Mark


def nothing() -> None:
    """What is left of a call that has been made."""


class HostTime:
    """When a thread passed a point in its order, on the host's clock; nobody waits for it."""

    __slots__ = ("at_s",)

    def __init__(self) -> None:
        self.at_s = 0.0

    def set(self) -> None:
        self.at_s = time.perf_counter()


class HostMark:
    """A point in a thread's order, and the host's time at which the thread passed it. Answers as a CUDA event does."""

    def __init__(self) -> None:
        self.at_s = 0.0
        self.then: Call = nothing  # called by the thread that passes it
        self._passed = threading.Event()

    def set(self) -> None:
        self.at_s = time.perf_counter()
        self._passed.set()
        self.then()

    def query(self) -> bool:
        return self._passed.is_set()

    def synchronize(self) -> None:
        """Ctrl-C is heard meanwhile on the main thread; no other thread may take it."""
        if threading.current_thread() is threading.main_thread():
            wait_for(self._passed)
        else:
            self._passed.wait()


class ThreadStream:
    """A thread that makes the calls it is given, in order, with `n_threads` cores for each.

    Args:
        failed: told what a call raised; the calls behind it are made all the same, so that no mark is waited for in
            vain. bind: called first on the new thread.
    """

    def __init__(
        self, name: str, torch: Any, n_threads: int, failed: Callable[[BaseException], None], bind: Call = nothing
    ) -> None:
        self._torch, self._n_threads, self._failed, self._bind = torch, n_threads, failed, bind
        self._jobs: SimpleQueue[Call | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"lane-{name}", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        self._bind()
        self._torch.set_num_threads(self._n_threads)
        with self._torch.inference_mode():
            while True:
                job = self._jobs.get()
                if job is None:
                    return
                try:
                    job()
                except BaseException as error:
                    self._failed(error)
                del job  # with the tensors that it names

    def enqueue(self, call: Call, n: int = 1, begun: Mark | None = None, ended: Mark | None = None) -> float:
        start_s = time.perf_counter()
        self._jobs.put(_Block(call, n, begun, ended, self._failed))
        return time.perf_counter() - start_s

    def mark(self) -> HostMark:
        mark = HostMark()
        self._jobs.put(mark.set)
        return mark

    def wait(self, mark: Mark) -> None:
        self._jobs.put(mark.synchronize)

    def synchronize(self) -> None:
        self.mark().synchronize()

    def hold(self, duration_s: float) -> None:
        """Nothing to hold: a thread gets a whole block at once, so no gap of the host can open inside it."""

    def stop(self) -> None:
        self._jobs.put(None)
        self._thread.join(timeout=30)


class _Block:
    """Calls between two marks, which are set close to them: no other thread comes in between."""

    __slots__ = ("_begun", "_call", "_ended", "_failed", "_n")

    def __init__(self, call: Call, n: int, begun: Any, ended: Any, failed: Callable[[BaseException], None]) -> None:
        self._call, self._n, self._begun, self._ended, self._failed = call, n, begun, ended, failed

    def __call__(self) -> None:
        if self._begun is not None:
            self._begun.set()
        try:
            for _ in range(self._n):
                self._call()
        except BaseException as error:
            self._failed(error)
        self._call = nothing  # let go of tensors before anybody hears that it is over
        if self._ended is not None:
            self._ended.set()
