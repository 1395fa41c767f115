"""The highest rate of requests that a policy serves: without end, and with so many of them kept to their SLO.

What it can serve at all is measured where somebody always waits: in a closed loop of twice as many clients as run
together. The queue of any lower rate is stable. Up to which rate enough requests keep to their SLO is found by
bisection below that, with the same requests in the same rhythm at every rate, so that one only comes closer together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import ClassVar, NamedTuple, Self

import msgspec
from msgspec.structs import replace

from sim.base.errors import BadInput
from sim.base.units import show_frac, show_number
from sim.figures import numbers
from sim.options import RunSpec
from sim.results.figure import label_of, plot_unit
from sim.results.record import Result
from sim.results.routing_words import of_results
from sim.studies.answer import Answer, Column, Shown
from sim.studies.runner.runner import Runner
from sim.studies.runner.searches import Replays, Search, narrowed
from sim.workload.slo import slo_text

STEPS = 7
"""Of the bisection: to 1/128 of what can be served."""
CURVE = (0.2, 0.4, 0.6, 0.8, 0.9)
"""Shares of what can be served at which the curve is drawn."""
LEAST: float = 1 / 2**STEPS


RATE, KEPT = "arrivals_per_s", "slo.attained_frac"
FIGURES = (
    *("ttft_s.mean", "ttft_s.p95", "queue_s.mean", "tpot_s.mean"),
    *(KEPT, "slo.goodput_tokens_per_s"),
)
AtRate = dict[str, float | None]
"""How requests fare at one `RATE`: figures of a result, their means over all draws."""


class Range(msgspec.Struct, frozen=True):
    """A rate: mean, least and most over the draws."""

    mean: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        return cls(math.fsum(values) / len(values), min(values), max(values))

    @property
    def said(self) -> str:
        """`0.013 (0.012 to 0.014)`."""
        spread = "" if self.least == self.most else f" ({show_number(self.least)} to {show_number(self.most)})"
        return f"{show_number(self.mean)}{spread}"


class Saturation(msgspec.Struct, frozen=True):
    """Of one policy. `kept_per_s` is None without an SLO, 0 where even the lowest rate tried breaks it for too many;
    `lowest` is what became of them there, over draws of which that is true."""

    name: str
    capacity_per_s: Range
    capacity_tokens_per_s: Range
    kept_per_s: Range | None
    curve: list[AtRate]
    caveats: list[str]
    lowest: AtRate | None

    @property
    def most_per_s(self) -> float:
        """By which policies are ordered."""
        return (self.kept_per_s or self.capacity_per_s).mean


class Rates(Answer, kw_only=True, eq=False):
    """Every policy's rates, the one that serves most first. requests: of a replay; draws: of requests and gaps."""

    ROWS: ClassVar = "policies"
    hw: str = ""
    slo: dict[str, dict[str, float]] = {}  # noqa: RUF012 - msgspec copies it
    attain_frac: float
    draws: int
    requests: int
    policies: list[Saturation]

    def tables(self) -> list[Shown]:
        """A row per policy, and how requests fare at lower rates."""
        rates = [("requests/s", "capacity_per_s"), ("output tokens/s", "capacity_tokens_per_s")]
        if self.slo:
            rates.append((f"{show_frac(self.attain_frac)} keep their SLO", "kept_per_s"))
        columns = [Column("policy", lambda one: one.name)]
        for title, rate in rates:
            ends = {title: "mean", "least": "least", "most": "most"} if self.draws > 1 else {title: "mean"}
            columns += [Column(said, partial(_rate, rate, end), "x") for said, end in ends.items()]
        most = Shown("most", "How much is served", "Mean, least and most over the draws.", columns, self.policies)
        sentence = "How requests fare at each rate, mean over the draws."
        rows = [(one, at) for one in self.policies for at in one.curve]
        curve = [
            Column("policy", lambda row: row[0].name),
            Column("requests/s", lambda row: row[1][RATE], "x"),
            Column("of most", lambda row: row[1][RATE] / row[0].capacity_per_s.mean, "frac"),
        ]
        curve += [
            Column(label_of(key), partial(_at_rate, key), plot_unit(key))
            for key in FIGURES
            if self.slo or not key.startswith("slo.")
        ]
        return [most, Shown("rates", "Rate by rate", sentence, curve, rows)]


def _rate(rate: str, end: str, one: Saturation) -> float | None:
    return getattr(getattr(one, rate), end, None)


def _at_rate(key: str, row: tuple[Saturation, AtRate]) -> float | None:
    return row[1].get(key)


class Drawn(NamedTuple):
    """What one draw of requests and gaps gave; `full`: the run in which somebody always waits."""

    full: Result
    capacity_per_s: float
    kept_per_s: float | None
    lowest: AtRate | None
    curve: list[AtRate]


