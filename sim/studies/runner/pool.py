"""Many runs on few cores: a pool of processes whose answers do not depend on which process gave them, or when."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from multiprocessing import resource_tracker
from types import ModuleType
from typing import Any, NamedTuple

from sim.base.errors import CheckFailed
from sim.base.interrupts import POLL_S, heard, held

# A call: a function of a module and its arguments, which a process of its own can import and receive.
Call = tuple[Callable[..., Any], tuple[Any, ...]]
# Who answers calls, as `answers` does.
Answers = Callable[[Sequence[Call], int], Generator[tuple[int, Any], None, None]]


class Awaited(NamedTuple):
    """Stands among the arguments of a call for one item of what another call of the same list answers.

    Attributes:
        call: the index of that other one. item: of its answer, a tuple.
    """

    call: int
    item: int


class Order:
    """Which calls may begin: all at once, but for those that wait for another's answer (one `Awaited` at most)."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._after: dict[int, list[int]] = {}
        for index, (_, arguments) in enumerate(calls):
            for argument in arguments:
                if isinstance(argument, Awaited):
                    self._after.setdefault(argument.call, []).append(index)

    def first(self) -> list[tuple[int, Call]]:
        """(index, call) of those that wait for nothing."""
        waiting = {index for some in self._after.values() for index in some}
        return [(index, call) for index, call in enumerate(self._calls) if index not in waiting]

    def freed(self, index: int, answer: Any) -> list[tuple[int, Call]]:
        """Those that waited for this answer, which is among their arguments now."""
        found = []
        for later in self._after.pop(index, ()):
            function, arguments = self._calls[later]
            told = tuple(answer[one.item] if isinstance(one, Awaited) else one for one in arguments)
            found.append((later, (function, told)))
        return found


def finished(
    calls: Sequence[Call], submit: Callable[[Call], Future[Any]], look: Callable[[], None] = lambda: None
) -> Generator[tuple[int, Any], None, None]:
    """(index, answer) of every call as it is answered by others, whom `submit` hands it to.

    Args:
        look: called again and again meanwhile.

    Raises:
        CancelledError: a call was dropped. Whatever a call itself raises.
    """
    order, indices = Order(calls), dict[Future[Any], int]()

    def begin(some: Sequence[tuple[int, Call]]) -> set[Future[Any]]:
        begun = {submit(call): index for index, call in some}
        indices.update(begun)
        return set(begun)

    waiting = begin(order.first())
    while waiting:
        done, waiting = wait(waiting, POLL_S, FIRST_COMPLETED)
        heard()
        look()
        for future in sorted(done, key=indices.__getitem__):
            index, answer = indices.pop(future), future.result()
            waiting |= begin(order.freed(index, answer))
            yield index, answer


def n_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def answers(calls: Sequence[Call], workers: int) -> Generator[tuple[int, Any], None, None]:
    """(index, answer) of every call as it is answered, on so many processes; on this one when it is one.

    Whoever stops early, by an error or Ctrl-C, leaves no process behind.

    Raises:
        CheckFailed: a process ended without an answer. Whatever a call itself raises.
    """
    workers = min(workers, len(calls))
    if workers <= 1:
        order = Order(calls)
        ready = deque(order.first())
        while ready:
            index, (function, arguments) = ready.popleft()
            answer = function(*arguments)
            ready.extendleft(reversed(order.freed(index, answer)))  # next: what they need is at hand
            yield index, answer
        return
    # The pool's own threads set events that this one waits for: Ctrl-C must not come in the middle of that.
    with held():
        yield from _pooled(calls, workers)


def in_order(
    calls: Sequence[Call],
    workers: int,
    done: Callable[[int, int], None] = lambda _done, _all: None,
    pool: Answers = answers,
) -> list[Any]:
    """All answers, in the order of the calls; `done` is told of (calls answered, in all). Raises as `answers` does."""
    found: dict[int, Any] = {}
    with closing(pool(calls, workers)) as stream:
        for index, answer in stream:
            found[index] = answer
            done(len(found), len(calls))
    return [found[index] for index in range(len(calls))]


def _pooled(calls: Sequence[Call], workers: int) -> Generator[tuple[int, Any], None, None]:
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _settle)

    def submit(call: Call) -> Future[Any]:
        with _interrupts_held(), _main_hidden():
            return pool.submit(call[0], *call[1])

    try:
        yield from finished(calls, submit)
    except BrokenProcessPool:
        raise CheckFailed(
            f"a worker process ended without an answer (out of memory?); repeat it with fewer than --workers {workers}"
        ) from None
    except BaseException:
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


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
