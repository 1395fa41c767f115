"""ExpertFlow: what tokens foretell, who gets the slots, and what happens when the forecast is wrong."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from cpu_bench import check_knobs, replay, resident, seeded, written
from tiny_traces import from_rows

from policies.expertflow import ExpertFlow
from sim.base.errors import BadInput
from sim.policy.order import FREE, LAST
from sim.policy.pieces import Piece
from sim.workload.learn_split import StoreSplit, requests_of
from sim.workload.token_paths import TokenPaths
from traces.format.reader import Trace

# Token 10 went to 0.0 and 1.0, 11 to 0.1 and 1.0, 12 to 0.2 and 1.1.
ROUTES = {10: [[0], [0]], 11: [[1], [0]], 12: [[2], [1]]}


def trace_of(tmp_path, tokens, prompt, routes=None, levels=None):
    """A store request of tokens 10, 11, 12, then one of `tokens`, routed as then or as `routes` says."""
    rows = [*ROUTES.values(), *(routes or [ROUTES[token] for token in tokens])]
    requests = [(3, 1, "store"), (prompt, len(tokens) - prompt + 1, "test")]
    more = {"token_ids": [10, 11, 12, *tokens], **(levels or {})}
    return written(tmp_path / "t.safetensors", requests, rows, 4, **more)


def test_a_forecast_weighs_a_token_against_all_tokens(tmp_path):
    with Trace(trace_of(tmp_path, [10], 1)) as trace:
        paths = TokenPaths(StoreSplit(trace, requests_of(trace, "store")), "expertflow")
    # Layer 1: two of three tokens went to 0. Token 12: 2 x 1 + 3 for expert 1; 2 x 2 for expert 0.
    ids, scores = paths.forecast(12)
    assert ids.tolist() == [[2], [1]]
    assert scores.tolist() == [[5], [5]]
    # One never seen goes where most went; in layer 0, where all are equal, to the lowest id.
    ids, scores = paths.forecast(99)
    assert ids.tolist() == [[0], [0]]
    assert scores.tolist() == [[2], [4]]


def test_room_for_four_needs_of_three_and_two(tmp_path):
    """The card's example: slots go to layers in order, three and one; the fifth expert takes the first free slot."""
    seen = replay(ExpertFlow(), trace_of(tmp_path, [10, 11, 12], 3), 4)
    assert seen.log == [
        # Layer 1: expert 0 is foretold by two tokens, 2 x (4 + 3), expert 1 by one.
        ("prefetch", 0, 0),
        ("prefetch", 0, 1),
        ("prefetch", 0, 2),
        ("prefetch", 1, 0),
        ("gpu", 0, 0),
        ("gpu", 0, 1),
        ("gpu", 0, 2),
        ("evict", 0, 0),
        ("prefetch", 1, 1),
        ("gpu", 1, 0),
        ("gpu", 1, 1),
    ]
    assert resident(seen) == [(0, 1), (0, 2), (1, 0), (1, 1)]
    assert seen.result.policy_stats == {"foretold_frac": 1.0}


def test_what_nobody_foretold_takes_the_slot_of_what_nobody_wanted(tmp_path):
    path = trace_of(tmp_path, [10], 1, [[[3], [0]]])
    # Room for both layers: 0.0 was foretold and not chosen, and leaves for 0.3.
    seen = replay(ExpertFlow(predict_s=0.0), path, 2)
    assert seen.log == [
        ("prefetch", 0, 0),
        ("prefetch", 1, 0),
        ("evict", 0, 0),
        ("fetch", 0, 3),
        ("gpu", 0, 3),
        ("gpu", 1, 0),
    ]
    # At second 1 the copy of 0.0 is under way and cannot be stopped; 0.3 goes before 1.0, which was asked for first.
    assert seen.lane("h2d") == [("prefetch 0.0", 0, 10), ("demand 0.3", 10, 20), ("prefetch 1.0", 20, 30)]
    assert seen.result.policy_stats == {"foretold_frac": 0.5}


def test_slots_are_filled_again_in_order(tmp_path):
    seen = replay(ExpertFlow(), trace_of(tmp_path, [10, 12], 1), 1)
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


