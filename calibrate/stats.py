"""Blocks of samples, their median and interquartile range, and what to do when they scatter. Never a mean."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from calibrate.clock import Call, Clock

NOISY_FRAC = 0.10
"""IQR over median above which a figure is flagged."""


@dataclass(frozen=True)
class Effort:
    """How hard to try: samples wanted, shortest block, most calls in a block, and the time box of one point."""

    n_samples: int = 20
    min_block_s: float = 1e-3
    max_calls: int = 64
    max_s: float = 0.4
    min_samples: int = 3


DEFAULT = Effort()


@dataclass(frozen=True)
class Samples:
    """Seconds per call, one per block of `calls` calls."""

    calls: int
    samples_s: tuple[float, ...]


def measure(call: Call, clock: Clock, effort: Effort, now: Callable[[], float] = time.perf_counter) -> Samples:
    """Time `call` in blocks long enough for the clock and keep every block; growing the block doubles as warm-up.

    The time box counts whole calls of the clock on the host, set-up inside the clock included.
    """
    start_s = now()
    n = 1
    clock.total_s(call, n)  # first call: lazy initialisation, never kept
    while (block_s := clock.total_s(call, n)) < effort.min_block_s and n < effort.max_calls:
        # Aim past the target at once: doubling alone spends a synchronise per step.
        n = min(effort.max_calls, max(2 * n, min(8 * n, int(1.3 * n * effort.min_block_s / max(block_s, 1e-9)))))
    samples: list[float] = []
    while len(samples) < effort.n_samples:
        samples.append(clock.total_s(call, n) / n)
        if len(samples) >= effort.min_samples and now() - start_s > effort.max_s:
            break
    return Samples(n, tuple(samples))


@dataclass(frozen=True)
class Summary:
    """Median, quartiles and count of samples in one unit."""

    median: float
    low: float
    high: float
    n: int

    @property
    def iqr(self) -> float:
        return self.high - self.low

    @property
    def noise_frac(self) -> float:
        """IQR over median; 0 for a zero median."""
        return self.iqr / abs(self.median) if self.median else 0.0

    @property
    def noisy(self) -> bool:
        return self.noise_frac > NOISY_FRAC


def summarise(samples: Sequence[float]) -> Summary:
    """Median and quartiles (linear interpolation) of at least one sample."""
    low, median, high = (float(value) for value in np.percentile(np.asarray(samples, dtype=np.float64), (25, 50, 75)))
    return Summary(median, low, high, len(samples))


NO_MEASUREMENT = "no measurement"
"""How the note of a refused figure begins."""
MOST_OFF_FRAC = 0.5
"""Of a fit, in the median over its points: one that is off by more does not describe what it was fitted to."""
MOST_IQR = 2.0
"""IQR over value: above, half of it either way reaches zero. Calibrations that predict well have at most 1."""


def measured(
    value: float, iqr: float | None = None, n: int | None = None, note: str = "", ref: str = "samples"
) -> dict[str, Any]:
    """A figure of a profile as plain data."""
    spread = {} if iqr is None else {"iqr": float(iqr), "n": n}
    figure = {"value": float(value), "source": "measured", "ref": ref, **spread}
    return {**figure, "note": note} if note else figure


def assumed(value: float, note: str = "not measured in this run") -> dict[str, Any]:
    """A figure of a profile that nobody measured."""
    return {"value": float(value), "source": "assumed", "note": note}


def doubted(figure: dict[str, Any], probe: str, off_frac: float = 0.0) -> dict[str, Any]:
    """A figure as it is, or assumed and with a range where its samples and its fit are too bad to call it measured."""
    value, iqr, note = float(figure["value"]), float(figure["iqr"]), str(figure.get("note", ""))
    if not (why := refused(probe, value, iqr, off_frac)):
        return figure
    ends = range_of(value, iqr, off_frac) if value > 0 else {}
    return {**figure, "source": "assumed", "note": f"{why}; {note}" if note else why, **ends}


def refused(probe: str, value: float, iqr: float, off_frac: float = 0.0) -> str:
    """Why a figure is no measurement, in a note that names the probe to repeat; empty where it is one.

    Args:
        off_frac: by which the fit behind it is off, in the median over its points.
    """
    why = [f"its fit is off by {off_frac:.0%} in the median"] if off_frac > MOST_OFF_FRAC else []
    if iqr > MOST_IQR * abs(value):
        why.append(f"its IQR is {iqr / abs(value):.1f} times the value" if value else "its samples scatter around zero")
    return f"{NO_MEASUREMENT} (probe {probe}): {', '.join(why)}" if why else ""


def range_of(value: float, iqr: float, off_frac: float = 0.0) -> dict[str, float]:
    """`low` and `high`: as far off as the fit is, or half of the IQR where that is more."""
    off = max(off_frac, iqr / (2 * value)) if value > 0 else 0.0
    return {"low": value / (1 + off), "high": value * (1 + off)}


def advice(what: str, summary: Summary) -> str | None:
    """One line saying that a figure scatters and what to do about it; None when it does not."""
    if not summary.noisy:
        return None
    remedy = "close other work on this machine, then repeat with --resume and more --minutes"
    if summary.n < 8:
        remedy = "give it more --minutes"
    return f"{what}: IQR is {100 * summary.noise_frac:.0f} % of the median over {summary.n} blocks; {remedy}"
