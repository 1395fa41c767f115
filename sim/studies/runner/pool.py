"""Many runs on few cores: a pool of processes whose answers do not depend on which process gave them, or when."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.base.interrupts import POLL_S, heard, held

if TYPE_CHECKING:
    from concurrent.futures import Future

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
    from concurrent.futures import FIRST_COMPLETED, wait

    order, indices = Order(calls), dict["Future[Any]", int]()

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
    from sim.studies.runner.processes import pooled

    # The pool's own threads set events that this one waits for: Ctrl-C must not come in the middle of that.
    with held():
        yield from pooled(calls, workers)


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
