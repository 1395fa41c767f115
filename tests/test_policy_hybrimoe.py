"""HybriMoE: the schedule, the scores that decide who leaves, and what is prefetched while the link is idle."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from cpu_bench import check_knobs, replay, resident, seeded, written
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.hybrimoe.cache import LayerCaches, MrsScores
from policies.hybrimoe.gains import Gains, Rates, Simulation, share_out
from policies.hybrimoe.policy import HybriMoe
from sim.policy.pieces import Piece

CODE = Rates(lambda _: 0.5, lambda n: 1.0 * n, 0.79, 0.418)  # `model_gpu_time`, `model_cpu_time`, `model_move_time`


class TestSchedule:
    def test_six_missing_experts_with_the_code_s_constants(self):
        # GPU: 0 at 0.418 + 0.5 = 0.918, 1 at 1.418; 2 would take until 1.918, the CPU 1.79 with 5: CPU. Then 2 until
        # 1.918 (CPU: 2.79), 3 until 2.418; 4 would take until 2.918: CPU, 2.79.
        shares = share_out([], range(6), dict.fromkeys(range(6), 1), CODE)
        assert (shares.gpu, shares.cpu) == ([0, 1, 2, 3], [5, 4])
        assert (shares.gpu_end, shares.cpu_end) == (pytest.approx(2.418), pytest.approx(2.79))

    def test_most_tokens_first_and_residents_before_all(self):
        tokens = {0: 1, 1: 5, 2: 2, 3: 9}
        shares = share_out([0, 1], [2, 3], tokens, Rates(lambda _: 1.0, lambda n: 100.0 * n, 0.0, 0.0))
        assert shares.gpu == [1, 0, 3, 2]

    def test_what_is_there_may_run_on_the_cpu(self):
        shares = share_out([0, 1], [], {0: 3, 1: 1}, Rates(lambda _: 4.0, lambda n: 1.5 * n, 0.0, 1.0))
        assert (shares.gpu, shares.cpu) == ([0], [1])  # GPU 4 <= CPU 1.5? no: the CPU takes 1; then 4 <= 1.5 + 4.5

    def test_a_tie_goes_to_the_gpu(self):
        assert share_out([], [0], {0: 1}, Rates(lambda _: 1.0, lambda _: 3.0, 0.0, 2.0)).gpu == [0]

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(st.tuples(st.booleans(), st.integers(1, 6)), min_size=1, max_size=8),
        st.tuples(*[st.integers(0, 9)] * 4),
    )
    def test_ends_are_those_of_running_it(self, experts, rates):
        """Whole numbers, so that sums are exact; run the two queues from scratch and compare."""
        gpu, cpu, first, move = rates
        tokens = dict(enumerate(n for _, n in experts))
        there = [e for e, (held, _) in enumerate(experts) if held]
        missing = [e for e, (held, _) in enumerate(experts) if not held]
        rule = Rates(lambda n: float(gpu + n), lambda n: float(cpu * n), float(first), float(move))
        shares = share_out(there, missing, tokens, rule)
        assert sorted(shares.gpu + shares.cpu) == sorted(tokens)
        order = sorted(there, key=lambda e: (-tokens[e], e)) + sorted(missing, key=lambda e: (-tokens[e], e))
        assert shares.gpu + shares.cpu[::-1] == order
        clock = arrival = 0.0
        for expert in shares.gpu:
            arrival += move if expert in missing else 0
            clock = max(clock, arrival if expert in missing else 0) + gpu + tokens[expert]
        assert shares.gpu_end == clock
        assert shares.cpu_end == sum(cpu * tokens[e] for e in shares.cpu) + (first if shares.cpu else 0)
        simulated = Simulation(rule)
        for _ in range(2):  # worked out, then remembered
            counts = [[tokens[e] for e in part] for part in (there, missing)]
            assert simulated.makespan(*counts) == max(shares.gpu_end, shares.cpu_end)


def seen(mrs, layer, scores, used):
    rows = np.zeros(mrs.all.shape)
    rows[layer] = scores
    mrs.observe(layer, mrs.weighed(rows)[layer], used)
    now = mrs.now(layer)
    mrs.end()
    assert now.tolist() == mrs.all[layer].tolist()


class TestScores:
    def test_by_hand(self):
        mrs = MrsScores(2, 4, alpha=0.5, top_p=2)
        seen(mrs, 0, [4.0, 3.0, 2.0, 1.0], [0])
        assert mrs.all[0].tolist() == [2.0, 1.5, 0.0, 0.0]
        seen(mrs, 0, [0.0, 1.0, 4.0, 3.0], [2])
        assert mrs.all[0].tolist() == [1.0, 0.75, 2.0, 1.5]
        assert mrs.all[1].tolist() == [0.0] * 4

    def test_alpha_weighs_the_newest(self):
        mrs = MrsScores(1, 2, alpha=0.25, top_p=2)
        seen(mrs, 0, [4.0, 0.0], [0])
        seen(mrs, 0, [0.0, 4.0], [1])
        assert mrs.all[0].tolist() == [0.75, 1.0]

    def test_of_several_tokens_the_code_takes_the_first_the_paper_the_mean(self, tmp_path):
        """Alpha 1/2 and p = 2 of 4. Together the two tokens of the prompt give 0 and 3 2048 each, 1 and 2 2047 each."""
        scores = [[2048, 1024, 1023, 0], [0, 1023, 1024, 2048]]
        path = scored(tmp_path / "t", [[[0]], [[3]]], 4, prompt=2, scores=scores, guesses=[[[0]]] * 2)
        held = {v: replay(HybriMoe(variant=v, lookahead=0), path, 6).outcome.setup.policy for v in ("paper", "code")}
        assert held["code"]._caches.mrs.all[0].tolist() == [1024, 512, 0, 0]
        assert held["paper"]._caches.mrs.all[0].tolist() == [512, 0, 0, 512]

    def test_ties_at_the_edge_of_the_top_go_to_the_lowest_id(self):
        mrs = MrsScores(1, 4, alpha=1.0, top_p=2)
        seen(mrs, 0, [1.0, 2.0, 1.0, 1.0], [1])
        assert mrs.all[0].tolist() == [1.0, 2.0, 0.0, 0.0]


def scored(path, rows, n_experts, prompt=1, guesses=None, scores=None):
    """A trace whose scores fall with the rank (or `scores[token]`, the same in all layers); `guesses[token][layer][d]`
    names the expert predicted `d` + 1 layers ahead."""
    experts = np.array(rows)
    n, n_layers, k = experts.shape
    shares = np.zeros((n, n_layers, n_experts))
    for rank in range(k):
        np.put_along_axis(shares, experts[:, :, rank : rank + 1], (2 << (k - rank)) / 4095, 2)
    np.put_along_axis(shares, experts[:, :, :1], 1 - shares.sum(2, keepdims=True) + (2 << k) / 4095, 2)
    if scores is not None:
        shares = np.repeat(np.array(scores)[:, None, :] / 4095, n_layers, 1)
    levels = {"scores": shares}
    for d in range(1, min(4, n_layers) if guesses is not None else 1):
        ahead = np.zeros((n, n_layers + (d == 1) - d, n_experts))
        for token, layers in enumerate(guesses):
            for layer in range(ahead.shape[1]):
                ahead[token, layer, layers[layer][d - 1]] = 1.0
        levels[f"next_scores_{d}"] = ahead
    return written(path, [(prompt, n - prompt + 1, "test")], rows, n_experts, **levels)


def whole(**settings):
    """Experts copied whole, so that decisions are as many as experts."""
    return HybriMoe(matrices=1, **settings)


def test_five_steps_of_the_code(tmp_path):
    # One expert of each of two layers (beside a buffer of four): expert 0. A token's CPU time is Mixtral's 0.2: what is
    # there runs on the GPU beside a CPU expert (0.5, 0.99); with nothing there, the first is moved (0.918 <= 0.99).
    rows = [[[0, 1], [2, 3]], [[0, 1], [0, 1]], [[2, 1], [1, 2]], [[2, 0], [0, 1]], [[0, 3], [3, 2]]]
    seen = replay(whole(variant="code", cpu_time_per_token=0.2), scored(tmp_path / "t", rows, 4), 6)
    assert seen.log == [
        ("fetch", 0, 1),
        ("gpu", 0, 0),
        ("gpu", 0, 1),
        ("evict", 0, 1),  # a prompt: all on the GPU, nothing stays
        ("fetch", 1, 2),
        ("fetch", 1, 3),
        ("gpu", 1, 2),
        ("evict", 1, 2),
        ("gpu", 1, 3),
        ("evict", 1, 3),
        ("cpu", 0, 1),
        ("gpu", 0, 0),
        ("cpu", 1, 1),
        ("gpu", 1, 0),
        ("cpu", 0, 1),
        ("evict", 0, 0),
        ("fetch", 0, 2),
        ("gpu", 0, 2),
        ("cpu", 1, 2),
        ("evict", 1, 0),
        ("fetch", 1, 1),
        ("gpu", 1, 1),
        ("cpu", 0, 0),
        ("gpu", 0, 2),
        ("cpu", 1, 0),
        ("gpu", 1, 1),
        ("cpu", 0, 3),
        ("evict", 0, 2),
        ("fetch", 0, 0),
        ("gpu", 0, 0),
        ("cpu", 1, 2),
        ("evict", 1, 1),
        ("fetch", 1, 3),
        ("gpu", 1, 3),
    ]
    assert resident(seen) == [(0, 0), (1, 3)]


def test_two_moved_experts_share_a_cache_of_one(tmp_path):
    # With the published constants both go to the GPU: the second waits until the first has run.
    rows = [[[0, 1], [0, 1]], [[2, 3], [0, 1]]]
    seen = replay(whole(variant="code"), scored(tmp_path / "t", rows, 4), 6)
    assert seen.log[8:15] == [
        ("evict", 0, 0),
        ("fetch", 0, 2),
        ("gpu", 0, 2),
        ("evict", 0, 2),
        ("fetch", 0, 3),
        ("gpu", 0, 3),
        ("gpu", 1, 0),
    ]


@pytest.mark.parametrize(("evict", "leaves"), [("mrs", 0), ("lru", 1)])
def test_who_leaves(evict, leaves, tmp_path):
    # Two of each layer's four: 0 and 1. The prompt chooses 0 (scores 0.5, 0.4), then 2 is chosen (1: 0.4, 2: 0.6):
    # S = 0.125, 0.3, 0.3, 0: expert 0 has the least of those there, though 1 was never used.
    rows = [[[0]] * 4, [[2]] * 4]
    path = scored(tmp_path / "t", rows, 4, scores=[[2048, 1638, 409, 0], [0, 1638, 2457, 0]])
    seen = replay(whole(variant="code", evict=evict), path, 12)
    assert [entry for entry in seen.log if entry[0] == "evict"] == [("evict", layer, leaves) for layer in range(4)]


def prompt_then(tmp_path, token, guesses):
    """Four layers of four experts, one of each there (drawn). A prompt of what is there, then a token.

    Experts are counted from the one that is there: `token[layer]` wants it (0) or the one after it (1);
    `guesses[layer][d]` is predicted for layer + d + 1. Returns the run and who was there.
    """
    policy = whole(lookahead=2)
    start = replay(policy, scored(tmp_path / "start", [[[0]] * 4], 4, guesses=[[[0, 0, 0]] * 4]), 8)
    there = [expert for _, expert in resident(start)]
    rows = [[[e] for e in there], [[(e + by) % 4] for e, by in zip(there, token, strict=True)]]
    named = [
        [(there[min(3, layer + d)] + by) % 4 for d, by in enumerate(ahead, 1)] for layer, ahead in enumerate(guesses)
    ]
    path = scored(tmp_path / "t", rows, 4, guesses=[named, named])
    return replay(whole(lookahead=2), path, 8), there


def test_prefetches_what_saves_most_one_at_a_time_while_the_link_is_idle(tmp_path):
    # Layer 0 wants what is there; of all later layers the one after it is guessed, rightly. Each would save 3 s (CPU 5,
    # GPU 2): the nearest first. The prompt takes 13 s (four layers of 1 + 2, head).
    seen, there = prompt_then(tmp_path, [0, 1, 1, 1], [[1, 1, 1]] * 4)
    one, three = (there[1] + 1) % 4, (there[3] + 1) % 4
    # Attention 13..14: layer 1's expert comes 14..24. Asked for at 17, it is on its way and runs 24..26. The host looks
    # at the link again when layer 2's gate has spoken, at 27: too late for layer 2, whose expert the CPU computes
    # (27..28 down, 28..33). Layer 3's comes 27..37, ahead of that result, which arrives 37..38; asked for at 39.
    copies = [row for row in seen.lane("h2d") if row[0].startswith("prefetch")]
    assert copies == [(f"prefetch 1.{one}", 14, 24), (f"prefetch 3.{three}", 27, 37)]
    assert seen.lane("cpu") == [(f"expert 2.{(there[2] + 1) % 4}", 28, 33)]
    assert seen.classes("decode") == {"hit": 2, "late": 1, "cpu": 1}
    assert seen.end_s == 39 + 2 + 1
    assert [entry[1:] for entry in seen.log if entry[0] == "evict"] == [(1, there[1]), (3, there[3])]


def foreseeing(held, n_gpus=1):
    """A policy of three layers of four experts whose caches hold `held`, by layer."""
    policy = whole(lookahead=2)
    view = SimpleNamespace(
        n_layers=3,
        n_experts=4,
        top_k=2,
        n_gpus=n_gpus,
        layer=0,
        arrived=lambda _: True,
        piece=lambda layer, e: Piece(layer, e, 0.0, 1.0, "bf16", e % n_gpus, 1, layer * 4 + e, serving=True),
    )
    policy._caches = LayerCaches(MrsScores(3, 4, 0.5, 2), view)
    for layer, experts in held.items():
        for expert in experts:
            policy._caches.add(layer * 4 + expert)
    policy._n_experts, policy._asked, policy._wanted = 4, {}, []
    simulated = Simulation(Rates(lambda n: 2.0, lambda n: 5.0 * n, 0.0, 10.0))
    policy._gains = Gains(policy._caches, simulated, 4, n_gpus)
    return policy, view


def test_the_largest_gain_goes_first_however_far_its_layer(monkeypatch):
    policy, view = foreseeing({})
    admitted = []
    monkeypatch.setattr(policy._gains, "of", lambda *_: [(-1.0, 1, 0, 4), (-5.0, 2, 3, 11), (-1.0, 2, 0, 8)])
    monkeypatch.setattr(policy, "_admit", lambda at, loser: admitted.append(at) or [])
    policy._experts = SimpleNamespace(of=lambda at: SimpleNamespace(prefetch=[]))
    policy._guessed = 0, []
    for _ in range(3):
        policy._pump(view)
    assert admitted == [11, 4, 8]


@given(
    guesses=st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2, unique=True), min_size=1, max_size=2),
    held=st.dictionaries(st.integers(0, 2), st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True)),
    move=st.sampled_from([0.5, 3.0, 10.0]),
)
def test_of_one_token_a_layers_gain_is_that_of_each_expert(guesses, held, move):
    policy, _ = foreseeing(held)
    simulated = Simulation(Rates(lambda n: 2.0, lambda n: 5.0 * n, 0.0, move))
    gains = Gains(policy._caches, simulated, 4, 1)
    assert gains.wanted(0, guesses) == [at for _, _, _, at in sorted(gains.of(0, guesses), reverse=True)]


@pytest.mark.parametrize("n_gpus", [1, 2])
def test_whom_a_prefetch_would_throw_out_counts(n_gpus):
    # A layer holds one expert, and it is guessed with another: to have that one instead gains nothing.
    for held, gains in ((0, []), (2, [(1, 5.0), (0, 5.0)])):
        policy, _ = foreseeing({1: [held]} if n_gpus == 1 else {1: [held, 1 if held else 3]}, n_gpus=n_gpus)
        found = [(expert, -gain) for gain, _, expert, _ in policy._gains.of(0, [[1, 0]])]
        assert found == (gains if n_gpus == 1 else [(1, 1.0)] if held == 0 else [(0, 1.0)])


def test_of_several_tokens_each_experts_count():
    # Two tokens guess 1, one guesses 3; the cache holds 2. As it is the CPU computes 3 in 5 s, and 1 comes: 12 s.
    # With 1 there the CPU has 3 alone, 5 s; with 3 there it has 1, 10 s.
    policy, _ = foreseeing({1: [2]})
    assert policy._gains.of(0, [{1: 2, 3: 1}]) == [(-7.0, 1, 1, 5), (-2.0, 1, 3, 7)]


def test_no_gain_no_prefetch(tmp_path):
    # What is there is guessed; nothing is missing. And where the CPU is as fast as the GPU, nothing is gained.
    seen, _ = prompt_then(tmp_path, [0, 1, 1, 1], [[0, 0, 0]] * 4)
    assert seen.prefetched() == {}
    assert [kind for kind, _, _ in seen.log[-3:]] == ["cpu"] * 3
    rows, guesses = [[[0]] * 4, [[1]] * 4], [[[1, 1, 1]] * 4] * 2
    path = scored(tmp_path / "even", rows, 4, guesses=guesses)
    assert replay(whole(lookahead=2), path, 8, cpu_s=2.0).prefetched() == {}
    assert replay(whole(lookahead=2), path, 8).prefetched() != {}


def test_the_code_prefetches_by_score(tmp_path):
    # Off as published. With one: layer 1's highest score is 3 after the prompt; it replaces 0.
    rows = [[[0, 3], [3, 2]], [[0, 3], [3, 2]], [[0, 3], [3, 2]]]
    path = scored(tmp_path / "t", rows, 4)
    assert replay(whole(variant="code"), path, 6).prefetched() == {}
    seen = replay(whole(variant="code", prefetch_size=1), path, 6)
    assert ("prefetch", 1, 3) in seen.log
    assert seen.log[seen.log.index(("prefetch", 1, 3)) - 1] == ("evict", 1, 0)


@pytest.mark.parametrize("variant", ["paper", "code"])
def test_a_gpu_has_places_for_the_layers_that_it_has_experts_of(variant, tmp_path):
    """Three layers of two experts on three GPUs: each has experts of two layers, and a place in both of them."""
    rows = [[[0, 1]] * 3] * 4
    path = scored(tmp_path / "t", rows, 2, guesses=[[[1, 1, 1]] * 3] * 4)
    seen = replay(whole(variant=variant, lookahead=2, prefetch_size=1), path, 2, gpus=3, cpu_s=90.0)
    assert seen.outcome.setup.policy._sizes == [[1, 1, 1]] * 3
    assert seen.log.count(("gpu", 2, 1)) == 4
    assert len(resident(seen)) == 6
    assert seen.result.h2d_bytes == 0


def test_matrices_are_copied_and_computed_one_by_one(tmp_path):
    # A missing expert of 160 bytes comes as 80 and 80: 5 s each; its halves run as they come, 1 s each (one kernel).
    path = scored(tmp_path / "t", [[[0]] * 4, [[2]] * 4], 4)
    seen = replay(HybriMoe(variant="code", matrices=2), path, 12)
    assert seen.log[4:8] == [("evict", 0, 1)] * 2 + [("fetch", 0, 2)] * 2
    # The prompt takes 13 s (four layers of 1 + 2 x 1, head); attention 13..14.
    assert seen.lane("h2d")[:2] == [("demand 0.2", 14, 19), ("demand 0.2", 19, 24)]
    halves = [row[1:] for row in seen.lane("gpu") if row[0] == "expert 0.2"]
    assert halves == [(19, 20), (24, 25)]


def test_a_cpu_result_waits_for_one_matrix_at_most(tmp_path):
    path = scored(tmp_path / "t", [[[0]] * 4] + [[[1]] * 4] * 3, 4, guesses=[[[2, 2, 2]] * 4] * 4)  # always wrong
    longest = {}
    for n in (1, 4, 10):
        seen = replay(HybriMoe(lookahead=2, matrices=n), path, 8)
        done = [end_s for _, _, end_s in seen.lane("cpu")]
        up = [start_s for what, start_s, _ in seen.lane("h2d") if what.startswith("activations")]
        longest[n] = max(start_s - end_s for start_s, end_s in zip(up, done, strict=True))
    # A prefetch of 10 s starts when the CPU is asked, whose result is there 6 s later: 4 s before the prefetch ends; of
    # matrices of 2.5 s the third is then in its way, of those of 1 s none.
    assert longest == {1: 4, 4: 1.5, 10: 0}


KNOBS = {
    "variant": ({}, "code"),
    "cache_size": ({}, 1),
    "alpha": ({"variant": "code"}, 0.05),
    "top_p": ({"variant": "code"}, 1),
    "evict": ({"variant": "code"}, "lru"),
    "lookahead": ({}, 1),
    "prefetch_size": ({"variant": "code"}, 2),
    "matrices": ({}, 1),
    "initial_seed": ({}, 1),
    "gpu_time": ({"variant": "code"}, 3.0),
    "cpu_time_per_token": ({"variant": "code"}, 0.1),
    "cpu_first_time": ({"variant": "code"}, 0.0),
    "move_time": ({"variant": "code"}, 3.0),
}


def test_every_parameter_matters(tmp_path):
    with seeded(tmp_path, n_layers=4, n_experts=8, top_k=2, outputs=20) as trace:
        check_knobs(HybriMoe, trace.path, 24, KNOBS)
