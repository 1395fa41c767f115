"""From counts and times to the stable keys of `--json`. Every number here is a fold over what the engine counted."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.base.lanes import WAITED_FOR
from sim.engine.counts import CLASSES
from sim.machine.lanes import CPU, GPU, H2D, HOST, SIDE
from sim.results.sampling import Interval, samples
from sim.results.schema import (
    BoundBy,
    Composition,
    Copies,
    Ends,
    Figure,
    HitRates,
    Length,
    Lengths,
    Phase,
    Phases,
    Prefetches,
    Provenance,
    Sampling,
    ServedRates,
    Share,
    Statistic,
    Uncertainty,
    Union,
)
from sim.workload.iterations import DECODE, PREFILL

if TYPE_CHECKING:
    from sim.engine.counts import Loss, Tally
    from sim.engine.drive import Clockwork, RequestTimes
    from sim.machine.simulated import SimulatedMachine
    from sim.real.machine.machine import RealMachine

# How far a figure may be off when its file gives no range of its own (assumed; see docs/provenance.md).
SPREAD = {"measured": 0.05, "datasheet": 0.15, "assumed": 0.30}


def statistic(values: Iterable[float]) -> Statistic:
    """Mean and percentiles; a percentile without 1 / (1 - p) observations behind it is None."""
    ordered = sorted(values)
    n = len(ordered)

    def percentile(p: float) -> float | None:
        return quantile(ordered, p) if n >= round(1 / (1 - p)) else None

    return Statistic(math.fsum(ordered) / n if n else None, percentile(0.50), percentile(0.95), percentile(0.99), n)


def quantile(ordered: list[float], p: float) -> float:
    """Linear interpolation between order statistics (numpy's default)."""
    at = p * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


class Times(NamedTuple):
    """Of the requests that were served."""

    ttft_s: Statistic
    tpot_s: Statistic
    e2e_s: Statistic
    throughput_tokens_per_s: float | None


def times(clockwork: Clockwork) -> Times:
    """TTFT, TPOT, end-to-end time per request, throughput over the makespan."""
    done = clockwork.requests
    ttft = [t.first_token_s - t.start_s for t in done]
    tpot = [
        (t.last_token_s - t.first_token_s) / (t.request.outputs - 1) for t in done if t.request.outputs > 1
    ]  # a request of one token has no time per further token
    outputs = sum(t.request.outputs for t in done)
    first_s = min((t.start_s for t in done), default=0.0)
    last_s = max((t.last_token_s for t in done), default=0.0)
    span_s = last_s - first_s
    return Times(
        statistic(ttft),
        statistic(tpot),
        statistic(t.last_token_s - t.start_s for t in done),
        outputs / span_s if span_s > 0 else None,
    )


def request_row(times: RequestTimes) -> tuple[Any, ...]:
    """One request in the table `requests`."""
    request = times.request
    further = request.outputs - 1
    tpot_s = (times.last_token_s - times.first_token_s) / further if further else None
    return (
        request.index, request.task, request.prompt_len, request.outputs, request.arrival_s, times.start_s,
        times.first_token_s, times.last_token_s, times.first_token_s - times.start_s, tpot_s,
    )  # fmt: skip


def lengths(clockwork: Clockwork) -> Lengths:
    """Prompt and output tokens of the requests that were served, and the longest context among them."""
    done = [t.request for t in clockwork.requests]

    def length(ns: list[int]) -> Length:
        return Length(sum(ns) / len(ns) if ns else None, min(ns, default=None), max(ns, default=None))

    longest = max((r.prompt_len + r.outputs for r in done), default=None)
    return Lengths(length([r.prompt_len for r in done]), length([r.outputs for r in done]), longest)


def phases(clockwork: Clockwork) -> Phases:
    """Iterations, tokens and time of prefill and decode."""

    def phase(name: str) -> Phase:
        found = clockwork.phases[name]
        return Phase(found.n_iterations, found.n_tokens, found.time_s)

    return Phases(phase(PREFILL), phase(DECODE))


def hit_rates(tally: Tally, definition: str) -> HitRates:
    """Decode rates by class under a definition."""
    decode = tally.hits[DECODE]
    counts = list(decode.tokens if definition == "token" else decode.experts)
    total = sum(counts)
    if definition == "room":
        counts[0], counts[2] = counts[0] + counts[2], 0
    elif definition == "cached":
        counts[0], counts[3] = counts[0] - decode.prefetched, counts[3] + decode.prefetched
    return HitRates(**{name: n / total if total else None for name, n in zip(CLASSES, counts, strict=True)})


def cache_ratio(served: ServedRates) -> Share:
    """Share of the experts that served which were there, or on their way."""
    return None if served.hit is None else served.hit + (served.late_hit or 0.0)


def changed_frac(loss: Loss) -> float:
    """Share of activations whose expert the policy changed or dropped."""
    return (loss.changed + loss.dropped) / loss.activations if loss.activations else 0.0


def union(tally: Tally, n_layers: int, slots: float) -> Union:
    """Different experts that one layer of a decode iteration asks for, a layer's share of all room, and their ratio.

    A batch's hit rates say little without them: where the union comes near the slots, every policy keeps the same.
    """
    n_steps = tally.n_iterations[DECODE] * n_layers
    experts = sum(tally.hits[DECODE].experts) / n_steps if n_steps else None
    over = None if experts is None or not slots else experts / slots
    return Union(experts, slots, over)


def prefetching(tally: Tally) -> Prefetches:
    """Useful, late, wasted, harmful, with counts and bytes; and what was issued, cancelled, dropped."""
    p = tally.prefetch
    return Prefetches(
        **{fate: Copies(p.n[fate], p.n_bytes[fate]) for fate in p.n},
        issued=Copies(p.n_issued, p.issued_bytes),
        cancelled=Copies(p.n_cancelled, p.cancelled_bytes),
        refused=Copies(p.n_dropped, 0),
    )


def composition(clockwork: Clockwork, phase: str) -> Composition:
    """Share of the phase's time GPU 0 was busy, or waiting for copies, host, CPU, predictor; sums to 1."""
    times_ = clockwork.phases[phase]
    total = math.fsum(times_.parts_s)
    return Composition(
        **{share: times_.parts_s[cause] / total if total else None for cause, share in enumerate(WAITED_FOR)}
    )


def bound_by(clockwork: Clockwork) -> BoundBy:
    """What bounds decode (prefill when nothing decodes), and how each phase's time is composed."""
    prefill, decode = composition(clockwork, PREFILL), composition(clockwork, DECODE)
    main = decode if clockwork.phases[DECODE].n_iterations else prefill
    known = {name: share for name, share in main.by_part().items() if share is not None}
    return BoundBy(WAITED_FOR[max(known, key=lambda k: known[k])].resource if known else None, prefill, decode)


class Attribution(NamedTuple):
    """Part of GPU 0's time that rests on one figure, and by which factors it changes over that figure's range."""

    figure: str
    source: str
    spent_s: float
    low_factor: float
    high_factor: float
    value: float | None
    ref: str
    noise_frac: float | None  # interquartile range of its samples over its value


def attributions(
    machine: SimulatedMachine, clockwork: Clockwork, phases: Iterable[str] = (PREFILL, DECODE)
) -> list[Attribution]:
    """Which figure each part of GPU 0's time in these phases rests on.

    Busy and waiting parts are split by the quantities their lane spent its time on, over the whole run.
    """
    cost = machine.cost
    chosen = (clockwork.phases[phase].parts_s for phase in phases)
    parts_s = [math.fsum(column) for column in zip(*chosen, strict=True)]
    seconds = [0.0] * len(cost.attributed_to)
    _spread(seconds, parts_s[GPU], list(enumerate(machine.gpu_s)))
    n_copies, busy_s = sum(up.n_copies for up in machine.h2d), math.fsum(up.busy_s for up in machine.h2d)
    latency_s = n_copies * cost.h2d_latency_s
    _spread(seconds, parts_s[H2D], [(cost.q_h2d_latency, latency_s), (cost.q_h2d_bandwidth, busy_s - latency_s)])
    _spread(seconds, parts_s[CPU], list(enumerate(machine.cpu_s)))
    _spread(seconds, parts_s[HOST], machine.host_shares())
    _spread(seconds, parts_s[SIDE], list(enumerate(machine.side_s)))
    rows: list[Attribution] = []
    for (name, quantity), spent_s in zip(cost.attributed_to, seconds, strict=True):
        if spent_s > 0:
            low, high = factors(name, quantity)
            noise = None if quantity.iqr is None or not quantity.value else quantity.iqr / quantity.value
            rows.append(Attribution(name, quantity.source, spent_s, low, high, quantity.value, quantity.ref, noise))
    return rows


def plus_minus(rows: list[Attribution], total_s: float) -> float | None:
    """Share of the time by which calibration scatters: one standard deviation (IQR / 1.349) of each figure's samples,
    added in quadrature by the time that rests on it. None where a tenth of the time or more rests on no samples.
    """
    sampled = [row for row in rows if row.noise_frac is not None]
    if math.fsum(row.spent_s for row in sampled) < 0.9 * total_s:
        return None
    squares = ((row.spent_s * (row.noise_frac or 0.0) / total_s / 1.349) ** 2 for row in sampled)
    return math.sqrt(math.fsum(squares))


def _spread(seconds: list[float], total_s: float, shares: list[tuple[int, float]]) -> None:
    whole = math.fsum(share for _, share in shares)
    if whole > 0:
        for index, share in shares:
            seconds[index] += total_s * share / whole


def factors(name: str, quantity: Any) -> tuple[float, float]:
    """Smallest and largest factor by which time may change when the figure is off by its own range or the default."""
    value, spread = quantity.value, SPREAD[quantity.source]
    low = quantity.low if quantity.low is not None else value * (1 - spread)
    high = quantity.high if quantity.high is not None else value * (1 + spread)
    if value <= 0:
        return 1.0, 1.0
    if name.endswith("_per_s") or ".flops_per_s" in name:
        return min(1.0, value / high), max(1.0, value / low)
    return min(1.0, low / value), max(1.0, high / value)


def provenance(machine: SimulatedMachine | RealMachine, clockwork: Clockwork) -> Provenance:
    """Share of simulated time resting on measured, datasheet and assumed figures, and on which."""
    if machine.measured is True:
        return Provenance(1.0, 0.0, 0.0, [])
    rows = sorted(attributions(machine, clockwork), key=lambda row: -row.spent_s)
    total = math.fsum(row.spent_s for row in rows)
    shares = {
        source: (math.fsum(row.spent_s for row in rows if row.source == source) / total if total else None)
        for source in ("measured", "datasheet", "assumed")
    }
    figures = [Figure(row.figure, row.spent_s / total, row.source, row.value, row.ref) for row in rows]
    return Provenance(**shares, figures=figures)


def uncertainty(
    machine: SimulatedMachine | RealMachine, clockwork: Clockwork, timed: Times, batch: int, arrivals: bool
) -> Uncertainty:
    """Band of the mean times when every figure moves to the end of its range at once (so it is wide), from the ends of
    what other requests of the kind may give (`sim.results.sampling`); with one request, which says nothing of others,
    from it.

    Factors are of the whole run's time. TTFT takes those of prefill, TPOT those of decode: a run that loads its experts
    once rests on the link before the first token and on the GPU ever after. Where a TTFT holds waits (arrivals), or a
    TPOT other requests' prefills (batches), they are of both phases.
    """
    rows = [] if machine.measured is True else attributions(machine, clockwork)
    total = math.fsum(row.spent_s for row in rows)
    drawn = samples(clockwork, batch)
    tpot, ttft = drawn["tpot_s"], drawn["ttft_s"]
    sampling = Sampling(_of_times(tpot.interval()), _of_times(ttft.interval()), tpot.n, ttft.n)
    if not total:
        return Uncertainty(None, None, None, sampling, None, None)

    def band(mean: float | None, over: Ends, phase: str, alone: bool) -> Ends:
        if mean is None:
            return None
        own = attributions(machine, clockwork, (phase,)) if alone and machine.measured is False else []
        low, high = _ends(own or rows)
        least, most = over or (mean, mean)
        return least * low, most * high

    return Uncertainty(
        *_ends(rows),
        plus_minus(rows, total),
        sampling,
        band(timed.ttft_s.mean, sampling.ttft_s, PREFILL, not arrivals),
        band(timed.tpot_s.mean, sampling.tpot_s, DECODE, batch == 1),
    )


def _of_times(ends: Interval | None) -> Ends:
    """An interval of a mean time, which cannot be negative: few requests that differ much would have it so."""
    return None if ends is None else (max(0.0, ends[0]), max(0.0, ends[1]))


def _ends(rows: list[Attribution]) -> tuple[float, float]:
    """By which factors time changes when all its figures are at their best at once, and at their worst."""
    total = math.fsum(row.spent_s for row in rows)
    return (math.fsum(row.spent_s * row.low_factor for row in rows) / total,
            math.fsum(row.spent_s * row.high_factor for row in rows) / total)  # fmt: skip


def lane_utilisation(machine: SimulatedMachine | RealMachine, makespan_s: float) -> dict[str, float | None]:
    """Busy share of every lane over the makespan; over the lane's own time where it goes on after the last token."""
    lanes, ends_s = machine.lane_busy_s(), machine.lane_ends_s() if machine.measured is False else {}
    spans_s = {name: max(makespan_s, ends_s.get(name, 0.0)) for name in lanes}
    return {name: (busy_s / spans_s[name] if spans_s[name] else None) for name, busy_s in sorted(lanes.items())}
