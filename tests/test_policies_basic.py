"""The plain caches by hand: who leaves, with which settings."""

from __future__ import annotations

from random import Random as Draws

import pytest
from easy_numbers import run

from policies.belady import Belady
from policies.gpu_only import GpuOnly
from policies.lfru import Lfru
from policies.lfu import Lfu
from policies.lru import Lru
from policies.on_demand import OnDemand
from sim.base.errors import BadInput, DoesNotFit


def evicted(policy, tmp_path, asked, room, n_experts=4):
    """Experts in the order they left, for tokens that each ask for one expert of one layer."""
    seen = run(policy, tmp_path, [[[expert]] for expert in asked], room=room, n_experts=n_experts)
    return [expert for kind, _, expert in seen.log if kind == "evict"]


def test_lru_evicts_the_oldest_use(tmp_path):
    assert evicted(Lru(), tmp_path, [0, 1, 0, 2, 3], room=2) == [1, 0]


def test_lfu_evicts_the_fewest_uses_ties_to_the_lowest_expert(tmp_path):
    # Uses when 3 comes: 0 twice, 1 once, 2 once: 1 leaves. Then 1 comes back (twice): 2 and 3 have one each: 2 leaves.
    assert evicted(Lfu(), tmp_path, [0, 0, 2, 1, 3, 1], room=3) == [1, 2]


def test_lfu_may_forget_uses_of_what_left(tmp_path):
    # 0 is used twice, then 1 and 2 share the other room. Remembering, 1 has two uses when it is back, so that 3 throws
    # out 0 (lowest id of equals); forgetting, 1 starts again with one use and leaves first.
    asked = [0, 0, 1, 2, 1, 3]
    assert evicted(Lfu(), tmp_path, asked, room=2) == [1, 2, 0]
    assert evicted(Lfu(reset_on_evict=True), tmp_path, asked, room=2) == [1, 2, 1]


def test_lfru_evicts_the_fewest_uses_per_look_up_since_the_last(tmp_path):
    # When 2 comes the clock stands at 4: 0 has 3 uses, last at 3, so 3 / 2; 1 came at 4, 1 / 1: 1 leaves, as by uses.
    assert evicted(Lfru(), tmp_path, [0, 0, 0, 1, 2], room=2) == [1]
    # When 2 comes at 6, 0 has 3 uses and last one at 3, 3 / 4, and 1 has 3 / 1: of equal uses the older leaves.
    assert evicted(Lfru(), tmp_path, [0, 0, 0, 1, 1, 1, 2], room=2) == [0]
    # 0 has 2 / 2 and 1 has 1 / 1, equals: the one that came first leaves, whichever its number.
    assert evicted(Lfru(), tmp_path, [0, 0, 1, 2], room=2) == [0]
    assert evicted(Lfru(), tmp_path, [1, 1, 0, 2], room=2) == [1]


def test_lfru_forgets_the_uses_of_what_left(tmp_path):
    # 1 leaves for 2 (at 5: 0 has 4 / 2, 1 has 1 / 1), 2 for 1 (4 / 3 and 1 / 1), and when 3 comes 0 has 4 / 4 and 1,
    # back with one use, 1 / 1: equals, 0 came first. Had 1 kept its use, it would have 2 / 1 and no tie.
    # One use of 0 more, and the tie is gone: 5 / 4 stays, 1 / 1 leaves. Had 1 kept its first use, 0 would leave.
    assert evicted(Lfru(), tmp_path, [0, 0, 0, 0, 1, 2, 1, 3], room=2) == [1, 2, 0]
    assert evicted(Lfru(), tmp_path, [0, 0, 0, 0, 0, 1, 2, 1, 3], room=2) == [1, 2, 1]


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_lfru_against_a_replay_of_its_published_code(scope, tmp_path):
    """Dictionaries in the order of coming and one clock per cache, as tinyserve has them; one expert per look-up."""
    draw, n_layers, n_experts, room = Draws(5), 3, 6, 9
    rows = [[[int(n_experts * draw.random() ** 2)] for _ in range(n_layers)] for _ in range(120)]
    caches = {name: ({}, [0]) for name in (range(n_layers) if scope == "layer" else [0])}
    left = []
    for row in rows:
        for layer, (expert,) in enumerate(row):
            data, clock = caches[layer if scope == "layer" else 0]
            if (layer, expert) not in data and len(data) == room // len(caches):
                out = min(data, key=lambda key: data[key][0] / (clock[0] - data[key][1] + 1))
                del data[out]
                left.append(out)
            clock[0] += 1
            data[layer, expert] = (data.get((layer, expert), (0, 0))[0] + 1, clock[0])
    seen = run(Lfru(scope=scope), tmp_path, rows, room=room, n_experts=n_experts)
    assert [(layer, expert) for kind, layer, expert in seen.log if kind == "evict"] == left
    assert len(left) > 60


