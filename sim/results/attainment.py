"""Which requests kept to their SLO, what they amount to per second, and what took the time of the others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from sim.figures import Attained, Ends, SloAttainment, Violations
from sim.results.blocks import block_length
from sim.results.sampling import Z

if TYPE_CHECKING:
    from sim.engine.run_loop import RequestTimes, Spent
    from sim.workload.slo import Slo, Slos


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
    if slo.ttft_s is not None and times.ttft_s > slo.ttft_s:
        return _largest(
            parts(times.queue_s + times.away_before_first_s, times.ttft_s, times.until_begun, times.until_first)
        )
    if slo.tpot_s is not None and times.tpot_s is not None and times.tpot_s > slo.tpot_s:
        decode_s = times.last_token_s - times.first_token_s
        away_s = times.away_s - times.away_before_first_s
        return _largest(parts(away_s, decode_s, times.until_first, times.until_last))
    if slo.e2e_s is not None and times.e2e_s > slo.e2e_s:
        return _largest(parts(times.queue_s + times.away_s, times.e2e_s, times.until_begun, times.until_last))
    return None


def _largest(found: Parts) -> str:
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


def attainment(served: Sequence[RequestTimes], slos: Slos) -> SloAttainment | None:
    """None where nothing was promised. Requests whose task has no SLO are not counted."""
    if not slos:
        return None
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
