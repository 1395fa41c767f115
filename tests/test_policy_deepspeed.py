"""DeepSpeed ZeRO-Inference: fetches and prefetches by hand. An expert is two tensors of 40 elements, 5 s of copy each.

Expert 2 s, attention 1 s, head 1 s.
"""

from __future__ import annotations

import pytest
from easy_numbers import EXPERT_BYTES, run

from policies.deepspeed import DeepSpeed
from sim.base.errors import DoesNotFit

BASE = {"stage3_param_persistence_threshold": 0, "tensors_per_expert": 2, "stage3_prefetch_bucket_size": 40}
KNOBS = {
    "granularity": "expert",
    "stage3_max_live_parameters": 0,
    "stage3_prefetch_bucket_size": 0,
    "stage3_param_persistence_threshold": 41,
    "max_ongoing_fetches": 1,
    "cache": "lfu",
    "tensors_per_expert": 1,
}
STEPS = [[[0], [1]], [[1], [0]], [[0], [0]], [[1], [1]], [[0], [1]]]


def policy(**settings):
    return DeepSpeed(**BASE | settings)


def ends(seen):
    return [end for what, _, end in seen.lane("gpu") if what == "head"]


def test_five_steps_by_layer(tmp_path):
    seen = run(policy(), tmp_path, STEPS, room=4, n_experts=2)
    # The first pass records: 1 + 20 + 2, twice, and the head. All experts of a layer come, one of them computes.
    assert seen.log[:10] == [
        ("fetch", 0, 0),
        ("fetch", 0, 1),
        ("gpu", 0, 0),
        ("evict", 0, 0),
        ("evict", 0, 1),
        ("fetch", 1, 0),
        ("fetch", 1, 1),
        ("gpu", 1, 1),
        ("evict", 1, 0),
        ("evict", 1, 1),
    ]
    assert seen.lane("gpu")[:5] == [
        ("attention 0", 0, 1),
        ("expert 0.0", 21, 23),
        ("attention 1", 23, 24),
        ("expert 1.1", 44, 46),
        ("head", 46, 47),
    ]
    # Then attention, gate and experts each prefetch a tensor (a bucket of 40 elements) of what the record says is next.
    second = [entry for entry in seen.log[10:] if entry[0] != "evict"][:10]
    assert second == [
        ("prefetch", 0, 0),
        ("prefetch", 0, 0),  # attention, gate
        ("fetch", 0, 1),
        ("prefetch", 1, 0),
        ("gpu", 0, 1),  # the missing expert at once; the next layer begins
        ("prefetch", 1, 0),
        ("prefetch", 1, 1),
        ("fetch", 1, 1),
        ("gpu", 1, 0),
        ("prefetch", 0, 0),
    ]
    copies = [span for span in seen.lane("h2d") if span[1] >= 47][:7]
    assert copies == [
        ("prefetch 0.0", 47, 52),
        ("prefetch 0.0", 52, 57),
        ("demand 0.1", 57, 67),
        ("prefetch 1.0", 67, 72),
        ("prefetch 1.0", 72, 77),
        ("prefetch 1.1", 77, 82),
        ("demand 1.1", 82, 87),
    ]
    # 40 s of copies, the last expert (in two tensors of one kernel each) and the head.
    assert ends(seen) == [47, 90, 133, 176, 219]
    assert seen.outcome.report.counts.peak_bytes[0] == 2.5 * EXPERT_BYTES


def test_five_steps_by_expert(tmp_path):
    """Tensor after tensor, then the expert; nothing is prefetched: 2 x (1 + 10 + 2) + 1 per token."""
    seen = run(policy(granularity="expert"), tmp_path, STEPS, room=1, n_experts=2)
    assert seen.log == [
        entry
        for token in STEPS
        for layer, (expert,) in enumerate(token)
        for entry in [("fetch", layer, expert)] * 2 + [("gpu", layer, expert)] + [("evict", layer, expert)] * 2
    ]
    assert ends(seen) == [27, 54, 81, 108, 135]
    assert list(seen.outcome.report.counts.peak_bytes) == [EXPERT_BYTES]


