"""Many runs on few cores: a pool of processes whose answers do not depend on which process gave them, or when."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from sim.base.interrupts import POLL_S, heard, held

if TYPE_CHECKING:
    from concurrent.futures import Future

# A call: a function of a module and its arguments, which a process of its own can import and receive.
Call = tuple[Callable[..., Any], tuple[Any, ...]]
# Who answers calls, as `answers` does.
Answers = Callable[..., Generator[tuple[int, Any], None, None]]
# (index, answer) -> (index, call) of those that have waited for it.
After = Callable[[int, Any], Sequence[tuple[int, Call]]]


def finished(
    calls: Sequence[Call],
    submit: Callable[[Call], Future[Any]],
    after: After | None = None,
    look: Callable[[], None] = lambda: None,
) -> Generator[tuple[int, Any], None, None]:
    """(index, answer) of every call as it is answered by others, whom `submit` hands it to.

    Args:
        after: which calls an answer brings. look: called again and again meanwhile.

    Raises:
        CancelledError: a call was dropped. Whatever a call itself raises.
    """
    from concurrent.futures import FIRST_COMPLETED, wait

    indices = {submit(call): index for index, call in enumerate(calls)}
    waiting = set(indices)
    while waiting:
        done, waiting = wait(waiting, POLL_S, FIRST_COMPLETED)
        heard()
        look()
        for future in sorted(done, key=indices.__getitem__):
            index, answer = indices.pop(future), future.result()
            more = {submit(call): later for later, call in (after(index, answer) if after else ())}
            indices |= more
            waiting |= more.keys()
            yield index, answer


def n_cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def answers(calls: Sequence[Call], workers: int, after: After | None = None) -> Generator[tuple[int, Any], None, None]:
    """(index, answer) of every call as it is answered, on so many processes; on this one when it is one.

    Whoever stops early, by an error or Ctrl-C, leaves no process behind.

    Args:
        after: which calls an answer brings.

    Raises:
        CheckFailed: a process ended without an answer. Whatever a call itself raises.
    """
    workers = workers if after else min(workers, len(calls))
    if workers <= 1:
        ready = deque(enumerate(calls))
        while ready:
            index, (function, arguments) = ready.popleft()
            answer = function(*arguments)
            ready.extendleft(reversed(after(index, answer) if after else ()))  # next: what they need is at hand
            yield index, answer
        return
    from sim.studies.runner.processes import pooled

    # The pool's own threads set events that this one waits for: Ctrl-C must not come in the middle of that.
    with held():
        yield from pooled(calls, workers, after)


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
