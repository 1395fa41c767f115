"""MoESys: a ring of whole layers. Copy of an expert 10 s, expert 2 s, attention 1 s, head 1 s."""

from __future__ import annotations

from itertools import pairwise

import pytest
from easy_numbers import EXPERT_BYTES, execute_easy, run, setup
from tiny_traces import tiny_trace

from policies.moesys import MoeSys
from sim.base.errors import DoesNotFit
from traces.format.reader import Trace

KNOBS = {"layers": 1}
# Three layers of two experts, k = 1, five tokens; the ring holds two layers.
STEPS = [[[0], [1], [0]], [[1], [1], [1]], [[0], [0], [0]], [[1], [0], [1]], [[0], [1], [1]]]


def ends(seen):
    return [end for what, _, end in seen.lane("gpu") if what == "head"]


def test_five_steps(tmp_path):
    seen = run(MoeSys(), tmp_path, STEPS, room=4, n_experts=2)
    one = [
        ("gpu", 0, 0),
        ("evict", 0, 0),
        ("evict", 0, 1),
        ("prefetch", 2, 0),
        ("prefetch", 2, 1),
        ("gpu", 1, 1),
        ("evict", 1, 0),
        ("evict", 1, 1),
        ("prefetch", 0, 0),
        ("prefetch", 0, 1),
        ("gpu", 2, 0),
        ("evict", 2, 0),
        ("evict", 2, 1),
        ("prefetch", 1, 0),
        ("prefetch", 1, 1),
    ]
    assert seen.log[:15] == one
    # Whatever the gates choose, the ring turns in the same way.
    turns = [entry for entry in seen.log if entry[0] != "gpu"]
    assert turns == [entry for entry in one if entry[0] != "gpu"] * 5
    # Layers 0 and 1 are there: attention 0..1, expert 1..3, 3..4, 4..6. Layer 2 is loaded from 3, when layer 0 is done,
    # to 23, and waits for both its experts: 23..25, head 26. From then on the link never rests: 20 s per layer.
    assert seen.lane("h2d")[:4] == [
        ("prefetch 2.0", 3, 13),
        ("prefetch 2.1", 13, 23),
        ("prefetch 0.0", 23, 33),
        ("prefetch 0.1", 33, 43),
    ]
    assert seen.lane("gpu")[:7] == [
        ("attention 0", 0, 1),
        ("expert 0.0", 1, 3),
        ("attention 1", 3, 4),
        ("expert 1.1", 4, 6),
        ("attention 2", 6, 7),
        ("expert 2.0", 23, 25),
        ("head", 25, 26),
    ]
    assert ends(seen) == [26, 86, 146, 206, 266]


@pytest.mark.parametrize(("copy_s", "n_experts"), [(10.0, 2), (3.0, 4), (2.0, 3), (0.25, 4)])
def test_closed_form_time_and_memory(copy_s, n_experts, tmp_path):
    """Per layer max(compute, E x T_load); K x E experts. Compute: attention 1, k = 2 experts of 2; the head once."""
    n_layers = 5
    rows = [[[0, 1]] * n_layers] * 6
    seen = run(MoeSys(), tmp_path, rows, room=5 * n_experts, n_experts=n_experts, copy_s=copy_s)
    per_token = [b - a for a, b in pairwise(ends(seen)[-3:])]
    # Where loads are longer the link never rests, and hides the head.
    assert per_token == pytest.approx([max(n_layers * n_experts * copy_s, n_layers * 5.0 + 1)] * 2)
    assert list(seen.outcome.report.counts.peak_bytes) == [2 * n_experts * EXPERT_BYTES]


def test_a_ring_of_one_layer_overlaps_attention_alone(tmp_path):
    seen = run(MoeSys(layers=1), tmp_path, STEPS, room=2, n_experts=2)
    # A layer is loaded (20) while the next attention runs, then computes (2); the head delays nothing.
    assert [b - a for a, b in pairwise(ends(seen))] == [66] * 4
    assert list(seen.outcome.report.counts.peak_bytes) == [2 * EXPERT_BYTES]


def test_a_ring_of_all_layers_copies_nothing(tmp_path):
    seen = run(MoeSys(layers=7), tmp_path, STEPS, room=6, n_experts=2)
    assert seen.result.h2d_bytes == 0
    assert ends(seen) == [10, 20, 30, 40, 50]


def test_every_parameter_is_known_to_this_table_and_none_is_dead(tmp_path):
    assert set(KNOBS) == {param.name for param in MoeSys.params}
    default = run(MoeSys(), tmp_path, STEPS, room=4, n_experts=2)
    assert run(MoeSys(**KNOBS), tmp_path, STEPS, room=4, n_experts=2).log != default.log


def test_room_is_the_ring(tmp_path):
    with Trace(tiny_trace(tmp_path / "t", 3, 5, 2, levels=())) as trace:
        for gpus, need in ((1, 10), (2, 6), (3, 4)):
            execute_easy(setup(MoeSys(), trace, need, gpus=gpus, batch=2))
            with pytest.raises(DoesNotFit, match=f"at least {need} whole experts"):
                execute_easy(setup(MoeSys(), trace, need - 1, gpus=gpus))