def test_the_live_limit_and_the_bucket(tmp_path):
    """An expert is 80 elements, a layer 160: while it is live, a limit of 161 lets one tensor in, 160 none."""

    def peak(live, bucket):
        made = policy(stage3_max_live_parameters=live, stage3_prefetch_bucket_size=bucket)
        seen = run(made, tmp_path, STEPS, room=4, n_experts=2)
        return seen.outcome.report.counts.peak_bytes[0] / EXPERT_BYTES, seen.prefetched().get("issued", 0)

    assert peak(160, 1000)[0] == 2
    assert peak(161, 1000)[0] == 2.5  # the tensor that reaches the limit is still fetched
    assert peak(241, 1000)[0] == 3.5
    assert peak(1000, 41)[0] == 3
    assert peak(1000, 1000)[0] == 4
    assert peak(1000, 0) == (2, 0)
    assert peak(0, 1000) == (2, 0)


@pytest.mark.parametrize("n", [1, 2])
def test_no_more_fetches_are_under_way_than_allowed(n, tmp_path):
    """Tensor by tensor: the host asks for one more only when the n-th before it has come."""
    seen = run(policy(granularity="expert", max_ongoing_fetches=n), tmp_path, STEPS, room=4, n_experts=2)
    asked = [start for what, start, _ in seen.lane("host", zero=True) if what.startswith("launch copy")]
    came = [end for _, _, end in seen.lane("h2d")]
    assert len(asked) == len(came)
    assert all(asked[at + n] >= came[at] for at in range(len(came) - n))
    assert any(asked[at] < came[at - n + 1] for at in range(n, len(came))) or n == 1


def test_small_tensors_stay(tmp_path):
    """A tensor has 40 elements: it stays below the threshold, not at it."""
    moved = run(policy(stage3_param_persistence_threshold=40), tmp_path, STEPS, room=4, n_experts=2)
    assert moved.result.h2d_bytes > 0
    seen = run(policy(stage3_param_persistence_threshold=41), tmp_path, STEPS, room=4, n_experts=2)
    assert seen.result.h2d_bytes == 0
    with pytest.raises(DoesNotFit, match="at least 4 whole"):
        run(policy(stage3_param_persistence_threshold=41), tmp_path, STEPS, room=3, n_experts=2)


@pytest.mark.parametrize("knob", KNOBS)
def test_no_knob_is_dead(knob, tmp_path):
    def facts(**settings):
        seen = run(policy(**settings), tmp_path, STEPS, room=4, n_experts=2, sync_s=0.25)
        return seen.log, seen.end_s

    assert facts() != facts(**{knob: KNOBS[knob]})


def test_two_steps_with_a_cache(tmp_path):
    """Room for three of the four experts: what a layer leaves stays, and whoever was computed least goes first."""
    seen = run(policy(cache="lfu", stage3_prefetch_bucket_size=0), tmp_path, STEPS[:2], room=3, n_experts=2)
    assert seen.log == [
        ("fetch", 0, 0),
        ("fetch", 0, 1),
        ("gpu", 0, 0),
        ("evict", 0, 1),
        ("fetch", 1, 0),
        ("fetch", 1, 1),
        ("gpu", 1, 1),  # 0.1 was never computed, 0.0 once
        ("evict", 1, 0),
        ("fetch", 0, 1),
        ("gpu", 0, 1),  # likewise 1.0; 0.0 is there
        ("evict", 0, 0),
        ("fetch", 1, 0),
        ("gpu", 1, 0),  # both of layer 0 once: the one that came first
    ]
    # 1 + 20 + 2 twice and the head; then one expert a layer: 1 + 10 + 2 twice and the head.
    assert ends(seen) == [47, 47 + 27]
    assert list(seen.outcome.report.counts.peak_bytes) == [3 * EXPERT_BYTES]
