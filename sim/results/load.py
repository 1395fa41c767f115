"""A run under load: how fast requests come and are served, how many are there, whether the queue is stable; by replica
where there are several; and which requests kept to their SLO."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sim.figures import Attained, Ends, Load, Replica, SloAttainment, Violations
from sim.results import metrics
from sim.results.blocks import block_length
from sim.results.sampling import Z

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sim.engine.report import Report
    from sim.engine.run_loop import RequestTimes, Spent
    from sim.workload.slo import Slo, Slos


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

    Attributes:
        span_s: from the first arrival to the last token; 0 where nobody came. arrivals_per_s: how fast they came; None
            where that cannot be said, and in a closed loop, which has no rate.
        taken: those that were while some waited. Where several run together a prompt also waits, slots being free, for
            the iteration that is under way and for the prompts before it: how fast those are taken in is how fast
            prompts run, not how fast requests are served.
        capacity_per_s: how fast they were taken in while others waited for a slot; None where fewer than half of them
            did. A queue that grows lets nearly everybody wait, and of the few that do in one that is short the rate is
            anybody's guess. stable: whether that is faster than they came.
        busy_s: time in which any was served. there_s, waiting_s: that they were there, or waited for their prompts to
            begin, all added.
    """

    def __init__(self, served: Sequence[RequestTimes], source: str, slots: int = 1) -> None:
        came = np.array([times.start_s for times in served])
        begun = np.array([times.begun_s for times in served])
        done = np.array([times.last_token_s for times in served])
        n = len(served)
        self.span_s = float(done.max() - came.min()) if n else 0.0
        arrivals_s = float(came.max() - came.min()) if n else 0.0
        closed = source.startswith("closed:")
        self.arrivals_per_s = (n - 1) / arrivals_s if arrivals_s > 0 and not closed else None
        full = _full(begun, done, slots) if slots > 1 and n else None
        waited = begun > came
        if full is not None and len(full):
            before = np.searchsorted(full[:, 0], begun) - 1  # the last stretch that began before they did
            waited = waited & (before >= 0) & (full[before, 1] > came)
            self.taken = Taken(*taken_while_some_wait(came, begun, full), True, int(waited.sum()), n)
        else:
            self.taken = Taken(*taken_while_some_wait(came, begun), slots == 1, int(waited.sum()), n)
        self.capacity_per_s = _rate([self.taken])
        self.stable = not _grows(self)
        self.busy_s = _covered_s(begun, done)
        self.there_s = math.fsum((done - came).tolist())
        self.waiting_s = math.fsum((begun - came).tolist())


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


def _grows(found: Load | Moments) -> bool:
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


def by_replica(report: Report, source: str, definition: str, slots: int) -> list[Replica]:
    """One for each replica."""
    span_s = Moments([times for one in report.replicas for times in one.requests], source).span_s
    found = []
    for number, one in enumerate(report.replicas):
        own = Moments(one.requests, source, slots)
        outputs = sum(times.request.outputs for times in one.requests)
        shares = (outputs, own.busy_s, own.there_s, own.waiting_s)
        per_s, busy, there, waiting = (value / span_s if span_s > 0 else None for value in shares)
        row = Replica(
            replica=number,
            requests=len(one.requests),
            output_tokens=outputs,
            throughput_tokens_per_s=per_s,
            hit_rate=metrics.hit_rates(one.counts.tally, definition).hit,
            busy_frac=busy,
            requests_in_system=there,
            requests_waiting=waiting,
            queue_mean_s=own.waiting_s / len(one.requests) if one.requests else None,
            arrivals_per_s=own.arrivals_per_s,
            capacity_per_s=own.capacity_per_s,
            stable=own.stable,
            h2d_bytes=one.lanes.h2d_bytes,
            policy_stats=one.counts.stats,
            scheduler_stats=one.scheduler_stats,
        )
        found.append(row)
    return found


