"""Lynx: bins of confidence, what a batch keeps, and where the rest goes."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
from cpu_bench import check_knobs, replay, resident, seeded, written
from easy_numbers import execute_easy, setup

from policies.lynx import Lynx

# Three requests of one layer and 4 experts, two per token. A is sure of 0, B of 0, C of 3.
SCORES = [[0.6, 0.25, 0.05, 0.1], [0.5, 0.1, 0.3, 0.1], [0.05, 0.1, 0.15, 0.7]]
CHOSEN = [[0, 1], [0, 2], [3, 2]]


def bench(tmp_path):
    """Each request's prompt is one such token, and so is the token it generates."""
    twice = [at for at in range(3) for _ in range(2)]
    rows, scores = [[CHOSEN[at]] for at in twice], [[SCORES[at]] for at in twice]
    return written(tmp_path / "t.safetensors", [(1, 2, "test")] * 3, rows, 4, scores=scores)


def decoded(policy, path):
    """Experts that ran in the one decode step of all three requests."""
    seen = replay(policy, path, 4, batch=3)
    assert [kind for kind, _, _ in seen.log] == ["gpu"] * len(seen.log)  # all fit, nothing moves
    return [expert for _, _, expert in seen.log][6:], seen


def bound(**settings):
    policy = Lynx(**settings)
    policy.bind(SimpleNamespace(n_gpus=1))
    return policy


def test_bins_are_floors_of_logit_differences():
    chance = np.random.default_rng(3)
    for alpha, beta in ((1.0, 5), (2.5, 3), (0.5, 8)):
        scores = chance.integers(1, 4000, (40, 6)).astype(float)
        ids = np.argsort(-scores, axis=1)[:, :4]
        found = bound(alpha=alpha, beta=beta).bins(scores, ids)
        for row, own, below in zip(scores.tolist(), ids.tolist(), found.tolist(), strict=True):
            deltas = [math.log(row[e]) - math.log(max(row)) for e in own]
            assert below == [-max(-beta, min(0, math.floor(alpha * delta))) for delta in deltas]


def test_a_score_of_nothing_is_in_the_last_bin():
    assert bound().bins(np.array([[4095.0, 0.0]]), np.array([[0, 1]])).tolist() == [[0, 5]]


def test_the_smallest_set_keeps_everybodys_best(tmp_path):
    """0 and 3 have a score of at least 1 (2 + 0 and 1); 1: 3^-1; 2: 3^-1 + 3^-2. All go to 0 and 3."""
    ran, seen = decoded(Lynx(), bench(tmp_path))
    assert ran == [0, 3]
    assert seen.result.policy_stats == {"run_frac": 2 / 4}
    assert seen.classes("decode") == {"hit": 2, "substituted": 2}
    # 3 of the 12 activations of prompts and tokens; prompts stay as they are.
    assert seen.result.activations_changed_frac == 3 / 12


def test_at_least_as_many_are_kept_as_a_token_needs():
    # Both tokens are sure of 0 alone: of the others 1, a bin below, goes before 2.
    ids, bins = np.array([[0, 1], [0, 2]]), np.array([[0, 1], [0, 2]])
    assert bound()._kept(bins, ids, set()) == {0, 1}


def test_a_bin_further_keeps_all(tmp_path):
    # ln(.25 / .6) and ln(.3 / .5) are in bin -1, so 1 and 2 reach 3^-1; with alpha 2 both are in bin -2.
    assert decoded(Lynx(keep_bin=1), bench(tmp_path))[0] == [0, 1, 2, 3]
    assert decoded(Lynx(keep_bin=1, alpha=2.0), bench(tmp_path))[0] == [0, 3]
    assert decoded(Lynx(keep_bin=1, alpha=2.0, beta=1), bench(tmp_path))[0] == [0, 1, 2, 3]


def test_one_token_alone_changes_nothing(tmp_path):
    with seeded(tmp_path, levels={"scores"}) as trace:
        seen = execute_easy(setup(Lynx(), trace, 5))
    assert seen.result.activations_changed_frac == 0


def test_five_steps_aware_of_the_cache(tmp_path):
    """Room for two; a choice is kept that is its token's best or is there."""
    rows = [[[0, 1]], [[2, 3]], [[2, 0]], [[1, 3]], [[0, 1]]]
    scores = [
        [0.5, 0.3, 0.1, 0.1],
        [0.05, 0.1, 0.55, 0.3],
        [0.3, 0.1, 0.35, 0.25],
        [0.05, 0.45, 0.05, 0.45],
        [0.4, 0.3, 0.2, 0.1],
    ]
    path = written(tmp_path / "t.safetensors", [(1, 5, "test")], rows, 4, scores=[[row] for row in scores])
    assert replay(Lynx(cache_aware=True, base=2), path, 2).log == [
        ("fetch", 0, 0),
        ("fetch", 0, 1),
        ("gpu", 0, 0),
        ("gpu", 0, 1),  # a prompt is left alone
        ("evict", 0, 0),
        ("fetch", 0, 2),
        ("gpu", 0, 1),
        ("gpu", 0, 2),  # 3 is unsure: of 0 and 1, 1 scores higher
        ("gpu", 0, 2),
        ("gpu", 0, 1),  # 0 is unsure and not there: 1 for it
        ("evict", 0, 2),
        ("fetch", 0, 3),
        ("gpu", 0, 1),
        ("gpu", 0, 3),  # both are the best
        ("evict", 0, 3),
        ("fetch", 0, 0),
        ("gpu", 0, 1),
        ("gpu", 0, 0),  # 1 is unsure, and there
    ]


def test_aware_of_the_cache_it_prefers_who_is_there(tmp_path):
    """One request: 0 and 1, then 2 and 3 for a token that is unsure of 3."""
    scores = [[[0.5, 0.3, 0.1, 0.1]], [[0.05, 0.1, 0.55, 0.3]]]
    path = written(tmp_path / "t.safetensors", [(1, 2, "test")], [[[0, 1]], [[2, 3]]], 4, scores=scores)
    aware = replay(Lynx(cache_aware=True, base=2), path, 2)
    # 2 comes (for 0, the least recently used of those the token does not need); 3 is replaced by 1, which is there.
    assert aware.log == [
        ("fetch", 0, 0),
        ("fetch", 0, 1),
        ("gpu", 0, 0),
        ("gpu", 0, 1),
        ("evict", 0, 0),
        ("fetch", 0, 2),
        ("gpu", 0, 1),
        ("gpu", 0, 2),
    ]
    assert resident(aware) == [(0, 1), (0, 2)]
    assert [e for kind, _, e in replay(Lynx(), path, 2).log if kind == "fetch"] == [0, 1, 2, 3]


KNOBS = {
    "alpha": ({"keep_bin": 2}, 2.0),
    "beta": ({"keep_bin": 1, "alpha": 4.0}, 1),
    "keep_bin": ({}, 1),
    "base": ({}, 6),
    "cache_aware": ({}, True),
    "scope": ({}, "layer"),
}


def test_every_parameter_matters(tmp_path):
    with seeded(tmp_path, n_experts=8, n_requests=12, outputs=9, levels={"scores"}) as trace:
        check_knobs(Lynx, trace.path, 8, KNOBS, batch=3)
