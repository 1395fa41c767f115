"""Fits of measured curves: few parameters with a meaning, least squares on relative error, residuals kept.

All fits work on logarithms of their parameters, so that none turns negative, and on (measured - model) / measured, so
that a 10 us point counts as much as a 10 ms one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sim.base.extras import need

Array = npt.NDArray[np.float64]


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
