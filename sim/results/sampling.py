"""How far a mean over requests may move with the choice of requests, and which runs over the same ones are told apart.

A bootstrap over requests: percentiles of the means of resampled requests, at a level widened for few of them, since
the percentile interval is too narrow by sqrt((n - 1) / n) and by z for t (Hesterberg, "What Teachers Should Know About
the Bootstrap", The American Statistician 69(4), 2015: the expanded percentile interval). A resampled mean never leaves
the range of what was seen, which holds the true mean too seldom when that is very little: below `FEWEST` it is
Student's t. scipy.stats has both, and tests hold this against it; importing it takes longer than a short run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from sim.engine.report import Report

SHARES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}
"""Percentiles, by their keys in a result."""
FEWEST_FOR = {name: round(1 / (1 - share)) for name, share in SHARES.items()}
"""Observations from which a percentile is given."""
LEVEL = 0.95
FEWEST = 8  # requests (batches of them) from which they are resampled
RESAMPLES = 9_999
MOST_DRAWN = 20_000_000  # numbers drawn at most, with no fewer than `LEAST_RESAMPLES`
LEAST_RESAMPLES = 999
MOST_AT_ONCE = 1_000_000  # numbers of one piece
ADDED_AT_ONCE = 128  # numbers of a row that numpy adds up in one go; of more it adds up halves
SEED = 0  # the same requests give the same interval, bit for bit
NO_DIFFERENCE = 1e-9  # of a mean: smaller ones are rounding

Z = 1.959963984540054  # of the normal distribution, 2.5 % above
_T = (
    12.7062047361747,
    4.3026527297495,
    3.1824463052837,
    2.7764451051978,
    2.5705818356363,
    2.446911851145,
    2.3646242515928,
    2.3060041352042,
    2.2621571627982,
    2.2281388519863,
)
"""Of Student's t with 1 to 10 degrees of freedom."""

Interval = tuple[float, float]


class Sample:
    """One figure of every request, in order of the trace.

    Args:
        values: request -> figure. batch: requests served together share their iterations, so one unit is drawn for
            that many of them.
    """

    def __init__(self, values: Mapping[int, float], batch: int = 1) -> None:
        ordered = [values[request] for request in sorted(values)]
        units = [ordered[i : i + batch] for i in range(0, len(ordered), batch)]
        self.sums = np.array([math.fsum(unit) for unit in units])
        self.counts = np.array([float(len(unit)) for unit in units])
        self.n_requests, self.n = len(ordered), len(units)
        self.mean = math.fsum(ordered) / len(ordered) if ordered else math.nan
        self._resampled: NDArray[np.float64] | None = None

    def resampled(self) -> NDArray[np.float64]:
        """Means of resampled units; the draws depend on their number alone, so equal requests are drawn in all runs."""
        if self._resampled is None:
            self._resampled = _resampled(self.sums.tobytes(), self.counts.tobytes())
        return self._resampled

    def interval(self) -> Interval | None:
        """Where the mean of any such requests lies, at `LEVEL`; None from one unit, which says nothing of others."""
        if self.n < 2:
            return None
        if self.n >= FEWEST:
            return expanded(self.resampled(), self.n)
        return _by_t(self.mean, self.sums - self.mean * self.counts, self.counts)

    def minus(self, other: Sample) -> Interval | None:
        """Where the mean of the paired differences lies. Both are of the same requests, served in the same batches."""
        if self.n < 2:
            return None
        if self.n >= FEWEST:
            return expanded(self.resampled() - other.resampled(), self.n)
        mean = self.mean - other.mean
        return _by_t(mean, self.sums - other.sums - mean * self.counts, self.counts)

    def significant(self, other: Sample) -> bool:
        """Whether the requests show which of two runs has the smaller mean, beyond what other requests might change."""
        if self.n < 2 or abs(self.mean - other.mean) <= NO_DIFFERENCE * abs(self.mean):
            return False
        if self.n >= FEWEST and (sure := _counted_apart(self.resampled(), other.resampled(), self.n)) is not None:
            return sure
        difference = self.minus(other)
        return difference is not None and (difference[0] > 0 or difference[1] < 0)


@lru_cache(maxsize=128)
def _resampled(sums_data: bytes, counts_data: bytes) -> NDArray[np.float64]:
    """Kept by what they are of: a sweep asks for the same of a point's own error and of its place among the others."""
    sums, counts = np.frombuffer(sums_data), np.frombuffer(counts_data)
    n = len(sums)
    even = n > 0 and bool((counts == counts[0]).all())  # then any n of them are as many requests
    return np.concatenate(
        [drawn_sums(sums, drawn) / (n * counts[0] if even else drawn_sums(counts, drawn)) for drawn in _draws(n)]
    )


def drawn_sums(units: NDArray[np.float64], drawn: NDArray[np.int64]) -> NDArray[np.float64]:
    """The sum of each row that is drawn, to the bit as numpy adds it up: in pairs of eight running sums.

    Where columns lie together, thousands of rows of a few numbers are added up at once, three times as fast.
    """
    n = drawn.shape[1]
    if not (drawn.flags.f_contiguous and 8 <= n <= ADDED_AT_ONCE):
        found: NDArray[np.float64] = units.take(drawn).sum(axis=1)
        return found
    columns = units.take(drawn.T)
    running = columns[:8].copy()
    for at in range(8, n - n % 8, 8):
        running += columns[at : at + 8]
    a, b, c, d, e, f, g, h = running
    total: NDArray[np.float64] = ((a + b) + (c + d)) + ((e + f) + (g + h))
    for rest in columns[n - n % 8 :]:
        total += rest
    return total


