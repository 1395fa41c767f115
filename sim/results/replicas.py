"""Several replicas: a row for each, and the requests of all with where each was served."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.figures import Replica
from sim.results import metrics
from sim.results.load import Moments

if TYPE_CHECKING:
    from sim.engine.engine import Engine
    from sim.engine.report import Report
    from sim.engine.run_loop import Step


class Watched(NamedTuple):
    """Who is told what of one replica; the arguments of `execute`."""

    spans: Any = None
    log: Any = None
    on_step: Callable[[Step], None] | None = None
    begun: Callable[[Engine], None] | None = None


def request_rows(report: Report) -> Iterator[tuple[Any, ...]]:
    """Of the table `requests`; where there are several replicas, each with its own."""
    for times in report.requests:
        row = metrics.request_row(times)
        yield (*row, report.replica_of[times.request.index]) if report.replicas else row


def rows(report: Report, source: str, definition: str, slots: int) -> list[Replica]:
    """One for each replica."""
    span_s = Moments([times for one in report.replicas for times in one.requests], source).span_s
    return [_row(number, one, source, definition, span_s, slots) for number, one in enumerate(report.replicas)]


def _row(number: int, one: Report, source: str, definition: str, span_s: float, slots: int) -> Replica:
    requests = one.requests
    own = Moments(requests, source, slots)
    outputs = sum(times.request.outputs for times in requests)

    def per_s(value: float) -> float | None:
        return value / span_s if span_s > 0 else None

    return Replica(
        replica=number,
        requests=len(requests),
        output_tokens=outputs,
        throughput_tokens_per_s=per_s(outputs),
        hit_rate=metrics.hit_rates(one.counts.tally, definition).hit,
        busy_frac=per_s(own.busy_s),
        requests_in_system=per_s(own.there_s),
        requests_waiting=per_s(own.waiting_s),
        queue_mean_s=own.waiting_s / len(requests) if requests else None,
        arrivals_per_s=own.arrivals_per_s,
        capacity_per_s=own.capacity_per_s,
        stable=own.stable,
        h2d_bytes=one.lanes.h2d_bytes,
        policy_stats=one.counts.stats,
        scheduler_stats=one.scheduler_stats,
    )