def test_belady_evicts_the_farthest_next_use(tmp_path):
    # When 2 comes, 1 is wanted before 0: 0 leaves. When 0 is back, neither is wanted again: the lower id leaves.
    assert evicted(Belady(), tmp_path, [0, 1, 2, 1, 0], room=2) == [0, 1]


def test_belady_reads_no_further_than_it_needs(tmp_path):
    # Nothing is asked for again: the lowest expert leaves.
    assert evicted(Belady(), tmp_path, [1, 0, 2], room=2) == [0]


@pytest.mark.parametrize("make", [Lru, Lfu, Lfru, Belady])
def test_a_cache_per_layer(make, tmp_path):
    # Two layers, room for 3: layer 0 gets 2, layer 1 gets 1. Tokens ask 0 0, 1 1, 0 0, 1 1: layer 0 keeps both,
    # layer 1 keeps one: 2 + 4 copies.
    rows = [[[0], [0]], [[1], [1]], [[0], [0]], [[1], [1]]]
    seen = run(make(scope="layer"), tmp_path, rows, room=3)
    assert seen.result.demand_copies.n == 6
    assert {layer for kind, layer, _ in seen.log if kind == "evict"} == {1}
    with pytest.raises(DoesNotFit, match=f"policy {make.name}.*at least 2 whole experts"):
        run(make(scope="layer"), tmp_path, rows, room=1)


def test_gpu_only_places_everything(tmp_path):
    seen = run(GpuOnly(), tmp_path, [[[0, 1]], [[2, 3]]], room=4)
    assert [entry[0] for entry in seen.log] == ["gpu"] * 4
    assert seen.classes("decode") == {"hit": 2}


# Two layers of three experts, K = 1.
FIVE = [[[0], [1]], [[2], [1]], [[0], [0]], [[1], [2]], [[1], [1]]]


def test_on_demand_five_steps(tmp_path):
    """Every expert is copied, run and freed: 1 + 10 + 2 s per layer, 1 s for the head."""
    seen = run(OnDemand(), tmp_path, FIVE, room=2, n_experts=3)
    layers = [(layer, row[layer][0]) for row in FIVE for layer in (0, 1)]
    assert seen.log == [(kind, *at) for at in layers for kind in ("fetch", "gpu", "evict")]
    assert seen.end_s == 5 * (2 * 13 + 1)


@pytest.mark.parametrize(("slots", "starts"), [(1, [1, 13]), (2, [1, 11])])
def test_one_slot_copies_only_after_the_last_one_ran(slots, starts, tmp_path):
    seen = run(OnDemand(slots=slots), tmp_path, [[[0, 1]]], room=2, n_experts=2)
    assert [start for _, start, _ in seen.lane("h2d")] == starts


def test_on_demand_of_whole_layers_and_by_matrices(tmp_path):
    whole = run(OnDemand(granularity="layer"), tmp_path, FIVE, room=2, n_experts=3)
    assert whole.log[:7] == [
        ("fetch", 0, 0),
        ("gpu", 0, 0),
        ("fetch", 0, 1),
        ("evict", 0, 0),
        ("fetch", 0, 2),
        ("evict", 0, 1),
        ("evict", 0, 2),
    ]
    assert whole.result.demand_copies.n == 5 * 2 * 3
    # Two matrices of 5 s each, the first computed (1 s) while the second comes.
    halves = run(OnDemand(matrices=2), tmp_path, FIVE[:1], room=2, n_experts=3)
    assert halves.lane("h2d")[:2] == [("demand 0.0", 1, 6), ("demand 0.0", 6, 11)]
    assert halves.lane("gpu")[1:3] == [("expert 0.0", 6, 7), ("expert 0.0", 11, 12)]


def test_on_demand_needs_its_slots(tmp_path):
    with pytest.raises(DoesNotFit, match="at least 3 whole experts"):
        run(OnDemand(slots=3), tmp_path, [[[0, 1]]], room=2)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (Lru, {"scope": "layers"}, "parameter lru.scope, got 'layers': not a choice; did you mean 'layer'"),
        (Lru, {"windo": 3}, "parameter lru.windo: no such parameter"),
        (GpuOnly, {"x": 1}, "no such parameter; it has none"),
        (Lfu, {"reset_on_evict": 1}, "must be true or false"),
        (OnDemand, {"slots": 0}, r"must lie in \[1, 64\]"),
        (OnDemand, {"slots": 1.5}, "must be a whole number"),
        (OnDemand, {"slots": "two"}, "must be a finite number"),
        (OnDemand, {"slots": True}, "must be a finite number"),
    ],
)
def test_settings_are_checked(kind, settings, message):
    with pytest.raises(BadInput, match=message):
        kind(**settings)
