"""From counts and times to the stable keys of `--json`. Every number here is a fold over what the engine counted."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from oracle.counts import CLASSES, HIT, LATE, MISS, PARTIAL
from oracle.iterations import DECODE, PREFILL
from oracle.lanes import CPU, GPU, H2D, HOST, SIDE
from sim.results.sampling import Interval, samples

if TYPE_CHECKING:
    from oracle.counts import Tally
    from oracle.drive import Clockwork
    from oracle.simulated import SimMachine

# A percentile is given only when at least one observation is expected beyond it.
_PERCENTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}

# How far a figure may be off when its file gives no range of its own (assumed; see docs/provenance.md).
SPREAD = {"measured": 0.05, "datasheet": 0.15, "assumed": 0.30}


def statistic(values: Iterable[float]) -> dict[str, float | int | None]:
    """{mean, p50, p95, p99, n}; a percentile without 1 / (1 - p) observations behind it is null."""
    ordered = sorted(values)
    n = len(ordered)
    result: dict[str, float | int | None] = {"mean": math.fsum(ordered) / n if n else None}
    for name, p in _PERCENTILES.items():
        result[name] = quantile(ordered, p) if n >= round(1 / (1 - p)) else None
    result["n"] = n
    return result


def quantile(ordered: list[float], p: float) -> float:
    """Linear interpolation between order statistics (numpy's default)."""
    at = p * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def times(clockwork: Clockwork) -> dict[str, Any]:
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
    return {
        "requests": len(done),
        "decode_tokens": clockwork.phases[DECODE].n_tokens,
        "ttft_s": statistic(ttft),
        "tpot_s": statistic(tpot),
        "e2e_s": statistic(t.last_token_s - t.start_s for t in done),
        "throughput_tokens_per_s": outputs / span_s if span_s > 0 else None,
    }


def lengths(clockwork: Clockwork) -> dict[str, Any]:
    """Prompt and output tokens of the requests that were served, and the longest context among them."""
    done = [t.request for t in clockwork.requests]
    columns = {"prompt_tokens": [r.prompt_len for r in done], "output_tokens": [r.outputs for r in done]}
    result: dict[str, Any] = {
        name: {"mean": sum(ns) / len(ns) if ns else None, "min": min(ns, default=None), "max": max(ns, default=None)}
        for name, ns in columns.items()
    }
    result["longest_context_tokens"] = max((r.prompt_len + r.outputs for r in done), default=None)
    return result


def phases(clockwork: Clockwork) -> dict[str, dict[str, Any]]:
    """Iterations, tokens and time of prefill and decode."""
    return {
        name: {"iterations": times_.n_iterations, "tokens": times_.n_tokens, "time_s": times_.time_s}
        for name, times_ in clockwork.phases.items()
    }


def hit_rates(tally: Tally, definition: str) -> dict[str, Any]:
    """Decode rates by class under a definition; prefill and token-weighted rates beside them."""
    decode, prefill = tally.hits[DECODE], tally.hits[PREFILL]
    counts = list(decode.tokens if definition == "token" else decode.experts)
    total = sum(counts)
    if definition == "slot":
        counts[0], counts[2] = counts[0] + counts[2], 0
    elif definition == "cached":
        counts[0], counts[3] = counts[0] - decode.prefetched, counts[3] + decode.prefetched
    shares = ((name, n / total if total else None) for name, n in zip(CLASSES, counts, strict=True))
    rates: dict[str, Any] = {f"{name}_rate": share for name, share in shares}
    rates["prefill_hit_rates"] = prefill.rates()
    rates["token_hit_rates"] = decode.rates(tokens=True)
    served = rates["served_hit_rates"] = decode.served()
    rates["cache_ratio"] = None if served["hit"] is None else served["hit"] + (served["late_hit"] or 0.0)
    rates["gate_mass_kept"] = tally.loss.gate_mass_kept()
    loss = tally.loss
    rates["activations_changed_frac"] = (loss.changed + loss.dropped) / loss.activations if loss.activations else 0.0
    rates["activations_lowered_frac"] = loss.lowered / tally.n_executed if tally.n_executed else 0.0
    return rates


def distinct(tally: Tally, n_layers: int, slots: float) -> dict[str, float | None]:
    """Different experts that one layer of a decode iteration executes, a layer's share of all room, and their ratio.

    A batch's hit rates say little without them: where the union comes near the slots, every policy keeps the same.
    """
    n_steps = tally.n_iterations[DECODE] * n_layers
    counts = tally.hits[DECODE]  # corrected since 0.1: what is executed, after rerouting
    n_served = sum(counts.experts[kind] + counts.aside[kind] for kind in (HIT, PARTIAL, LATE, MISS))
    experts = n_served / n_steps if n_steps else None
    over = None if experts is None or not slots else experts / slots
    return {"per_layer": experts, "slots": slots, "per_slot": over}


def prefetching(tally: Tally) -> dict[str, dict[str, int]]:
    """Useful, late, wasted, harmful, with counts and bytes; and what was issued, cancelled, dropped."""
    p = tally.prefetch
    result = {kind: {"n": p.n[kind], "bytes": p.n_bytes[kind]} for kind in p.n}
    result["issued"] = {"n": p.n_issued, "bytes": p.issued_bytes}
    result["cancelled"] = {"n": p.n_cancelled, "bytes": p.cancelled_bytes}
    result["refused"] = {"n": p.n_dropped, "bytes": 0}
    return result


def composition(clockwork: Clockwork, phase: str) -> dict[str, float | None]:
    """Share of the phase's time GPU 0 was busy, or waiting for copies, host, CPU, predictor; sums to 1."""
    times_ = clockwork.phases[phase]
    total = math.fsum(times_.parts_s)
    named = {"gpu": GPU, "copy": H2D, "host": HOST, "cpu": CPU, "predictor": SIDE}
    return {name: (times_.parts_s[index] / total if total else None) for name, index in named.items()}


_BOUND = {"gpu": "gpu", "copy": "copy link", "host": "host", "cpu": "cpu", "predictor": "predictor"}


def bottleneck(clockwork: Clockwork) -> dict[str, Any]:
    """What bounds decode (prefill when nothing decodes), and how each phase's time is composed."""
    shares = {phase: composition(clockwork, phase) for phase in (PREFILL, DECODE)}
    main = shares[DECODE] if clockwork.phases[DECODE].n_iterations else shares[PREFILL]
    known = {name: share for name, share in main.items() if share is not None}
    return {"resource": _BOUND[max(known, key=lambda k: known[k])] if known else None, **shares}


class Resting(NamedTuple):
    """Part of GPU 0's time that rests on one figure, and by which factors it changes over that figure's range."""

    figure: str
    source: str
    spent_s: float
    low_factor: float
    high_factor: float
    value: float | None
    ref: str
    noise_frac: float | None  # interquartile range of its samples over its value


def resting_s(machine: SimMachine, clockwork: Clockwork, phases: Iterable[str] = (PREFILL, DECODE)) -> list[Resting]:
    """Which figure each part of GPU 0's time in these phases rests on.

    Busy and waiting parts are split by the quantities their lane spent its time on, over the whole run.
    """
    cost = machine.cost
    chosen = (clockwork.phases[phase].parts_s for phase in phases)
    parts_s = [math.fsum(column) for column in zip(*chosen, strict=True)]
    seconds = [0.0] * len(cost.rests_on)
    _spread(seconds, parts_s[GPU], list(enumerate(machine.gpu_s)))
    n_copies, busy_s = sum(up.n_copies for up in machine.up), math.fsum(up.busy_s for up in machine.up)
    latency_s = n_copies * cost.h2d_latency_s
    _spread(seconds, parts_s[H2D], [(cost.q_h2d_latency, latency_s), (cost.q_h2d_bandwidth, busy_s - latency_s)])
    _spread(seconds, parts_s[CPU], list(enumerate(machine.cpu_s)))
    _spread(seconds, parts_s[HOST], machine.host_shares())
    _spread(seconds, parts_s[SIDE], list(enumerate(machine.side_s)))
    rows: list[Resting] = []
    for (name, quantity), spent_s in zip(cost.rests_on, seconds, strict=True):
        if spent_s > 0:
            low, high = factors(name, quantity)
            noise = None if quantity.iqr is None or not quantity.value else quantity.iqr / quantity.value
            rows.append(Resting(name, quantity.source, spent_s, low, high, quantity.value, quantity.ref, noise))
    return rows


def plus_minus(rows: list[Resting], total_s: float) -> float | None:
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


def provenance(machine: SimMachine, clockwork: Clockwork) -> dict[str, Any]:
    """Share of simulated time resting on measured, datasheet and assumed figures, and on which."""
    rows = sorted(resting_s(machine, clockwork), key=lambda row: -row.spent_s)
    total = math.fsum(row.spent_s for row in rows)
    shares = {
        source: (math.fsum(row.spent_s for row in rows if row.source == source) / total if total else None)
        for source in ("measured", "datasheet", "assumed")
    }
    figures = [
        {"figure": row.figure, "share": row.spent_s / total, "source": row.source, "value": row.value, "ref": row.ref}
        for row in rows
    ]
    return {**shares, "figures": figures}


def uncertainty(
    machine: SimMachine, clockwork: Clockwork, result: dict[str, Any], batch: int, arrivals: bool
) -> dict[str, Any]:
    """Band of the mean times when every figure moves to the end of its range at once (so it is wide), from the ends of
    what other requests of the kind may give (`sim.results.sampling`); with one request, which says nothing of others,
    from it.

    Factors are of the whole run's time. TTFT takes those of prefill, TPOT those of decode: a run that loads its experts
    once rests on the link before the first token and on the GPU ever after. Where a TTFT holds waits (arrivals), or a
    TPOT other requests' prefills (batches), they are of both phases.
    """
    rows = resting_s(machine, clockwork)
    total = math.fsum(row.spent_s for row in rows)
    drawn = samples([_times_of(t) for t in clockwork.requests], batch)
    over = {key: _of_times(drawn[key].interval()) for key in ("tpot_s", "ttft_s")}
    sampling: dict[str, Any] = dict(over)
    sampling |= {"tpot_n": drawn["tpot_s"].n, "ttft_n": drawn["ttft_s"].n}
    if not total:
        return {
            "tpot_s": None,
            "ttft_s": None,
            "low_factor": None,
            "high_factor": None,
            "plus_minus_frac": None,
            "sampling": sampling,
        }
    low, high = _ends(rows)
    band: dict[str, Any] = {"low_factor": low, "high_factor": high}
    band["plus_minus_frac"] = plus_minus(rows, total)
    band["sampling"] = sampling
    for key, phase, alone in (("ttft_s", PREFILL, not arrivals), ("tpot_s", DECODE, batch == 1)):
        mean = result[key]["mean"]
        own = resting_s(machine, clockwork, (phase,)) if alone else []
        low, high = _ends(own or rows)
        if mean is None:
            band[key] = None
        else:
            least, most = over[key] or (mean, mean)
            band[key] = [least * low, most * high]
    return band


def _times_of(t: Any) -> tuple[int, float, float | None]:
    further = t.request.outputs - 1
    tpot_s = (t.last_token_s - t.first_token_s) / further if further else None
    return t.request.index, t.first_token_s - t.start_s, tpot_s


def _of_times(ends: Interval | None) -> list[float] | None:
    """An interval of a mean time, which cannot be negative: few requests that differ much would have it so."""
    return None if ends is None else [max(0.0, end) for end in ends]


def _ends(rows: list[Resting]) -> tuple[float, float]:
    """By which factors time changes when all its figures are at their best at once, and at their worst."""
    total = math.fsum(row.spent_s for row in rows)
    return (
        math.fsum(row.spent_s * row.low_factor for row in rows) / total,
        math.fsum(row.spent_s * row.high_factor for row in rows) / total,
    )


def lane_utilisation(machine: SimMachine, makespan_s: float) -> dict[str, float | None]:
    """Busy share of every lane over the makespan; over the lane's own time where it goes on after the last token."""
    lanes, ends_s = machine.lane_busy_s(), machine.lane_ends_s()
    spans_s = {name: max(makespan_s, ends_s.get(name, 0.0)) for name in lanes}
    return {name: (busy_s / spans_s[name] if spans_s[name] else None) for name, busy_s in sorted(lanes.items())}
