"""HOBBIT: importance classes, two caches under one score, and gates stacked until one misses something."""

from __future__ import annotations

import numpy as np
import pytest
from cpu_bench import check_knobs, replay, resident, seeded, written
from easy_numbers import execute_easy, setup

from policies.hobbit import HIGH, LOW, SKIP, Hobbit, Records, TwoCaches, Weights, classes_of, classes_of_token, needed
from sim.policy.pieces import Piece


class TestClasses:
    @pytest.mark.parametrize(
        ("weights", "classes"),
        [
            ([1, 1], [HIGH, HIGH]),
            ([3, 2], [HIGH, HIGH]),  # the first's share is T1 itself
            ([62, 38], [HIGH, LOW]),
            ([9, 1], [HIGH, LOW]),
            ([91, 9], [HIGH, SKIP]),
            ([4, 3, 2, 1], [HIGH, HIGH, LOW, LOW]),
            ([8, 1, 1], [HIGH, LOW, LOW]),
            ([19, 1, 0], [HIGH, SKIP, SKIP]),
            ([0, 0], [HIGH, HIGH]),
        ],
    )
    def test_by_the_weight_before(self, weights, classes):
        one = np.array([weights], dtype=np.float64)
        assert classes_of_token(weights, 0.6, 0.9) == classes
        assert classes_of(one, 0.6, 0.9).tolist() == [classes]
        assert classes_of(np.repeat(one, 3, axis=0), 0.6, 0.9).tolist() == [classes] * 3

    def test_one_token_and_many_agree(self):
        weights = np.random.default_rng(1).random((200, 6))
        rows = [classes_of_token(row, 0.6, 0.9) for row in weights.tolist()]
        assert classes_of(weights, 0.6, 0.9).tolist() == rows

    def test_the_most_important_need_of_any_token_counts(self):
        ids, classes = np.array([[0, 1], [2, 0], [1, 2]]), np.array([[HIGH, SKIP], [HIGH, LOW], [LOW, SKIP]])
        assert needed(ids, classes) == {0: HIGH, 1: LOW, 2: HIGH}


class TestScore:
    def test_by_hand(self):
        records = Records(4, 2, Weights(0.4, 0.3, 0.2, 0.1), ahead=False)
        for time, level in ((2, HIGH), (5, LOW)):
            records.time = time
            records.use(1, 0, level)
        records.time = 10
        # R = 5, F = 2, H = 1 of T = 10; layer 1 seen from layer 3: (3 - 1) mod 4 of 4; ahead: (1 - 3) mod 4.
        assert records.score(1, 0, 3) == pytest.approx(0.4 * 0.5 + 0.3 * 0.2 + 0.2 * 0.1 + 0.1 * 0.5)
        assert records.score(3, 1, 0) == pytest.approx(0.1 * (1 - 1 / 4))
        ahead = Records(4, 2, Weights(0.0, 0.0, 0.0, 1.0), ahead=True)
        assert [ahead.score(layer, 0, 1) for layer in (1, 2, 3, 0)] == [1, 0.75, 0.5, 0.25]
        records.reset()
        assert records.score(1, 0, 1) == pytest.approx(0.1)

    def test_who_leaves(self):
        records = Records(2, 4, Weights(1.0, 0.0, 0.0, 0.0), ahead=False)
        cache = TwoCaches((3, 0), records)
        pieces = [Piece(0, e, 0.0, 1.0, "bf16", 0, 1, e, serving=True) for e in (2, 1, 3)]
        for piece in pieces:
            assert not cache.full(HIGH)
            cache.add(HIGH, piece)
        assert cache.full(HIGH)
        assert cache.full(LOW)
        records.time = 1
        records.use(0, 3, HIGH)

        def everyone(_):
            return True

        assert cache.loser(HIGH, 0, (), everyone) is pieces[1]  # 1 and 2 were never used: the lower id
        assert cache.loser(HIGH, 0, {pieces[1]}, everyone) is pieces[0]
        assert cache.loser(HIGH, 0, (), lambda piece: piece is pieces[2]) is pieces[2]
        assert cache.loser(HIGH, 0, (), lambda piece: False) is None
        assert cache.loser(LOW, 0, (), everyone) is None


def weighed(tmp_path, rows, weights, n_experts, lengths=None, **levels):
    """`weights[token]`: of its experts, the same in every layer."""
    n, n_layers, k = np.array(rows).shape
    arrays = np.broadcast_to(np.array(weights, dtype=float)[:, None, :], (n, n_layers, k))
    requests = [(*length, "test") for length in lengths or [(1, n)]]
    return written(tmp_path / "t", requests, rows, n_experts, weights=arrays, **levels)


# One layer of four. Room for three: 120 bytes for three in int4 (40 each), the rest for two in bf16 (160 each).
ROWS = [[[0, 1]], [[0, 2]], [[3, 2]], [[0, 1]], [[1, 0]]]
WEIGHTS = [[0.5, 0.5], [0.75, 0.25], [0.9375, 0.0625], [0.9375, 0.0625], [0.75, 0.25]]


