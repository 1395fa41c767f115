"""From raw samples to the figures of a profile: pooled medians by point, fits over them, and contention ratios.

All fits work on logarithms of their parameters, so that none turns negative, and on (measured - model) / measured, so
that a 10 us point counts as much as a 10 ms one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from calibrate.ops import BYTES, ExpertShape
from calibrate.stats import Summary, advice, measured, summarise
from calibrate.store import Record, key_text
from sim.base.extras import need

Array = npt.NDArray[np.float64]
EXPERT_KERNELS = 5  # gate, silu, up, mul, down


@dataclass(frozen=True)
class Fit:
    """Parameters by name, and the relative error of the model at each point, (model - measured) / measured."""

    params: dict[str, float]
    residuals: tuple[float, ...]

    @property
    def worst_frac(self) -> float:
        return max((abs(value) for value in self.residuals), default=0.0)

    @property
    def median_frac(self) -> float:
        return float(np.median(np.abs(self.residuals))) if self.residuals else 0.0

    @property
    def median_off_frac(self) -> float:
        """By which model and measurement differ, in the median over points: the larger over the smaller, less 1. What
        takes five times as long as the model says is 400 % off, where its residual is 80 %."""
        if not self.residuals:
            return 0.0
        ratios = np.maximum(1.0 + np.asarray(self.residuals), 1e-9)
        return float(np.median(np.maximum(ratios, 1.0 / ratios))) - 1.0


def fit_copy(n_bytes: Sequence[int], seconds: Sequence[float]) -> Fit:
    """t = latency + bytes / bandwidth (seconds, bytes, bytes per second); two points at least."""
    sizes, measured = np.asarray(n_bytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    largest = int(np.argmax(sizes))
    bandwidth = sizes[largest] / measured[largest]
    latency_s = max(float(np.min(measured - sizes / bandwidth)), 1e-7, 0.2 * float(np.min(measured)))
    return _fit({"latency_s": latency_s, "bandwidth_bytes_per_s": bandwidth}, measured, lambda p: p[0] + sizes / p[1])


@dataclass(frozen=True)
class TimedWork:
    """One measured operation: what it reads (bytes), what it multiplies (FLOPs) and how long it took (seconds)."""

    n_bytes: float
    flops: float
    seconds: float


def fit_roofline(work: Sequence[TimedWork], floor_s: float, *, overhead: bool) -> Fit:
    """t = max(floor, bytes / bandwidth, flops / rate), plus a constant overhead where asked for (seconds).

    The overhead is told apart from the bandwidth only by operations of different size; with one size (all bytes
    equal) it is left at 0 instead of being fitted to noise.
    """
    n_bytes, flops, measured = (np.array([getattr(w, name) for w in work]) for name in ("n_bytes", "flops", "seconds"))
    start = {"bandwidth_bytes_per_s": float(np.max(n_bytes / measured)), "flops_per_s": float(np.max(flops / measured))}
    if overhead and len({round(float(value)) for value in n_bytes}) > 1:
        start["overhead_s"] = 0.1 * float(np.min(measured))

    def model(p: Array) -> Array:
        parts = np.stack([np.full_like(measured, floor_s), n_bytes / p[0], flops / p[1]])
        return np.asarray(parts.max(axis=0) + (p[2] if len(p) > 2 else 0.0))

    best = _fit(start, measured, model)
    return Fit({"overhead_s": 0.0, **best.params, "floor_s": floor_s}, best.residuals)


def _fit(start: dict[str, float], measured: Array, model: Callable[[Array], Array]) -> Fit:
    need("a fit of samples", "scipy")
    from scipy.optimize import least_squares

    names = list(start)

    def residual(log_params: Array) -> Array:
        return np.asarray((model(np.exp(log_params)) - measured) / measured)

    first = np.log(np.array([max(start[name], 1e-30) for name in names]))
    # soft_l1: one disturbed point must not bend the whole curve. Bounds: what the points do not determine stays near
    # its first guess instead of running to infinity.
    solution = least_squares(
        residual,
        first,
        loss="soft_l1",
        f_scale=0.1,
        x_scale=1.0,
        max_nfev=2000,
        bounds=(first - np.log(1e4), first + np.log(30.0)),
    )
    found = np.exp(solution.x)
    return Fit(dict(zip(names, map(float, found), strict=True)), tuple(float(v) for v in residual(solution.x)))


@dataclass
class MeasuredPoint:
    """All rounds of one point pooled: its key, its samples' summary, and host seconds to enqueue it where known."""

    key: Mapping[str, str | int]
    samples_s: list[float] = field(default_factory=list)
    enqueue_s: list[float] = field(default_factory=list)
    covered: list[float] = field(default_factory=list)

    @property
    def summary(self) -> Summary:
        return summarise(self.samples_s)

    @property
    def lasted(self) -> bool:
        """Whether what ran beside it lasted as long."""
        return not self.covered or summarise(self.covered).median >= 0.9