def test_five_steps(tmp_path):
    """Paths 10 (0.0, 1.0), 11 (0.1, 1.0), 12 (0.2, 1.1), room for two; token 11 goes to 1.3 instead."""
    routes = [ROUTES[10], [[1], [3]], ROUTES[12], ROUTES[10], ROUTES[10]]
    seen = replay(ExpertFlow(), trace_of(tmp_path, [10, 11, 12, 10, 10], 1, routes), 2)
    assert seen.log == [
        ("prefetch", 0, 0),
        ("prefetch", 1, 0),
        ("gpu", 0, 0),
        ("gpu", 1, 0),
        ("evict", 0, 0),
        ("prefetch", 0, 1),
        ("gpu", 0, 1),
        ("evict", 0, 1),
        ("fetch", 1, 3),
        ("gpu", 1, 3),  # 0.1 became free before 1.0 was found to be unwanted
        ("evict", 1, 0),
        ("prefetch", 0, 2),
        ("evict", 1, 3),
        ("prefetch", 1, 1),
        ("gpu", 0, 2),
        ("gpu", 1, 1),
        ("evict", 0, 2),
        ("prefetch", 0, 0),
        ("evict", 1, 1),
        ("prefetch", 1, 0),
        ("gpu", 0, 0),
        ("gpu", 1, 0),
        ("gpu", 0, 0),
        ("gpu", 1, 0),
    ]


def test_slots_leave_in_the_order_they_became_free(tmp_path):
    # 0.2 is foretold by two tokens and loaded before 0.0; 0.0 runs first (lowest id), and is the first to be free.
    seen = replay(ExpertFlow(), trace_of(tmp_path, [10, 12, 12], 3), 3)
    assert seen.log == [
        ("prefetch", 0, 2),
        ("prefetch", 0, 0),
        ("prefetch", 1, 1),
        ("gpu", 0, 0),
        ("gpu", 0, 2),
        ("evict", 0, 0),
        ("prefetch", 1, 0),
        ("gpu", 1, 0),
        ("gpu", 1, 1),
    ]


def test_where_all_is_foretold_the_last_of_the_forecast_leaves(tmp_path):
    """Three layers with room for two of what is to come: what nobody foretold takes the later one's slot."""
    rows = [[[0], [1], [2]], [[0], [1], [2]], [[3], [1], [2]]]
    requests = [(1, 2, "store"), (1, 1, "test")]
    path = written(tmp_path / "t.safetensors", requests, rows, 4, token_ids=[10, 10, 10])
    seen = replay(ExpertFlow(), path, 3)
    assert seen.log[:3] == [("prefetch", 0, 0), ("prefetch", 1, 1), ("prefetch", 2, 2)]
    assert seen.log[3:5] == [("evict", 0, 0), ("fetch", 0, 3)]
    policy = ExpertFlow()
    policy.bind(SimpleNamespace(n_layers=3, n_experts=1, n_gpus=1))
    pieces = [Piece(layer, 0, 0.0, 1.0, "bf16", 0, 1, layer) for layer in range(3)]
    for piece in reversed(pieces):
        policy.loaded(piece)
    policy.plan(pieces)
    assert policy.order.bar.tolist() == [LAST] * 3  # for no prefetch, and for a demand the last of the forecast
    assert policy.order.rank.argmin() == 2
    policy.passed(1)  # what is not foretold any more leaves first, the one loaded first before the other
    assert policy.order.bar.tolist() == [FREE, FREE, LAST]
    assert policy.order.rank[1] < policy.order.rank[0]


def test_the_prediction_is_waited_for_unless_hidden(tmp_path):
    path = trace_of(tmp_path, [10], 1)
    # Prediction 4, copy 10, expert 2, copy of the next until 24, expert 2, head 1.
    assert replay(ExpertFlow(predict_s=4.0), path, 2).end_s == 4 + 10 + 10 + 2 + 1
    assert replay(ExpertFlow(predict_s=4.0, hidden=True), path, 2).end_s == 10 + 10 + 2 + 1


def test_it_needs_a_store_split_or_a_surrogate(tmp_path):
    path = from_rows(tmp_path / "t", [[[0]]], 2)
    with pytest.raises(BadInput, match="split 'store' has no requests: expertflow learns there"):
        replay(ExpertFlow(), path, 2)
    assert replay(ExpertFlow(predictor="surrogate:0.9"), path, 2).end_s > 0
    with pytest.raises(BadInput, match=r"expertflow\.predictor, got 'trained': write tokens"):
        ExpertFlow(predictor="trained")


KNOBS = {
    "predictor": ({}, "surrogate:0.9"),
    "seed": ({"predictor": "surrogate:0.5"}, 1),
    "predict_s": ({}, 3.0),
    "hidden": ({"predict_s": 3.0}, True),
}


def test_every_parameter_matters(tmp_path):
    with seeded(tmp_path, outputs=12, levels={"token_ids"}) as trace:
        check_knobs(ExpertFlow, trace.path, 6, KNOBS, batch=2)
