"""A run under load: how fast requests come and are served, how many are there, whether the queue is stable."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from sim.results.schema import Load

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sim.engine.drive import RequestTimes


def load(served: list[RequestTimes], source: str) -> Load | None:
    """Of requests that came at times of their own; None where nobody was served.

    A queue is unstable where requests come faster than they are served while some wait: then it grows as long as they
    come, and percentiles say how long that was. In a closed loop nobody comes before he is answered: that is stable.
    """
    if not served:
        return None
    came = np.array([times.start_s for times in served])
    begun = np.array([times.begun_s for times in served])
    done = np.array([times.last_token_s for times in served])
    order = np.sort(came)
    span_s, arrivals_s = float(done.max() - order[0]), float(order[-1] - order[0])
    arrive_per_s = (len(came) - 1) / arrivals_s if arrivals_s > 0 else None
    if source.startswith("closed:"):
        arrive_per_s = None
    serve_per_s = while_some_wait(came, begun)
    return Load(
        source=source,
        arrivals_per_s=arrive_per_s,
        served_per_s=len(came) / span_s if span_s > 0 else None,
        capacity_per_s=serve_per_s,
        stable=arrive_per_s is None or serve_per_s is None or arrive_per_s < serve_per_s,
        busy_frac=_covered_s(begun, done) / span_s if span_s > 0 else None,
        requests_in_system=math.fsum((done - came).tolist()) / span_s if span_s > 0 else None,
        requests_waiting=math.fsum((begun - came).tolist()) / span_s if span_s > 0 else None,
    )


def while_some_wait(came: NDArray[np.float64], begun: NDArray[np.float64]) -> float | None:
    """Requests taken in per second of the time in which others waited; None where no two waited after one another.

    Of every stretch of time in which somebody waits, what lies between the first and the last that was taken in: before
    that the wait for the first is cut short by its arrival.
    """
    waits = np.flatnonzero(begun > came)
    order = waits[np.argsort(came[waits], kind="stable")]
    came, begun = came[order], begun[order]
    until = np.maximum.accumulate(begun)
    starts = np.flatnonzero(np.concatenate(([True], came[1:] > until[:-1]))) if len(came) else np.empty(0, np.int64)
    n, taken_s = 0, 0.0
    for one in np.split(begun, starts[1:]):
        if len(one) > 1:
            n, taken_s = n + len(one) - 1, taken_s + float(one.max() - one.min())
    return n / taken_s if taken_s > 0 else None


def _covered_s(start_s: NDArray[np.float64], end_s: NDArray[np.float64]) -> float:
    """Length of the union of intervals."""
    if not len(start_s):
        return 0.0
    order = np.argsort(start_s, kind="stable")
    start_s, end_s = start_s[order], np.maximum.accumulate(end_s[order])
    free = np.maximum(start_s[1:] - end_s[:-1], 0.0)
    return float(end_s[-1] - start_s[0] - math.fsum(free.tolist()))


def unstable(found: Load, shown: bool) -> str:
    """The label of a run whose queue grows as long as requests come."""
    assert found.arrivals_per_s is not None
    assert found.capacity_per_s is not None
    rates = f"arrives {found.arrivals_per_s:.3g}/s, serves {found.capacity_per_s:.3g}/s"
    rest = "say how long it ran" if shown else "left out; --force shows them"
    return f"unstable queue: {rates}: percentiles of TTFT, queue and end-to-end time {rest}"
