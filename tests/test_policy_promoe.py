"""ProMoE: chunks, two queues and reordered inference by hand.

Copy of an expert 10 s in two chunks of 5, each computed in 2 s, attention 1 s, head 1 s; a prediction takes no time.
"""

from __future__ import annotations

import numpy as np
import pytest
from easy_numbers import EXPERT_BYTES, execute_easy, setup
from tiny_traces import tiny_header, tiny_trace

from policies.promoe import ProMoe
from sim.base.errors import DoesNotFit
from traces.format.reader import Trace
from traces.format.requests import Request
from traces.format.writer import write_trace

BASE = {"chunks": 2, "predictor_s": 0.0}
KNOBS = {
    "predictor": "surrogate:0.9",
    "stride": 1,
    "predictor_s": 30.0,
    "chunks": 1,
    "preempt": False,
    "reorder": False,
    "depth": 1,
    "seed": 1,
}


def guessed(path, rows, guesses, n_experts=4):
    """A trace whose predictions two layers ahead rank `guesses[token][layer]` first."""
    experts = np.array(rows)
    n, n_layers, k = experts.shape
    scores = np.zeros((n, n_layers - 2, n_experts))
    for token, layers in enumerate(guesses):
        for layer, order in enumerate(layers):
            for place, expert in enumerate(order):
                scores[token, layer, expert] = (2048 >> place) / 4095
            scores[token, layer, order[0]] += 1 - scores[token, layer].sum()
    header = tiny_header(n_layers, n_experts, k)
    requests = [Request(0, 0, 1, n, "", None, "test")]
    return write_trace(path, header, requests, None, experts=experts, next_scores_2=scores)


# Three layers of four experts, k = 1, room for one expert per layer; a prompt token, then four.
ROWS = [[[0], [0], [0]], [[1], [0], [2]], [[1], [0], [2]], [[0], [1], [1]], [[0], [1], [1]]]
TOLD = [[[0]], [[2]], [[1]], [[1]], [[0]]]  # of layer 2: unused in the prompt; right, wrong, right, wrong


def told(tmp_path, room=3, rows=ROWS, guesses=TOLD, settings=None, **world):
    with Trace(guessed(tmp_path / "t", rows, guesses)) as trace:
        return execute_easy(setup(ProMoe(**BASE | (settings or {})), trace, room, **world))


def both(kind, layer, expert):
    return [(kind, layer, expert)] * 2


def test_five_steps(tmp_path):
    seen = told(tmp_path)
    assert seen.log == [
        # The prompt: nothing is predicted, everything is missing.
        *both("fetch", 0, 0),
        ("gpu", 0, 0),
        *both("fetch", 1, 0),
        ("gpu", 1, 0),
        *both("fetch", 2, 0),
        ("gpu", 2, 0),
        # 1 takes the place of 0; 2 is predicted for layer 2, right; its first chunk takes the place of the LRU expert.
        *both("evict", 0, 0),
        *both("fetch", 0, 1),
        ("evict", 2, 0),
        ("prefetch", 2, 2),
        ("evict", 2, 0),
        ("prefetch", 2, 2),
        ("gpu", 0, 1),
        ("gpu", 1, 0),
        ("gpu", 2, 2),
        # Layer 2 is told 1, and asks for 2, which has lost its place to it.
        ("evict", 2, 2),
        ("prefetch", 2, 1),
        ("evict", 2, 2),
        ("prefetch", 2, 1),
        ("gpu", 0, 1),
        ("gpu", 1, 0),
        *both("evict", 2, 1),
        *both("fetch", 2, 2),
        ("gpu", 2, 2),
        # Right again, though layer 1 misses in between.
        *both("evict", 0, 1),
        *both("fetch", 0, 0),
        ("evict", 2, 2),
        ("prefetch", 2, 1),
        ("evict", 2, 2),
        ("prefetch", 2, 1),
        ("gpu", 0, 0),
        *both("evict", 1, 0),
        *both("fetch", 1, 1),
        ("gpu", 1, 1),
        ("gpu", 2, 1),
        # And wrong once more.
        ("evict", 2, 1),
        ("prefetch", 2, 0),
        ("evict", 2, 1),
        ("prefetch", 2, 0),
        ("gpu", 0, 0),
        ("gpu", 1, 1),
        *both("evict", 2, 0),
        *both("fetch", 2, 1),
        ("gpu", 2, 1),
    ]
    # Token 3, from 88: its miss of layer 0 at 89..99, then the first predicted chunk 99..104. At 102 layer 1 misses:
    # its chunks overtake the second predicted one, having waited for no more than the chunk in flight.
    copies = [span for span in seen.lane("h2d") if span[1] >= 88][:6]
    assert copies == [
        ("demand 0.0", 89, 94),
        ("demand 0.0", 94, 99),
        ("prefetch 2.1", 99, 104),
        ("demand 1.1", 104, 109),
        ("demand 1.1", 109, 114),
        ("prefetch 2.1", 114, 119),
    ]
    # The prompt: three times 1 + 10 + 2, and the head. Token 1: 1 + 10 + 2, then 3 and 1; layer 2 waits for the second
    # predicted chunk until 61, 2 and the head: 64.
    assert [end for what, _, end in seen.lane("gpu") if what == "head"] == [40, 64, 88, 122, 146]
    assert seen.result.policy_stats["predicted_frac"] == 0.5
    assert list(seen.outcome.report.counts.peak_bytes) == [3 * EXPERT_BYTES]


