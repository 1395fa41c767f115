"""From counts and times to the stable keys of `--json`. Every number here is a fold over what the engine counted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from sim.base.lanes import ALWAYS, CHARGED
from sim.base.quantities import USER_REF
from sim.engine.counts import CLASSES, HIT, LATE, MISS, PARTIAL
from sim.figures import (
    Bottleneck,
    Composition,
    Contention,
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
    Slowed,
    Statistic,
)
from sim.machine.memory_law import BY_LAW, SLOWS
from sim.results.sampling import FEWEST_FOR, SHARES
from sim.workload.iterations import DECODE, MIXED, PREFILL

if TYPE_CHECKING:
    from sim.engine.counts import Tally
    from sim.engine.report import PhaseReport, Report
    from sim.profiles.hardware import Hardware

LAW, SET = "law", "set"
LEAST_FRAC = 1e-9
"""Of a lane's time: less is rounding of ends that were worked out twice."""


def statistic(values: Iterable[float], under_load: bool = False) -> Statistic:
    """Mean and percentiles; a percentile p without 1 / (1 - p) observations behind it is None.

    Args:
        under_load: of requests in order of arrival, which wait as their neighbours do: with the 90th percentile, and
            with sampling errors.
    """
    every = list(values)
    ordered, n = sorted(every), len(every)
    found = {name: quantile(ordered, p) if n >= FEWEST_FOR[name] else None for name, p in SHARES.items()}
    mean, given = math.fsum(ordered) / n if n else None, [name for name, value in found.items() if value is not None]
    told = Statistic(mean, found["p50"], found["p95"], found["p99"], n)
    if not under_load:
        return told
    from sim.results.blocks import errors

    sampling = errors(every, given) if n > 1 else None
    return msgspec.structs.replace(told, p90=found["p90"], sampling=sampling)


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
    rows = [(t.ttft_s, t.tpot_s, t.e2e_s, t.queue_s, t.service_s) for t in done]
    columns = zip(*rows, strict=True) if rows else [()] * 5
    outputs = sum(t.request.outputs for t in done)
    span_s = max((t.last_token_s for t in done), default=0.0) - min((t.start_s for t in done), default=0.0)
    ttft, tpot, e2e, queue, service = (statistic((v for v in column if v is not None), arrivals) for column in columns)
    return Times(ttft, tpot, e2e, queue, service, outputs / span_s if span_s > 0 else None)


def served(report: Report, makespan_s: float) -> dict[str, Any]:
    """Tokens of the requests that were served, what iterations took, and how busy each lane was over the makespan (over
    its own time where it goes on after the last token): keys of a result."""
    prompts = [t.request.prompt_len for t in report.requests]
    outputs = [t.request.outputs for t in report.requests]
    asked, put_out = (
        Length(sum(ns) / len(ns) if ns else None, min(ns, default=None), max(ns, default=None))
        for ns in (prompts, outputs)
    )
    longest = max(map(sum, zip(prompts, outputs, strict=True)), default=None)
    prefill, decode, mixed = (report.phases[name] for name in (PREFILL, DECODE, MIXED))
    beside = report.n_decoded - decode.n_tokens
    if report.drafted is not None:  # the phase has rows of drafts that were rejected, too
        beside = report.drafted.n_beside
    both = MixedPhase(mixed.n_iterations, mixed.n_tokens, beside, mixed.time_s) if mixed.n_iterations else None
    alone, after = (Phase(one.n_iterations, one.n_tokens, one.time_s) for one in (prefill, decode))
    lanes = report.lanes
    spans_s = {name: max(makespan_s, lanes.ends_s.get(name, 0.0)) for name in lanes.busy_s}
    busy = sorted(lanes.busy_s.items())
    return {
        "lengths": Lengths(asked, put_out, longest),
        "phases": Phases(alone, after, both),
        "lane_utilisation": {name: busy_s / spans_s[name] if spans_s[name] else None for name, busy_s in busy},
    }


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


