"""MoE-Lightning: a static share, a double buffer, pages. Copy of an expert 10 s, expert 2 s, attention and head 1 s."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from cpu_bench import check_knobs
from easy_numbers import EXPERT_BYTES, execute_easy, figure, run, setup
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tiny_traces import from_rows, tiny_trace

from policies.moe_lightning import MoeLightning
from sim.base.errors import DoesNotFit
from traces.format.reader import Trace

# Four layers of two experts, k = 1, five tokens. A static share of a half: expert 0 of every layer stays.
STEPS = [[[0], [1], [0], [1]], [[1], [1], [1], [0]], [[0], [0], [0], [0]], [[1], [0], [1], [1]], [[0], [1], [1], [0]]]
UNSTAGED = {"staging_traffic": 0.0}


def heads(seen):
    return [end for what, _, end in seen.lane("gpu") if what == "head"]


def streamed(rows, tmp_path, batch=1, prompt=1, cpu_bytes_per_s=math.inf, room=6, n_experts=2, copy_s=10.0, **settings):
    """One request per slot, all alike; `rows` of one request. Staging at `cpu_bytes_per_s` of host memory."""
    lengths = [(prompt, len(rows) - prompt + 1)] * batch
    path = from_rows(tmp_path / "t", [row for _ in range(batch) for row in rows], n_experts, lengths)
    with Trace(path) as trace:
        made = setup(MoeLightning(**settings), trace, room, batch=batch, copy_s=copy_s)
        cpu = replace(made.hw.cpu, memory_bandwidth_bytes_per_s=figure(cpu_bytes_per_s))
        made = dataclasses.replace(made, hw=replace(made.hw, cpu=cpu))
        return execute_easy(made)


def test_five_steps(tmp_path):
    seen = run(MoeLightning(**UNSTAGED), tmp_path, STEPS, room=6, n_experts=2)
    # Room for six: one of every layer, and the other one of two layers. Layer l + 2 comes when layer l is done.
    turn = [
        ("evict", 0, 1),
        ("prefetch", 2, 1),
        ("evict", 1, 1),
        ("prefetch", 3, 1),
        ("evict", 2, 1),
        ("prefetch", 0, 1),
        ("evict", 3, 1),
        ("prefetch", 1, 1),
    ]
    expected = [
        entry
        for row in STEPS
        for layer in range(4)
        for entry in (("gpu", layer, row[layer][0]), *turn[2 * layer : 2 * layer + 2])
    ]
    assert seen.log == expected
    # Layers 0 and 1 are there: attention 0..1, expert 1..3, 3..4, 4..6. Layer 2's page comes 3..13; its layer waits for
    # it though the gate chose the expert that stays: 13..15. Layer 3's page comes 13..23. Then the link never rests.
    assert seen.lane("h2d")[:3] == [("prefetch 2.1", 3, 13), ("prefetch 3.1", 13, 23), ("prefetch 0.1", 23, 33)]
    assert seen.lane("gpu")[:9] == [
        ("attention 0", 0, 1),
        ("expert 0.0", 1, 3),
        ("attention 1", 3, 4),
        ("expert 1.1", 4, 6),
        ("attention 2", 6, 7),
        ("expert 2.0", 13, 15),
        ("attention 3", 15, 16),
        ("expert 3.1", 23, 25),
        ("head", 25, 26),
    ]
    assert heads(seen) == [26, 66, 106, 146, 186]
    assert seen.result.caveats[0] == "attention on the GPU"
    assert seen.result.policy_stats == {"static_experts": 4, "pages_per_layer": 1}


@pytest.mark.parametrize(
    ("share", "room", "copy_s"), [(0.0, 8, 10.0), (0.25, 11, 10.0), (0.5, 14, 3.0), (0.75, 17, 0.5)]
)
def test_closed_form(share, room, copy_s, tmp_path):
    """Per layer max(compute, (1 - r_w) x E x T_load); r_w x L x E + 2 (1 - r_w) E experts of room."""
    n_layers, n_experts = 5, 4
    rows = [[[0, 3]] * n_layers] * 6
    need = int(share * n_layers * n_experts + 2 * (1 - share) * n_experts)
    assert need == room
    seen = run(MoeLightning(static_share=share, **UNSTAGED), tmp_path, rows, room, n_experts=n_experts, copy_s=copy_s)
    per_token = [b - a for a, b in pairwise(heads(seen)[-3:])]
    assert per_token == [max(n_layers * (1 - share) * n_experts * copy_s, n_layers * 5.0 + 1)] * 2
    assert list(seen.outcome.report.counts.peak_bytes) == [room * EXPERT_BYTES]
    refusal = "at least 8 whole experts" if room == 8 else f"takes room for {room} experts on GPU 0"
    with pytest.raises(DoesNotFit, match=refusal):
        run(MoeLightning(static_share=share), tmp_path, rows, room - 1, n_experts=n_experts)


@pytest.mark.parametrize(("room", "static"), [(8, 0), (9, 1), (10, 2), (11, 5), (13, 7), (14, 10), (20, 20)])
def test_what_the_budget_holds_stays(room, static, tmp_path):
    # Five layers of four. Room for 11: one of each layer stays (5), 2 x 3 stream. Nine: 0.0 stays, but two layers in a
    # row that keep nothing need 8.
    seen = run(MoeLightning(), tmp_path, [[[0]] * 5] * 2, room, n_experts=4)
    assert seen.result.policy_stats["static_experts"] == static
    assert seen.outcome.report.counts.peak_bytes[0] <= room * EXPERT_BYTES


# A batch of four in micro-batches of one: four pages of a layer's two streamed experts, half an expert each.
ROWS = [[[0], [1], [0], [1]]] * 3


def test_pages_are_staged_one_after_the_other(tmp_path):
    facts = {"batch": 4, "micro_batch": 1, "room": 4, "static_share": 0.0, "cpu_bytes_per_s": 16.0}
    seen = streamed(ROWS, tmp_path, **facts)
    # Staging: 2 x 160 bytes of traffic an expert at 16 bytes/s, 20 s; copying it takes 10 s.
    prompt, decode = seen.lane("h2d")[:2], seen.lane("h2d")[-8:]
    assert {end - start for _, start, end in prompt} == {10}
    assert {end - start for _, start, end in decode} == {5}
    staged = seen.lane("predictor")[-8:]
    assert [end - start for _, start, end in staged] == [10] * 8
    # Each page starts when it is staged, while the next one is: the stage is the slower of the two.
    assert [start for _, start, _ in decode] == [end for _, _, end in staged]
    whole = streamed(ROWS, tmp_path, paged=False, **facts)
    assert [end - start for _, start, end in whole.lane("predictor")[-2:]] == [40] * 2
    assert whole.lane("h2d")[-2][1] == whole.lane("predictor")[-1][2], "the link waits for all of a layer"
    assert whole.end_s > seen.end_s
    assert seen.result.policy_stats["pages_per_layer"] > whole.result.policy_stats["pages_per_layer"] == 1


def test_pages_cover_a_layer_once(tmp_path):
    """Whatever the number of pages, what streams is each expert that does not stay, entirely."""
    rows = [[[0], [1], [2], [1]]] * 4
    plain = streamed(rows, tmp_path, room=8, n_experts=3, static_share=0.34)
    for batch, micro_batch in ((2, 1), (3, 1), (3, 2), (5, 1), (7, 2)):
        seen = streamed(rows, tmp_path, batch, room=8, n_experts=3, static_share=0.34, micro_batch=micro_batch)
        per_pass = {
            r.result.h2d_bytes / sum(r.outcome.report.counts.tally.n_iterations.values()) for r in (plain, seen)
        }
        assert len(per_pass) == 1


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_shape_streams_each_expert_once_a_pass(data, tmp_path_factory):
    """Whatever the shape: what moves in a pass is every expert that does not stay, once, in parts that make it up."""
    draw = data.draw
    n_layers, n_experts, gpus = draw(st.integers(3, 5)), draw(st.integers(2, 6)), draw(st.integers(1, 3))
    batch, micro_batch = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    path = tiny_trace(tmp_path_factory.mktemp("t") / "t", n_layers, n_experts, 1, 2 * batch, 2, 4, levels=())
    with Trace(path) as trace:
        roomy = execute_easy(setup(MoeLightning(), trace, n_layers * n_experts, gpus=gpus)).engine.view
        room = MoeLightning().min_experts(roomy) + draw(st.integers(0, 9))
        policy = MoeLightning(micro_batch=micro_batch)
        seen = execute_easy(setup(policy, trace, room, gpus=gpus, batch=batch))
    passes = sum(seen.outcome.report.counts.tally.n_iterations.values())
    n_streamed = n_layers * n_experts - seen.result.policy_stats["static_experts"]
    assert seen.result.h2d_bytes == passes * n_streamed * EXPERT_BYTES
    for layer, streamed in enumerate(policy._streamed):
        for n in (1, 2, 3, 7, 11):
            policy._micro_batches = n
            pages = policy._pages(layer, seen.engine.view)
            assert len(pages) == (n if streamed else 0)
            assert all(pages)
            covered = {piece.expert: 0.0 for piece in streamed}
            for part in (part for page in pages for part in page):
                assert covered[part.expert] == part.start_frac
                covered[part.expert] = part.stop_frac
            assert set(covered.values()) <= {1.0}


def test_every_micro_batch_reads_the_weights(tmp_path):
    """Kernels of 1 s each: four tokens at once take an expert's 2 s, one after the other 8 s."""
    facts = {"batch": 4, "room": 8, "static_share": 1.0}
    once = streamed(ROWS, tmp_path, micro_batch=4, **facts)
    again = streamed(ROWS, tmp_path, micro_batch=1, **facts)
    assert [a - b for a, b in zip(heads(again), heads(once), strict=True)][-1] == 2 * 4 * 6  # decode steps, layers, s
    # Two tokens each: 4 s where 2 s would do.
    assert heads(streamed(ROWS, tmp_path, micro_batch=2, **facts))[-1] - heads(once)[-1] == 2 * 4 * 2
    assert heads(streamed(ROWS, tmp_path, micro_batch=1, repeat_reads=False, **facts)) == heads(once)


