"""FloE: compressed copies, what stays of them, and a prediction one layer ahead."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from cpu_bench import check_knobs, replay, seeded, written
from easy_numbers import EXPERT_BYTES

from policies.common.foretold import foretold, in_turn
from policies.floe import Floe
from sim.base.errors import BadInput
from sim.profiles.models import load_model

# A prompt of one token, then two tokens; the next gate is foretold rightly once.
ROWS = [[[0], [0]], [[1], [2]], [[1], [2]]]
NEXT = [[[1.0, 0, 0], [1.0, 0, 0]], [[0, 0, 1.0], [1.0, 0, 0]], [[0, 1.0, 0], [1.0, 0, 0]]]


def bench(tmp_path):
    weights = [[[1.0], [1.0]]] * 3
    return written(tmp_path / "t.safetensors", [(1, 3, "test")], ROWS, 3, weights=weights, next_scores_1=NEXT)


def test_published_factor_and_the_one_that_stands_in():
    """A third of an expert in 2 of 16 bits, a tenth of the rest in 16; 9.3 is published, int2 throughout is 8."""
    model = load_model("mixtral-8x7b")
    stands_in = model.expert_bytes("bf16") / model.expert_bytes(Floe().compressed)
    derived = 1 / (1 / 3 * 2 / 16 + 2 / 3 / 10)
    assert derived == pytest.approx(9.3, rel=0.01)
    assert stands_in == pytest.approx(8, rel=0.01)
    assert derived / stands_in == pytest.approx(1.16, abs=0.01)  # copies take so much longer, says the file


def test_steps_by_hand(tmp_path):
    seen = replay(Floe(), bench(tmp_path), 1)  # room for eight compressed experts
    assert seen.log == [
        ("fetch", 0, 0),
        ("gpu", 0, 0),
        ("fetch", 1, 0),
        ("gpu", 1, 0),  # of prompts nothing is predicted
        ("fetch", 0, 1),
        ("gpu", 0, 1),
        ("prefetch", 1, 2),
        ("gpu", 1, 2),
        ("gpu", 0, 1),
        ("prefetch", 1, 1),
        ("gpu", 1, 2),  # they stay; 1.1 was not wanted
    ]
    assert seen.result.h2d_bytes == 5 * EXPERT_BYTES // 8
    assert seen.result.policy_stats == {"predicted_right_frac": 0.5}
    # A copy of 1.25 s. The prompt: attention, copy, expert, twice, head. Then 1.2 comes while 0.1 computes.
    assert seen.lane("h2d") == [
        ("demand 0.0", 1, 2.25),
        ("demand 1.0", 5.25, 6.5),
        ("demand 0.1", 10.5, 11.75),
        ("prefetch 1.2", 11.75, 13),
        ("prefetch 1.1", 18.75, 20),
    ]
    assert seen.end_s == (2 * (1 + 1.25 + 2) + 1) + (1 + 1.25 + 2 + 1 + 2 + 1) + 2 * (1 + 2) + 1
    assert seen.classes("decode") == {"miss": 1, "hit": 3}


def test_five_steps(tmp_path):
    """Room for four experts of four bits. Layer 1 is foretold 2 (right), 1 (wrong), 2 (right), 3 (wrong)."""
    rows = [[[0], [0]], [[1], [2]], [[1], [2]], [[3], [2]], [[0], [1]]]
    told = [[[float(e == guess) for e in range(4)], [1.0, 0, 0, 0]] for guess in (0, 2, 1, 2, 3)]
    facts = {"weights": [[[1.0], [1.0]]] * 5, "next_scores_1": told}
    path = written(tmp_path / "t.safetensors", [(1, 5, "test")], rows, 4, **facts)
    seen = replay(Floe(compressed="int4"), path, 1)
    assert seen.log == [
        ("fetch", 0, 0),
        ("gpu", 0, 0),
        ("fetch", 1, 0),
        ("gpu", 1, 0),
        ("fetch", 0, 1),
        ("gpu", 0, 1),
        ("prefetch", 1, 2),
        ("gpu", 1, 2),
        ("gpu", 0, 1),
        ("evict", 0, 0),
        ("prefetch", 1, 1),
        ("gpu", 1, 2),  # 0.0 has not been used for longest
        ("evict", 1, 0),
        ("fetch", 0, 3),
        ("gpu", 0, 3),
        ("gpu", 1, 2),
        ("evict", 0, 1),
        ("fetch", 0, 0),
        ("gpu", 0, 0),
        ("evict", 1, 1),
        ("prefetch", 1, 3),
        ("evict", 0, 3),
        ("fetch", 1, 1),
        ("gpu", 1, 1),  # a copy in vain, and the one it had thrown out comes back
    ]
    assert seen.result.policy_stats == {"predicted_right_frac": 0.5}


def test_every_tokens_first_guess_goes_before_any_second(tmp_path):
    gate = SimpleNamespace(next_scores=lambda _: np.array([[9.0, 5.0, 1.0, 0.0], [1.0, 0.0, 9.0, 5.0]]))
    assert in_turn(foretold(gate, 1, None, SimpleNamespace(top_k=2))) == [0, 2, 1, 3]


def test_channels_of_a_token_are_copied_anew(tmp_path):
    seen = replay(Floe(channels="token"), bench(tmp_path), 1)
    assert [entry for entry in seen.log if entry[0] != "gpu"] == [
        ("fetch", 0, 0),
        ("evict", 0, 0),
        ("fetch", 1, 0),
        ("evict", 1, 0),
        ("fetch", 0, 1),
        ("evict", 0, 1),
        ("prefetch", 1, 2),
        ("evict", 1, 2),
        ("fetch", 0, 1),
        ("evict", 0, 1),
        ("prefetch", 1, 1),
        ("fetch", 1, 2),
        ("evict", 1, 1),
        ("evict", 1, 2),
    ]


def test_everything_runs_compressed_and_the_result_says_so(tmp_path):
    result = replay(Floe(), bench(tmp_path), 1).result
    assert result.activations_changed_frac == 0
    assert result.activations_lowered_frac == 1.0


def test_the_least_recently_used_leaves(tmp_path):
    # int4: room for four. 0.0, 1.0, 0.1, 1.2, then 1.1 takes the place of 0.0.
    seen = replay(Floe(compressed="int4"), bench(tmp_path), 1)
    assert [entry for entry in seen.log if entry[0] == "evict"] == [("evict", 0, 0)]


def test_predictors(tmp_path):
    with seeded(tmp_path, outputs=40, levels={"weights", "next_scores_1"}) as trace:
        drawn = replay(Floe(predictor="surrogate:0.88"), trace.path, 1)
        assert drawn.result.caveats == ["lossy", "surrogate", "synthetic"]
        assert drawn.result.policy_stats["predicted_right_frac"] == pytest.approx(0.88, abs=0.05)
        assert not replay(Floe(predictor="none"), trace.path, 1).prefetched()
    with pytest.raises(BadInput, match=r"floe\.predictor, got 'mlp': write gate_reuse"):
        Floe(predictor="mlp")


KNOBS = {
    "compressed": ({}, "int4"),
    "channels": ({}, "token"),
    "predictor": ({}, "none"),
    "seed": ({"predictor": "surrogate:0.5"}, 1),
}


def test_every_parameter_matters(tmp_path):
    with seeded(tmp_path, n_experts=8, outputs=12, levels={"weights", "next_scores_1"}) as trace:
        check_knobs(Floe, trace.path, 1, KNOBS)
