"""A run under load: how fast requests come and are served, how many are there, whether the queue is stable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sim.figures import Load, Replica

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sim.engine.run_loop import RequestTimes


class Taken(NamedTuple):
    """How many were taken in while others waited, in which time, whether for a slot; and how many of all waited."""

    n: int
    time_s: float
    for_slot: bool
    n_waited: int
    n_all: int


class Moments:
    """Of requests that were served, by the same replica where there are several: when they came, were begun and done.

    Args:
        source: of their arrivals. slots: requests that may run together.
    """

    def __init__(self, served: Sequence[RequestTimes], source: str, slots: int = 1) -> None:
        self.came = np.array([times.start_s for times in served])
        self.begun = np.array([times.begun_s for times in served])
        self.done = np.array([times.last_token_s for times in served])
        self._closed = source.startswith("closed:")
        self._slots = slots

    @property
    def span_s(self) -> float:
        """From the first arrival to the last token; 0 where nobody came."""
        return float(self.done.max() - self.came.min()) if len(self.came) else 0.0

    @property
    def arrivals_per_s(self) -> float | None:
        """How fast they came; None where that cannot be said, and in a closed loop, which has no rate."""
        arrivals_s = float(self.came.max() - self.came.min()) if len(self.came) else 0.0
        return (len(self.came) - 1) / arrivals_s if arrivals_s > 0 and not self._closed else None

    @property
    def capacity_per_s(self) -> float | None:
        """How fast they were taken in while others waited for a slot; None where fewer than half of them did. A queue
        that grows lets nearly everybody wait, and of the few that do in one that is short the rate is anybody's guess.
        """
        return _rate([self.taken])

    @property
    def taken(self) -> Taken:
        """While some waited.

        Where several run together a prompt also waits, slots being free, for the iteration that is under way and for
        the prompts before it: how fast those are taken in is how fast prompts run, not how fast requests are served.
        """
        if self._slots > 1 and len(self.begun) and len(full := _full(self.begun, self.done, self._slots)):
            n, time_s = taken_while_some_wait(self.came, self.begun, full)
            before = np.searchsorted(full[:, 0], self.begun) - 1  # the last stretch that began before they did
            waited = (self.begun > self.came) & (before >= 0) & (full[before, 1] > self.came)
            return Taken(n, time_s, True, int(waited.sum()), len(self.came))
        n, time_s = taken_while_some_wait(self.came, self.begun)
        return Taken(n, time_s, self._slots == 1, int((self.begun > self.came).sum()), len(self.came))

    @property
    def stable(self) -> bool:
        """Whether that is faster than they came."""
        arrive_per_s, serve_per_s = self.arrivals_per_s, self.capacity_per_s
        return arrive_per_s is None or serve_per_s is None or arrive_per_s < serve_per_s

    @property
    def busy_s(self) -> float:
        """Time in which any was served."""
        return _covered_s(self.begun, self.done)

    @property
    def there_s(self) -> float:
        """Time that they were there, all added."""
        return math.fsum((self.done - self.came).tolist())

    @property
    def waiting_s(self) -> float:
        """Time that they waited before their prompts, all added."""
        return math.fsum((self.begun - self.came).tolist())


def load(
    served: Sequence[RequestTimes], source: str, replicas: Sequence[Sequence[RequestTimes]] = (), slots: int = 1
) -> Load | None:
    """Of requests that came at times of their own; None where nobody was served.

    A queue is unstable where requests come faster than they are served while some wait: then it grows as long as they
    come, and percentiles say how long that was. In a closed loop nobody comes before he is answered: that is stable.

    Args:
        replicas: the same requests by the replica that served them, where there are several. What all can take in is as
            many times what one takes in while others wait there; all are stable if each is; the busy share is the mean.
        slots: requests that may run together, at each.
    """
    if not served:
        return None
    every = Moments(served, source, slots)
    own = [Moments(one, source, slots) for one in replicas] or [every]
    one_per_s = _rate([one.taken for one in own])
    span_s = every.span_s
    return Load(
        source=source,
        arrivals_per_s=every.arrivals_per_s,
        served_per_s=len(served) / span_s if span_s > 0 else None,
        capacity_per_s=None if one_per_s is None else len(own) * one_per_s,
        stable=all(one.stable for one in own),
        busy_frac=math.fsum(one.busy_s for one in own) / len(own) / span_s if span_s > 0 else None,
        requests_in_system=every.there_s / span_s if span_s > 0 else None,
        requests_waiting=every.waiting_s / span_s if span_s > 0 else None,
    )


def _rate(taken: Sequence[Taken]) -> float | None:
    """Of one or several; where slots were full at any, of those alone."""
    counted = [one for one in taken if one.for_slot] or taken
    time_s = sum(one.time_s for one in counted)
    most_waited = 2 * sum(one.n_waited for one in counted) >= sum(one.n_all for one in counted)
    return sum(one.n for one in counted) / time_s if time_s > 0 and most_waited else None


def _full(begun: NDArray[np.float64], done: NDArray[np.float64], slots: int) -> NDArray[np.float64]:
    """From when until when all slots were taken: rows of two. Whoever ends at an instant leaves before the next."""
    at_s = np.concatenate((done, begun))
    order = np.argsort(at_s, kind="stable")
    running = np.cumsum(np.where(order < len(done), -1, 1))
    from_s, until_s = at_s[order], np.append(at_s[order][1:], np.inf)
    return np.stack((from_s, until_s), axis=1)[(running >= slots) & (until_s > from_s)]


def taken_while_some_wait(
    came: NDArray[np.float64], begun: NDArray[np.float64], full: NDArray[np.float64] | None = None
) -> tuple[int, float]:
    """How many, and in which time.

    Of every stretch of time in which somebody waits, what lies between the first and the last that was taken in: before
    that the wait for the first is cut short by its arrival. Given when several slots were `full`, what lies between
    that and the last: slots that filled together fall free together, and the long wait for the first of them counts.
    """
    waits = np.flatnonzero(begun > came)
    order = waits[np.argsort(came[waits], kind="stable")]
    came, begun = came[order], begun[order]
    until = np.maximum.accumulate(begun)
    starts = np.flatnonzero(np.concatenate(([True], came[1:] > until[:-1]))) if len(came) else np.empty(0, np.int64)
    n, taken_s = 0, 0.0
    for start, stretch in zip(starts.tolist(), np.split(begun, starts[1:]), strict=False):
        if full is None:
            n, taken_s = n + len(stretch) - 1, taken_s + float(stretch.max() - stretch.min())
        elif len(later := full[full[:, 1] > came[start]]):
            since_s = max(float(later[0, 0]), float(came[start]))
            one = stretch[stretch > since_s]
            if len(one):
                n, taken_s = n + len(one), taken_s + float(one.max()) - since_s
    return n, taken_s


def _covered_s(start_s: NDArray[np.float64], end_s: NDArray[np.float64]) -> float:
    """Length of the union of intervals."""
    if not len(start_s):
        return 0.0
    order = np.argsort(start_s, kind="stable")
    start_s, end_s = start_s[order], np.maximum.accumulate(end_s[order])
    free = np.maximum(start_s[1:] - end_s[:-1], 0.0)
    return float(end_s[-1] - start_s[0] - math.fsum(free.tolist()))


def _grows(found: Load) -> bool:
    come, taken = found.arrivals_per_s, found.capacity_per_s
    return come is not None and taken is not None and come >= taken


def unstable(found: Load, replicas: Sequence[Replica] = ()) -> str:
    """The label of a run whose queue grows as long as requests come, or that of one of its replicas."""
    told: Load | Replica = found
    if not _grows(found):  # all of them together could serve what comes
        told = next(one for one in replicas if not one.stable)
    arrive_per_s, serve_per_s = told.arrivals_per_s, told.capacity_per_s
    assert arrive_per_s is not None
    assert serve_per_s is not None
    where = f" at replica {told.replica}" if isinstance(told, Replica) else ""
    rates = f"arrives {arrive_per_s:.3g}/s, serves {serve_per_s:.3g}/s"
    return f"unstable queue{where}: {rates}: percentiles of TTFT, queue and end-to-end time say how long it ran"
