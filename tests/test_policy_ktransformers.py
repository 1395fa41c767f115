"""KTransformers: masks, what is deferred and when it arrives, long prompts through the GPU."""

from __future__ import annotations

from collections import Counter

import pytest
from cpu_bench import check_knobs, replay, resident, taught

from policies.ktransformers import KTransformers
from sim.base.errors import DoesNotFit

STORE = [[[0, 1], [3, 2]], [[0, 3], [3, 1]], [[2, 0], [3, 2]]]


def none_there(path, **settings):
    """All experts on the CPU, unless a prompt goes through the GPU."""
    return replay(KTransformers(gpu_experts_per_layer=0, **settings), path, 4)


@pytest.mark.parametrize(
    ("strategy", "there"),
    [
        (
            "uniform",
            [(0, 0), (0, 1), (1, 0)],
        ),  # three rooms beside a layer of four: what is left over to the first layer
        ("front_loading", [(0, 0), (0, 1), (0, 2)]),
        ("frequency", [(0, 0), (1, 2), (1, 3)]),  # 0.0 and 1.3 three times, 1.2 twice
    ],
)
def test_masks(strategy, there, tmp_path):
    path = taught(tmp_path, STORE, [[[0, 1], [0, 1]]], 4)
    assert resident(replay(KTransformers(strategy=strategy), path, 7)) == there


def test_a_random_mask_is_the_seed_s(tmp_path):
    path = taught(tmp_path, STORE, [[[0, 1], [0, 1]]], 4)
    masks = [resident(replay(KTransformers(strategy="random", mask_seed=seed), path, 7)) for seed in (42, 42, 1, 2)]
    assert masks[0] == masks[1]
    assert len({tuple(mask) for mask in masks}) == 3
    assert all(len(mask) == 3 for mask in masks)


def test_experts_per_layer_times_layers(tmp_path):
    path = taught(tmp_path, STORE, [[[0, 1], [0, 1]]], 4)
    assert resident(replay(KTransformers(gpu_experts_per_layer=1), path, 7)) == [(0, 0), (1, 0)]
    with pytest.raises(DoesNotFit, match=r"gpu_experts_per_layer, got 2: 4 experts on the GPU, room for 3 beside"):
        replay(KTransformers(gpu_experts_per_layer=2), path, 7)
    # Without long prompts no layer has to be kept free; with room for all none either.
    assert len(resident(replay(KTransformers(gpu_experts_per_layer=3, gpu_prefill_threshold=0), path, 7))) == 6
    assert len(resident(replay(KTransformers(), path, 8))) == 8


def test_five_steps(tmp_path):
    # Expert 0 of both layers is there. The CPU's experts are launched first, the GPU's run beside them.
    rows = [[[0, 1], [1, 0]], [[1, 2], [0, 3]], [[0, 3], [2, 3]], [[3, 0], [0, 1]], [[1, 0], [3, 2]]]
    seen = replay(KTransformers(), taught(tmp_path, STORE, rows, 4), 6)
    assert seen.log == [
        ("cpu", 0, 1),
        ("gpu", 0, 0),
        ("cpu", 1, 1),
        ("gpu", 1, 0),
        ("cpu", 0, 1),
        ("cpu", 0, 2),
        ("cpu", 1, 3),
        ("gpu", 1, 0),
        ("cpu", 0, 3),
        ("gpu", 0, 0),
        ("cpu", 1, 2),
        ("cpu", 1, 3),
        ("cpu", 0, 3),
        ("gpu", 0, 0),
        ("cpu", 1, 1),
        ("gpu", 1, 0),
        ("cpu", 0, 1),
        ("gpu", 0, 0),
        ("cpu", 1, 3),
        ("cpu", 1, 2),
    ]
    # First token: attention 0..1; down 1..2, CPU 2..7, up 7..8, the GPU's expert 1..3 beside it; the same again.
    assert seen.lane("gpu")[:3] == [("attention 0", 0, 1), ("expert 0.0", 1, 3), ("attention 1", 8, 9)]
    assert seen.lane("cpu")[0] == ("expert 0.1", 2, 7)
    # An expert on the CPU makes a layer 8 s; two of them, one after the other, 13 s. One second for each head.
    n_on_cpu = Counter({8: 7, 13: 3})
    assert seen.end_s == sum(length * n for length, n in n_on_cpu.items()) + 5


HEAVIEST_FIRST = [[[0, 1, 2], [1, 2, 0]]]  # two layers, all on the CPU; a prompt of one token has router order