def test_gpus_repeat_at_the_same_time():
    """Four tokens of two experts, each on a GPU of its own: 2 s more on either, not 4."""
    policy = MoeLightning(micro_batch=1)
    prices = SimpleNamespace(gpu_s=lambda n: 2.0)
    view = SimpleNamespace(n_gpus=2, prices=prices, piece=lambda layer, expert: SimpleNamespace(gpu=expert))
    policy._micro_batches, policy._gpu_s = 4, {}
    gate = SimpleNamespace(layer=0, ids=np.array([[0], [1], [0], [1]]), needs={0: 2, 1: 2})
    assert policy._again_s(gate, view) == 2.0


def test_prompts_come_in_whole_layers(tmp_path):
    seen = streamed([[[0], [1], [0], [1]]] * 4, tmp_path, prompt=4, micro_batch=1, room=4, static_share=0.0)
    assert {end - start for _, start, end in seen.lane("h2d")} == {10}
    assert seen.result.policy_stats["pages_per_layer"] == 1


def test_experts_on_the_cpu(tmp_path):
    seen = run(MoeLightning(ffn_on_gpu=False), tmp_path, STEPS, room=1, n_experts=2)
    assert seen.log == [("cpu", layer, row[layer][0]) for row in STEPS for layer in range(4)]
    assert MoeLightning(ffn_on_gpu=False).traits == {"cpu", "evicts_eagerly"}
    assert "cpu" not in MoeLightning.traits


def test_two_layers_need_no_buffer(tmp_path):
    seen = run(MoeLightning(), tmp_path, [row[:2] for row in STEPS], room=4, n_experts=2)
    assert seen.result.h2d_bytes == 0
    with pytest.raises(DoesNotFit, match="at least 4 whole experts"):
        run(MoeLightning(), tmp_path, [row[:2] for row in STEPS], room=3, n_experts=2)


KNOBS = {
    "static_share": ({}, 0.0),
    "micro_batch": ({}, 2),
    "paged": ({"micro_batch": 1}, False),
    "staging_traffic": ({}, 0.0),
    "repeat_reads": ({"micro_batch": 1}, False),
    "ffn_on_gpu": ({}, False),
}


def test_every_parameter_matters(tmp_path):
    path = from_rows(tmp_path / "t", ROWS * 4, 2, [(1, 3)] * 4)
    check_knobs(MoeLightning, path, 6, KNOBS, batch=4)
