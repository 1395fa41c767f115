"""llama.cpp: which layers' experts are where, CPU and GPU in turns, and copies for large batches."""

from __future__ import annotations

import pytest
from cpu_bench import check_knobs, replay, resident
from easy_numbers import EXPERT_BYTES
from tiny_traces import from_rows

from policies.llama_cpp import LlamaCpp
from sim.base.errors import BadInput, DoesNotFit

ROWS = [[[0], [1], [2]], [[1], [2], [0]], [[2], [0], [1]], [[0], [0], [0]], [[1], [1], [2]]]


def traced(tmp_path, rows=ROWS, prompt=1, n_experts=3):
    return from_rows(tmp_path / "t", rows, n_experts, [(prompt, len(rows) - prompt + 1)])


def layers(seen, n_experts=3):
    held = resident(seen)
    assert len(held) % n_experts == 0, "experts of a layer go together"
    return [layer for layer, expert in held if expert == 0]


@pytest.mark.parametrize(
    ("settings", "room", "on_gpu"),
    [
        ({}, 8, [0, 1]),
        ({}, 7, [0, 1]),
        ({}, 6, [0]),
        ({}, 3, []),
        ({}, 9, [0, 1, 2]),  # one room is kept for copies
        ({"op_offload": False}, 6, [0, 1]),
        ({"placement": "n_cpu_moe"}, 7, [1, 2]),
        ({"placement": "n_cpu_moe", "n_cpu_moe": 2}, 7, [2]),
        ({"placement": "n_cpu_moe", "n_cpu_moe": 9}, 7, []),
        ({"placement": "n_cpu_moe", "n_cpu_moe": 0}, 9, [0, 1, 2]),
        ({"placement": "cpu_moe"}, 9, []),
        ({"placement": "ngl"}, 7, [1, 2]),
        ({"placement": "ngl", "n_gpu_layers": 2}, 7, [2]),  # the output is one of them
        ({"placement": "ngl", "n_gpu_layers": 1}, 7, []),
        ({"placement": "ngl", "n_gpu_layers": 0}, 7, []),
        ({"placement": "ngl", "n_gpu_layers": 99}, 9, [0, 1, 2]),
    ],
)
def test_early_layers_fit_first_and_n_cpu_moe_keeps_the_late_ones(settings, room, on_gpu, tmp_path):
    assert layers(replay(LlamaCpp(**settings), traced(tmp_path), room)) == on_gpu


@pytest.mark.parametrize(
    ("settings", "placement", "on_gpu"),
    [({"n_cpu_moe": 2}, "n_cpu_moe", [2]), ({"n_gpu_layers": 3}, "ngl", [1, 2]), ({"n_cpu_moe": None}, "fit", [0, 1])],
)
def test_a_number_asks_for_its_placement(settings, placement, on_gpu, tmp_path):
    policy = LlamaCpp(**settings)
    assert policy.settings["placement"] == placement
    seen = replay(policy, traced(tmp_path), 7)
    assert layers(seen) == on_gpu
    of_last = {"n_cpu_moe": 3 - len(on_gpu)} if placement == "n_cpu_moe" else {}
    assert policy.stats() == {"layers_on_gpu": len(on_gpu), **of_last}


@pytest.mark.parametrize(
    "settings",
    [
        {"placement": "fit", "n_cpu_moe": 2},
        {"placement": "cpu_moe", "n_gpu_layers": 0},
        {"placement": "ngl", "n_cpu_moe": 2},
    ],
)
def test_a_number_of_another_placement_is_refused(settings):
    with pytest.raises(BadInput, match="that asks for another placement; leave one of them out"):
        LlamaCpp(**settings)


def test_all_layers_on_the_gpu_beside_n_cpu_moe_is_what_it_always_was(tmp_path):
    assert layers(replay(LlamaCpp(n_gpu_layers=99, n_cpu_moe=2), traced(tmp_path), 7)) == [2]
    with pytest.raises(BadInput, match=r"n_gpu_layers, got 2 with n_cpu_moe: .* set it to 4 or more"):
        replay(LlamaCpp(n_gpu_layers=2, n_cpu_moe=2), traced(tmp_path), 7)


def test_more_than_fits_is_refused(tmp_path):
    with pytest.raises(
        DoesNotFit, match=r"n_cpu_moe, got 0: it leaves 3 layers on the GPU, and 2 fit beside .*; set it to 1"
    ):
        replay(LlamaCpp(placement="n_cpu_moe", n_cpu_moe=0), traced(tmp_path), 7)

    with pytest.raises(
        DoesNotFit, match=r"n_gpu_layers, got 4: it leaves 3 layers .* and 2 fit beside .*; set it to 3 or"
    ):
        replay(LlamaCpp(placement="ngl", n_gpu_layers=4), traced(tmp_path), 7)