def test_a_gate_withdraws_what_it_does_not_need(tmp_path):
    """Chunks of 20 s: when layer 2 asks, the wrong expert's first chunk is in flight, its second has not started."""
    rows, guesses = [ROWS[0], [[0], [0], [0]]], [[[0]], [[3]]]
    seen = told(tmp_path, 6, rows, guesses, copy_s=40.0)
    assert seen.prefetched() == {"issued": 2, "cancelled": 1, "wasted": 1}
    other = told(tmp_path, 6, rows, guesses, {"preempt": False}, copy_s=40.0)
    assert other.prefetched() == {"issued": 2, "wasted": 2}


def test_what_is_ready_is_computed_first(tmp_path):
    # One layer holds two of four experts; of the prompt's 0, 1 stay. Then the router ranks 2 before 0.
    rows = [[[0, 1], [0, 1], [0, 1]], [[2, 0], [0, 1], [0, 1]]]
    ready_first, in_order = (
        [entry for entry in told(tmp_path, 6, rows, [[[0]], [[0]]], {"reorder": reorder}).log if entry[0] == "gpu"][6:8]
        for reorder in (True, False)
    )
    assert ready_first == [("gpu", 0, 0), ("gpu", 0, 2)]
    assert in_order == [("gpu", 0, 2), ("gpu", 0, 0)]


def test_all_that_is_missing_is_asked_for_before_anything_is_computed(tmp_path):
    seen = told(tmp_path, 6, [[[0, 1]] * 3, [[0, 1]] * 3], [[[0]], [[0]]])
    assert seen.log[:6] == [*both("fetch", 0, 0), *both("fetch", 0, 1), ("gpu", 0, 0), ("gpu", 0, 1)]


def test_what_has_come_further_is_computed_first(tmp_path):
    # Told 2 and 3 for layer 2: 10 s later, at its gate, 2 is there and 3 on its way. The router ranks 3 first.
    rows = [[[0, 1]] * 3, [[0, 1], [0, 1], [3, 2]]]
    ran = {}
    for reorder in (True, False):
        seen = told(tmp_path, 6, rows, [[[0, 1]], [[2, 3]]], {"reorder": reorder})
        ran[reorder] = [entry for entry in seen.log if entry[0] == "gpu"][-2:]
    assert ran == {True: [("gpu", 2, 2), ("gpu", 2, 3)], False: [("gpu", 2, 3), ("gpu", 2, 2)]}


