"""How far the mean times of a run may be off: by the figures they rest on, and by the choice of requests."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from sim.figures import Ends, Errors, Sampling, Uncertainty
from sim.results.provenance import Attribution, attributions
from sim.results.sampling import Interval, samples, times_of
from sim.workload.iterations import DECODE, MIXED, PREFILL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.engine.report import Report
    from sim.engine.run_loop import RequestTimes
    from sim.results.metrics import Times


class Waits(NamedTuple):
    """Where requests come at times of their own: whom each server took, in its order, and whether each comes when one
    before it has been answered."""

    servers: Sequence[Sequence[RequestTimes]]
    closed: bool


def uncertainty(report: Report, timed: Times, batch: int, waits: Waits | None) -> Uncertainty:
    """Band of the mean times when every figure moves to the end of its range at once (so it is wide), from the ends of
    what other requests of the kind may give (`sim.results.sampling`); with one request, which says nothing of others,
    from it.

    Factors are of the whole run's time. TTFT takes those of prefill, TPOT those of decode: a run that loads its experts
    once rests on the link before the first token and on the GPU ever after. Where a TPOT holds other requests' prefills
    (batches), they are of all phases. Where a TTFT holds waits, requests wait again for services of other lengths; not
    so in batches, of which nobody knows who would have shared them: no band.
    """
    rows = attributions(report)
    total = math.fsum(row.spent_s for row in rows)
    sampling = _of_requests(report, batch) if waits is None else _of_load(timed)
    if not total:
        return Uncertainty(None, None, None, sampling, None, None)

    def factors(phase: str, alone: bool) -> tuple[float, float]:
        own = attributions(report, (phase,)) if alone else []
        return _ends(own or rows)

    prefill = factors(PREFILL, not report.phases[MIXED].n_iterations)
    decode = factors(DECODE, batch == 1)
    ttft: tuple[float, float] | None = prefill
    if waits is not None and waits.closed:
        ttft = _ends(rows)
    elif waits is not None:
        ttft = _of_waits(waits, prefill, decode) if batch == 1 else None
    return Uncertainty(
        *_ends(rows),
        plus_minus(rows, total),
        sampling,
        _band(timed.ttft_s.mean, sampling.ttft_s, ttft),
        _band(timed.tpot_s.mean, sampling.tpot_s, decode),
    )


def _band(mean: float | None, over: Ends, factors: tuple[float, float] | None) -> Ends:
    if mean is None or factors is None:
        return None
    least, most = over or (mean, mean)
    return least * factors[0], most * factors[1]


def _of_waits(waits: Waits, prefill: tuple[float, float], decode: tuple[float, float]) -> tuple[float, float] | None:
    """By which factors the mean TTFT changes when services do, and nobody comes at another time."""
    now, least, most = (
        math.fsum(ttft_s for served in waits.servers for ttft_s in ttfts_s(served, *factors))
        for factors in ((1.0, 1.0), *zip(prefill, decode, strict=True))
    )
    return (least / now, most / now) if now else None


def ttfts_s(served: Sequence[RequestTimes], prefill: float, decode: float) -> list[float]:
    """Of requests that one server takes one after the other, in this order, when their prompts and the
    tokens after the first take so many times as long as they did (Lindley's recursion)."""
    found, free_s = [], -math.inf
    for times in served:
        first_s = max(times.start_s, free_s) + prefill * times.service_s
        free_s = first_s + decode * (times.last_token_s - times.first_token_s)
        found.append(first_s - times.start_s)
    return found


def _of_requests(report: Report, batch: int) -> Sampling:
    drawn = samples(times_of(report), batch)
    tpot, ttft = drawn["tpot_s"], drawn["ttft_s"]
    return Sampling(_of_times(tpot.interval()), _of_times(ttft.interval()), tpot.n, ttft.n)


def _of_load(timed: Times) -> Sampling:
    """Of requests whose neighbours wait alike: the intervals of their blocks."""
    tpot, ttft = timed.tpot_s.sampling, timed.ttft_s.sampling
    return Sampling(
        _of_times(tpot.mean) if isinstance(tpot, Errors) else None,
        _of_times(ttft.mean) if isinstance(ttft, Errors) else None,
        tpot.blocks if isinstance(tpot, Errors) else 0,
        ttft.blocks if isinstance(ttft, Errors) else 0,
    )


def _of_times(ends: Interval | None) -> Ends:
    """An interval of a mean time, which cannot be negative: few requests that differ much would have it so."""
    return None if ends is None else (max(0.0, ends[0]), max(0.0, ends[1]))


def _ends(rows: list[Attribution]) -> tuple[float, float]:
    """By which factors time changes when all its figures are at their best at once, and at their worst."""
    total = math.fsum(row.spent_s for row in rows)
    return (
        math.fsum(row.spent_s * row.low_factor for row in rows) / total,
        math.fsum(row.spent_s * row.high_factor for row in rows) / total,
    )


def plus_minus(rows: list[Attribution], total_s: float) -> float | None:
    """Share of the time by which calibration scatters: one standard deviation (IQR / 1.349) of each figure's samples,
    added in quadrature by the time that rests on it. None where a tenth of the time or more rests on no samples.
    """
    sampled = [row for row in rows if row.noise_frac is not None]
    if math.fsum(row.spent_s for row in sampled) < 0.9 * total_s:
        return None
    squares = ((row.spent_s * (row.noise_frac or 0.0) / total_s / 1.349) ** 2 for row in sampled)
    return math.sqrt(math.fsum(squares))