class TestDeferral:
    def test_the_lightest_arrives_a_layer_later(self, tmp_path):
        path = taught(tmp_path, [[[0, 1, 2], [0, 1, 2]]], HEAVIEST_FIRST, 4)
        seen = none_there(path, max_deferred=1)
        # 0 and 1 on the CPU 2..7 and 7..12, 2 behind them 12..17. Layer 1's attention waits for 1 (up 12..13), not 2.
        assert seen.lane("cpu")[:3] == [("expert 0.0", 2, 7), ("expert 0.1", 7, 12), ("expert 0.2", 12, 17)]
        assert ("attention 1", 13, 14) in seen.lane("gpu")
        # The last layer never defers: all three of 17..32 are waited for, the head runs 33..34.
        assert seen.lane("cpu")[3:] == [("expert 1.1", 17, 22), ("expert 1.2", 22, 27), ("expert 1.0", 27, 32)]
        assert seen.end_s == 34
        assert seen.result.policy_stats == {"deferred_frac": 1 / 6}
        # Without deferral the CPU stands still during layer 1's attention: 18..19, down 19..20, CPU 20..35.
        on_time = none_there(path)
        assert ("attention 1", 18, 19) in on_time.lane("gpu")
        assert on_time.end_s == 37

    def test_the_order_is_immediate_then_deferred_then_gpu(self, tmp_path):
        # Two may be late: 1 and 2 are protected. 2 is on the CPU, on time; 3 is deferred.
        path = taught(tmp_path, [[[2, 1, 0, 3], [2, 1, 0, 3]]], [[[1, 2, 0, 3], [2, 0, 1, 3]]], 4)
        policy = KTransformers(strategy="frequency", max_deferred=2, gpu_prefill_threshold=0)
        seen = replay(policy, path, 2)  # all equally used: the lowest ids are there
        assert resident(seen) == [(0, 0), (0, 1)]
        assert seen.log[:4] == [("cpu", 0, 2), ("cpu", 0, 3), ("gpu", 0, 1), ("gpu", 0, 0)]  # in router order
        assert seen.result.policy_stats == {"deferred_frac": 1 / 8}

    def test_what_one_token_protects_is_on_time_for_all(self, tmp_path):
        # Alone, each token would defer its second expert. Together: 0 and 1 protect each other, 2 is nobody's first.
        rows = [[[0, 1], [0, 1]], [[1, 2], [0, 1]]]
        path = taught(tmp_path, [[[0, 1], [0, 1]]], rows, 4, prompt=2)
        seen = none_there(path, max_deferred=1)
        assert seen.log[:3] == [("cpu", 0, 0), ("cpu", 0, 1), ("cpu", 0, 2)]
        assert seen.result.policy_stats == {"deferred_frac": 1 / 8}

    def test_immediate_ones_come_first_whatever_their_ids(self, tmp_path):
        # Two tokens: 3 is the heaviest of both and on time; 1 and 2 are late, and behind it on the CPU.
        path = taught(tmp_path, [[[0, 1], [0, 1]]], [[[3, 1], [3, 1]], [[3, 2], [3, 2]]], 4, prompt=2)
        seen = none_there(path, max_deferred=1)
        assert seen.log[:3] == [("cpu", 0, 3), ("cpu", 0, 1), ("cpu", 0, 2)]
        assert seen.log[3:] == [("cpu", 1, 1), ("cpu", 1, 2), ("cpu", 1, 3)]  # the last layer defers nothing

    def test_all_may_be_late(self, tmp_path):
        path = taught(tmp_path, [[[0, 1, 2], [0, 1, 2]]], HEAVIEST_FIRST, 4)
        assert ("attention 1", 1, 2) in none_there(path, max_deferred=9).lane("gpu")

    def test_only_deferral_is_lossy(self, tmp_path):
        path = taught(tmp_path, [[[0, 1, 2], [0, 1, 2]]], HEAVIEST_FIRST, 4)
        assert "lossy" in none_there(path, max_deferred=1).result.caveats
        assert "lossy" not in none_there(path).result.caveats
        assert KTransformers.traits == {"cpu"}


# A prompt of three tokens wants 3 (three times), 2 (twice) and 1; then one token wants 3 and 2. In two layers alike.
LONG = [[row, row] for row in ([3, 2], [2, 3], [3, 1], [3, 2])]


