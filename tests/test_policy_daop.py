"""DAOP: placement, swaps after a prompt, experts predicted, computed early and degraded."""

from __future__ import annotations

import numpy as np
import pytest
from cpu_bench import check_knobs, replay, resident, seeded, written

from policies.common.placement import uses
from policies.daop import Daop
from sim.workload.learn_split import StoreSplit, requests_of
from traces.format.reader import Trace


def traced(tmp_path, store, rows, n_experts, prompt=1, guesses=None):
    """A store request (its first row is the prompt), then one to be scored. `guesses[token][layer]`: scores in 1/4095
    predicted for the next layer; without them the next layer's own choice, in its order."""
    every = np.array([*store, *rows])
    n, n_layers, k = every.shape
    falling = np.array([4095 - sum(2**i for i in range(1, k)), *(2 ** (k - i) for i in range(1, k))])
    scores = np.zeros((n, n_layers, n_experts))
    np.put_along_axis(scores, every, np.broadcast_to(falling, every.shape), 2)
    ahead = np.roll(scores, -1, axis=1)
    for token, layers in (guesses or {}).items():
        for layer, guess in layers.items():
            ahead[len(store) + token, layer] = guess
    requests = [(1, len(store), "store"), (prompt, len(rows) - prompt + 1, "test")]
    return written(tmp_path / "t", requests, every, n_experts, scores=scores / 4095, next_scores_1=ahead / 4095)


# Decode tokens of the store split: 0.0 four times, 0.1 once; 1.1 three times, 1.2 twice. The prompt does not count.
STORE = [[[2], [0]], [[0], [1]], [[0], [1]], [[0], [2]], [[1], [1]], [[0], [2]]]


@pytest.mark.parametrize(
    ("room", "most", "there"),
    [
        (3, 240, [(0, 0), (1, 1)]),  # one room is the placeholder's; one expert per layer
        (4, 240, [(0, 0), (1, 1), (1, 2)]),  # what is left over goes by popularity over all layers
        (5, 240, [(0, 0), (0, 1), (1, 1), (1, 2)]),
        (2, 240, [(0, 0)]),
        (5, 3, [(0, 0), (1, 1), (1, 2)]),
    ],
)
def test_equally_many_of_each_layer_then_by_popularity(room, most, there, tmp_path):
    path = traced(tmp_path, STORE, [[[0], [1]]], 3)
    assert resident(replay(Daop(cache_experts=most), path, room)) == there


def one_hot(expert, n_experts=3):
    return [4095 * (e == expert) for e in range(n_experts)]


def test_five_steps(tmp_path):
    rows = [[[0], [1]], [[0], [1]], [[1], [2]], [[0], [1]], [[2], [1]]]
    guesses = {token: {0: one_hot(expert)} for token, expert in ((1, 1), (2, 2), (3, 2), (4, 1))}
    seen = replay(Daop(first_predict_layer=1), traced(tmp_path, STORE, rows, 3, guesses=guesses), 3)
    assert seen.log == [
        ("gpu", 0, 0),
        ("gpu", 1, 1),  # the prompt wants what is there
        ("gpu", 0, 0),
        ("gpu", 1, 1),
        ("cpu_ahead", 1, 2),
        ("cpu", 0, 1),
        ("cpu", 1, 2),
        ("cpu_ahead", 1, 2),
        ("gpu", 0, 0),
        ("cpu", 1, 2),  # predicted wrongly, and executed all the same
        ("cpu", 0, 2),
        ("gpu", 1, 1),
    ]
    assert seen.classes("decode") == {"hit": 4, "cpu": 3, "substituted": 1}
    assert seen.result.policy_stats == {"prediction_accuracy": 0.75, "swaps": 0}
    assert seen.result.activations_changed_frac == 1 / 10


def test_before_the_first_predicted_layer_the_gate_is_followed(tmp_path):
    rows = [[[0], [1]], [[0], [1]]]
    path = traced(tmp_path, STORE, rows, 3, guesses={1: {0: one_hot(0)}})
    assert ("cpu", 1, 0) in replay(Daop(first_predict_layer=1), path, 3).log
    seen = replay(Daop(), path, 3)
    assert seen.log == [("gpu", 0, 0), ("gpu", 1, 1)] * 2
    assert seen.result.policy_stats["prediction_accuracy"] == 0.0  # none was executed


TWO = [[[0, 1], [0, 1]]] * 3  # a store in which 0 and 1 are used, in both layers: they are there with room for five