def test_ngl_computes_the_first_layers_on_the_cpu_and_says_what_it_does_not(tmp_path):
    seen = replay(LlamaCpp(placement="ngl", n_gpu_layers=2), traced(tmp_path), 4)
    assert seen.log == [
        (place, layer, row[layer][0]) for row in ROWS for layer, place in ((0, "cpu"), (1, "cpu"), (2, "gpu"))
    ]
    assert "dense layers on the GPU" in seen.result.caveats
    whole = replay(LlamaCpp(placement="ngl", n_gpu_layers=4), traced(tmp_path), 9)
    assert "dense layers on the GPU" not in whole.result.caveats
    assert "dense layers on the GPU" not in replay(LlamaCpp(), traced(tmp_path), 4).result.caveats


def test_five_steps_in_turns(tmp_path):
    seen = replay(LlamaCpp(), traced(tmp_path), 4)  # layer 0 on the GPU
    assert seen.log == [
        (place, layer, row[layer][0]) for row in ROWS for layer, place in ((0, "gpu"), (1, "cpu"), (2, "cpu"))
    ]
    # A token: 1 + 2; 1, then 1 s down, 5 s, 1 s up; the same; the head.
    assert seen.end_s == 5 * (3 + 8 + 8 + 1)
    assert seen.classes("decode") == {"hit": 4, "cpu": 8}
    # They take turns: nothing on the GPU while the CPU computes.
    for _, start_s, end_s in seen.lane("cpu"):
        assert all(stop_s <= start_s or begin_s >= end_s for _, begin_s, stop_s in seen.lane("gpu"))
    assert seen.result.h2d_bytes == seen.result.d2h_bytes  # hidden states alone


def prompt_of(n_tokens, tmp_path):
    """One layer; all tokens of the prompt want 0, but for the last one, which wants 2."""
    return traced(tmp_path, [[[0]]] * (n_tokens - 1) + [[[2]]], n_tokens, 4)


@pytest.mark.parametrize(("n_tokens", "copied"), [(31, False), (32, True)])
def test_thirty_two_tokens_are_enough_to_copy(n_tokens, copied, tmp_path):
    seen = replay(LlamaCpp(), prompt_of(n_tokens, tmp_path), 2)
    assert seen.classes("prefill") == {"miss" if copied else "cpu": 2}
    assert {kind for kind, _, _ in seen.log} == ({"fetch", "gpu", "evict"} if copied else {"cpu"})


def test_a_large_batch_copies_the_used_experts_matrix_by_matrix(tmp_path):
    seen = replay(LlamaCpp(), prompt_of(32, tmp_path), 2)
    one = [("fetch", 0, 0)] * 3 + [("gpu", 0, 0)] + [("evict", 0, 0)] * 3
    assert seen.log == one + [(kind, layer, 2) for kind, layer, _ in one]
    # 160 bytes in three: 53, 54, 53 at 16 bytes/s. Attention 0..1, copies to 11, then matrices, a kernel of 1 s each.
    assert [(end_s - start_s) * 16 for _, start_s, end_s in seen.lane("h2d")] == pytest.approx([53, 54, 53] * 2)
    assert seen.lane("h2d")[2][2] == pytest.approx(11)
    assert seen.lane("gpu")[1][1] == pytest.approx(11)
    assert seen.lane("h2d")[3][1] == pytest.approx(14)  # one stream: the next copy after the last computation
    assert resident(seen) == []
    assert seen.outcome.report.counts.peak_bytes[0] == EXPERT_BYTES


def test_older_versions_copy_the_whole_layer(tmp_path):
    seen = replay(LlamaCpp(copy_used_only=False), prompt_of(32, tmp_path), 2)
    assert [e for kind, _, e in seen.log if kind == "fetch"] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert [e for kind, _, e in seen.log if kind == "gpu"] == [0, 2]


def test_each_ubatch_copies_again(tmp_path):
    # Tokens 0..15 and 16..31: both want 0, only the second wants 2.
    path = prompt_of(32, tmp_path)
    seen = replay(LlamaCpp(ubatch=16, op_offload_min_batch=16, matrices=2), path, 2)
    assert [e for kind, _, e in seen.log if kind == "fetch"] == [0] * 4 + [2] * 2
    assert seen.outcome.report.counts.tally.n_executed == 32
    every = replay(LlamaCpp(ubatch=16, op_offload_min_batch=16, matrices=2, copy_used_only=False), path, 2)
    assert [e for kind, _, e in every.log if kind == "fetch"] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    # What counts as large is the ubatch, not the prompt.
    assert replay(LlamaCpp(ubatch=16), path, 2).classes("prefill") == {"cpu": 2}


KNOBS = {
    "placement": ({}, "n_cpu_moe"),
    "n_cpu_moe": ({}, 3),
    "n_gpu_layers": ({}, 1),
    "op_offload": ({}, False),
    "op_offload_min_batch": ({}, 100),
    "copy_used_only": ({}, False),
    "ubatch": ({}, 32),
    "matrices": ({}, 2),
}


def test_every_parameter_matters(tmp_path):
    rows = [[[0], [1], [0]]] * 64 + ROWS
    check_knobs(LlamaCpp, traced(tmp_path, rows, 64, 5), 9, KNOBS)