class TestLongPrompts:
    def test_layer_by_layer(self, tmp_path):
        path = taught(tmp_path, [[[0, 1], [0, 1]]], LONG, 4, prompt=3)
        seen = replay(KTransformers(gpu_prefill_threshold=3), path, 6)
        assert seen.log[:8] == [
            ("fetch", 0, 1),
            ("fetch", 0, 2),
            ("fetch", 0, 3),  # all that is missing, wanted or not
            ("gpu", 0, 1),
            ("gpu", 0, 2),
            ("gpu", 0, 3),
            ("evict", 0, 1),
            ("evict", 0, 2),
        ]
        # Nothing runs before the layer is complete: attention 0..1, copies 1..31, experts from 31.
        assert seen.lane("gpu")[:2] == [("attention 0", 0, 1), ("expert 0.1", 31, 33)]
        assert resident(seen) == [(0, 0), (1, 0)]
        assert [kind for kind, _, _ in seen.log[-4:]] == ["cpu"] * 4

    def test_dynamic_update_keeps_the_prompt_s_favourites(self, tmp_path):
        path = taught(tmp_path, [[[0, 1], [0, 1]]], LONG, 4, prompt=3)
        seen = replay(KTransformers(gpu_prefill_threshold=3, dynamic_update=True), path, 6)
        assert resident(seen) == [(0, 3), (1, 3)]
        assert seen.classes("decode") == {"hit": 2, "cpu": 2}

    def test_ties_and_padding_go_to_the_lowest_id(self, tmp_path):
        # Three of a layer stay; the prompt wants 3 and 2 equally often, nobody else: 2, 3, and 0 fills up.
        rows = [[[3, 2], [3, 2]], [[2, 3], [2, 3]], [[0, 1], [0, 1]]]
        path = taught(tmp_path, [[[0, 1], [0, 1]]], rows, 5, prompt=2)
        policy = KTransformers(gpu_prefill_threshold=2, dynamic_update=True, gpu_experts_per_layer=2)
        assert resident(replay(policy, path, 9)) == [(0, 2), (0, 3), (1, 2), (1, 3)]
        policy = KTransformers(gpu_prefill_threshold=2, dynamic_update=True, strategy="front_loading")
        assert resident(replay(policy, path, 8)) == [(0, 0), (0, 2), (0, 3)]

    @pytest.mark.parametrize(
        ("threshold", "rule", "through_gpu"),
        [
            (3, "at_least", True),
            (3, "more_than", False),
            (2, "more_than", True),
            (4, "at_least", False),
            (0, "at_least", False),
        ],
    )
    def test_the_threshold(self, threshold, rule, through_gpu, tmp_path):
        path = taught(tmp_path, [[[0, 1], [0, 1]]], LONG, 4, prompt=3)
        seen = replay(KTransformers(gpu_prefill_threshold=threshold, threshold_rule=rule), path, 6)
        assert any(kind == "fetch" for kind, _, _ in seen.log) == through_gpu


KNOBS = {
    "gpu_experts_per_layer": ({}, 0),
    "strategy": ({}, "frequency"),
    "mask_seed": ({"strategy": "random"}, 1),
    "max_deferred": ({}, 1),
    "gpu_prefill_threshold": ({}, 3),
    "threshold_rule": ({"gpu_prefill_threshold": 3}, "more_than"),
    "dynamic_update": ({"gpu_prefill_threshold": 3}, True),
}


def test_every_parameter_matters(tmp_path):
    rows = [[[3, 2], [1, 2]], [[2, 3], [1, 0]], [[3, 1], [2, 1]], [[3, 2], [1, 3]], [[0, 2], [2, 3]]]
    check_knobs(KTransformers, taught(tmp_path, STORE, rows, 4, prompt=3), 6, KNOBS)


def test_room_for_less_than_a_layer(tmp_path):
    """No prompt can go through the GPU then; the mask has the room there is, or none of it."""
    rows = [[[0, 1], [0, 1]], [[1, 0], [0, 1]], [[0, 2], [3, 0]], [[2, 0], [0, 1]]]
    path = taught(tmp_path, STORE, rows, 4, prompt=3)
    for settings, there in (({}, [(0, 0), (0, 1), (1, 0)]), ({"gpu_experts_per_layer": 0}, [])):
        seen = replay(KTransformers(gpu_prefill_threshold=3, **settings), path, 3)
        assert resident(seen) == there
        assert "fetch" not in {kind for kind, _, _ in seen.log}
        assert {kind for kind, *_ in seen.log} == ({"cpu", "gpu"} if there else {"cpu"})
    assert "fetch" in {kind for kind, _, _ in replay(KTransformers(gpu_prefill_threshold=3), path, 4).log}