class Table:
    """Measured points by probe; look up by any subset of their key."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._points: dict[tuple[str, str], MeasuredPoint] = {}
        self.failed: list[Record] = []
        self.skipped: list[Record] = []
        rest: list[Record] = []
        for record in records:
            if record.status != "ok":
                rest.append(record)
                continue
            point = self._points.setdefault((record.probe, key_text(record.key)), MeasuredPoint(record.key))
            point.samples_s += record.samples_s
            point.enqueue_s += record.extra.get("enqueue_s", [])
            point.covered += record.extra.get("covered", [])
        for record in rest:
            # Skipped in one round but measured in another is measured.
            if (record.probe, key_text(record.key)) not in self._points:
                (self.failed if record.status == "failed" else self.skipped).append(record)

    def find(self, probe: str, **wanted: str | int) -> list[MeasuredPoint]:
        """Points of a probe whose key has all the given values."""
        return [
            point
            for (name, _), point in self._points.items()
            if name == probe and all(point.key.get(k) == v for k, v in wanted.items())
        ]

    def one(self, probe: str, **wanted: str | int) -> MeasuredPoint | None:
        found = self.find(probe, **wanted)
        return found[0] if found else None

    def __iter__(self) -> Any:
        return iter((probe, point) for (probe, _), point in self._points.items())

    def noise(self) -> list[str]:
        """Advice for every point that scatters by more than a tenth of its median."""
        lines = [advice(f"{probe} {key_text(point.key)}", point.summary) for probe, point in self]
        return [line for line in lines if line]


@dataclass(frozen=True)
class Fitted:
    """A fit and the points under it."""

    fit: Fit
    points: list[MeasuredPoint]

    @property
    def n(self) -> int:
        """Samples behind it."""
        return sum(point.summary.n for point in self.points)


def link(table: Table, direction: str, memory: str) -> Fitted | None:
    """Queued copies from page-locked memory, waited-for copies from pageable memory; None below three sizes."""
    pattern = "queued" if memory == "pinned" else "wall"
    points = table.find("copy", direction=direction, memory=memory, pattern=pattern)
    points.sort(key=lambda p: int(p.key["n_bytes"]))
    if len(points) < 3:
        return None
    fit = fit_copy([int(p.key["n_bytes"]) for p in points], [p.summary.median for p in points])
    return Fitted(fit, points)


def gpu_experts(table: Table, dtype: str, floor_s: float) -> Fitted | None:
    """Plain experts of every shape and token count; None where fewer than four points were measured."""
    return _roofline(table.find("expert", variant="plain"), dtype, EXPERT_KERNELS * floor_s, overhead=False)


def cpu_experts(table: Table, dtype: str, threads: int) -> Fitted | None:
    """Experts on `threads` cores in one number format."""
    return _roofline(table.find("cpu_expert", dtype=dtype, threads=threads), dtype, 0.0, overhead=True)


def _roofline(points: list[MeasuredPoint], dtype: str, floor_s: float, *, overhead: bool) -> Fitted | None:
    if len(points) < 4:
        return None
    work = []
    for point in points:
        shape = ExpertShape(int(point.key["hidden"]), int(point.key["intermediate"]))
        n_tokens = int(point.key["n_tokens"])
        # Tokens in and out count too: at thousands of tokens they rival a small expert's weights.
        moved = shape.weight_bytes(BYTES[dtype]) + 2 * n_tokens * shape.hidden * BYTES[dtype]
        work.append(TimedWork(moved, shape.flops(n_tokens), point.summary.median))
    return Fitted(fit_roofline(work, floor_s, overhead=overhead), points)


@dataclass(frozen=True)
class Together:
    """Bytes per second of experts on the CPU and of experts gathered for the device, each alone and both at once."""

    cpu_alone: float
    copies_alone: float
    cpu: float
    copies: float
    noise_frac: float
    n: int

    @property
    def rates(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """(CPU, copies) alone, then together."""
        return (self.cpu_alone, self.copies_alone), (self.cpu, self.copies)

    @property
    def most(self) -> float:
        """What host memory was seen to give at once: no more than it can."""
        return max(self.cpu + self.copies, self.cpu_alone, self.copies_alone)


def together(table: Table, threads: int) -> Together | None:
    """The pair on all cores with one token; None where one of the four was not measured or the copies did not last."""
    found = []
    for what, moved in (("cpu_by_gather", "cpu_bytes"), ("gather_by_cpu", "copy_bytes")):
        for state in ("alone", "both"):
            wanted: dict[str, str | int] = {"what": what, "state": state}
            if what == "cpu_by_gather" or state == "both":
                wanted["threads"] = threads
            point = table.one("contention", **wanted)
            if point is None or not point.lasted:
                return None
            found.append((int(point.key[moved]) / point.summary.median, point.summary))
    (cpu_alone, a), (cpu, b), (copies_alone, c), (copies, d) = found
    every = (a, b, c, d)
    noise_frac, n = max(s.noise_frac for s in every), min(s.n for s in every)
    return Together(cpu_alone, copies_alone, cpu, copies, noise_frac, n)


def slowdown(table: Table, what: str, note: str = "", **key: str | int) -> dict[str, Any] | None:
    """Extra time of one activity beside another, as a share of its own time alone: both / alone - 1, from 0 to 10; None
    when either is missing or the background did not last."""
    alone = table.one("contention", what=what, state="alone", **key)
    alone = alone or table.one("contention", what=what, state="alone")
    both = table.one("contention", what=what, state="both", **key)
    if alone is None or both is None or not both.lasted:
        return None
    a, b = alone.summary, both.summary
    value = max(0.0, b.median / a.median - 1.0)
    return measured(min(value, 10.0), (a.noise_frac + b.noise_frac) * (1.0 + value), min(a.n, b.n), note)