def test_five_steps(tmp_path):
    path = weighed(tmp_path, ROWS, WEIGHTS, 4)
    seen = replay(Hobbit(lookahead=0, low_frac=0.25), path, 3)
    assert seen.log == [
        ("fetch", 0, 0),
        ("fetch", 0, 1),
        ("gpu", 0, 0),
        ("gpu", 0, 1),  # both needed high
        ("fetch", 0, 2),
        ("gpu", 0, 0),
        ("gpu", 0, 2),  # 2 comes in int4
        ("evict", 0, 1),
        ("fetch", 0, 3),
        ("gpu", 0, 2),
        ("gpu", 0, 3),  # 2 would be skipped, but is there
        ("gpu", 0, 0),  # 1 is skipped
        ("evict", 0, 3),
        ("fetch", 0, 1),
        ("gpu", 0, 0),
        ("gpu", 0, 1),  # int4 would do for 0, but bf16 is there
    ]
    # 160 bytes in 10 s, 40 in 2.5 s. A token: attention 1, loads, 2 s for each expert, head 1.
    assert [end_s - start_s for _, start_s, end_s in seen.lane("h2d")] == [10, 10, 2.5, 10, 10]
    assert seen.end_s == 26 + 8.5 + 16 + 4 + 16
    assert seen.classes("decode") == {"hit": 4, "miss": 3, "dropped": 1}
    assert seen.result.activations_lowered_frac == 2 / 9
    assert seen.result.activations_changed_frac == 1 / 10
    # Of seven experts run for generated tokens two were missing in bf16, and one in int4, a quarter of the bytes.
    assert seen.result.policy_stats == {
        "needed_high_frac": 0.5,
        "needed_low_frac": 0.25,
        "needed_skip_frac": 0.25,
        "miss_penalty": 2.25 / 7,
    }


def test_the_main_thread_waits_for_all_loads_of_the_layer(tmp_path):
    seen = replay(Hobbit(lookahead=0), weighed(tmp_path, ROWS[:1], WEIGHTS[:1], 4), 3)
    assert seen.lane("h2d") == [("demand 0.0", 1, 11), ("demand 0.1", 11, 21)]
    assert seen.lane("gpu")[1:3] == [("expert 0.0", 21, 23), ("expert 0.1", 23, 25)]


def test_what_is_skipped(tmp_path):
    path = weighed(tmp_path, ROWS, WEIGHTS, 4)
    always = replay(Hobbit(lookahead=0, low_frac=0.25, skip="always"), path, 3)
    assert always.classes("decode") == {"hit": 3, "miss": 3, "dropped": 2}
    never = replay(Hobbit(lookahead=0, low_frac=0.25, skip="never"), path, 3)
    assert never.classes("decode") == {"hit": 4, "miss": 4}


def test_more_than_room_is_served_in_turns(tmp_path):
    # A prompt that needs all four in bf16, room for two of them: two come, run, and make room.
    path = weighed(tmp_path, [[[0, 1]], [[2, 3]]], [[0.5, 0.5]] * 2, 4, [(2, 1)])
    seen = replay(Hobbit(lookahead=0, low_frac=0.25), path, 3)
    assert seen.log == [
        ("fetch", 0, 0),
        ("fetch", 0, 1),
        ("gpu", 0, 0),
        ("gpu", 0, 1),
        ("evict", 0, 0),
        ("fetch", 0, 2),
        ("evict", 0, 1),
        ("fetch", 0, 3),
        ("gpu", 0, 2),
        ("gpu", 0, 3),
    ]


def named(experts, n_experts=4):
    """A score of one for each expert named."""
    return [[[float(e == expert) for e in range(n_experts)] for expert in layers] for layers in experts]


def test_gates_are_stacked_until_one_misses_something(tmp_path):
    # Three layers of four, room for four, all in high. A prompt of 0 in every layer prefetches all of the next layer as
    # far as there is room; then a token wants 1, 0, 0: layer 1's guess (0) is there, layer 2's (3) is not.
    levels = {"next_scores_1": named([[0, 0, 0], [0, 0, 0]]), "next_scores_2": named([[0], [3]])}
    path = weighed(tmp_path, [[[0]] * 3, [[1], [0], [0]]], [[1.0], [1.0]], 4, **levels)
    seen = replay(Hobbit(lookahead=2, low_frac=0.0), path, 4)
    prompt = [
        ("fetch", 0, 0),
        ("prefetch", 1, 0),
        ("prefetch", 1, 1),
        ("prefetch", 1, 2),
        ("gpu", 0, 0),
        # Least score first: 1.1 and 1.2 were not used (0.25 for their layer); 0.0 was (0.75, and 0.17).
        ("evict", 1, 1),
        ("prefetch", 2, 0),
        ("evict", 1, 2),
        ("prefetch", 2, 1),
        ("evict", 0, 0),
        ("prefetch", 2, 2),
        ("gpu", 1, 0),
        ("gpu", 2, 0),
    ]
    token = [
        ("evict", 2, 1),
        ("fetch", 0, 1),
        ("evict", 2, 2),
        ("prefetch", 2, 3),
        ("gpu", 0, 1),
        ("gpu", 1, 0),
        ("gpu", 2, 0),
    ]
    assert seen.log == prompt + token
    assert resident(seen) == [(0, 1), (1, 0), (2, 0), (2, 3)]
    # With one layer in the stack nothing is missing there, and nothing prefetched.
    shallow = replay(Hobbit(lookahead=1, low_frac=0.0), path, 4)
    assert [entry for entry in shallow.log[len(prompt) :] if entry[0] == "prefetch"] == []


