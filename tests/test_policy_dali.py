"""DALI: the greedy division of a layer, its cache by workload, and what is copied ahead."""

from __future__ import annotations

from itertools import product
from random import Random as Draws

import pytest
from cpu_bench import check_knobs, replay, resident, written
from easy_numbers import run
from tiny_traces import tiny_trace

from policies.dali import Costs, Dali, Shares, Warc, divide

# -- the division ------------------------------------------------------------------------------------------------------


def makespan(costs, shares):
    return max(sum(costs[at].gpu_s for at in shares.gpu), sum(costs[at].cpu_s for at in shares.cpu))


def optimum(costs):
    found = []
    for way in product(("gpu", "cpu"), repeat=len(costs)):
        sides = [[at for at, side in enumerate(way) if side == one] for one in ("gpu", "cpu")]
        found.append(makespan(costs, Shares(*sides)))
    return min(found)


def test_divided_by_hand():
    # One is on the GPU (2 s against 6), three would have to be copied (12 s against 5, 5, 6).
    costs = [Costs(12, 5), Costs(2, 6), Costs(12, 5), Costs(12, 6)]
    # In order of the difference: 1 (+4) on the GPU, 2 against 6; 3 (-6): 14 or 6, the CPU; 0 (-7): 14 or 11, the CPU;
    # 2 (-7): 14 or 16: the GPU.
    assert divide(costs, "descending") == ([1, 2], [3, 0])
    assert makespan(costs, divide(costs, "descending")) == 14 == optimum(costs)
    # By the largest difference: 0 and 2 on the CPU (5, 10); 3: 12 or 16, the GPU; 1: 14 or 16, the GPU.
    assert divide(costs, "absolute") == ([3, 1], [0, 2])
    # Both ways the same: the side that ends earlier, then the GPU.
    assert divide([Costs(3, 3)], "descending") == ([0], [])
    assert divide([Costs(1, 5), Costs(4, 5)], "descending") == ([0, 1], [])


@pytest.mark.parametrize("order", ["descending", "absolute"])
def test_against_every_division(order):
    """Layers of up to 9 experts with an RTX 3090's times: the notes give the greedy division 92 % of the optimum."""
    draw, shares = Draws(7), []
    for _ in range(250):
        gpu_s, cpu_s, copy_s = draw.choice([(0.41, 5.5, 14.4), (0.012, 0.15, 0.39)])  # Mixtral, Qwen3-30B; ms
        n_tokens = [draw.randint(1, 32) for _ in range(draw.randint(2, 9))]
        costs = [Costs(gpu_s + copy_s * (draw.random() < 0.6), cpu_s * max(1.0, n / 16)) for n in n_tokens]
        found = divide(costs, order)
        assert sorted([*found.gpu, *found.cpu]) == list(range(len(costs)))
        shares.append(optimum(costs) / makespan(costs, found))
    assert max(shares) <= 1 + 1e-9
    assert min(shares) > 0.5
    assert 0.92 < sum(shares) / len(shares) < 1.0


# -- the cache ---------------------------------------------------------------------------------------------------------


def test_the_cache_by_hand():
    warc = Warc([0, 1], [2, 3, 4], w_size=2, u_size=1)
    assert warc.step({0: 1, 3: 1}) == []
    assert warc.step({3: 1, 4: 2}) == [(1, 3)]  # 3 and 4 have 2 each: the lower id; 1 has none, 0 has 1
    assert warc.residents == {0, 3}
    assert warc.step({1: 5}) == []  # scores were zeroed
    warc.forget()
    assert warc.step({2: 1}) == []
    assert warc.step({0: 1, 3: 1}) == [(0, 2)]  # 1 has nothing again: 2 comes; of 0 and 3 the lower id leaves
    both = Warc([0, 1], [2, 3], w_size=1, u_size=2)
    assert both.step({0: 9, 1: 8, 2: 1}) == [(1, 2)]  # whoever has a token comes, however busy who leaves
    assert both.step({1: 2, 3: 1}) == [(0, 1), (2, 3)]
    assert Warc([0], [1], w_size=1, u_size=0).step({1: 3}) == []


# -- timelines ---------------------------------------------------------------------------------------------------------