def saturate(specs: Sequence[tuple[str, RunSpec]], n_draws: int, kept_frac: float, runner: Runner) -> Rates:
    """Find them.

    Args:
        specs: (name, run) with as many requests as one replay has; their arrivals are what is looked for. n_draws: of
            requests and gaps, by seeds that count up from the run's. kept_frac: share that has to keep to its SLO.

    Raises:
        BadInput: arrivals given, or a run that cannot be.
    """
    first = specs[0][1]
    for _, spec in specs:
        if spec.arrivals is not None or spec.arrivals_scale != 1.0:
            raise BadInput("--arrivals, got it here: the rate is what is looked for; leave it out")
        if spec.sim_energy is not None:
            raise BadInput(
                f"--set sim.energy, got {spec.sim_energy!r}: rates are looked for, no joules; take simulate --arrivals"
            )
    replays = Replays(runner, first.requests or 1, strict=True)
    draws = [replace(spec, seed=spec.seed + draw) for _, spec in specs for draw in range(n_draws)]
    every = iter(replays.together([one_draw(spec, kept_frac) for spec in draws], "rates"))
    found = [(name, [next(every) for _ in range(n_draws)]) for name, _ in specs]
    ranked = sorted(((over(name, drawn), drawn[0].full) for name, drawn in found), key=lambda one: -one[0].most_per_s)
    rows = [row for row, _ in ranked]
    return Rates(
        first_line=said(rows[0], slo_text(first.slo), kept_frac) + of_results([ranked[0][1]]),
        trace=first.trace,
        hw=first.hw,
        slo=first.slo,
        attain_frac=kept_frac,
        draws=n_draws,
        requests=replays.n_requests,
        policies=rows,
        _lines=[f"caveats: {'; '.join(rows[0].caveats)}"] if rows[0].caveats else [],
    )


def said(best: Saturation, promised: str, kept_frac: float) -> str:
    """Who serves most, and how much that is."""
    tokens = show_number(best.capacity_tokens_per_s.mean)
    serves = f"{best.name} serves up to {best.capacity_per_s.said} requests/s ({tokens} output tokens/s)"
    if best.kept_per_s is None:
        return serves
    keep = f"{show_frac(kept_frac)} keep to {promised}"
    if best.kept_per_s.most:
        return f"{best.name}: {keep} up to {best.kept_per_s.said} requests/s; {serves}"
    at, least = best.lowest, ""
    if at is not None:
        least = f" (at {show_number(at[RATE] or 0.0)} requests/s {show_frac(at[KEPT])} do)"
    return f"no rate at which {keep}{least}; {serves}"


def n_clients(spec: RunSpec) -> int:
    """Of a closed loop in which somebody always waits: twice as many as run together."""
    return 2 * spec.batch * spec.replicas


def closed(spec: RunSpec) -> RunSpec:
    """The run in which somebody always waits."""
    return replace(spec, arrivals=f"closed:{n_clients(spec)}", arrivals_scale=1.0)


def one_draw(spec: RunSpec, kept_frac: float) -> Search[Drawn]:
    """Capacity, kept rate and curve with the requests and gaps of one seed. Raises BadInput for too few requests."""
    (full,) = yield [closed(spec)]
    per_s = full.load.capacity_per_s
    if per_s is None:
        n = n_clients(spec) + 1
        raise BadInput(f"--requests, got {full.n_requests}: too few for most of them to wait; give {n} or more")
    curve = yield from _at(spec, [share * per_s for share in CURVE])
    if not spec.slo:
        return Drawn(full, per_s, None, None, curve)
    tried: dict[float, AtRate] = {}

    def holds(step: float) -> Search[bool]:
        rate = per_s * step * LEAST
        (tried[rate],) = yield from _at(spec, [rate])
        return (tried[rate][KEPT] or 0.0) >= kept_frac

    _, step = yield from narrowed(holds, 2**STEPS, 0, whole=True)
    return Drawn(full, per_s, per_s * step * LEAST, None if step else tried[min(tried)], curve)


def _at(spec: RunSpec, rates_per_s: Sequence[float]) -> Search[list[AtRate]]:
    results = yield [replace(spec, arrivals=f"poisson:{rate!r}") for rate in rates_per_s]
    known = zip(rates_per_s, (dict(numbers(result.to_dict())) for result in results), strict=True)
    return [{RATE: rate, **{key: one.get(key) for key in FIGURES}} for rate, one in known]


def _mean(points: Sequence[AtRate]) -> AtRate:
    """Over draws."""
    every = {key: [point[key] for point in points] for key in points[0]}
    return {key: None if None in some else math.fsum(some) / len(some) for key, some in every.items()}  # type: ignore[arg-type]


def over(name: str, draws: Sequence[Drawn]) -> Saturation:
    """One policy's, over its draws."""
    kept = [draw.kept_per_s for draw in draws if draw.kept_per_s is not None]
    lowest = [draw.lowest for draw in draws if draw.lowest is not None]
    return Saturation(
        name,
        Range.of([draw.capacity_per_s for draw in draws]),
        Range.of([draw.capacity_per_s * (draw.full.n_outputs / draw.full.n_requests) for draw in draws]),
        Range.of(kept) if kept else None,
        [_mean(points) for points in zip(*(draw.curve for draw in draws), strict=True)],
        draws[0].full.caveats,
        _mean(lowest) if lowest else None,
    )
