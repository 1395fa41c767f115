"""Sampling errors of requests under load: neighbours wait alike, so blocks of them are drawn."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_help import mixtral_shaped, simulated
from numpy.random import Generator
from queue_intervals import shares_held

from sim.results.blocks import SHARES, block_length, errors, fewest_blocks, quantile_intervals
from sim.results.sampling import LEAST_RESAMPLES, SEED, expanded


def remembering(rng: Generator, n: int, keep: float) -> list[float]:
    """A series each of whose values holds so much of the one before."""
    noise = rng.normal(size=n + 500)
    for i in range(1, n + 500):
        noise[i] += keep * noise[i - 1]
    return noise[500:].tolist()


@pytest.mark.parametrize("keep", [0.5, 0.8])
def test_blocks_are_as_long_as_theory_has_them(keep: float) -> None:
    """Of an autoregression Politis and White's best length is known: (6 r^2 / (1 - r^2)^2)^(1/3) n^(1/3)."""
    n = 2000
    best = (6 * keep**2 / (1 - keep**2) ** 2) ** (1 / 3) * n ** (1 / 3)
    found = [block_length(remembering(np.random.default_rng(seed), n, keep)) for seed in range(20)]
    assert np.mean(found) == pytest.approx(best, rel=0.3)


def test_what_forgets_at_once_has_short_blocks() -> None:
    found = [block_length(np.random.default_rng(seed).normal(size=400).tolist()) for seed in range(20)]
    assert np.median(found) <= 4
    assert block_length([1.0] * 50) == block_length([]) == block_length([3.0, 1.0]) == 1
    assert 1 <= block_length([float(i) for i in range(30)]) <= 10  # a backlog that only grows: a third at most


@pytest.mark.parametrize(("n", "length"), [(40, 1), (41, 5), (120, 7)])
def test_percentiles_are_those_of_the_resampled_requests(n: int, length: int) -> None:
    """Drawn once more, block by block, and numpy's percentile taken of each resample: the same interval."""
    values = np.random.default_rng(7).exponential(size=n)
    blocks = [values[i : i + length] for i in range(0, n, length)]
    rng = np.random.Generator(np.random.PCG64(SEED))
    drawn = rng.integers(0, len(blocks), (LEAST_RESAMPLES, len(blocks)))
    found = quantile_intervals(values.tolist(), length, list(SHARES))
    for name, share in SHARES.items():
        by_hand = np.array([np.quantile(np.concatenate([blocks[i] for i in row]), share) for row in drawn])
        assert found[name] == pytest.approx(expanded(by_hand, len(blocks)), rel=1e-12)


def test_a_percentile_needs_blocks_beyond_it() -> None:
    assert [fewest_blocks(name) for name in SHARES] == [8, 20, 40, 200]
    series = np.random.default_rng(1).normal(size=100).tolist()
    told = errors(series, list(SHARES))
    assert told.blocks == math.ceil(100 / told.block_requests)
    given = [name for name in SHARES if getattr(told, name) is not None]
    assert given == [name for name in SHARES if told.blocks >= fewest_blocks(name)] != []
    assert errors(series, ["p50"]).p90 is None  # what is not shown has no interval either


def test_the_mean_wait_lies_where_it_says_far_more_often_than_of_single_requests() -> None:
    """The mean wait of this queue is known: a bootstrap over requests holds it half of the time."""
    blocks, single = shares_held(0.5, 600, 40)
    assert blocks >= 0.75
    assert single <= 0.65


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    path = mixtral_shaped(tmp_path, n_requests=20)

    def called(*args: object) -> Any:
        return simulated(capsys, "--policy", "lru", "--hw", "rtx3090", "--trace", path, *args)

    return called


def test_only_a_load_has_sampling_errors_of_percentiles(run: Callable[..., Any]) -> None:
    told = run("--arrivals", "poisson:0.04", "--requests", 120, "--json").json
    for time in ("ttft_s", "queue_s", "e2e_s", "tpot_s", "service_s"):
        sampling = told[time]["sampling"]
        assert told[time]["p50"] <= told[time]["p90"] <= told[time]["p95"] <= told[time]["p99"]
        for name in ("mean", *SHARES):
            if sampling[name] is not None:
                assert sampling[name][0] <= told[time][name] <= sampling[name][1]
        assert sampling["blocks"] == math.ceil(120 / sampling["block_requests"])
    assert told["ttft_s"]["sampling"]["p50"] is not None
    assert told["uncertainty"]["sampling"]["ttft_s"] == told["ttft_s"]["sampling"]["mean"]
    assert told["uncertainty"]["sampling"]["ttft_n"] == told["ttft_s"]["sampling"]["blocks"]
    assert f"{told['ttft_s']['sampling']['blocks']} blocks" in run("--arrivals", "poisson:0.04", "--requests", 120).out
    alone = run("--json").json
    assert all(set(alone[time]) == {"mean", "p50", "p95", "p99", "n"} for time in ("ttft_s", "queue_s", "tpot_s"))
    assert "under load" not in run().out


def test_no_time_is_less_than_none() -> None:
    """One of three waited; Student's t alone would have its mean begin below 0."""
    found = errors([0.0, 0.0, 3.0], []).mean
    assert found is not None
    assert found[0] == 0.0
    assert found[1] > 1.0


def test_percentiles_of_a_queue_that_grows_come_with_the_warning(run: Callable[..., Any]) -> None:
    args = ("--arrivals", "poisson:1", "--requests", 40)
    told, shown = run(*args, "--json").json, run(*args).out
    for time in ("ttft_s", "queue_s", "e2e_s"):
        assert 0 < told[time]["p50"] < told[time]["p90"]
    (warning,) = (label for label in told["caveats"] if label.startswith("unstable queue"))
    assert "say how long it ran" in warning
    assert warning.partition(":")[0] in shown