def test_the_first_layer_that_misses_something_is_enough(tmp_path):
    # As before, but layer 1's guess (1) is missing too: then layer 2's (3) has to wait for layer 1's gate.
    levels = {"next_scores_1": named([[0, 0, 0], [1, 3, 0]]), "next_scores_2": named([[0], [3]])}
    path = weighed(tmp_path, [[[0]] * 3, [[1], [0], [0]]], [[1.0], [1.0]], 4, **levels)
    log = replay(Hobbit(lookahead=2, low_frac=0.0), path, 4).log
    prefetched = [entry for entry in log if entry[0] in ("gpu", "prefetch")][-5:]
    assert prefetched == [("prefetch", 1, 1), ("gpu", 0, 1), ("prefetch", 2, 3), ("gpu", 1, 0), ("gpu", 2, 0)]


def test_prefetches_keep_to_the_same_rule(tmp_path):
    # The guess for layer 1: 0.75 for 2 (high), 0.25 for 3 (low), as the second token wants it.
    guess = [[[0, 0, 0.75, 0.25]] * 2] * 2
    path = weighed(tmp_path, [[[0, 1], [0, 1]], [[0, 1], [2, 3]]], [[0.5, 0.5], [0.75, 0.25]], 4, next_scores_1=guess)
    seen = replay(Hobbit(lookahead=1, low_frac=0.25), path, 6)
    copies = {what: end_s - start_s for what, start_s, end_s in seen.lane("h2d")}
    assert copies["prefetch 1.2"] == 10
    assert copies["prefetch 1.3"] == 2.5


@pytest.mark.parametrize(("skip", "prefetched"), [("missing", [2]), ("always", [2]), ("never", [2, 3])])
def test_what_would_be_skipped_is_not_prefetched(skip, prefetched, tmp_path):
    # The guess for layer 1: 0.95 for 2, 0.05 for 3, which is of the third class.
    guess = [[[0, 0, 0.95, 0.05]] * 2] * 2
    path = weighed(tmp_path, [[[0, 1], [0, 1]], [[0, 1], [2, 3]]], [[0.5, 0.5], [0.5, 0.5]], 4, next_scores_1=guess)
    log = replay(Hobbit(lookahead=1, low_frac=0.25, skip=skip), path, 6).log
    token = log[max(i for i, entry in enumerate(log) if entry == ("gpu", 0, 0)) - 3 :]
    assert [e for kind, layer, e in token if (kind, layer) == ("prefetch", 1)] == prefetched


def test_misses_on_the_cpu(tmp_path):
    path = weighed(tmp_path, ROWS, WEIGHTS, 4)
    seen = replay(Hobbit(lookahead=0, cpu_misses=True, low_frac=0.0), path, 3)
    # What the CPU computes is loaded behind while there is room, and hit from then on.
    assert [step for step in seen.log if step[0] != "gpu"] == [
        ("cpu", 0, 0),
        ("cpu", 0, 1),
        ("prefetch", 0, 0),
        ("prefetch", 0, 1),
        ("cpu", 0, 2),
        ("prefetch", 0, 2),
        ("cpu", 0, 3),
    ]
    assert not seen.outcome.report.counts.tally.n_demand
    assert Hobbit(cpu_misses=True).traits == {"lossy", "cpu"}
    assert Hobbit.traits == {"lossy"}


def test_rooms(tmp_path):
    """Bytes of both caches stay within the budget; one whole expert always fits; with room for all there is no low."""
    with seeded(tmp_path) as trace:
        for low_frac, room, high, low in (
            (0.0, 5, 5, 0),
            (0.2, 5, 4, 4),
            (0.5, 5, 2, 10),
            (1.0, 2, 1, 4),
            (0.5, 12, 12, 0),
        ):
            seen = execute_easy(setup(Hobbit(low_frac=low_frac), trace, room))
            assert seen.outcome.setup.policy._caches[0].rooms == (high, low)


KNOBS = {
    "t1": ({}, 0.3),
    "t2": ({}, 0.65),
    "skip": ({"t2": 0.7}, "never"),
    "low_precision": ({}, "int8"),
    "low_frac": ({}, 0.0),
    "w_lru": ({}, 0.0),
    "w_lfu": ({}, 1.0),
    "w_lhu": ({}, 1.0),
    "w_fld": ({}, 1.0),
    "fld": ({}, "ahead"),
    "reset": ({}, False),
    "lookahead": ({}, 1),
    "cpu_misses": ({}, True),
}


def test_every_parameter_matters(tmp_path):
    with seeded(tmp_path, n_layers=5, n_experts=8, outputs=25) as trace:
        check_knobs(Hobbit, trace.path, 12, KNOBS)
