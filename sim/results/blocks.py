"""How far means and percentiles of requests under load may be off: neighbours in a queue wait alike, so blocks of
consecutive requests are what is drawn.

A bootstrap over single requests takes them for independent, and its interval is several times too narrow where a
backlog reaches over many of them. Blocks as long as the series remembers are close to independent (Carlstein, "The Use
of Subseries Values for Estimating the Variance of a General Statistic from a Stationary Sequence", Annals of Statistics
14(3), 1986; for means: Law and Kelton's batch means). Their length is found from the autocorrelation (Politis and
White, "Automatic Block-Length Selection for the Dependent Bootstrap", Econometric Reviews 23(1), 2004, with the
correction of Patton, Politis and White, 28(4), 2009).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from sim.figures import Ends, Errors
from sim.results.sampling import FEWEST, LEAST_RESAMPLES, MOST_AT_ONCE, SEED, SHARES, Sample, expanded

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sim.results.sampling import Interval


def block_length(values: Sequence[float]) -> int:
    """How many consecutive values make a block that is close to independent of the next; 1 where they are already.

    For the circular block bootstrap of the mean; at most 3 sqrt(n), and a third of them.
    """
    n = len(values)
    series = np.asarray(values, dtype=float)
    series = series - series.mean() if n else series
    if n < 4 or not float(series @ series) > 0.0:
        return 1
    most = max(1, math.ceil(min(3 * math.sqrt(n), n / 3)))
    quiet = max(5, math.ceil(math.sqrt(math.log10(n))))
    n_lags = min(n - 1, math.ceil(math.sqrt(n)) + quiet)
    covariance = np.array([float(series[: n - lag] @ series[lag:]) / n for lag in range(n_lags + 1)])
    small = np.abs(covariance[1:] / covariance[0]) < 2 * math.sqrt(math.log10(n) / n)
    runs = (lag for lag in range(n_lags - quiet + 1) if small[lag : lag + quiet].all())
    remembered = next(runs, None)
    if remembered is None:  # never quiet for long: up to the last lag that is not small
        loud = np.flatnonzero(~small)
        remembered = int(loud[-1]) + 1 if len(loud) else 0
    width = min(2 * max(remembered, 1), n_lags)
    lags = np.arange(1, width + 1)
    weights = np.minimum(1.0, 2.0 * (1.0 - lags / width)) * covariance[1 : width + 1]
    spectrum = covariance[0] + 2.0 * math.fsum(weights.tolist())
    slope = 2.0 * math.fsum((lags * weights).tolist())
    if spectrum <= 0.0:
        return most
    length = (2 * slope**2 / (4 / 3 * spectrum**2)) ** (1 / 3) * n ** (1 / 3)
    return int(min(most, max(1, math.ceil(length))))


def errors(values: Sequence[float], given: Sequence[str]) -> Errors:
    """95 % intervals of the mean and of percentiles.

    Args:
        values: times of requests in order of arrival. given: percentiles that are shown (`p95`); others are left out.
    """
    length = block_length(values)
    sample = Sample(dict(enumerate(values)), length)
    told = [name for name in given if sample.n >= fewest_blocks(name)]
    found = quantile_intervals(values, length, told) if told else {}
    ends: dict[str, Ends] = {name: found.get(name) for name in SHARES}
    mean = sample.interval()
    if mean is not None:
        mean = max(0.0, mean[0]), mean[1]  # Student's t knows no least value, and no time is less than none
    return Errors(mean=mean, **ends, block_requests=length, blocks=sample.n)


def fewest_blocks(name: str) -> int:
    """Blocks from which an interval of a percentile is given: so that some two of them lie beyond it, since one that
    is hardly reached is resampled into its own maximum. A mean has Student's t below `FEWEST`."""
    return max(FEWEST, round(2 / (1 - SHARES[name])))


def quantile_intervals(values: Sequence[float], length: int, names: Sequence[str]) -> dict[str, Interval]:
    """Where percentiles of any such series lie, from resampled blocks of so many consecutive values."""
    series = np.asarray(values, dtype=float)
    order = np.argsort(series, kind="stable")
    ordered, block_of = series[order], order // length
    n_blocks, drawn = int(block_of.max()) + 1, []
    sizes = np.bincount(np.arange(len(series)) // length)
    rng = np.random.Generator(np.random.PCG64(SEED))
    left, at_once = LEAST_RESAMPLES, max(1, MOST_AT_ONCE // len(series))
    while left:
        rows = min(left, at_once)
        blocks = rng.integers(0, n_blocks, (rows, n_blocks)) + n_blocks * np.arange(rows)[:, None]
        times = np.bincount(blocks.ravel(), minlength=rows * n_blocks).reshape(rows, n_blocks)
        drawn.append(_quantiles(ordered, np.cumsum(times[:, block_of], axis=1), times @ sizes, names))
        left -= rows
    means = np.concatenate(drawn, axis=1)
    return {name: expanded(found, n_blocks) for name, found in zip(names, means, strict=True)}


def _quantiles(
    ordered: NDArray[np.float64], up_to: NDArray[np.int64], totals: NDArray[np.int64], names: Sequence[str]
) -> NDArray[np.float64]:
    """Of samples in which each value of `ordered` stands as often as `up_to` grows by: between order statistics as in
    `sim.results.metrics.quantile`. A row for each name."""
    found = []
    for name in names:
        at = SHARES[name] * (totals - 1)
        low = np.floor(at).astype(np.int64)
        high = np.minimum(low + 1, totals - 1)
        below, above = (ordered[(up_to <= place[:, None]).sum(axis=1)] for place in (low, high))
        found.append(below + (above - below) * (at - low))
    return np.array(found)
