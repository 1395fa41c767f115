"""SiDA-MoE: the hash table routes, and what it names is loaded before the pass."""

from __future__ import annotations

import pytest
from cpu_bench import check_knobs, replay, resident, seeded
from test_policy_expertflow import trace_of
from tiny_traces import from_rows

from policies.sida import Sida
from sim.base.errors import BadInput


def bench(tmp_path, tokens, routes=None):
    weights = [[[1.0], [1.0]]] * (3 + len(tokens))
    return trace_of(tmp_path, tokens, 1, routes, {"weights": weights})


def test_the_paper_loads_ahead_and_each_layer_waits_for_its_own(tmp_path):
    """A prompt of token 10 (0.0 and 1.0), then token 12 (0.2 and 1.1), which the gate sends elsewhere."""
    seen = replay(Sida(predict_s=0.0), bench(tmp_path, [10, 12], [[[0], [0]], [[3], [1]]]), 4)
    assert seen.log == [
        ("prefetch", 0, 0),
        ("prefetch", 1, 0),
        ("gpu", 0, 0),
        ("gpu", 1, 0),
        ("prefetch", 0, 2),
        ("prefetch", 1, 1),
        ("gpu", 0, 2),
        ("gpu", 1, 1),
    ]
    # Copies 0 to 10 and 10 to 20, experts 10 to 12 and 20 to 22, head 23; then the same again.
    assert seen.end_s == 46
    assert seen.classes("decode") == {"late": 1, "substituted": 1}
    assert seen.result.activations_changed_frac == 1 / 4


def test_short_of_memory_it_is_first_in_first_out(tmp_path):
    seen = replay(Sida(), bench(tmp_path, [10, 12]), 3)
    assert seen.log[4:] == [
        ("prefetch", 0, 2),
        ("evict", 0, 0),
        ("prefetch", 1, 1),
        ("gpu", 0, 2),
        ("gpu", 1, 1),
    ]
    # Room for one: what does not fit before the pass follows.
    seen = replay(Sida(), bench(tmp_path, [10, 12]), 1)
    assert seen.log == [
        ("prefetch", 0, 0),
        ("gpu", 0, 0),
        ("evict", 0, 0),
        ("prefetch", 1, 0),
        ("gpu", 1, 0),
        ("evict", 1, 0),
        ("prefetch", 0, 2),
        ("gpu", 0, 2),
        ("evict", 0, 2),
        ("prefetch", 1, 1),
        ("gpu", 1, 1),
    ]


def test_the_code_moves_in_bulk_and_waits(tmp_path):
    seen = replay(Sida(variant="code", predict_s=0.0), bench(tmp_path, [10, 12]), 4)
    assert seen.log == [
        ("fetch", 0, 0),
        ("fetch", 1, 0),
        ("gpu", 0, 0),
        ("gpu", 1, 0),
        ("write_back", 0, 0),
        ("evict", 0, 0),
        ("write_back", 1, 0),
        ("evict", 1, 0),
        ("fetch", 0, 2),
        ("fetch", 1, 1),
        ("gpu", 0, 2),
        ("gpu", 1, 1),
    ]
    # Two copies up, two layers of 3, head; two down, two up, the same again.
    assert seen.end_s == (20 + 6 + 1) + (20 + 20 + 6 + 1)
    assert resident(seen) == [(0, 2), (1, 1)]


def test_the_code_leaves_what_is_foretold_again(tmp_path):
    """Token 10 went to 0.0 and 1.0, token 11 to 0.1 and 1.0."""
    seen = replay(Sida(variant="code", predict_s=0.0), bench(tmp_path, [10, 11]), 4)
    assert seen.log[4:] == [("write_back", 0, 0), ("evict", 0, 0), ("fetch", 0, 1), ("gpu", 0, 1), ("gpu", 1, 0)]


def test_a_layer_s_experts_come_in_order_of_id(tmp_path):
    path = trace_of(tmp_path, [12, 12, 10], 3, None, {"weights": [[[1.0], [1.0]]] * 6})
    loads = [entry[1:] for entry in replay(Sida(), path, 8).log if entry[0] == "prefetch"]
    assert loads == [(0, 0), (0, 2), (1, 0), (1, 1)]


def test_five_steps(tmp_path):
    """Room for three of token paths 10 (0.0, 1.0), 11 (0.1, 1.0), 12 (0.2, 1.1); the gates are not asked."""
    routes = [[[3], [3]]] * 5
    seen = replay(Sida(predict_s=0.0), bench(tmp_path, [10, 11, 10, 12, 11], routes), 3)
    assert seen.log == [
        ("prefetch", 0, 0),
        ("prefetch", 1, 0),
        ("gpu", 0, 0),
        ("gpu", 1, 0),
        ("prefetch", 0, 1),
        ("gpu", 0, 1),
        ("gpu", 1, 0),  # 1.0 is there still
        ("gpu", 0, 0),
        ("gpu", 1, 0),  # all of it is
        ("evict", 0, 0),
        ("prefetch", 0, 2),
        ("evict", 1, 0),
        ("prefetch", 1, 1),
        ("gpu", 0, 2),
        ("gpu", 1, 1),
        ("evict", 0, 2),
        ("prefetch", 1, 0),
        ("gpu", 0, 1),
        ("gpu", 1, 0),  # first in, first out: 0.1 is foretold
    ]
    assert seen.classes("decode") == {"substituted": 8}


def test_tables_of_prompts_are_ready_those_of_tokens_are_not(tmp_path):
    path = bench(tmp_path, [10, 12])
    assert replay(Sida(predict_s=5.0), path, 4).end_s == 46 + 5
    assert replay(Sida(predict_s=5.0, ahead=False), path, 4).end_s == 46 + 10


def test_selections_alone_take_a_surrogate(tmp_path):
    path = from_rows(tmp_path / "t", [[[0], [1]], [[1], [2]]], 3)
    seen = replay(Sida(predictor="surrogate:1.0"), path, 3)
    assert "surrogate" in seen.result.caveats
    assert seen.result.activations_changed_frac == 0
    with pytest.raises(BadInput, match=r"split 'store' has no requests: sida learns there.*--train-frac 0\.7"):
        replay(Sida(), path, 3)


KNOBS = {
    "predictor": ({}, "surrogate:0.9"),
    "seed": ({"predictor": "surrogate:0.5"}, 1),
    "variant": ({}, "code"),
    "predict_s": ({}, 3.0),
    "ahead": ({}, False),
}


def test_every_parameter_matters(tmp_path):
    with seeded(tmp_path, outputs=12, levels={"token_ids", "weights"}) as trace:
        check_knobs(Sida, trace.path, 6, KNOBS)