def test_being_predicted_counts_as_an_access(tmp_path):
    """Room for two per layer: layer 2 holds 0 (older) and 1. Told 0, it asks for 2: 1 leaves."""
    rows = [[[0], [0], [0]], [[0], [0], [1]], [[0], [0], [2]]]
    seen = told(tmp_path, 6, rows, [[[0]], [[1]], [[0]]])
    assert [entry for entry in seen.log if entry[0] == "evict"] == both("evict", 2, 1)
    other = told(tmp_path, 6, rows, [[[0]], [[1]], [[1]]])
    assert [entry for entry in other.log if entry[0] == "evict"] == both("evict", 2, 0)


@pytest.mark.parametrize("knob", KNOBS)
def test_no_knob_is_dead(knob, tmp_path):
    base = {"predictor": "surrogate:0.5"} if knob == "seed" else {}
    levels = {"next_scores_1", "next_scores_2"}
    with Trace(tiny_trace(tmp_path / "t", 4, 6, 2, prompt=3, outputs=9, levels=levels)) as trace:
        one, other = (
            execute_easy(setup(ProMoe(**BASE | base | more), trace, 12)) for more in ({}, {knob: KNOBS[knob]})
        )
    assert (one.log, one.end_s) != (other.log, other.end_s)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"preempt": False},
        {"reorder": False},
        {"depth": 1},
        {"depth": 64},
        {"chunks": 3},
        {"chunks": 1},
        {"predictor": "surrogate:0.3", "preempt": False, "reorder": False},
    ],
)
@pytest.mark.parametrize(("gpus", "batch"), [(1, 1), (2, 3)])
def test_any_room_suffices(settings, gpus, batch, tmp_path):
    levels = {"next_scores_2"}
    with Trace(tiny_trace(tmp_path / "t", 4, 6, 3, prompt=5, outputs=8, n_requests=6, levels=levels)) as trace:
        for room in (4, 5, 9, 14, 24):
            seen = execute_easy(setup(ProMoe(**BASE | settings), trace, room, gpus=gpus, batch=batch))
            assert max(seen.outcome.report.counts.peak_bytes) <= room * EXPERT_BYTES
        with pytest.raises(DoesNotFit, match="at least 4 whole"):
            execute_easy(setup(ProMoe(**BASE | settings), trace, 3, gpus=gpus))


def test_a_right_surrogate_leaves_only_the_first_layers_to_chance(tmp_path):
    with Trace(tiny_trace(tmp_path / "t", 5, 6, 2, outputs=8, levels=())) as trace:
        seen = execute_easy(setup(ProMoe(**BASE | {"predictor": "surrogate:1", "depth": 64}), trace, 30))
    assert seen.result.policy_stats["predicted_frac"] == 1.0
    assert "surrogate" in seen.result.caveats


@pytest.mark.parametrize(
    ("shape", "settings", "copy_s"),
    [
        ((3, 6, 2), {"chunks": 3, "predictor": "surrogate:0.6", "reorder": False}, 1.0),
        ((4, 6, 2), {"chunks": 2, "predictor": "surrogate:0.6", "reorder": False}, 10.0),
        ((4, 8, 3), {"chunks": 3, "predictor": "gate_reuse", "reorder": False}, 1.0),
        ((4, 8, 3), {"chunks": 3, "predictor": "gate_reuse"}, 3.0),
    ],
)
def test_a_low_task_takes_no_room_of_an_expert_still_to_be_completed(shape, settings, copy_s, tmp_path):
    """Its chunk came while the gate spoke, into bytes that an expert with a place had not filled yet: no room was left.

    Found by trying 3,456 combinations of shape, room, speed and parameters; these four ended with an error.
    """
    with Trace(
        tiny_trace(
            tmp_path / "t", *shape, n_requests=3, prompt=3, outputs=12, levels={"next_scores_1", "next_scores_2"}
        )
    ) as trace:
        policy = ProMoe(**BASE | settings | {"preempt": False, "depth": 1})
        seen = execute_easy(setup(policy, trace, 2 * shape[0], copy_s=copy_s))
    assert list(seen.outcome.report.counts.peak_bytes) == [2 * shape[0] * EXPERT_BYTES]
