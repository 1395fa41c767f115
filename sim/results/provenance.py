"""Which figures of hardware and stack simulated time rests on, how good these are, and how far the mean times of a run
may be off: by these figures, and by the choice of requests."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from sim.base.lanes import BACK, CPU, GPU, H2D, HOST, NVME, PEER, SIDE
from sim.figures import Ends, Errors, Input, Provenance, Sampling, Uncertainty
from sim.results.sampling import samples, times_of
from sim.workload.iterations import DECODE, MIXED, PHASES, PREFILL

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sim.base.quantities import Quantity
    from sim.engine.report import Report
    from sim.engine.run_loop import RequestTimes
    from sim.results.metrics import Times

# How far a figure may be off when its file gives no range of its own (assumed; see docs/provenance.md).
SPREAD = {"measured": 0.05, "datasheet": 0.15, "assumed": 0.30}


class Attribution(NamedTuple):
    """Part of the time that rests on one figure, and by which factors it changes over that figure's range."""

    figure: str
    source: str
    spent_s: float
    low_factor: float
    high_factor: float
    value: float | None
    ref: str
    noise_frac: float | None  # interquartile range of its samples over its value


def attributions(report: Report, phases: Iterable[str] = PHASES) -> list[Attribution]:
    """Which figure each part of these phases' time rests on; nothing where it was measured.

    What the critical path spends on a lane is split by what that lane spent its time on in the whole run.
    """
    lanes, spent = report.lanes, report.lanes.figures
    if spent is None:
        return []
    cost = spent.cost
    chosen = (report.phases[phase].path_s for phase in phases)
    parts_s = [max(0.0, math.fsum(column)) for column in zip(*chosen, strict=True)]
    seconds = [0.0] * len(cost.figures.entries)

    def spread(part: int, shares: Iterable[tuple[int, float]]) -> None:
        shares = list(shares)
        whole = math.fsum(share for _, share in shares)
        if whole > 0:
            for index, share in shares:
                seconds[index] += parts_s[part] * share / whole

    on_gpus = list(enumerate(spent.gpu_s))
    if cost.several.gathers:  # by ports of their own
        peers = (cost.copies.q_p2p_latency, cost.copies.q_p2p_bandwidth)
        spread(PEER, [one for one in on_gpus if one[0] in peers])
        on_gpus = [one for one in on_gpus if one[0] not in peers]
    spread(GPU, on_gpus)
    copies, n_copies = cost.copies, sum(n for n, _ in spent.links)
    busy_s, latency_s = math.fsum(link_s for _, link_s in spent.links), n_copies * copies.call_latency_s
    by_law = cost.sharing.on and "h2d_slowdown_by_cpu" not in cost.sharing.stated
    slowed_s = spent.copies_slowed_s if by_law else 0.0
    on_links = [(copies.q_h2d_latency, latency_s), (copies.q_h2d_bandwidth, busy_s - slowed_s - latency_s)]
    spread(H2D, [*on_links, (cost.sharing.q_host, slowed_s)])
    n_machines = report.n_machines  # of replicas a lane's time is a mean
    down_s, down_bytes_s = lanes.busy_s["d2h"], lanes.d2h_bytes / copies.d2h_bytes_per_s / n_machines
    spread(BACK, [(copies.q_d2h_latency, max(0.0, down_s - down_bytes_s)), (copies.q_d2h_bandwidth, down_bytes_s)])
    spread(CPU, enumerate(spent.cpu_s))
    spread(HOST, spent.host_s)
    waited = [one for one in spent.host_s if one[0] in cost.q_predictor.values()]  # of the side lane, too
    spread(SIDE, [*enumerate(spent.side_s), *waited])
    if (drive := cost.drive) is not None:
        lag_s, slowed_s = spent.n_reads * drive.lag_s / n_machines, spent.reads_slowed_s / n_machines
        in_a_row_s = lanes.busy_s["nvme"] - slowed_s
        spread(NVME, [(drive.q_latency, lag_s), (drive.q_bandwidth, in_a_row_s), (cost.sharing.q_host, slowed_s)])
    rows: list[Attribution] = []
    for (name, quantity), spent_s in zip(cost.figures.entries, seconds, strict=True):
        if spent_s > 0:
            low, high = factors(name, quantity)
            noise = None if quantity.iqr is None or not quantity.value else quantity.iqr / quantity.value
            rows.append(Attribution(name, quantity.source, spent_s, low, high, quantity.value, quantity.ref, noise))
    return rows


