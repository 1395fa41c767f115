"""SwapMoE: who is a Virtual Expert, what happens to the others' tokens, and swaps that nobody waits for."""

from __future__ import annotations

import numpy as np
import pytest
from cpu_bench import check_knobs, replay, resident, seeded, written

from policies.lynx import masked_top_k
from policies.swapmoe import SwapMoe
from sim.base.errors import BadInput


def shares(best, second, n=4):
    """Scores of one layer: 0.6 for the best, 0.2 for the second, 0.1 for the others."""
    return [0.6 if e == best else 0.2 if e == second else 0.1 for e in range(n)]


def bench(tmp_path, tokens):
    """One layer of 4 experts; the store split finds 0 and 1 important; then one request per (best, second)."""
    every = [(0, 1), (1, 0), *tokens]
    requests = [(1, 1, "store"), (1, 1, "store"), *((1, 1, "test") for _ in tokens)]
    rows, scores = [[[best]] for best, _ in every], [[shares(*pair)] for pair in every]
    return written(tmp_path / "t.safetensors", requests, rows, 4, scores=scores)


def test_five_requests_by_hand(tmp_path):
    """All ask for expert 2, which is not there; a request takes 4 s, a copy 10."""
    seen = replay(SwapMoe(), bench(tmp_path, [(2, 1)] * 5), 2)
    assert seen.log == [
        ("gpu", 0, 1),  # masked: of 0 and 1, 1 has the higher score
        # 2 is important now, 0 and 1 equally unimportant: 0 stays, 2 takes the place of 1 as its copy begins.
        ("evict", 0, 1),
        ("prefetch", 0, 2),
        ("gpu", 0, 0),
        ("gpu", 0, 0),
        ("gpu", 0, 0),  # on its way from second 4 to 14: nobody waits
        ("gpu", 0, 2),  # there at second 17
    ]
    assert seen.end_s == 5 * 4
    assert resident(seen) == [(0, 0), (0, 2)]
    assert seen.classes("prefill") == {"hit": 1, "substituted": 4}
    assert seen.result.policy_stats == {"updates": 5, "swaps": 1}


def test_of_equals_those_that_are_there_stay(tmp_path):
    """1 and 2 are there; 3 becomes important and all others are equally unimportant: 3 comes for 2, and 0 does not."""
    every = [(1, 2), (2, 1), *[(3, 1)] * 8]
    requests = [(1, 1, "store")] * 2 + [(1, 1, "test")] * 8
    rows, scores = [[[best]] for best, _ in every], [[shares(*pair)] for pair in every]
    seen = replay(SwapMoe(), written(tmp_path / "t.safetensors", requests, rows, 4, scores=scores), 2)
    assert [entry for entry in seen.log if entry[0] != "gpu"] == [("evict", 0, 2), ("prefetch", 0, 3)]


@pytest.mark.parametrize(("frequency", "updates"), [(1, 5), (2, 2), (3, 1), (6, 0)])
def test_updates_follow_every_so_many_samples(frequency, updates, tmp_path):
    seen = replay(SwapMoe(frequency=frequency), bench(tmp_path, [(2, 1)] * 5), 2)
    assert seen.result.policy_stats["updates"] == updates


def test_without_a_store_split_it_begins_with_the_first_ids(tmp_path):
    path = written(tmp_path / "t.safetensors", [(1, 1, "test")], [[[3]]], 4, scores=[[shares(3, 2)]])
    assert replay(SwapMoe(), path, 2).log == [("gpu", 0, 0)]


def test_fewer_experts_than_a_token_needs_drop_the_rest(tmp_path):
    rows, scores = [[[2, 1]], [[2, 1]]], [[shares(2, 1)], [shares(2, 1)]]
    path = written(tmp_path / "t.safetensors", [(1, 1, "store"), (1, 1, "test")], rows, 4, scores=scores)
    seen = replay(SwapMoe(), path, 1)
    assert seen.log == [("gpu", 0, 2)]
    assert seen.classes("prefill") == {"hit": 1, "dropped": 1}


def test_more_than_fits_is_refused(tmp_path):
    path = bench(tmp_path, [(2, 1)])
    assert resident(replay(SwapMoe(experts_per_layer=1), path, 2)) == [(0, 0)]
    with pytest.raises(BadInput, match="got 3: the expert budget holds 2 per layer on GPU 0"):
        replay(SwapMoe(experts_per_layer=3), path, 2)


def test_norms_weigh_tokens(tmp_path):
    """Expert 1 was chosen twice, expert 2 once by a token three times as long."""
    requests = [(3, 1, "store"), (1, 1, "test")]
    rows, scores = [[[1]], [[1]], [[2]], [[0]]], [[shares(e, 3)] for e in (1, 1, 2, 0)]
    norms = [[1.0], [1.0], [3.0], [1.0]]
    path = written(tmp_path / "t.safetensors", requests, rows, 4, scores=scores, gate_input_norms=norms)
    assert replay(SwapMoe(), path, 1).log == [("gpu", 0, 1)]
    assert replay(SwapMoe(input_norms=True), path, 1).log == [("gpu", 0, 2)]


def test_masked_gating_against_a_plain_definition():
    chance = np.random.default_rng(7)
    for _ in range(200):
        scores = chance.integers(0, 5, (3, 6)).astype(float)
        ids = np.argsort(-scores, axis=1, kind="stable")[:, :2]
        allowed = chance.random(6) < 0.5
        found, weights = masked_top_k(scores, ids, allowed)
        for row, own, got, share in zip(scores.tolist(), ids.tolist(), found.tolist(), weights.tolist(), strict=True):
            masked = [e for e in own if allowed[e]]
            masked += sorted((e for e in range(6) if allowed[e] and e not in own), key=lambda e: (-row[e], e))
            expected = masked[:2]
            assert got == expected + [-1] * (2 - len(expected))
            total = sum(row[e] for e in expected)
            assert share == [row[e] / total if total and e >= 0 else 0.0 for e in got]


def test_a_biased_routers_choice_stays():
    found, _ = masked_top_k(np.array([[5.0, 4.0, 3.0]]), np.array([[2, 0]]), np.ones(3, dtype=bool))
    assert found.tolist() == [[2, 0]]


KNOBS = {
    "frequency": ({}, 3),
    "sample": ({}, "pass"),
    "experts_per_layer": ({}, 1),
    "input_norms": ({}, True),
    "depth": ({"sample": "pass"}, 4),
}


def test_every_parameter_matters(tmp_path):
    levels = {"scores", "gate_input_norms"}
    with seeded(tmp_path, n_layers=4, n_experts=8, n_requests=12, outputs=9, levels=levels) as trace:
        check_knobs(SwapMoe, trace.path, 12, KNOBS, copy_s=3.0)
