"""SeqMoE's surrogate: an oracle of the next tokens that errs as often as told, and a cache kept and filled by it."""

from __future__ import annotations

from random import Random as Draws

import numpy as np
import pytest
from cpu_bench import check_knobs, resident
from easy_numbers import run
from tiny_traces import from_rows

from policies.belady import Belady
from policies.lru import Lru
from policies.seqmoe import SeqMoe, chance, named

SURE = {"recall": 1.0, "recall_drop": 0.0, "extra": 0, "overhead_frac": 0.0}  # an oracle without noise


# -- the oracle's mistakes ---------------------------------------------------------------------------------------------


def test_what_is_named():
    drawn = np.array([0.1, 0.5, 0.9, 0.3, 0.2])
    chosen = np.array([False, True, True, False, False])

    def found(recall, extra):
        return np.flatnonzero(named(chosen, drawn, np.array(recall), extra)).tolist()

    assert found(0.6, 0) == [0, 1]  # 2 is forgotten; of 0 3 4 the lowest draw fills up
    assert found(1.0, 0) == [1, 2]
    assert found(0.0, 1) == [0, 3, 4]
    assert found(0.6, 7) == [0, 1, 3, 4]  # the others are all there are
    both = named(np.array([chosen, ~chosen]), np.array([drawn, drawn]), np.array([[0.6], [0.0]]), 0)
    assert both.tolist() == [[True, True, False, False, False], [False, True, True, False, False]]


def test_draws_are_even_and_their_own():
    draws = chance(0, range(64), range(8), 64)
    counts, _ = np.histogram(draws, bins=8, range=(0.0, 1.0))
    assert counts.sum() == draws.size == 8 * 64 * 64
    assert abs(counts / draws.size - 1 / 8).max() < 0.006

    def once(seed, target, layer, ahead):
        return chance(seed, range(target + 1 - ahead, target + 1), range(layer, layer + 1), 16)[-1, 0]

    assert once(3, 5, 2, 1).tolist() == chance(3, range(5, 9), range(4), 16)[0, 2].tolist()
    others = [once(4, 5, 2, 1), once(3, 5, 1, 1), once(3, 6, 2, 1), once(3, 5, 2, 2)]
    assert all((once(3, 5, 2, 1) != other).all() for other in others)
    key = ((7 * 1_000_003 + 5) * 4099 + 2) * 17 + 3
    assert (once(7, 5, 2, 3) * 2**53).tolist() == [splitmix64(key, n) for n in range(16)]