def test_what_is_predicted_for_the_cpu_is_ready_when_its_layer_comes(tmp_path):
    # Layer 1 is predicted, rightly: 0 (there) and 2.
    path = traced(tmp_path, TWO, [[[0, 1], [0, 1]], [[0, 1], [0, 2]]], 4)
    seen = replay(Daop(first_predict_layer=1), path, 5)
    # The prompt takes 11 s (two layers of 1 + 2 + 2, head). Attention 11..12; down 12..13, CPU 13..18, up 18..19.
    assert seen.lane("cpu") == [("expert 1.2", 13, 18)]
    # Layer 0's experts 12..16, attention 16..17, expert 0 17..19, the result is there: head 19..20.
    assert seen.lane("gpu")[-2:] == [("expert 1.0", 17, 19), ("head", 19, 20)]
    # Following the gate, the CPU comes first and the GPU waits for it: down 17..18, CPU 18..23, up 23..24.
    late = replay(Daop(), path, 5)
    assert late.lane("gpu")[-2:] == [("expert 1.0", 24, 26), ("head", 26, 27)]


@pytest.mark.parametrize(
    ("scores", "degrade", "ids", "weights"),
    [
        ([600, 195, 2100, 1200], True, [2, 0], [2100 / 2700, 600 / 2700]),  # all on the CPU: 2 stays, 0 for 3
        ([195, 600, 1200, 2100], True, [3, 1], [2100 / 2700, 600 / 2700]),
        ([600, 195, 2100, 1200], False, [2, 3], [2100 / 3300, 1200 / 3300]),
        ([1200, 195, 2100, 600], True, [2, 0], [2100 / 3300, 1200 / 3300]),  # one is on the GPU: nothing to mend
    ],
)
def test_graceful_degradation(scores, degrade, ids, weights, tmp_path):
    path = traced(tmp_path, TWO, [[[0, 1], [0, 1]], [[0, 1], [2, 3]]], 4, guesses={1: {0: scores}})
    policy = Daop(first_predict_layer=1, degrade=degrade)
    seen = replay(policy, path, 5)
    assert policy._ahead.ids.tolist() == [ids]
    assert policy._ahead.weights[0].tolist() == pytest.approx(weights)
    assert {e for kind, layer, e in seen.log[-4:] if layer == 1 and kind != "cpu_ahead"} == set(ids)


def test_nothing_on_the_gpu_cannot_degrade(tmp_path):
    path = traced(tmp_path, TWO, [[[0, 1], [0, 1]], [[0, 1], [2, 3]]], 4)
    seen = replay(Daop(first_predict_layer=1, cache_experts=0), path, 5)
    assert seen.classes("decode") == {"cpu": 4}


def test_popularity_is_that_of_generated_tokens(tmp_path):
    """A store request of two prompt tokens (expert 1) and two generated ones (0 and 2)."""
    rows = [[[1]], [[1]], [[0]], [[2]], [[0]]]
    path = written(tmp_path / "t.safetensors", [(2, 3, "store"), (1, 1, "test")], rows, 3)
    with Trace(path) as trace:
        store = StoreSplit(trace, requests_of(trace, "store"))
        assert uses(store, "daop", prompts=False).tolist() == [[1, 0, 1]]
        assert uses(store, "fiddler").tolist() == [[1, 2, 1]]