def test_a_layer_by_hand(tmp_path):
    """One layer of six experts, three per token, room for four: two stay (0 and 1), two pass."""
    rows = [[[0, 1, 2]], [[0, 3, 4]], [[3, 4, 5]]]
    seen = run(Dali(predictor="surrogate:1", w_size=64), tmp_path, rows, room=4, n_experts=6)
    # A copy and the GPU take 12 s, the CPU 5 s: 2 on the CPU beside 0 and 1; then 3 and 4 (10 s against 14). Of the
    # last three two run on the CPU, and the third is copied: 12 against 15.
    assert seen.log == [
        ("cpu", 0, 2),
        ("gpu", 0, 0),
        ("gpu", 0, 1),
        ("cpu", 0, 3),
        ("cpu", 0, 4),
        ("gpu", 0, 0),
        ("cpu", 0, 3),
        ("cpu", 0, 4),
        ("fetch", 0, 5),
        ("gpu", 0, 5),
        ("evict", 0, 5),
    ]
    # The last token: its copy begins when attention is done, the expert 10 s later; the CPU needs 1 + 5 + 5 s,
    # and its second result comes up behind the first, which waits for the copy: both are done after 12 s. The head.
    start_s = next(start_s for what, start_s, _ in seen.lane("h2d") if what == "demand 0.5")
    assert seen.end_s == start_s + 12 + 1
    assert resident(seen) == [(0, 0), (0, 1)]


def test_who_passes_into_the_cache_is_not_copied_again(tmp_path):
    # Each step exchanges: the first token asks for 2, which the CPU (50 s) would be slow for, so that it is copied, and
    # takes the place of 0, which has no tokens; 1, asked for next, is there.
    seen = run(Dali(predictor="surrogate:1", w_size=1), tmp_path, [[[2]], [[1]]], room=4, n_experts=4, cpu_s=50.0)
    assert seen.log == [("gpu", 0, 2), ("gpu", 0, 1)]  # room for all four: nothing is exchanged
    seen = run(Dali(predictor="surrogate:1", w_size=1), tmp_path, [[[2]], [[1]]], room=4, n_experts=5, cpu_s=50.0)
    assert seen.log == [("fetch", 0, 2), ("gpu", 0, 2), ("evict", 0, 0), ("gpu", 0, 1)]
    assert resident(seen) == [(0, 1), (0, 2)]
    # On the CPU, an expert comes into the cache by a copy of its own.
    seen = run(Dali(predictor="surrogate:1", w_size=1), tmp_path, [[[2]]], room=4, n_experts=5)
    assert seen.log == [("cpu", 0, 2), ("evict", 0, 0), ("prefetch", 0, 2)]
    assert seen.result.policy_stats["exchanged"] == 1


def test_the_busiest_of_the_next_layer_is_copied_ahead(tmp_path):
    """Three tokens of a batch of requests: two name 3 for layer 1, one names 2; 0 and 1 are there."""
    rows, following = [], []
    for named in (3, 3, 2):
        for _ in range(2):  # a prompt of one token, and the token
            rows.append([[0], [0]])
            following.append([[float(expert == name) for expert in range(5)] for name in (named, 0)])
    path = written(tmp_path / "t.safetensors", [(1, 2, "test")] * 3, rows, 5, next_scores_1=following)
    seen = replay(Dali(w_size=64), path, 6, batch=3)
    assert [entry[1:] for entry in seen.log if entry[0] == "prefetch"] == [(1, 3)]
    seen = replay(Dali(w_size=64, prefetch_size=2), path, 8, batch=3)
    assert [entry[1:] for entry in seen.log if entry[0] == "prefetch"] == [(1, 3), (1, 2)]


def test_scores_begin_anew_with_a_sequence(tmp_path):
    # Two requests of one prompt and one token each; exchanges every second step of a sequence, so at each token.
    rows = [[[3]], [[3]]] * 2
    seen = run(Dali(predictor="surrogate:1", w_size=3), tmp_path, rows, room=4, n_experts=5, lengths=[(1, 2), (1, 2)])
    assert seen.result.policy_stats["exchanged"] == 0
    seen = run(Dali(predictor="surrogate:1", w_size=3), tmp_path, rows, room=4, n_experts=5)
    assert seen.result.policy_stats["exchanged"] == 1


KNOBS = {
    "w_size": ({}, 2),
    "u_size": ({}, 3),
    "prefetch_size": ({}, 0),
    "first": ({}, "absolute"),
    "predictor": ({}, "surrogate:0.5"),
    "seed": ({"predictor": "surrogate:0.5"}, 1),
}


def test_every_parameter_matters(tmp_path):
    levels = {"scores", "next_scores_1"}
    path = tiny_trace(tmp_path / "knobs.safetensors", 4, 8, 4, n_requests=6, prompt=3, outputs=9, levels=levels)
    check_knobs(Dali, path, 16, KNOBS, batch=2)
