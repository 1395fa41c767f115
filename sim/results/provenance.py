"""Which figures of hardware and stack simulated time rests on, and how good these are."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from sim.base.lanes import BACK, CPU, GPU, H2D, HOST, NVME, PEER, SIDE
from sim.figures import Input, Provenance
from sim.workload.iterations import PHASES

if TYPE_CHECKING:
    from sim.base.quantities import Quantity
    from sim.engine.report import Report

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
    on_gpus = list(enumerate(spent.gpu_s))
    if cost.several.gathers:  # by ports of their own
        peers = (cost.copies.q_p2p_latency, cost.copies.q_p2p_bandwidth)
        _spread(seconds, parts_s[PEER], [one for one in on_gpus if one[0] in peers])
        on_gpus = [one for one in on_gpus if one[0] not in peers]
    _spread(seconds, parts_s[GPU], on_gpus)
    copies, n_copies = cost.copies, sum(n for n, _ in spent.links)
    busy_s, latency_s = math.fsum(link_s for _, link_s in spent.links), n_copies * copies.call_latency_s
    by_law = cost.sharing.on and "h2d_slowdown_by_cpu" not in cost.sharing.stated
    slowed_s = spent.copies_slowed_s if by_law else 0.0
    on_links = [(copies.q_h2d_latency, latency_s), (copies.q_h2d_bandwidth, busy_s - slowed_s - latency_s)]
    on_links += [(cost.sharing.q_host, slowed_s)]
    _spread(seconds, parts_s[H2D], on_links)
    n_machines = report.n_machines  # of replicas a lane's time is a mean
    down_s, down_bytes_s = lanes.busy_s["d2h"], lanes.d2h_bytes / copies.d2h_bytes_per_s / n_machines
    on_way_back = [(copies.q_d2h_latency, max(0.0, down_s - down_bytes_s)), (copies.q_d2h_bandwidth, down_bytes_s)]
    _spread(seconds, parts_s[BACK], on_way_back)
    _spread(seconds, parts_s[CPU], list(enumerate(spent.cpu_s)))
    _spread(seconds, parts_s[HOST], spent.host_s)
    waited = [one for one in spent.host_s if one[0] in cost.q_predictor.values()]  # of the side lane, too
    _spread(seconds, parts_s[SIDE], [*enumerate(spent.side_s), *waited])
    if cost.drive is not None:
        drive, busy_s = cost.drive, lanes.busy_s["nvme"]
        lag_s = spent.n_reads * drive.lag_s
        lag_s, slowed_s = lag_s / n_machines, spent.reads_slowed_s / n_machines
        rests_on = [(drive.q_latency, lag_s), (drive.q_bandwidth, busy_s - slowed_s), (cost.sharing.q_host, slowed_s)]
        _spread(seconds, parts_s[NVME], rests_on)
    rows: list[Attribution] = []
    for (name, quantity), spent_s in zip(cost.figures.entries, seconds, strict=True):
        if spent_s > 0:
            low, high = factors(name, quantity)
            noise = None if quantity.iqr is None or not quantity.value else quantity.iqr / quantity.value
            rows.append(Attribution(name, quantity.source, spent_s, low, high, quantity.value, quantity.ref, noise))
    return rows


def _spread(seconds: list[float], total_s: float, shares: list[tuple[int, float]]) -> None:
    whole = math.fsum(share for _, share in shares)
    if whole > 0:
        for index, share in shares:
            seconds[index] += total_s * share / whole


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
    rows = sorted(attributions(report), key=lambda row: -row.spent_s)
    total = math.fsum(row.spent_s for row in rows)
    shares = {
        source: (math.fsum(row.spent_s for row in rows if row.source == source) / total if total else None)
        for source in ("measured", "datasheet", "assumed")
    }
    figures = [Input(row.figure, row.spent_s / total, row.source, row.value, row.ref) for row in rows]
    return Provenance(**shares, figures=figures)
