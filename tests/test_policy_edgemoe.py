"""EdgeMoE: what a path says of the next layer, and who leaves the buffer."""

from __future__ import annotations

import pytest
from cpu_bench import check_knobs, replay, resident, seeded, taught
from tiny_traces import from_rows

from policies.edgemoe import EdgeMoe
from sim.base.errors import BadInput

# Used: 0.0 three times, 0.1 once; 1.1 three times, 1.2 once; 2.2 twice, 2.0 and 2.1 once.
STORE = [[[0], [1], [2]], [[0], [1], [2]], [[0], [2], [0]], [[1], [1], [1]]]


def test_five_steps(tmp_path):
    rows = [[[0], [1], [2]], [[0], [2], [0]], [[2], [2], [2]], [[0], [2], [0]], [[1], [1], [1]]]
    seen = replay(EdgeMoe(), taught(tmp_path, STORE, rows, 3), 3)
    assert seen.log == [
        # After 0 comes 1 (two of three); after 0, 1 comes 2.
        ("fetch", 0, 0),
        ("gpu", 0, 0),
        ("prefetch", 1, 1),
        ("gpu", 1, 1),
        ("prefetch", 2, 2),
        ("gpu", 2, 2),
        # 1.2 is missing. 0.0: 5 uses, wanted after 2 layers: 2.5; 1.1: 4 / 3; 2.2: 3 / 1. Then 0 follows 0, 2: of 0.0
        # (2.5), 1.2 (2 / 3) and 2.2 (3), 1.2 leaves once it has run.
        ("gpu", 0, 0),
        ("evict", 1, 1),
        ("fetch", 1, 2),
        ("gpu", 1, 2),
        ("evict", 1, 2),
        ("prefetch", 2, 0),
        ("gpu", 2, 0),
        # A path never seen says nothing. 0.0: 5 / 3, 2.2: 3 / 2, 2.0: 2 / 2; then 0.0: 5 / 2, 2.2: 3, 0.2: 1 / 2.
        ("evict", 2, 0),
        ("fetch", 0, 2),
        ("gpu", 0, 2),
        ("evict", 0, 2),
        ("fetch", 1, 2),
        ("gpu", 1, 2),
        ("gpu", 2, 2),
        # 1.1 is foretold in vain: 0.0, used 6 / 3, and 2.2, 4 / 2, are equal, and the lower leaves. Then for 2.0: 1.1
        # and 1.2, 4 / 3 each, 2.2 4 / 1.
        ("gpu", 0, 0),
        ("evict", 0, 0),
        ("prefetch", 1, 1),
        ("gpu", 1, 2),
        ("evict", 1, 1),
        ("prefetch", 2, 0),
        ("gpu", 2, 0),
        # 2.0: 3 / 2, 2.2: 4 / 2, 1.2: 4 / 1; then 0.1 itself, run: 2 / 3; then 1.2: 4 / 3, 1.1: 5 / 3, 2.2: 4 / 1.
        ("evict", 2, 0),
        ("fetch", 0, 1),
        ("gpu", 0, 1),
        ("evict", 0, 1),
        ("prefetch", 1, 1),
        ("gpu", 1, 1),
        ("evict", 1, 2),
        ("prefetch", 2, 1),
        ("gpu", 2, 1),
    ]
    assert resident(seen) == [(1, 1), (2, 1), (2, 2)]
    assert seen.result.policy_stats == {"known_paths_frac": 8 / 10}


def test_tokens_of_a_prompt_guess_together(tmp_path):
    # One token guesses 1 (2/3) and 2 (1/3), the other 1 (1): 1 first, 2 second.
    rows = [[[0], [1], [2]], [[1], [1], [2]]]
    seen = replay(EdgeMoe(preload=2), taught(tmp_path, STORE, rows, 3, prompt=2), 9)
    assert [e for kind, layer, e in seen.log if kind == "prefetch" and layer == 1] == [1, 2]


def test_a_path_seen_often_says_no_more_than_one_seen_once(tmp_path):
    # After 0 always came 2 (three times), after 1 always 1 (once): of two tokens' guesses, both certain, the lower id.
    store = [[[0], [2], [0]]] * 3 + [[[1], [1], [0]]]
    path = taught(tmp_path, store, [[[0], [2], [0]], [[1], [1], [0]]], 3, prompt=2)
    assert [e for kind, layer, e in replay(EdgeMoe(), path, 9).log if (kind, layer) == ("prefetch", 1)] == [1]


def test_a_path_of_one_layer_knows_less(tmp_path):
    # After 1 in layer 1 came 2 twice and 1 once, whatever was in layer 0.
    path = taught(tmp_path, STORE, [[[1], [1], [1]]], 3)
    assert ("prefetch", 2, 1) in replay(EdgeMoe(), path, 9).log
    assert ("prefetch", 2, 2) in replay(EdgeMoe(path_layers=1), path, 9).log


def test_it_learns_from_the_store_split_alone(tmp_path):
    with pytest.raises(BadInput, match="split 'store' has no requests: edgemoe places"):
        replay(EdgeMoe(), from_rows(tmp_path / "t", [[[0]]], 2), 2)


KNOBS = {"preload": ({}, 2), "path_layers": ({}, 1)}


def test_every_parameter_matters(tmp_path):
    with seeded(tmp_path, outputs=20) as trace:
        check_knobs(EdgeMoe, trace.path, 6, KNOBS)