def span(quantity: Quantity) -> tuple[float, float]:
    """Smallest and largest value of a figure: its own range, or what its source has for one."""
    value, spread = quantity.value, SPREAD[quantity.source]
    low = quantity.low if quantity.low is not None else value * (1 - spread)
    high = quantity.high if quantity.high is not None else value * (1 + spread)
    return low, high


def factors(name: str, quantity: Quantity) -> tuple[float, float]:
    """Smallest and largest factor by which time may change when the figure is off by its own range or the default."""
    value, (low, high) = quantity.value, span(quantity)
    if value <= 0:
        return 1.0, 1.0
    if name.endswith("_per_s") or ".flops_per_s" in name or name.startswith("engine.quantised."):
        return min(1.0, value / high), max(1.0, value / low)
    return min(1.0, low / value), max(1.0, high / value)


def provenance(report: Report) -> Provenance:
    """Share of simulated time resting on measured, datasheet and assumed figures, and on which."""
    if report.lanes.figures is None:
        return Provenance(1.0, 0.0, 0.0, [])
    return rests_on((row.figure, row.spent_s, row.source, row.value, row.ref) for row in attributions(report))


def rests_on(rows: Iterable[tuple[str, float, str, float | None, str]]) -> Provenance:
    """Shares of a whole by the source of the figures behind it, and by each of these, the largest first.

    Args:
        rows: a figure, how much rests on it, its source, value and reference.
    """
    found = sorted((row for row in rows if row[1]), key=lambda row: -row[1])
    total = math.fsum(amount for _, amount, *_ in found)
    shares = {
        name: (math.fsum(amount for _, amount, source, *_ in found if source == name) / total if total else None)
        for name in SPREAD
    }
    figures = [Input(name, amount / total, source, value, ref) for name, amount, source, value, ref in found]
    return Provenance(**shares, figures=figures)


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
    if waits is None:
        drawn = samples(times_of(report), batch)
        tpot_s, ttft_s = (drawn[name].interval() for name in ("tpot_s", "ttft_s"))
        n = drawn["tpot_s"].n, drawn["ttft_s"].n
    else:  # of requests whose neighbours wait alike: the intervals of their blocks
        found = [one if isinstance(one, Errors) else None for one in (timed.tpot_s.sampling, timed.ttft_s.sampling)]
        tpot_s, ttft_s = (None if one is None else one.mean for one in found)
        n = found[0].blocks if found[0] else 0, found[1].blocks if found[1] else 0
    # An interval of a mean time, which cannot be negative: few requests that differ much would have it so.
    of_tpot, of_ttft = (None if one is None else (max(0.0, one[0]), max(0.0, one[1])) for one in (tpot_s, ttft_s))
    sampling = Sampling(of_tpot, of_ttft, *n)
    if not total:
        return Uncertainty(None, None, None, sampling, None, None)
    whole = _ends(rows)
    prefill = decode = whole
    if not report.phases[MIXED].n_iterations:
        prefill = _ends(attributions(report, (PREFILL,)) or rows)
    if batch == 1:
        decode = _ends(attributions(report, (DECODE,)) or rows)
    ttft: tuple[float, float] | None = prefill
    if waits is not None and waits.closed:
        ttft = whole
    elif waits is not None:
        ttft = _of_waits(waits, prefill, decode) if batch == 1 else None
    bands: list[Ends] = [None, None]
    for at, (mean, over, factors) in enumerate(
        ((timed.ttft_s.mean, of_ttft, ttft), (timed.tpot_s.mean, of_tpot, decode))
    ):
        if mean is not None and factors is not None:
            least, most = over or (mean, mean)
            bands[at] = least * factors[0], most * factors[1]
    return Uncertainty(*whole, plus_minus(rows, total), sampling, *bands)


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