class Parts(NamedTuple):
    """A time of one request by what it went to; they sum to it.

    queue: before its prompt began, and while it was pre-empted. copies, drive: iterations that it ran or waited in,
    while the GPU waited for copies, or for reads from a drive. prefill: the rest of iterations of prompts, its own and
    others'. compute: the rest.
    """

    queue: float
    prefill: float
    copies: float
    compute: float
    drive: float


def parts(queue_s: float, whole_s: float, since: Spent, until: Spent) -> Parts:
    """Of a time that holds a wait in the queue, and of what all iterations had spent after the first and by its end."""
    prefill_copies_s = until.prefill_copies_s - since.prefill_copies_s
    prefill_drive_s = until.prefill_drive_s - since.prefill_drive_s
    copies_s = prefill_copies_s + until.decode_copies_s - since.decode_copies_s
    drive_s = prefill_drive_s + until.decode_drive_s - since.decode_drive_s
    prefill_s = until.prefill_s - since.prefill_s - prefill_copies_s - prefill_drive_s
    return Parts(queue_s, prefill_s, copies_s, whole_s - queue_s - prefill_s - copies_s - drive_s, drive_s)


def violated(times: RequestTimes, slo: Slo) -> str | None:
    """What took most of the time in the first limit that a request broke; None: it kept all."""
    begun, first, last = times.until_begun, times.until_first, times.until_last
    if slo.ttft_s is not None and times.ttft_s > slo.ttft_s:
        found = parts(times.queue_s + times.away_before_first_s, times.ttft_s, begun, first)
    elif slo.tpot_s is not None and times.tpot_s is not None and times.tpot_s > slo.tpot_s:
        away_s = times.away_s - times.away_before_first_s
        found = parts(away_s, times.last_token_s - times.first_token_s, first, last)
    elif slo.e2e_s is not None and times.e2e_s > slo.e2e_s:
        found = parts(times.queue_s + times.away_s, times.e2e_s, begun, last)
    else:
        return None
    return max(zip(found, found._fields, strict=True), key=lambda part: part[0])[1]


def interval(kept: list[float]) -> Ends:
    """Where a share lies, at 95 %: Wilson's interval (Journal of the American Statistical Association 22, 1927), which
    says something of 20 of 20, too. Neighbours in a queue fare alike, so that as many count as there are blocks.

    Args:
        kept: 1 or 0 of each request, in the order in which they came.
    """
    if not kept:
        return None
    n, share = math.ceil(len(kept) / block_length(kept)), math.fsum(kept) / len(kept)
    middle = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    either_way = Z / (1 + Z**2 / n) * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    return max(0.0, middle - either_way), min(1.0, middle + either_way)


def attainment(served: Sequence[RequestTimes], slos: Slos) -> SloAttainment:
    """What became of what was promised. Requests whose task has no SLO are not counted."""
    first_s = min((times.start_s for times in served), default=0.0)
    span_s = max((times.last_token_s for times in served), default=0.0) - first_s
    n: Counter[str] = Counter()
    met: Counter[str] = Counter()
    why: Counter[str] = Counter()
    tokens, kept = 0, []
    for times in served:
        task = times.request.task
        slo = slos.of(task)
        if slo is None:
            continue
        n[task] += 1
        cause = violated(times, slo)
        kept.append(float(cause is None))
        if cause is None:
            met[task] += 1
            tokens += times.request.outputs
        else:
            why[cause] += 1
    n_all, n_met = n.total(), met.total()
    return SloAttainment(
        limits=slos.limits(),
        requests=n_all,
        met=n_met,
        attained_frac=n_met / n_all if n_all else None,
        attained_ends=interval(kept),
        goodput_requests_per_s=n_met / span_s if span_s > 0 else None,
        goodput_tokens_per_s=tokens / span_s if span_s > 0 else None,
        violations=Violations(**{cause: why[cause] for cause in Parts._fields}),
        tasks={task: Attained(n[task], met[task], met[task] / n[task]) for task in sorted(n)},
    )
