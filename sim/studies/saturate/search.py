"""The highest rate of requests that a policy serves: without end, and with so many of them kept to their SLO.

What it can serve at all is measured where somebody always waits: in a closed loop of twice as many clients as run
together. The queue of any lower rate is stable. Up to which rate enough requests keep to their SLO is found by
bisection below that, with the same requests in the same rhythm at every rate, so that one only comes closer together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from sim.base.errors import BadInput
from sim.options import RunSpec
from sim.results.routing_words import of_results
from sim.studies.runner.pool import in_order, n_cores

STEPS = 7
"""Of the bisection: to 1/128 of what can be served."""
CURVE = (0.2, 0.4, 0.6, 0.8, 0.9)
"""Shares of what can be served at which the curve is drawn."""
LEAST: float = 1 / 2**STEPS


class AtRate(msgspec.Struct, frozen=True):
    """How requests fare at one rate, over all draws; percentiles and means are means over them."""

    arrivals_per_s: float
    ttft_mean_s: float = msgspec.field(name="ttft_s.mean")
    ttft_p95_s: float | None = msgspec.field(name="ttft_s.p95")
    queue_mean_s: float = msgspec.field(name="queue_s.mean")
    tpot_mean_s: float | None = msgspec.field(name="tpot_s.mean")
    attained_frac: float | None = msgspec.field(name="slo.attained_frac")
    goodput_tokens_per_s: float | None = msgspec.field(name="slo.goodput_tokens_per_s")


class Range(msgspec.Struct, frozen=True):
    """A rate: mean, least and most over the draws."""

    mean: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        return cls(math.fsum(values) / len(values), min(values), max(values))


class Saturation(msgspec.Struct, frozen=True):
    """Of one policy. `kept_per_s` is None without an SLO, 0 where even the lowest rate tried breaks it for too many;
    `lowest` is what became of them there, over draws of which that is true. `routing`: what it rests on, where that is
    little."""

    name: str
    capacity_per_s: Range
    capacity_tokens_per_s: Range
    kept_per_s: Range | None
    curve: list[AtRate]
    caveats: list[str]
    lowest: AtRate | None = None
    routing: str = ""


class Drawn(NamedTuple):
    """What one draw of requests and gaps gave."""

    capacity_per_s: float
    capacity_tokens_per_s: float
    kept_per_s: float | None
    lowest: AtRate | None
    curve: list[AtRate]
    caveats: list[str]
    routing: str


def saturate(
    specs: Sequence[tuple[str, RunSpec]],
    n_draws: int,
    kept_frac: float,
    workers: int | None = None,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> list[Saturation]:
    """Every policy's rates, the one that serves most first.

    Args:
        specs: (name, run) with as many requests as one replay has; their arrivals are what is looked for. n_draws: of
            requests and gaps, by seeds that count up from the run's. kept_frac: share that has to keep to its SLO.

    Raises:
        BadInput: arrivals given, or a run that cannot be.
    """
    for _, spec in specs:
        if spec.arrivals is not None or spec.arrivals_scale != 1.0:
            raise BadInput("--arrivals, got it here: the rate is what is looked for; leave it out")
        if spec.sim_energy is not None:
            raise BadInput(
                f"--set sim.energy, got {spec.sim_energy!r}: rates are looked for, no joules; take simulate --arrivals"
            )
    calls = [(one_draw, (_seeded(spec, draw), kept_frac)) for _, spec in specs for draw in range(n_draws)]
    found = in_order(calls, workers or n_cores(), progress)
    rows = [_over(name, found[i * n_draws : (i + 1) * n_draws]) for i, (name, _) in enumerate(specs)]
    return sorted(rows, key=lambda row: -(row.capacity_per_s if row.kept_per_s is None else row.kept_per_s).mean)


def _seeded(spec: RunSpec, draw: int) -> RunSpec:
    return msgspec.structs.replace(spec, seed=spec.seed + draw)


def n_clients(spec: RunSpec) -> int:
    """Of a closed loop in which somebody always waits: twice as many as run together."""
    return 2 * spec.batch * spec.replicas


def one_draw(spec: RunSpec, kept_frac: float) -> Drawn:
    """Capacity, kept rate and curve with the requests and gaps of one seed. Raises BadInput for too few requests."""
    full = _run(spec, f"closed:{n_clients(spec)}")
    assert full.load is not None
    per_s = full.load.capacity_per_s
    if per_s is None:
        n = n_clients(spec) + 1
        raise BadInput(f"--requests, got {full.n_requests}: too few for most of them to wait; give {n} or more")
    outputs = full.n_outputs / full.n_requests
    kept = lowest = None
    if spec.slo:
        tried: dict[float, AtRate] = {}

        def holds(rate: float) -> bool:
            tried[rate] = _at(spec, rate)
            return (tried[rate].attained_frac or 0.0) >= kept_frac

        kept = highest(holds, per_s)
        lowest = None if kept else tried[min(tried)]
    curve = [_at(spec, share * per_s) for share in CURVE]
    return Drawn(per_s, per_s * outputs, kept, lowest, curve, full.caveats, of_results([full]))


def highest(holds: Callable[[float], bool], limit: float) -> float:
    """The highest rate below `limit`, to a `LEAST` of it, at which something holds that holds at all lower ones; 0
    where it does not hold at the lowest that is tried."""
    low, high = 0, 2**STEPS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(limit * middle * LEAST) else (low, middle)
    return limit * low * LEAST


def _run(spec: RunSpec, arrivals: str) -> Any:
    from sim.run import execute, prepare

    setup = prepare(msgspec.structs.replace(spec, arrivals=arrivals))
    try:
        return execute(setup, bounds=False).result
    finally:
        setup.close()


def _at(spec: RunSpec, rate_per_s: float) -> AtRate:
    result = _run(spec, f"poisson:{rate_per_s!r}")
    slo = result.slo
    return AtRate(
        rate_per_s,
        result.ttft_s.mean,
        result.ttft_s.p95,
        result.queue_s.mean,
        result.tpot_s.mean,
        None if slo is None else slo.attained_frac,
        None if slo is None else slo.goodput_tokens_per_s,
    )


def _over(name: str, draws: Sequence[Drawn]) -> Saturation:
    kept = [draw.kept_per_s for draw in draws if draw.kept_per_s is not None]
    lowest = [draw.lowest for draw in draws if draw.lowest is not None]
    return Saturation(
        name,
        Range.of([draw.capacity_per_s for draw in draws]),
        Range.of([draw.capacity_tokens_per_s for draw in draws]),
        Range.of(kept) if kept else None,
        [_mean(points) for points in zip(*(draw.curve for draw in draws), strict=True)],
        draws[0].caveats,
        _mean(lowest) if lowest else None,
        draws[0].routing,
    )


def _mean(points: Sequence[AtRate]) -> AtRate:
    def mean(name: str) -> float | None:
        values = [getattr(point, name) for point in points]
        return None if None in values else math.fsum(values) / len(values)

    return AtRate(**{name: mean(name) for name in AtRate.__struct_fields__})  # type: ignore[arg-type]