class TestSwaps:
    # One layer of four, 0 and 1 there (room for three). A prompt of five: 2 three times, 0 and 1 once each.
    def run(self, tmp_path, ids=(2, 2, 2, 0, 1), store=((0,), (1,), (0,), (1,)), room=3, policy=None, **world):
        path = traced(tmp_path, [[list(ids)] for ids in store], [[[e]] for e in ids], 4, prompt=len(ids))
        return replay(policy or Daop(), path, room, **world)

    def test_a_hot_expert_replaces_a_cold_one(self, tmp_path):
        seen = self.run(tmp_path)
        # 2 (3 tokens) for 0 (1, the lower id of equals), which is computed on the CPU meanwhile; 3 has no tokens.
        assert seen.log == [("cpu", 0, 0), ("evict", 0, 0), ("fetch", 0, 2), ("gpu", 0, 1), ("gpu", 0, 2)]
        assert resident(seen) == [(0, 1), (0, 2)]
        assert seen.result.policy_stats["swaps"] == 1
        # Swaps come before everything on the GPU: attention 0..1, copy 1..11.
        assert seen.lane("gpu")[1] == ("expert 0.1", 11, 13)

    def test_the_ratio_must_be_exceeded(self, tmp_path):
        assert self.run(tmp_path, policy=Daop(swap_ratio=3.0)).result.policy_stats["swaps"] == 0
        assert self.run(tmp_path, policy=Daop(swap_ratio=2.9)).result.policy_stats["swaps"] == 1
        assert self.run(tmp_path, policy=Daop(largest_num=0)).result.policy_stats["swaps"] == 0

    def test_the_code_s_lists_hold_experts_of_both_sides(self, tmp_path):
        # 3, on the CPU without a token, is the coldest of all; paired with it, 2 does not come.
        assert self.run(tmp_path, policy=Daop(variant="code")).result.policy_stats["swaps"] == 0
        # With a token for 3 the lists are 2, 3, ... and 0, 1, ...: 2 comes for 0; 3 has no more tokens than 1.
        seen = self.run(tmp_path, ids=(2, 2, 2, 0, 1, 3), policy=Daop(variant="code"))
        assert resident(seen) == [(0, 1), (0, 2)]

    def test_the_coldest_leaves(self, tmp_path):
        # 2 (3 tokens) for 1 (one), not for 0 (two).
        assert resident(self.run(tmp_path, ids=(2, 2, 2, 0, 0, 1))) == [(0, 0), (0, 2)]

    def test_the_code_counts_a_cpu_expert_s_tokens_times_the_prompt_s_length(self, tmp_path):
        # 3, on the CPU with one token of eleven, is so less cold than 0 and 1 with three each: 2 (4) comes for 0.
        seen = self.run(tmp_path, ids=(2,) * 4 + (3,) + (0, 1) * 3, policy=Daop(variant="code"))
        assert resident(seen) == [(0, 1), (0, 2)]

    def test_one_that_leaves_runs_first_where_the_cpu_would_be_slower(self, tmp_path):
        # CPU 50 s: 0 runs on the GPU, then 2 takes its place. The code sends 0 again.
        ids = (2, 2, 2, 0, 1, 3)
        seen = self.run(tmp_path, ids, cpu_s=50.0)
        swap = [("gpu", 0, 0), ("evict", 0, 0), ("fetch", 0, 2)]
        through_the_placeholder = [("fetch", 0, 3), ("gpu", 0, 3), ("evict", 0, 3)]
        assert seen.log == [*swap, ("gpu", 0, 1), ("gpu", 0, 2), *through_the_placeholder]
        seen = self.run(tmp_path, ids, policy=Daop(variant="code", cpu_cost_per_token=30.0))
        again = [("gpu", 0, 0), ("evict", 0, 0), ("fetch", 0, 0), ("evict", 0, 0), ("fetch", 0, 2)]
        assert seen.log == [*again, ("gpu", 0, 1), ("gpu", 0, 2), *through_the_placeholder]

    def test_the_code_sends_down_what_leaves_first(self, tmp_path):
        # 2 comes for 0: 10 s down, which the host waits for; then the CPU (0 and 3) beside the copy up.
        ids = (2, 2, 2, 0, 1, 3)
        seen = self.run(tmp_path, ids, policy=Daop(variant="code"))
        assert seen.log == [
            ("cpu", 0, 0),
            ("cpu", 0, 3),
            ("evict", 0, 0),
            ("fetch", 0, 2),
            ("gpu", 0, 1),
            ("gpu", 0, 2),
        ]
        assert seen.lane("h2d")[0] == ("demand 0.2", 11, 21)
        assert seen.lane("gpu")[1] == ("expert 0.1", 21, 23)
        assert seen.lane("cpu") == [("expert 0.0", 12, 17), ("expert 0.3", 17, 22)]
        # Only the way up, as variant paper bills it; and the other way round.
        assert self.run(tmp_path, ids, policy=Daop(variant="code", copy_down="no")).lane("h2d")[0][1] == 1
        assert self.run(tmp_path, ids, policy=Daop(copy_down="yes")).lane("h2d")[0][1] == 11
        assert self.run(tmp_path, ids, policy=Daop()).lane("h2d")[0][1] == 1

    def test_tokens_change_nothing(self, tmp_path):
        # After the prompt the set is frozen, whatever is asked for.
        path = traced(tmp_path, TWO, [[[0, 1], [0, 1]]] + [[[2, 3], [3, 2]]] * 4, 4)
        seen = replay(Daop(), path, 5)
        assert resident(seen) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert not [kind for kind, _, _ in seen.log if kind in ("fetch", "evict")]


KNOBS = {
    "variant": ({}, "code"),
    "cache_experts": ({}, 5),
    "swap_ratio": ({}, 4.0),
    "largest_num": ({}, 0),
    "first_predict_layer": ({}, 2),
    "degrade": ({}, False),
    "copy_down": ({}, "yes"),
    "cpu_cost_per_token": ({"variant": "code"}, 30.0),
    "copy_cost": ({"variant": "code"}, 3.0),
}


def test_every_parameter_matters(tmp_path):
    with seeded(tmp_path, n_layers=7, n_experts=5, prompt=9, outputs=9) as trace:
        check_knobs(Daop, trace.path, 12, KNOBS)
