"""What is observed in a trace, against definitions written out plainly."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_traces import tiny_trace

from sim.base.errors import BadInput
from traces.format.reader import Trace
from traces.stats import figures as stats
from traces.stats import observe


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tiny_trace(tmp_path_factory.mktemp("observe") / "t", 3, 6, 2, n_requests=6, prompt=3, outputs=40, seed=3)
    with Trace(path) as opened:
        yield opened


def test_popularity_and_overlaps_are_those_of_stats(trace):
    rows = observe.sample(trace)
    np.testing.assert_allclose(observe.popularity(rows) * trace.n_tokens, stats.popularity(trace))
    for lag in (1, 8):
        share, n = stats.next_token_overlap(trace, lag)
        pairs = observe.lag_pairs(rows, lag)
        assert len(pairs[0]) == n
        np.testing.assert_allclose(observe.overlap(rows, *pairs), share)


def test_overlap_is_a_count_of_shared_experts(trace):
    rows = observe.sample(trace)
    one, two = np.array([0, 5, 90]), np.array([7, 5, 12])
    plain = [
        [len(set(rows.experts[a, layer]) & set(rows.experts[b, layer])) / 2 for layer in range(3)]
        for a, b in zip(one, two, strict=True)
    ]
    np.testing.assert_allclose(observe.overlap(rows, one, two), np.mean(plain, axis=0))


def test_pairs_are_what_they_say(trace):
    rows, rng = observe.sample(trace), np.random.default_rng(0)
    later, earlier = observe.lag_pairs(rows, 5)
    assert (rows.request[later] == rows.request[earlier]).all()
    assert (rows.position[later] - rows.position[earlier] == 5).all()
    for same in (True, False):
        one, two = observe.far_pairs(rows, same, rng)
        assert len(one) > 100
        assert (rows.request[one] != rows.request[two]).all()
        assert ((rows.task[one] == rows.task[two]) == same).all()


def test_what_requests_share_over_all_pairs(trace):
    rows = observe.sample(trace)
    chosen = rows.experts
    shares = (chosen[:, None, :, :, None] == chosen[None, :, :, None, :]).sum(axis=(-2, -1)) / 2  # (n, n, L)
    others = rows.request[:, None] != rows.request
    same_task = rows.task[:, None] == rows.task
    same, other = observe.overlap_between(rows)
    np.testing.assert_allclose(same, shares[others & same_task].mean(axis=0))
    np.testing.assert_allclose(other, shares[others & ~same_task].mean(axis=0))
    alone = observe.sample(trace, list(trace.requests)[:1])
    assert all(np.isnan(found).all() for found in observe.overlap_between(alone))


def test_rows_that_are_judged_are_spread_over_the_tasks(trace, monkeypatch):
    """Tasks alternate: every second request would be of one."""
    rows = observe.sample(trace)
    assert len(observe.score_rows(rows, "next_scores_1")) == 6
    monkeypatch.setattr(observe, "MAX_SCORE_ROWS", 100)
    kept = observe.score_rows(rows, "next_scores_1")
    assert len(kept) == 2
    assert {r.task for r in rows.requests if any(start <= r.first_decode_row < end for start, end in kept)} == {
        "chat",
        "code",
    }


def test_predictions_are_judged_as_stats_does(trace):
    """Over the test requests, layer by layer; choices are found, whichever of equal scores come first."""
    rows = observe.sample(trace, trace.requests.in_split("test"))
    for distance in (1, 2):
        wanted = stats.prediction_accuracy(trace, distance).recorded
        got = observe.prediction_overlap(rows, f"next_scores_{distance}", distance)
        np.testing.assert_allclose(got, wanted)


@pytest.mark.parametrize("n_values", [3, 1 << 16])
def test_who_is_among_the_highest_is_whom_choose_names(n_values):
    """Of few values most are equal somewhere, of many hardly any."""
    scores = np.random.default_rng(n_values).integers(0, n_values, (50, 4, 9)) / 7.0
    asked = np.argsort(np.random.default_rng(1).random((50, 4, 9)))[..., :3]
    for k in (1, 2, 8, 9):
        named = (observe.choose(scores, k)[..., :, None] == asked[..., None, :]).any(axis=-2)
        assert (observe.among(scores, k, asked) == named).all()


def test_affinity_by_hand():
    before = np.random.default_rng(0).integers(0, 4, (400, 1))
    assert observe.affinity(before, (before * 3 + 1) % 4, 4) == 1.0  # one expert follows another, always
    assert observe.affinity(before, np.full_like(before, 2), 4) == 1.0
    rng = np.random.default_rng(1)
    blind = observe.affinity(rng.integers(0, 4, (4000, 1)), rng.choice(4, (4000, 1), p=[0.4, 0.2, 0.2, 0.2]), 4)
    assert blind == pytest.approx(0.4, abs=0.03)  # knowing nothing, it names the most popular


def test_halves_take_turns_within_a_task(trace):
    one, other = observe.halves(trace)
    assert [r.index for r in one] == [0, 1, 4, 5]  # tasks alternate: chat, code, chat, code, ...
    assert [r.index for r in other] == [2, 3]
    with Trace(trace.path) as opened:
        assert isinstance(observe.too_few(opened), BadInput)


def test_samples_are_whole_requests_and_no_more_than_asked(trace):
    rows = observe.sample(trace, max_rows=100)
    assert len(rows.requests) == 2
    assert len(rows.experts) == 84
    np.testing.assert_array_equal(rows.experts[:42], trace.experts[:42])
