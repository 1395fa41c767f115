"""Which requests kept to their SLO, what they amount to per second, and what took the time of the others."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from sim.results.schema import Attained, SloAttainment, Violations

if TYPE_CHECKING:
    from sim.engine.run_loop import RequestTimes, Spent
    from sim.workload.slo import Slo, Slos


class Parts(NamedTuple):
    """A time of one request by what it went to; they sum to it.

    queue: before its prompt began, and while it was pre-empted. copies: iterations that it ran or waited in, while the
    GPU waited for copies. prefill: the rest of iterations of prompts, its own and others'. compute: the rest.
    """

    queue: float
    prefill: float
    copies: float
    compute: float


def parts(queue_s: float, whole_s: float, since: Spent, until: Spent) -> Parts:
    """Of a time that holds a wait in the queue, and of what all iterations had spent after the first and by its end."""
    prefill_s = until.prefill_s - since.prefill_s
    prefill_copies_s = until.prefill_copies_s - since.prefill_copies_s
    copies_s = prefill_copies_s + until.decode_copies_s - since.decode_copies_s
    prefill_s -= prefill_copies_s
    return Parts(queue_s, prefill_s, copies_s, whole_s - queue_s - prefill_s - copies_s)


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


def attainment(served: list[RequestTimes], slos: Slos) -> SloAttainment | None:
    """None where nothing was promised. Requests whose task has no SLO are not counted."""
    if not slos:
        return None
    first_s = min((times.start_s for times in served), default=0.0)
    span_s = max((times.last_token_s for times in served), default=0.0) - first_s
    n: Counter[str] = Counter()
    met: Counter[str] = Counter()
    why: Counter[str] = Counter()
    tokens = 0
    for times in served:
        task = times.request.task
        slo = slos.of(task)
        if slo is None:
            continue
        n[task] += 1
        cause = violated(times, slo)
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
        goodput_requests_per_s=n_met / span_s if span_s > 0 else None,
        goodput_tokens_per_s=tokens / span_s if span_s > 0 else None,
        violations=Violations(**{cause: why[cause] for cause in Parts._fields}),
        tasks={task: Attained(n[task], met[task], met[task] / n[task]) for task in sorted(n)},
    )