def found(tally: Tally, definition: str, n_layers: int, slots: float) -> dict[str, Any]:
    """How experts were found, what a lossy policy changed, and what was copied for them: keys of a result.

    Different experts of a layer are those that serve, rerouted ones among them. A batch's hit rates say little without
    them: where the union comes near the slots, every policy keeps the same.

    Args:
        slots: whole experts that a layer's share of all room holds.
    """
    decode, loss, prefetch = tally.hits[DECODE], tally.loss, tally.prefetch
    served = ServedRates(**decode.served())
    n_steps = tally.n_iterations[DECODE] * n_layers
    n_served = sum(decode.experts[kind] + decode.aside[kind] for kind in (HIT, PARTIAL, LATE, MISS))
    per_layer = n_served / n_steps if n_steps else None
    mixed = tally.hits[MIXED] if tally.n_iterations[MIXED] else None
    rates = hit_rates(tally, definition)
    return {
        **{f"{name}_rate": getattr(rates, name) for name in CLASSES},
        "prefill_hit_rates": HitRates(**tally.hits[PREFILL].rates()),
        "mixed_hit_rates": None if mixed is None else HitRates(**mixed.rates()),
        "token_hit_rates": HitRates(**decode.rates(tokens=True)),
        "served_hit_rates": served,
        "cache_ratio": None if served.hit is None else served.hit + (served.late_hit or 0.0),
        "gate_mass_kept": loss.gate_mass_kept(),
        "activations_changed_frac": (loss.changed + loss.dropped) / loss.activations if loss.activations else 0.0,
        "activations_lowered_frac": loss.lowered / tally.n_executed if tally.n_executed else 0.0,
        "distinct_experts": DistinctExperts(
            per_layer, slots, None if per_layer is None or not slots else per_layer / slots
        ),
        "prefetch": Prefetches(
            **{fate: Copies(n, prefetch.n_bytes[fate]) for fate, n in prefetch.n.items()},
            issued=Copies(prefetch.n_issued, prefetch.issued_bytes),
            cancelled=Copies(prefetch.n_cancelled, prefetch.cancelled_bytes),
            refused=Copies(prefetch.n_dropped, 0),
        ),
        "demand_copies": Copies(tally.n_demand, tally.demand_bytes),
    }


def bottleneck(phases: Mapping[str, PhaseReport], drive: bool = False) -> Bottleneck:
    """What bounds decode (other iterations, when nothing decodes by itself), and how each phase's time is composed: the
    shares of its critical path, which sum to 1.

    Where a path goes back beyond the phase's beginning (a copy that was under way then, say), what it has more there
    than the path of that beginning had, this had less: that is counted as nothing.

    Args:
        drive: it had one below host memory.
    """
    of = {share: resource for share, (resource, _) in CHARGED.items()}
    told = {share for share in ("back", "peer") if any(one.path_s[of[share]] for one in phases.values())}
    told |= {*ALWAYS, *(("drive",) if drive else ())}
    parts = {}
    for phase in (PREFILL, DECODE, MIXED):
        spent_s = {share: max(0.0, phases[phase].path_s[resource]) for share, resource in of.items()}
        total = math.fsum(spent_s.values())
        parts[phase] = Composition(**{key: s / total if total else None for key, s in spent_s.items() if key in told})
    both = parts[MIXED] if phases[MIXED].n_iterations else None
    main = parts[DECODE] if phases[DECODE].n_iterations else both or parts[PREFILL]
    return Bottleneck(main.largest(), parts[PREFILL], parts[DECODE], both)


def contention(report: Report, hw: Hardware) -> Contention | None:
    """What shared memory added to the time of a run's lanes; None where nothing was slowed. By what: the law, or where
    a term's figure is from; a term of 0 slows nothing."""
    figures, busy_s = report.lanes.figures, report.lanes.busy_s
    if figures is None or not figures.cost.sharing.on:
        return None
    added_s = {
        "cpu": figures.cpu_s[figures.cost.sharing.q_cpu],
        "h2d": figures.copies_slowed_s,
        "d2h": figures.write_backs_slowed_s,
        "gpu": figures.gpu_s[figures.cost.sharing.q_gpu],
        "nvme": figures.reads_slowed_s,
    }
    slowed: dict[str, Slowed | None] = dict.fromkeys(("cpu", "h2d", "d2h", "gpu"))
    for activity, seconds in added_s.items():
        lanes = [spent_s for lane, spent_s in busy_s.items() if lane.rstrip("0123456789") == activity]
        whole_s = report.n_machines * math.fsum(lanes)
        if seconds <= LEAST_FRAC * whole_s:
            continue
        by: dict[str, None] = {}
        for term in SLOWS[activity]:
            figure = hw.contention.stated.get(term)
            if figure is None and term in BY_LAW:
                by[LAW] = None
            elif figure is not None and figure.value > 0.0:
                by[SET if figure.ref == USER_REF else figure.source] = None
        # What is copied back, or read, shares host memory by law.
        slowed[activity] = Slowed(seconds, seconds / whole_s, ", ".join(by or [LAW]))
    return Contention(**slowed) if any(slowed.values()) else None
