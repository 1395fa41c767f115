"""Sampling error over requests: held against scipy, against what is known, and against what it is for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cli_help import mixtral_shaped
from scipy import stats

from sim.options import RunSpec
from sim.results.metrics import statistic
from sim.results.sampling import FEWEST, LEVEL, RESAMPLES, Sample, drawn_sums, quantiles, ranks, student
from sim.run import execute, prepare


def drawn(n: int, seed: int = 0) -> list[float]:
    return np.random.default_rng(seed).gamma(4.0, 0.25, n).tolist()


def sample(values: list[float], batch: int = 1) -> Sample:
    return Sample(dict(enumerate(values)), batch)


@pytest.mark.parametrize("degrees", [*range(1, 12), 17, 30, 99, 1199])
def test_quantiles_of_students_t(degrees: int) -> None:
    assert student(degrees) == pytest.approx(stats.t.ppf((1 + LEVEL) / 2, degrees), rel=1e-4)


@pytest.mark.parametrize("n", range(2, FEWEST))
def test_few_requests_take_students_t(n: int) -> None:
    values, other = drawn(n), drawn(n, 1)
    expected = stats.ttest_1samp(values, 0).confidence_interval(LEVEL)
    assert sample(values).interval() == pytest.approx((expected.low, expected.high), rel=1e-9)
    paired = stats.ttest_rel(values, other).confidence_interval(LEVEL)
    assert sample(values).minus(sample(other)) == pytest.approx((paired.low, paired.high), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("n", [FEWEST, 12, 18, 60, 300])
def test_more_are_resampled_as_scipy_does(n: int) -> None:
    """The same interval up to the scatter of resampling, at the level that is widened for few."""
    values, other = np.array(drawn(n)), np.array(drawn(n, 1)) * 1.02
    level = 1 - 2 * stats.norm.cdf(-np.sqrt(n / (n - 1)) * stats.t.ppf((1 + LEVEL) / 2, n - 1))
    for mine, theirs in (
        (sample(values.tolist()).interval(), values),
        (sample(values.tolist()).minus(sample(other.tolist())), values - other),
    ):
        found = stats.bootstrap(
            (theirs,), np.mean, n_resamples=RESAMPLES, confidence_level=level, method="percentile", random_state=1
        ).confidence_interval
        assert mine is not None
        assert mine == pytest.approx((found.low, found.high), abs=0.08 * (found.high - found.low))


@pytest.mark.parametrize("n", [2, 4, 8, 12, 18])
def test_the_interval_holds_the_mean_about_as_often_as_it_says(n: int) -> None:
    """Of skewed times; the range of what was seen holds it in half of all cases for n = 2, and in 7 of 8 for n = 4."""
    holds = 0
    for seed in range(400):
        low, high = sample(drawn(n, seed)).interval() or (0.0, 0.0)
        holds += low <= 1.0 <= high
    assert 0.90 <= holds / 400 <= 0.985


def test_equal_runs_are_never_told_apart_more_often_than_it_says() -> None:
    wrong = 0
    for seed in range(300):
        rng = np.random.default_rng(seed)
        shared = rng.gamma(4.0, 0.25, 12)  # what a request costs any policy
        one, other = (sample((shared + 0.1 * rng.standard_normal(12)).tolist()) for _ in range(2))
        wrong += one.significant(other)
    assert wrong / 300 <= 0.08


def test_it_is_the_same_every_time() -> None:
    assert sample(drawn(18)).interval() == sample(drawn(18)).interval()
    backwards = dict(reversed(list(enumerate(drawn(18)))))
    assert Sample(backwards).interval() == sample(drawn(18)).interval()


def test_one_says_nothing_of_others() -> None:
    one, other = sample([1.0]), sample([2.0])
    assert one.interval() is None
    assert one.minus(other) is None
    assert not one.significant(other)
    assert ranks([one, other]) is None
    assert ranks([]) is None


def test_requests_of_a_batch_are_one_unit() -> None:
    """Twelve requests decoded together share every iteration: their times agree, and say nothing of another batch."""
    assert sample([1.0] * 12, batch=12).interval() is None
    two = sample([1.0, 1.0, 1.0, 2.0, 2.0, 2.0], batch=3)
    assert (two.n, two.n_requests, two.mean) == (2, 6, 1.5)
    expected = stats.ttest_1samp([1.0, 2.0], 0).confidence_interval(LEVEL)
    assert two.interval() == pytest.approx((expected.low, expected.high))
    many = drawn(24)
    means = [sum(many[i : i + 2]) / 2 for i in range(0, 24, 2)]
    assert sample(many, batch=2).interval() == pytest.approx(sample(means).interval())


@pytest.mark.parametrize("key", ["ttft_s", "tpot_s"])
def test_a_time_in_a_result_is_never_negative(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str) -> None:
    """Two requests that differ much: Student's t alone would have the mean between -5 and 7.3 s."""
    trace = mixtral_shaped(tmp_path, n_requests=2, outputs=3)
    far = sample([0.5, 1.5])
    assert (far.interval() or (0, 0))[0] < -5
    monkeypatch.setattr("sim.results.provenance.samples", lambda *_: {"ttft_s": far, "tpot_s": far})
    setup = prepare(RunSpec(policy="lru", hw="rtx3090", trace=str(trace), cache="40experts"))
    band = execute(setup, bounds=False).result.uncertainty
    setup.close()
    low, high = getattr(band.sampling, key)
    assert (low, high) == (0.0, pytest.approx(1 + 12.7062047 * 0.5))
    assert getattr(band, key)[0] == 0.0


def test_equal_times_differ_by_rounding_alone() -> None:
    one, other = sample([0.1] * 12), sample([0.1 + 1e-16] * 12)
    assert not one.significant(other)
    assert one.interval() == pytest.approx((0.1, 0.1))
    assert sample([0.1] * 12).significant(sample([0.1001] * 12))


def test_many_requests_take_bounded_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.results.sampling.MOST_DRAWN", 1000)
    monkeypatch.setattr("sim.results.sampling.LEAST_RESAMPLES", 99)
    assert len(sample(drawn(50)).resampled()) == 99
    assert len(sample(drawn(8)).resampled()) == 125


@pytest.mark.parametrize("n", [1, 2, 9, 20, 100])
def test_percentiles_of_a_statistic_are_those_of_numpy(n: int) -> None:
    """Each from as many values on as one beyond it takes."""
    values = np.random.default_rng(n).random(n).tolist()
    found = statistic(values)
    for share, name, least in ((0.5, "p50", 2), (0.95, "p95", 20), (0.99, "p99", 100)):
        by_numpy = None if n < least else pytest.approx(float(np.quantile(values, share)))
        assert getattr(found, name) == by_numpy


@pytest.mark.parametrize("n", [*range(1, 28), 64, 100, 127, 128, 129, 200])
def test_sums_and_quantiles_are_those_of_numpy(n: int) -> None:
    """To the bit: results were made with numpy's own."""
    rng = np.random.default_rng(n)
    units, drawn = rng.lognormal(0, 3, n), rng.integers(0, n, (501, n))
    sums = units[drawn].sum(axis=1)
    for laid_out in (drawn, np.asfortranarray(drawn)):
        assert drawn_sums(units, laid_out).tobytes() == sums.tobytes()
    for some in (sums, sums[:n]):
        shares = [0.0, 1e-9, *rng.random(50).tolist(), 0.5, 1.0]
        assert quantiles(some, shares) == [float(np.quantile(some, share)) for share in shares]
