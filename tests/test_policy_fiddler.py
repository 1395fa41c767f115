"""Fiddler: what stays, and when a missing expert is copied rather than computed on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from cpu_bench import check_knobs, replay, resident, taught
from easy_numbers import EXPERT_BYTES
from tiny_traces import from_rows

from policies.common.placement import most_used, uses
from policies.fiddler import Constants, Fiddler, cpu_is_better
from sim.base.errors import BadInput
from sim.workload.learn_split import StoreSplit, requests_of
from traces.format.reader import Trace

# Two layers of three experts. In the store split expert 1 of layer 1 is used most (3), then 0.0 and 0.2 (2 each; the
# lower id first), then 1.0 (1), and 0.1 and 1.2 never or once.
STORE = [[[0], [1]], [[2], [1]], [[0], [1]], [[2], [0]]]
ROWS = [[[0], [1]], [[1], [1]], [[0], [2]], [[2], [0]], [[0], [1]]]


def test_popular_experts_of_all_layers_stay_but_for_one_placeholder(tmp_path):
    path = taught(tmp_path, STORE, ROWS, 3)
    for room, stays in ((1, []), (2, [(1, 1)]), (3, [(0, 0), (1, 1)]), (4, [(0, 0), (0, 2), (1, 1)])):
        seen = replay(Fiddler(), path, room)
        assert resident(seen) == stays
        assert seen.result.policy_stats["experts_on_gpu"] == len(stays)
    assert len(resident(replay(Fiddler(), path, 6))) == 6  # with room for all, nothing needs a placeholder


@pytest.mark.parametrize(("tokens", "lane"), [(9, "cpu"), (10, "h2d")])
def test_nine_tokens_are_computed_on_the_cpu_and_ten_are_copied(tokens, lane, tmp_path):
    """Card B12: 7 per token against 70; at 10 the tie goes to the GPU."""
    path = taught(tmp_path, [[[1]]], [[[0]]] * tokens, 3, prompt=tokens)
    seen = replay(Fiddler(variant="code"), path, 2)
    copied = [("fetch", 0, 0), ("gpu", 0, 0), ("evict", 0, 0)]
    assert seen.log == ([("cpu", 0, 0)] if lane == "cpu" else copied)
    assert seen.classes("prefill") == {"cpu" if lane == "cpu" else "miss": 1}


def test_the_code_s_rule_is_the_best_of_all_ways_to_share_a_layer_out():
    """All 2^E assignments scored by the sum of costs, the first of equals taken, as `mixtral_forward` does."""
    rng = np.random.default_rng(0)
    constants = Constants(7.0, 70.0)
    for _ in range(50):
        tokens, there = rng.integers(0, 20, 5).tolist(), rng.integers(0, 2, 5).tolist()
        costs = [[0 if there[e] else 70, 7 * tokens[e]] for e in range(5)]  # by place: 0 GPU, 1 CPU
        totals = [sum(costs[e][way >> e & 1] for e in range(5)) for way in range(32)]
        best = totals.index(min(totals))
        for e in range(5):
            if tokens[e]:
                assert (best >> e & 1) == (not there[e] and cpu_is_better(tokens[e], None, constants))


@pytest.mark.parametrize(("cpu_s", "copied"), [(11.0, 0), (12.0, 0), (12.5, 2)])
def test_the_paper_compares_latencies(cpu_s, copied, tmp_path):
    """A copy (10 s) and an expert (2 s) against the CPU; only what is strictly slower there is copied."""
    path = taught(tmp_path, STORE, [[[1], [2]]], 3)
    seen = replay(Fiddler(), path, 3, cpu_s=cpu_s)
    assert sum(kind == "fetch" for kind, _, _ in seen.log) == copied


def test_five_steps(tmp_path):
    # Room for 3: 1.1 and 0.0 stay. Token by token: both there; 0.1 on the CPU; 1.2 on the CPU; 0.2 and 1.0 on the CPU.
    seen = replay(Fiddler(), taught(tmp_path, STORE, ROWS, 3), 3)
    assert seen.log == [
        ("gpu", 0, 0),
        ("gpu", 1, 1),
        ("cpu", 0, 1),
        ("gpu", 1, 1),
        ("gpu", 0, 0),
        ("cpu", 1, 2),
        ("cpu", 0, 2),
        ("cpu", 1, 0),
        ("gpu", 0, 0),
        ("gpu", 1, 1),
    ]
    # All there: 1 + 2 + 1 + 2 + 1 s. An expert on the CPU: 1 s down, 5 s, 1 s up instead of 2 s: 5 s more.
    assert seen.end_s == 5 * 7 + 4 * 5
    assert seen.classes("decode") == {"hit": 4, "cpu": 4}


def test_the_gpu_s_experts_run_before_the_cpu_s_unless_they_may_overlap(tmp_path):
    # k = 2: 0 is there, 2 is not. Attention 0..1, expert 0: 1..3, then down 3..4, CPU 4..9, up 9..10, head 10..11.
    path = taught(tmp_path, [[[0, 1]]], [[[0, 2]]], 3)
    seen = replay(Fiddler(), path, 2)
    assert seen.lane("cpu") == [("expert 0.2", 4, 9)]
    assert seen.end_s == 11
    assert replay(Fiddler(overlap=True), path, 2).end_s == 9  # down 1..2, CPU 2..7, up 7..8


def test_copies_go_through_one_placeholder(tmp_path):
    # Nothing there, CPU dear: 0 and 1 pass through the placeholder, the second once the first has run.
    path = taught(tmp_path, [[[2, 3]]], [[[0, 1]]], 4)
    seen = replay(Fiddler(), path, 1, cpu_s=50.0)
    assert seen.lane("h2d") == [("demand 0.0", 1, 11), ("demand 0.1", 13, 23)]
    assert seen.outcome.report.counts.peak_bytes[0] == EXPERT_BYTES
    # With another one running on the GPU first, the copy still comes after it on the one stream.
    seen = replay(Fiddler(), taught(tmp_path, [[[0, 3]]], [[[0, 1]]], 4), 2, cpu_s=50.0)
    assert seen.lane("h2d") == [("demand 0.1", 3, 13)]


def test_popularity_by_hand(tmp_path):
    path = taught(tmp_path, STORE, ROWS, 3)
    with Trace(path) as trace:
        store = StoreSplit(trace, requests_of(trace, "store"))
        assert uses(store, "p").tolist() == [[2, 0, 2], [1, 3, 0]]
        assert uses(store, "p", prompts=False).tolist() == [[1, 0, 2], [1, 2, 0]]
        assert most_used(uses(store, "p")) == [(1, 1), (0, 0), (0, 2), (1, 0), (0, 1), (1, 2)]


def test_without_a_store_split_there_is_no_popularity(tmp_path):
    with pytest.raises(BadInput, match=r"split 'store' has no requests: fiddler places.*--train-frac 0\.7"):
        replay(Fiddler(), from_rows(tmp_path / "t", [[[0]]], 2), 2)


KNOBS = {
    "variant": ({}, "code"),  # 12 s against the CPU's 5: never copied; 4 tokens x 20 against 70: copied
    "cpu_cost_per_token": ({"variant": "code"}, 4.0),
    "copy_cost": ({"variant": "code"}, 20.0),
    "overlap": ({}, True),
}


def test_every_parameter_matters(tmp_path):
    # 13 tokens of a prompt want expert 1, which is not there: 7 x 13 > 70 > 4 x 13. Then one token wants 0 and 2.
    rows = [[[1, 0]]] * 10 + [[[1, 2]]] * 3 + [[[0, 2]]]
    path = taught(tmp_path, [[[0, 3]]], rows, 4, prompt=13)
    check_knobs(Fiddler, path, 2, KNOBS)
