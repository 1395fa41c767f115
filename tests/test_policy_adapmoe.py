"""AdapMoE: the published cache sizes, gating, matrices and the guess by hand, and every parameter.

Numbers of `easy_numbers`: copying an expert takes 10 s, a third of one 10/3 s; each computation launched 2 s.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from easy_numbers import execute_easy, setup
from tiny_traces import tiny_header, tiny_trace

from policies.adapmoe import (
    ACCURACY,
    SENSITIVITY,
    SINGLE,
    AdapMoe,
    cache_sizes,
    equal_sizes,
    expected_loads,
)
from sim.policy.pieces import Piece
from sim.workload.learn_split import StoreSplit, requests_of
from traces.format.reader import Trace
from traces.format.requests import Request
from traces.format.writer import write_trace

SIZES = {  # card B3: from the code's program, by (experts to cache, adaptive gating)
    (64, False): [8, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 2, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 2, 2, 2, 2],
    (64, True): [8, 4, 3, 3, 3, 3, 3, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    (128, False): [8, 5, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 3, 4, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4, 3, 3, 4, 4, 4, 4],
    (128, True): [8, 7, 6, 6, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 4, 4, 4, 3, 3, 3, 2, 2, 1, 1, 1, 1, 1, 1],
}
NEVER = [Fraction(0)] * 32


@pytest.mark.parametrize(("total", "gating"), SIZES)
def test_published_cache_sizes(total, gating):
    single = SINGLE if gating else NEVER
    assert cache_sizes(total, [8] * 32, 2, ACCURACY, single) == SIZES[total, gating]


def test_published_tables():
    assert len(ACCURACY) == len(SINGLE) == len(SENSITIVITY) == 32
    assert float(sum(SINGLE) / 32) == pytest.approx(0.248, abs=0.001)  # "25 % fewer experts"
    thresholds = [(0.005 / s) ** 0.5 for s in SENSITIVITY]
    assert thresholds[0] == pytest.approx(0.010, abs=0.001)
    assert max(thresholds) == pytest.approx(0.49, abs=0.01)


@pytest.mark.parametrize("t", range(9))
def test_expected_loads_are_the_code_s_formula(t):
    a, r = Fraction(7, 10), Fraction(1, 4)
    both, one = Fraction((8 - t) * (7 - t), 56), Fraction(2 * (8 - t) * t, 56)
    several = 2 * both * (1 - a) + both * a + one * (1 - a)
    assert expected_loads(t, 8, 2, a, r) == r * (1 - Fraction(t, 8)) * (1 - a) + (1 - r) * several


def test_the_program_finds_the_least():
    for seed in range(6):
        draw = np.random.default_rng(seed)
        a, r = ([Fraction(int(x), 100) for x in draw.integers(0, 100, 3)] for _ in range(2))
        n, total = [4, 5, 4], int(draw.integers(3, 13))
        cost = {
            v: sum(expected_loads(t, m, 2, x, y) for t, m, x, y in zip(v, n, a, r, strict=True))
            for v in itertools.product(range(1, 5), range(1, 6), range(1, 5))
            if sum(v) == total
        }
        assert float(cost[tuple(cache_sizes(total, n, 2, a, r))]) == pytest.approx(float(min(cost.values())))
    # Of equally good sizes a layer takes the smaller one: the last layer is asked first.
    assert cache_sizes(3, [8, 8], 2, [Fraction(1, 2)] * 2, [Fraction(0)] * 2) == [2, 1]
    assert equal_sizes(8, [4, 2, 4]) == [3, 2, 3]


def trace_of(path, rows, guesses, weights=None, n_experts=4):
    """Token t at layer l predicts `guesses[t][l]`, best first, for layer l + 1; `weights[t][l]` of the chosen ones."""
    experts = np.array(rows)
    n, n_layers, k = experts.shape
    scores = np.zeros((n, n_layers, n_experts))
    for token, layers in enumerate(guesses):
        for layer, order in enumerate(layers):
            for place, expert in enumerate(order):
                scores[token, layer, expert] = (2048 >> place) / 4095
            scores[token, layer, order[0]] += 1 - scores[token, layer].sum()
    used = np.full(experts.shape, 1.0 / k) if weights is None else np.array(weights)
    header = tiny_header(n_layers, n_experts, k)
    requests = [Request(0, 0, 1, n, "", None, "test")]
    return write_trace(path, header, requests, None, experts=experts, weights=used, next_scores_1=scores)


# Two layers of 4 experts, K = 1, room for 2 x 2 + 2 buffers: cached 2 and 3 of each layer, in this order of use.
STEPS = [[[3], [2]], [[3], [0]], [[0], [3]], [[2], [1]], [[2], [3]]]
GUESSES = [[[0], [0]], [[0], [0]], [[1], [0]], [[3], [0]], [[2], [0]]]


def swap(layer, expert, victim):
    return [("fetch", layer, expert)] * 3 + [("evict", layer, victim)]


def test_five_steps(tmp_path):
    policy = AdapMoe(buffers=2, gating=False, sizes="equal")
    with Trace(trace_of(tmp_path / "t", STEPS, GUESSES)) as trace:
        seen = execute_easy(setup(policy, trace, room=6))
    assert seen.log == [
        # The prompt hits 3 and 2, and guesses nothing. Order of use: 2 3 | 3 2.
        ("gpu", 0, 3),
        ("gpu", 1, 2),
        # 1: guesses 0 for layer 1. Right: it takes the place of 3, the least recently used there: 2 0.
        ("prefetch", 1, 0),
        ("gpu", 0, 3),
        ("evict", 1, 3),
        ("gpu", 1, 0),
        # 2: layer 0 loads 0 for 2, matrix by matrix: 3 0. Guesses 1. Wrong: 3 is loaded for 2: 0 3; 1 is let go next.
        *swap(0, 0, 2),
        ("prefetch", 1, 1),
        ("gpu", 0, 0),
        *swap(1, 3, 2),
        ("gpu", 1, 3),
        # 3: 1's buffer is free again; 2 for 3: 0 2. Guess 3 is there: nothing. 1 for 0, whose copy was whole: 3 1.
        ("evict", 1, 1),
        *swap(0, 2, 3),
        ("gpu", 0, 2),
        *swap(1, 1, 0),
        ("gpu", 1, 1),
        # 4: guesses 2; wrong; 3 is there, in three matrices.
        ("prefetch", 1, 2),
        ("gpu", 0, 2),
        ("gpu", 1, 3),
    ]
    # Token 2 starts at 27: attention 27..28, w1 of 0 28..31.33, computed 2 s as each of the three arrives.
    lane = [row for row in seen.lane("gpu") if row[0] == "expert 0.0"]
    copies = [row for row in seen.lane("h2d") if row[0] == "demand 0.0"]
    assert [row[2] - row[1] for row in copies] == [53 / 16, 54 / 16, 53 / 16]  # 53 and 54 of 160 bytes
    assert [row[1] for row in lane] == pytest.approx([row[2] for row in copies])
    # The wrong guess (10 s, after those copies) must end before layer 1 computes, which 3's own copy (10 s) then does.
    guess = next(row for row in seen.lane("h2d") if row[0] == "prefetch 1.1")
    wanted = next(row for row in seen.lane("h2d") if row[0] == "demand 1.3")
    assert guess[1] == pytest.approx(copies[-1][2])
    assert wanted[1] == pytest.approx(guess[2])
    last = seen.lane("gpu")[-2]  # token 4: 3 of layer 1 is there, and waits for the wrong guess all the same
    late = next(row for row in seen.lane("h2d") if row[0] == "prefetch 1.2")
    assert [row[1] for row in seen.lane("gpu") if row[0] == "expert 1.3"][-3] == pytest.approx(late[2])
    assert last[0] == "expert 1.3"
    stats = policy.stats()
    assert stats["right_frac"] == pytest.approx(1 / 3)
    assert stats["lru_hit_rate"] == pytest.approx(5 / 10)  # a right guess is a miss, as the code counts


def mixtral(made):
    """The same run, of a model that the published tables belong to."""
    return replace(made, model=msgspec.structs.replace(made.model, id="mixtral-8x7b"))


@pytest.mark.parametrize(("variant", "guess"), [("code", []), ("paper", [(2, 3)])])
def test_the_paper_looks_further_where_all_that_is_likely_is_there(variant, guess):
    """Of layer 1 expert 0 is likeliest, and there; of layer 2 expert 3, and not there."""
    policy = AdapMoe(variant=variant, gating=False)
    policy._groups = [[SimpleNamespace(gpu=0, main={0: None})] for _ in range(4)]
    policy._guesses, policy._pieces, policy._n_guesses, policy._guesses_now = {}, {}, 0, True
    best = {1: [1.0, 0, 0, 0], 2: [0, 0, 0, 1.0], 3: [0, 1.0, 0, 0]}
    gate = SimpleNamespace(layer=0, phase="decode", next_scores=lambda distance: np.array([best[distance]]))
    piece = {(layer, e): Piece(layer, e, 0.0, 1.0, "bf16", 0, 1, e) for layer in range(4) for e in range(4)}
    view = SimpleNamespace(n_layers=4, top_k=1, expert_bytes=1, free_bytes=lambda gpu: 9, piece=lambda *at: piece[at])
    asked = list(policy._guess(gate, view))
    assert [(d.piece.layer, d.piece.expert) for d in asked] == guess
    assert list(policy._guesses) == [layer for layer, _ in guess]


def test_gating_follows_the_sensitivities(tmp_path):
    """A second choice of weight 0.012 is kept where the threshold is 0.010 (layer 0), dropped at 0.017 (layer 1)."""
    rows = [[[0, 1]] * 32] * 3
    weights = [[[0.988, 0.012]] * 32] * 3
    with Trace(trace_of(tmp_path / "t", rows, [[[2, 3]] * 32] * 3, weights, 8)) as trace:
        seen = execute_easy(mixtral(setup(AdapMoe(buffers=4), trace, room=4 + 64)))
        other = execute_easy(setup(AdapMoe(buffers=4), trace, room=4 + 64))
    ran = [(layer, expert) for kind, layer, expert in seen.log if kind == "gpu"]
    assert ran.count((0, 1)) == 3
    assert ran.count((1, 1)) == ran.count((31, 1)) == 1  # by the prompt alone
    assert seen.result.dropped_rate == pytest.approx(31 / 64)
    assert seen.result.gate_mass_kept == pytest.approx(1 - 62 * 0.012 / 96, abs=1e-3)
    assert seen.engine.policy.stats()["single_expert_frac"] == pytest.approx(31 / 32)
    assert other.result.dropped_rate == 0.0
    assert other.engine.policy.stats()["gating"] == 0.0
    assert [len(g[0].main) for g in seen.engine.policy._groups] == SIZES[64, True]


@pytest.mark.parametrize(("threshold", "alone"), [(0.25, 0.0), (0.2501, 1.0)])
def test_a_weight_at_the_threshold_stays(threshold, alone, tmp_path):
    rows, guesses = [[[0, 1], [2, 3]]] * 2, [[[0], [0]]] * 2
    with Trace(trace_of(tmp_path / "t", rows, guesses, [[[0.75, 0.25]] * 2] * 2)) as trace:
        seen = execute_easy(setup(AdapMoe(score_threshold=threshold), trace, room=10))
    assert seen.result.policy_stats["single_expert_frac"] == alone


def test_gating_is_for_one_token_at_a_time(tmp_path):
    path = tiny_trace(tmp_path / "t", 3, 4, 2, n_requests=4, levels={"weights", "next_scores_1"})
    with Trace(path) as trace:
        one = execute_easy(setup(AdapMoe(buffers=2, score_threshold=1.0), trace, 9))
        two = execute_easy(setup(AdapMoe(buffers=2, score_threshold=1.0), trace, 9, batch=2))
    assert one.result.dropped_rate == 0.5
    assert two.result.dropped_rate == 0.0


def test_accuracy_is_counted_on_the_store_split(tmp_path):
    """One store request, two generated tokens: layer 1 is guessed right once in two; layer 0 never, by the code."""
    rows = [[[0], [1]], [[0], [1]], [[0], [1]], [[2], [3]]]
    guesses = [[[0], [0]], [[1], [0]], [[2], [0]], [[0], [0]]]
    path = trace_of(tmp_path / "t", rows, guesses)
    with Trace(path) as trace:
        for variant, first in (("code", 0), ("paper", 1)):
            policy = AdapMoe(buffers=2, variant=variant)
            policy._published, policy._thresholds, policy._shape, policy._n_learnt = False, None, (2, 4, 1), 0
            policy.learn(StoreSplit(trace, requests_of(trace, "test")))
            # Generated rows 1 and 2, 3: guesses for layer 1: 1 right, 2 wrong, 0 wrong; of rows 2, 3 layer 0 was
            # guessed 0.
            assert policy._accuracy[1] == Fraction(1, 3)
            assert policy._accuracy[0] == Fraction(first, 2)


@pytest.mark.parametrize("world", [{}, {"gpus": 2}, {"batch": 3}, {"gpus": 2, "batch": 3}])
@pytest.mark.parametrize("variant", ["code", "paper"])
def test_two_buffers_suffice(tmp_path, world, variant):
    levels = {"weights", "next_scores_1", "next_scores_2", "next_scores_3"}
    with Trace(tiny_trace(tmp_path / "t", 5, 6, 3, n_requests=4, levels=levels)) as trace:
        for room in range(7, 20, 3):
            seen = execute_easy(setup(AdapMoe(buffers=2, variant=variant), trace, room, **world))
            assert not seen.engine.pending.experts()


KNOBS = {
    "variant": "paper",
    "buffers": 2,
    "gating": False,
    "tolerance": 0.5,
    "score_threshold": 0.5,
    "tables": "store",
    "sizes": "equal",
    "prefetch": False,
    "chunks": 1,
}


@pytest.mark.parametrize("knob", KNOBS)
def test_every_parameter_changes_decisions(tmp_path, knob):
    levels = {"weights", "next_scores_1", "next_scores_2", "next_scores_3"}
    n_layers, rest = (32, 8) if knob in ("gating", "tolerance", "tables", "sizes") else (5, 6)
    with Trace(tiny_trace(tmp_path / "t", n_layers, rest, 2, n_requests=4, outputs=6, levels=levels)) as trace:
        logs = []
        for settings in ({}, {knob: KNOBS[knob]}):
            made = setup(AdapMoe(**settings), trace, room=64 + 6 if n_layers == 32 else 18)
            logs.append(execute_easy(mixtral(made) if n_layers == 32 else made).log)
    assert logs[0] != logs[1]
