"""Processes that answer calls, start without a word to scripts, leave Ctrl-C to their parent, and end with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import ModuleType
from typing import Any

from sim.base.errors import CheckFailed
from sim.base.interrupts import held
from sim.studies.runner.pool import After, Call, finished


class Standing:
    """Processes that stay from one list of calls to the next, for a study that asks again and again."""

    def __init__(self) -> None:
        self._before = set(multiprocessing.active_children())
        self._pools: dict[int, ProcessPoolExecutor] = {}

    def of(self, workers: int) -> ProcessPoolExecutor:
        """So many of them."""
        if workers not in self._pools:
            self._pools[workers] = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _settle)
        return self._pools[workers]

    def end(self, at_once: bool) -> None:
        """Leave none behind; `at_once`: whatever they are doing."""
        for child in set(multiprocessing.active_children()) - self._before if at_once else ():
            child.terminate()
        for pool in self._pools.values():
            pool.shutdown(cancel_futures=True)
        self._pools.clear()


_STANDING: list[Standing] = []


@contextmanager
def standing() -> Iterator[None]:
    """Within it, processes that were started for some calls stay for the next ones."""
    _STANDING.append(Standing())
    at_once = True
    try:
        yield
        at_once = False
    finally:
        with held():
            _STANDING.pop().end(at_once)


def pooled(calls: Sequence[Call], workers: int, after: After | None) -> Generator[tuple[int, Any], None, None]:
    """`sim.studies.runner.pool.answers` by so many of them. Raises CheckFailed where one ended without an answer."""
    processes = _STANDING[-1] if _STANDING else Standing()
    pool = processes.of(workers)

    def submit(call: Call) -> Future[Any]:
        with _interrupts_held(), _main_hidden():
            return pool.submit(call[0], *call[1])

    try:
        yield from finished(calls, submit, after)
    except BrokenProcessPool:
        raise CheckFailed(
            f"a worker process ended without an answer (out of memory?); repeat it with fewer than --workers {workers}"
        ) from None
    except BaseException:
        processes.end(at_once=True)
        raise
    finally:
        if not _STANDING:
            processes.end(at_once=False)


def _settle() -> None:
    """What a worker does first: leave Ctrl-C, which reaches every process of a terminal, to the one that started it,
    and end with it, however that one ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform != "win32":
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def _main_hidden() -> Iterator[None]:
    """While processes start, no script is told to them: what they run lies in modules, and a script that calls this
    without `if __name__ == "__main__"` would be run again by each."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """While processes start, Ctrl-C waits: they inherit that it does, so none of them dies with a traceback before it
    has settled, and the one that starts them hears of it afterwards. Windows has no signal masks and no such start."""
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        yield
        return
    resource_tracker.ensure_running()  # it would lift the mask when it starts
    usual = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, usual)