def _draws(n: int) -> Iterable[NDArray[np.int64]]:
    """Units drawn with replacement, row by row, in pieces of bounded size."""
    rows = max(LEAST_RESAMPLES, min(RESAMPLES, MOST_DRAWN // n))
    if rows * n <= MOST_AT_ONCE:
        yield _drawn(n, rows)  # of one comparison: every run's requests are drawn alike
        return
    rng = np.random.Generator(np.random.PCG64(SEED))
    while rows:
        some = min(rows, max(1, MOST_AT_ONCE // n))
        yield rng.integers(0, n, (some, n))
        rows -= some


@lru_cache(maxsize=2)
def _drawn(n: int, rows: int) -> NDArray[np.int64]:
    return np.asfortranarray(np.random.Generator(np.random.PCG64(SEED)).integers(0, n, (rows, n)))


def expanded(means: NDArray[np.float64], n: int) -> Interval:
    """The percentile interval of figures of resampled units, widened for few of them."""
    low, high = quantiles(means, (_tail(n), 1 - _tail(n)))
    return low, high


def quantiles(figures: NDArray[np.float64], shares: Sequence[float]) -> list[float]:
    """`np.quantile`, to the bit: who stands at a few places is found in a tenth of the time that order takes."""
    last = len(figures) - 1
    places = [(math.floor(last * share), last * share) for share in shares]
    asked = sorted({at for low, _ in places for at in (low, min(low + 1, last))})
    found = dict(zip(asked, np.partition(figures, asked)[asked].tolist(), strict=True))
    return [_between(found[low], found[min(low + 1, last)], at - low) for low, at in places]


def _between(a: float, b: float, above: float) -> float:
    """As NumPy has it."""
    return a + (b - a) * above if above < 0.5 else b - (b - a) * (1 - above)


@lru_cache(maxsize=64)
def _tail(n: int) -> float:
    """What the interval leaves out on either side."""
    return 0.5 * math.erfc(math.sqrt(n / (n - 1)) * student(n - 1) / math.sqrt(2))


def _counted_apart(one: NDArray[np.float64], other: NDArray[np.float64], n: int) -> bool | None:
    """Whether zero lies outside the percentiles of `one - other`, by counting the differences on either side of it:
    thousands of runs are held against each other, and sorting them takes thirty times as long. None where a percentile
    lies between a difference above zero and one that is not, so that counting does not tell."""
    last, n_not_above = len(one) - 1, np.count_nonzero(one <= other)
    low, high = math.floor(last * _tail(n)), math.floor(last * (1 - _tail(n)))  # in order of size, and the next one
    if n_not_above <= low:
        return True
    n_below = np.count_nonzero(one < other)
    if n_below > high + 1:
        return True
    return None if n_not_above == low + 1 or n_below == high + 1 else False


def _by_t(mean: float, residuals: NDArray[np.float64], counts: NDArray[np.float64]) -> Interval:
    n = len(residuals)
    error = math.sqrt(math.fsum((residuals**2).tolist()) / (n - 1) / n) / (math.fsum(counts.tolist()) / n)
    return mean - student(n - 1) * error, mean + student(n - 1) * error


def student(degrees: int) -> float:
    """The quantile of Student's t for `LEVEL`, both sides: exact up to 10 degrees, then to four digits by its series
    (Abramowitz and Stegun 26.7.5)."""
    if degrees <= len(_T):
        return _T[degrees - 1]
    first = (Z**3 + Z) / 4
    second = (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96
    third = (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384
    return Z + first / degrees + second / degrees**2 + third / degrees**3


def times_of(report: Report) -> list[tuple[int, float, float | None]]:
    """(request, TTFT, TPOT) of every request that was served; None for the TPOT of one that has none."""
    return [(t.request.index, t.ttft_s, t.tpot_s) for t in report.requests]


def samples(times: Iterable[Sequence[Any]], batch: int) -> dict[str, Sample]:
    """TTFT, and TPOT where a request has one, of requests as `times_of` has them."""
    every = list(times)
    ttft = {index: first for index, first, _ in every}
    tpot = {index: further for index, _, further in every if further is not None}
    return {"ttft_s": Sample(ttft, batch), "tpot_s": Sample(tpot, batch)}


def ranks(of: list[Sample]) -> list[tuple[tuple[int, int], list[int]]] | None:
    """For each run the best and the worst rank that the requests leave open, and the runs it is not told apart from.

    None where there is no sampling error to be had.
    """
    if not of or of[0].n < 2:
        return None
    found = []
    pairs = [[one.significant(other) for other in of[:i]] for i, one in enumerate(of)]  # whoever is asked
    for i, one in enumerate(of):
        apart = [j for j in range(len(of)) if j != i and pairs[max(i, j)][min(i, j)]]
        faster = sum(of[j].mean < one.mean for j in apart)
        tied = [j for j in range(len(of)) if j != i and j not in apart]
        found.append(((1 + faster, 1 + faster + len(tied)), tied))
    return found
