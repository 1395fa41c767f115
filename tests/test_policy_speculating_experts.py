"""Speculating Experts: two sets of buffers, what is foretold for the next layer, and running it in the gate's place."""

from __future__ import annotations

import pytest
from cpu_bench import check_knobs, replay, resident, seeded, written
from easy_numbers import EXPERT_BYTES, run

from policies.speculating_experts import SpeculatingExperts

KIND = SpeculatingExperts


def foretold(tmp_path, rows, named, n_experts=4):
    """A trace whose gate on the layer before names `named[token][layer]` (an expert) for the layer after; one request
    with a prompt of one token. The gate's own scores are those of what it chose."""
    scores, following = (
        [[[float(expert == one) for expert in range(n_experts)] for one in row] for row in table]
        for table in ([[ids[0] for ids in row] for row in rows], named)
    )
    levels = {"scores": scores, "next_scores_1": following}
    return written(tmp_path / "foretold.safetensors", [(1, len(rows), "test")], rows, n_experts, **levels)


# Three layers, one expert per token. The prompt's rows of predictions are not read.
ROWS = [[[0], [0], [0]], [[0], [1], [2]]]
NAMED = [[0, 0, 0], [1, 3, 0]]  # at layer 0: 1 for layer 1, right; at layer 1: 3 for layer 2, wrong


def test_exact_by_hand(tmp_path):
    seen = replay(KIND(mode="exact"), foretold(tmp_path, ROWS, NAMED), 8)
    # A prompt's layers of four come whole: 0..40, 40..80, and the third in the room of the first: 80..120. Experts at
    # 40..42, 80..82, 120..122 (attention is done before), head ..123. Then the token, whose attention ends at 124:
    copies = [span for span in seen.lane("h2d") if span[1] >= 123]
    # 0.0 on demand; 1.1, foretold, behind it, while 0.0 computes 134..136 and attention ..137; 2.3 144..154 while 1.1
    # computes 144..146; 2.2 on demand behind it, since a copy in flight ends; the layer waits for both.
    assert copies == [
        ("demand 0.0", 124, 134),
        ("prefetch 1.1", 134, 144),
        ("prefetch 2.3", 144, 154),
        ("demand 2.2", 154, 164),
    ]
    assert seen.end_s == 164 + 2 + 1
    assert seen.classes("decode") == {"miss": 2, "late": 1}
    assert seen.result.policy_stats["foretold_frac"] == 0.5
    assert resident(seen) == []
    assert seen.result.caveats == ["gate reuse", "synthetic"]


def test_executing_by_hand(tmp_path):
    seen = replay(KIND(), foretold(tmp_path, ROWS, NAMED), 8)
    # As above until 2.3 has come at 154: it runs in place of 2.2, and nothing is fetched again.
    assert [what for what, start_s, _ in seen.lane("h2d") if start_s >= 123] == [
        "demand 0.0",
        "prefetch 1.1",
        "prefetch 2.3",
    ]
    assert seen.end_s == 154 + 2 + 1
    assert seen.log[-2:] == [("gpu", 2, 3), ("evict", 2, 3)]
    assert seen.classes("decode") == {"miss": 1, "late": 1, "substituted": 1}
    assert seen.result.caveats == ["lossy", "gate reuse", "synthetic"]


def test_a_hit_in_time(tmp_path):
    # Experts of 20 s (10 s kernels): the copy of 10 s is there when the gate asks, and the layer waits for nothing.
    seen = replay(KIND(mode="exact"), foretold(tmp_path, ROWS, [NAMED[0], [1, 2, 0]]), 8, kernel_s=10.0)
    assert seen.classes("decode") == {"miss": 1, "hit": 2}


def test_without_a_predictor_every_layer_is_loaded_on_demand(tmp_path):
    seen = replay(KIND(mode="exact", predictor="none"), foretold(tmp_path, ROWS, NAMED), 8)
    assert seen.classes("decode") == {"miss": 3}
    # attention, copy, expert: 13 s a layer, and the head.
    assert seen.end_s == 123 + 3 * 13 + 1
    assert seen.result.h2d_bytes == (12 + 3) * EXPERT_BYTES


@pytest.mark.parametrize("mode", ["execute", "exact"])
def test_layer_0_is_never_foretold_and_nothing_is_kept(mode, tmp_path):
    rows = [[[0], [1]]] * 4
    seen = run(KIND(mode=mode, predictor="surrogate:1"), tmp_path, rows, room=4, n_experts=2)
    fetched = [entry[1:] for entry in seen.log if entry[0] == "fetch"]
    assert fetched == [(0, 0)] * 3  # each token anew
    assert [entry[1:] for entry in seen.log if entry[0] == "prefetch"][4:] == [(1, 1)] * 3


def test_at_best_all_but_the_copies_is_saved(tmp_path):
    """Nothing is kept, so a forecast that is always right still copies k experts per layer and token."""
    rows = [[[0, 1]] * 5] * 4
    on_demand, foretold = (
        run(KIND(mode="exact", predictor=predictor), tmp_path, rows, room=8, n_experts=4).result
        for predictor in ("none", "surrogate:1")
    )
    # A layer on demand: attention, two copies, two experts, 25 s; the head. Foretold, layer 0 and its copies as before;
    # then two copies per layer without a gap, and the last layer's experts.
    assert on_demand.tpot_s.mean == 5 * 25 + 1
    assert foretold.tpot_s.mean == 1 + 5 * 20 + 4 + 1
    assert foretold.h2d_bytes == on_demand.h2d_bytes


def test_surrogates_by_layer(tmp_path):
    # Never right for layer 1, always for the others.
    rows = [[[0], [1], [2], [3]]] * 9
    seen = run(KIND(mode="exact", predictor="surrogate:0,1"), tmp_path, rows, room=8, n_experts=4)
    assert {entry[1:] for entry in seen.log if entry[0] == "fetch"} == {(0, 0), (1, 1)}
    assert seen.result.policy_stats["foretold_frac"] == pytest.approx(2 / 3)
    assert "surrogate" in seen.result.caveats


KNOBS = {
    "mode": ({}, "exact"),
    "predictor": ({}, "none"),
    "predict_s": ({}, 3.0),
    "seed": ({"predictor": "surrogate:0.5"}, 1),
}


def test_every_parameter_matters(tmp_path):
    with seeded(tmp_path, n_experts=8) as trace:
        path = trace.path
    check_knobs(KIND, path, 16, KNOBS)
