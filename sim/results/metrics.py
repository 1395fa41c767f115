"""From counts and times to the stable keys of `--json`. Every number here is a fold over what the engine counted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import structs

from sim.base.lanes import ALWAYS, CHARGED
from sim.engine.counts import CLASSES, HIT, LATE, MISS, PARTIAL
from sim.figures import (
    Bottleneck,
    Composition,
    Copies,
    DistinctExperts,
    HitRates,
    Length,
    Lengths,
    MixedPhase,
    Phase,
    Phases,
    Prefetches,
    ServedRates,
    Share,
    Statistic,
)
from sim.workload.iterations import DECODE, MIXED, PREFILL

if TYPE_CHECKING:
    from sim.engine.counts import Loss, Tally
    from sim.engine.report import Lanes, PhaseReport, Report
    from sim.engine.run_loop import RequestTimes


def statistic(values: Iterable[float]) -> Statistic:
    """Mean and percentiles; a percentile without 1 / (1 - p) observations behind it is None."""
    ordered = sorted(values)
    n = len(ordered)
    mean = math.fsum(ordered) / n if n else None
    return Statistic(mean, _percentile(ordered, 0.50), _percentile(ordered, 0.95), _percentile(ordered, 0.99), n)


def _percentile(ordered: list[float], p: float) -> float | None:
    return quantile(ordered, p) if len(ordered) >= round(1 / (1 - p)) else None


def under_load(values: Iterable[float]) -> Statistic:
    """The same with the 90th percentile and with sampling errors, of requests in order of arrival."""
    from sim.results.blocks import SHARES, errors

    every = list(values)
    found = structs.replace(statistic(every), p90=_percentile(sorted(every), 0.90))
    given = [name for name in SHARES if getattr(found, name) is not None]
    return structs.replace(found, sampling=errors(every, given) if len(every) > 1 else None)


def quantile(ordered: list[float], p: float) -> float:
    """Linear interpolation between order statistics (numpy's default)."""
    at = p * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


class Times(NamedTuple):
    """Of the requests that were served; TTFT is `queue_s` and then `service_s`."""

    ttft_s: Statistic
    tpot_s: Statistic
    e2e_s: Statistic
    queue_s: Statistic
    service_s: Statistic
    throughput_tokens_per_s: float | None


def times(report: Report, arrivals: bool = False) -> Times:
    """TTFT, TPOT, end-to-end time per request, throughput over the makespan.

    Args:
        arrivals: requests come at times of their own, so that neighbours wait alike.
    """
    done = report.requests
    if arrivals:
        done = sorted(done, key=lambda t: (t.start_s, t.request.index))
    outputs = sum(t.request.outputs for t in done)
    first_s = min((t.start_s for t in done), default=0.0)
    last_s = max((t.last_token_s for t in done), default=0.0)
    span_s = last_s - first_s
    of = under_load if arrivals else statistic
    return Times(
        of(t.ttft_s for t in done),
        of(t.tpot_s for t in done if t.tpot_s is not None),
        of(t.e2e_s for t in done),
        of(t.queue_s for t in done),
        of(t.service_s for t in done),
        outputs / span_s if span_s > 0 else None,
    )


def request_row(times: RequestTimes) -> tuple[Any, ...]:
    """One request in the table `requests`."""
    request = times.request
    return (
        request.index,
        request.task,
        request.prompt_len,
        request.outputs,
        request.arrival_s,
        times.start_s,
        times.begun_s,
        times.first_token_s,
        times.last_token_s,
        times.queue_s,
        times.ttft_s,
        times.tpot_s,
        times.n_preemptions,
    )


def lengths(report: Report) -> Lengths:
    """Prompt and output tokens of the requests that were served, and the longest context among them."""
    done = [t.request for t in report.requests]

    def length(ns: list[int]) -> Length:
        return Length(sum(ns) / len(ns) if ns else None, min(ns, default=None), max(ns, default=None))

    longest = max((r.prompt_len + r.outputs for r in done), default=None)
    return Lengths(length([r.prompt_len for r in done]), length([r.outputs for r in done]), longest)


def phases(report: Report) -> Phases:
    """Iterations, tokens and time of prefill and decode, and of iterations with both."""

    def phase(name: str) -> Phase:
        found = report.phases[name]
        return Phase(found.n_iterations, found.n_tokens, found.time_s)

    mixed, beside = report.phases[MIXED], report.n_decoded - report.phases[DECODE].n_tokens
    if report.drafted is not None:  # the phase has rows of drafts that were rejected, too
        beside = report.drafted.n_beside
    both = MixedPhase(mixed.n_iterations, mixed.n_tokens, beside, mixed.time_s) if mixed.n_iterations else None
    return Phases(phase(PREFILL), phase(DECODE), both)


def hit_rates(tally: Tally, definition: str) -> HitRates:
    """Decode rates by class under a definition."""
    decode = tally.hits[DECODE]
    counts = list(decode.tokens if definition == "token" else decode.experts)
    total = sum(counts)
    if definition == "slot":
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


def distinct_experts(tally: Tally, n_layers: int, slots: float) -> DistinctExperts:
    """Different experts that one layer of a decode iteration executes, a layer's share of all room, and their ratio.

    What a lossy policy reroutes counts as the experts that serve. A batch's hit rates say little without them: where
    the union comes near the slots, every policy keeps the same.
    """
    n_steps = tally.n_iterations[DECODE] * n_layers
    counts = tally.hits[DECODE]
    n_served = sum(counts.experts[kind] + counts.aside[kind] for kind in (HIT, PARTIAL, LATE, MISS))
    experts = n_served / n_steps if n_steps else None
    over = None if experts is None or not slots else experts / slots
    return DistinctExperts(experts, slots, over)


def prefetching(tally: Tally) -> Prefetches:
    """Useful, late, wasted, harmful, with counts and bytes; and what was issued, cancelled, dropped."""
    p = tally.prefetch
    return Prefetches(
        **{fate: Copies(p.n[fate], p.n_bytes[fate]) for fate in p.n},
        issued=Copies(p.n_issued, p.issued_bytes),
        cancelled=Copies(p.n_cancelled, p.cancelled_bytes),
        refused=Copies(p.n_dropped, 0),
    )


def composition(phases: Mapping[str, PhaseReport], phase: str, drive: bool) -> Composition:
    """Shares of the critical path of a phase's time; they sum to 1.

    Where a path goes back beyond the phase's beginning (a copy that was under way then, say), what it has more there
    than the path of that beginning had, this had less: that is counted as nothing.
    """
    path_s = phases[phase].path_s
    spent_s = {share: max(0.0, path_s[resource]) for share, (resource, _) in CHARGED.items()}
    total = math.fsum(spent_s.values())
    told = {share for share in ("back", "peer") if any(one.path_s[CHARGED[share][0]] for one in phases.values())}
    told |= {*ALWAYS, *(("drive",) if drive else ())}
    return Composition(**{share: s / total if total else None for share, s in spent_s.items() if share in told})


def bottleneck(phases: Mapping[str, PhaseReport], drive: bool = False) -> Bottleneck:
    """What bounds decode (other iterations, when nothing decodes by itself), and how each phase's time is composed.

    Args:
        drive: it had one below host memory.
    """
    prefill, decode, mixed = (composition(phases, phase, drive) for phase in (PREFILL, DECODE, MIXED))
    both = mixed if phases[MIXED].n_iterations else None
    main = decode if phases[DECODE].n_iterations else both or prefill
    return Bottleneck(main.largest(), prefill, decode, both)


def lane_utilisation(lanes: Lanes, makespan_s: float) -> dict[str, float | None]:
    """Busy share of every lane over the makespan; over the lane's own time where it goes on after the last token."""
    spans_s = {name: max(makespan_s, lanes.ends_s.get(name, 0.0)) for name in lanes.busy_s}
    busy = sorted(lanes.busy_s.items())
    return {name: (busy_s / spans_s[name] if spans_s[name] else None) for name, busy_s in busy}