def splitmix64(key, n):
    """Its n-th number, from a state that stands at `key` steps: the upper 53 bits."""
    x = (n + 1 + key * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return (x ^ x >> 31) >> 11


@pytest.mark.parametrize("recall", [1.0, 0.9, 0.5])
def test_it_is_right_as_often_as_told(recall, tmp_path):
    draw = Draws(2)
    rows = [[draw.sample(range(12), 3) for _ in range(4)] for _ in range(150)]
    seen = run(SeqMoe(**SURE | {"recall": recall}), tmp_path, rows, room=12, n_experts=12)
    assert seen.result.policy_stats["foretold_frac"] == pytest.approx(recall, abs=0.03)
    assert seen.result.caveats[:2] == ["oracle", "surrogate"]


# -- who leaves, and what comes ----------------------------------------------------------------------------------------


def test_who_is_wanted_farthest_away_leaves(tmp_path):
    # One layer, room for two. When 2 comes, of 0 (wanted next) and 1 (wanted in two tokens) 1 leaves.
    rows = [[[0]], [[1]], [[2]], [[0]], [[1]]]
    seen = run(SeqMoe(**SURE, prefetch=False), tmp_path, rows, room=2, n_experts=3)
    assert [entry[2] for entry in seen.log if entry[0] == "evict"] == [1, 2]  # 2 is wanted no more
    # When a gate speaks the last forecast is a token old. Of two tokens it still holds the next one: 1 leaves, and at
    # the fifth, with 2 wanted next, 0. Of one it holds nothing, and the least recently used leaves.
    for horizon, left in ((2, [1, 0]), (1, [0, 1, 2, 0])):
        seen = run(SeqMoe(**SURE, prefetch=False, horizon=horizon), tmp_path, [*rows, [[2]]], room=2, n_experts=3)
        assert [entry[2] for entry in seen.log if entry[0] == "evict"] == left


def test_copied_ahead_half_by_half(tmp_path):
    """Two layers: after the first the next token's first layer is forecast and copied, after the second its second."""
    rows = [[[0], [1]], [[2], [3]]]
    seen = run(SeqMoe(**SURE), tmp_path, rows, room=8, n_experts=4)
    # 0.0 on demand 1..11, ran ..13; 0.2 of the next token behind it, 11..21; 1.1 on demand from 14 on, but 0.2 is under
    # way: 21..31, ran ..33; 1.3 behind it, 31..41. Head ..34, attention ..35, 0.2 is there, ..37, attention ..38, and
    # 1.3 at 41..43.
    assert seen.lane("h2d") == [
        ("demand 0.0", 1, 11),
        ("prefetch 0.2", 11, 21),
        ("demand 1.1", 21, 31),
        ("prefetch 1.3", 31, 41),
    ]
    assert seen.end_s == 44
    assert seen.classes("decode") == {"hit": 1, "late": 1}


def test_nothing_makes_room_for_what_is_wanted_later(tmp_path):
    # Room for two; 0.0 and 1.0 are wanted by every token, and 1.1 by the third one: there is no room for it ahead.
    rows = [[[0], [0]], [[0], [0]], [[0], [1]]]
    seen = run(SeqMoe(**SURE), tmp_path, rows, room=2, n_experts=2)
    assert [entry for entry in seen.log if entry[0] in ("prefetch", "evict", "fetch")] == [
        ("fetch", 0, 0),
        ("fetch", 1, 0),
        ("evict", 1, 0),  # once 1.0 has run for the second token, it is wanted by none: 1.1 comes in its place
        ("prefetch", 1, 1),
    ]
    assert resident(seen) == [(0, 0), (1, 1)]


def test_a_prompt_to_come_is_not_forecast(tmp_path):
    # The second request's prompt of three tokens asks for three experts: more than a token can.
    rows = [[[0]], [[1]], [[1]], [[2]], [[3]]]
    seen = run(SeqMoe(**SURE), tmp_path, rows, room=8, n_experts=4, lengths=[(1, 2), (3, 1)])
    assert [entry[1:] for entry in seen.log if entry[0] == "prefetch"] == [(0, 1)]


def test_without_noise_it_lies_between_lru_and_belady(tmp_path):
    draw = Draws(11)
    rows = [[draw.sample(range(8), 2) for _ in range(3)] for _ in range(120)]
    hits = [
        run(policy, tmp_path, rows, room=10, n_experts=8).result.hit_rate
        for policy in (Lru(scope="global"), SeqMoe(prefetch=False), SeqMoe(**SURE, prefetch=False), Belady())
    ]
    assert hits == sorted(hits)
    assert hits[1] > hits[0] + 0.1


KNOBS = {
    "recall": ({}, 0.5),
    "recall_drop": ({}, 0.1),
    "horizon": ({}, 2),
    "extra": ({}, 0),
    "prefetch": ({}, False),
    "overhead_frac": ({}, 0.5),
    "seed": ({}, 1),
}


def test_every_parameter_matters(tmp_path):
    draw = Draws(3)
    rows = [[draw.sample(range(12), 2) for _ in range(4)] for _ in range(24)]
    check_knobs(SeqMoe, from_rows(tmp_path / "knobs", rows, 12, [(2, 8), (2, 9), (2, 4)]), 20, KNOBS)
