"""Limits with a closed form: copies that cost nothing, room for everything, the smallest room."""

from __future__ import annotations

from itertools import pairwise

import pytest
from easy_numbers import EXPERT_BYTES, Run, execute_easy, setup
from scopes import one_cache
from tiny_traces import tiny_trace

from policies.belady import Belady
from policies.gpu_only import GpuOnly
from policies.lfu import Lfu
from policies.lru import Lru
from policies.on_demand import OnDemand
from traces.format.reader import Trace

CACHES = [Lru, Lfu, Belady]
LAYERS, EXPERTS, K = 3, 5, 2


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tiny_trace(
        tmp_path_factory.mktemp("limits") / "t", LAYERS, EXPERTS, K, prompt=4, outputs=7, levels={"weights"}
    )
    with Trace(path) as opened:
        yield opened


class OneSlot(OnDemand):
    """Experts pass through one slot."""

    def __init__(self) -> None:
        super().__init__(slots=1)


def simulate(policy, trace, room, **world) -> Run:
    return execute_easy(setup(policy, trace, room, **world))


@pytest.mark.parametrize("make", [*CACHES, OnDemand, OneSlot])
@pytest.mark.parametrize("host", [{}, {"launch_s": 0.75, "sync_s": 0.25}], ids=["free host", "busy host"])
@pytest.mark.parametrize("room", [2, 4, 9])
def test_copies_that_cost_nothing_leave_the_time_of_gpu_only(trace, make, host, room):
    """Exactly: a copy of no length ends when its victim's computation does, which the next one follows anyhow."""
    floor = simulate(GpuOnly(), trace, LAYERS * EXPERTS, **host)
    seen = simulate(one_cache(make), trace, room, copy_s=0, **host)
    assert seen.result.demand_copies.n > 0
    assert seen.end_s == floor.end_s
    assert [t.last_token_s for t in seen.outcome.report.requests] == [
        t.last_token_s for t in floor.outcome.report.requests
    ]


@pytest.mark.parametrize("make", [*CACHES, OnDemand])
def test_what_is_left_of_free_copies_is_their_launches(trace, make):
    """With copy launches of c seconds the time lies between gpu_only's and gpu_only's + c for each copy."""
    floor = simulate(GpuOnly(), trace, LAYERS * EXPERTS, launch_s=0.75)
    seen = simulate(one_cache(make), trace, 4, copy_s=0, launch_s=0.75, copy_launch_s=0.125)
    assert floor.end_s <= seen.end_s <= floor.end_s + 0.125 * seen.result.demand_copies.n


@pytest.mark.parametrize("make", CACHES)
def test_with_room_for_everything_each_expert_is_copied_once(trace, make):
    """Copies = distinct experts of the run; from then on an iteration takes as long as with gpu_only."""
    seen = simulate(one_cache(make), trace, LAYERS * EXPERTS)
    fetched = [entry[1:] for entry in seen.log if entry[0] == "fetch"]
    assert len(fetched) == len(set(fetched)) == len({entry[1:] for entry in seen.log if entry[0] == "gpu"})
    assert not [entry for entry in seen.log if entry[0] == "evict"]
    # Second request: all but surely warm. A decode token: L (attention 1 + k experts of 2) + head 1.
    last = seen.outcome.report.requests[-1]
    n_late = sum(start > last.first_token_s for _, start, _ in seen.lane("h2d"))
    assert last.last_token_s - last.first_token_s == 6 * (LAYERS * (1 + 2 * K) + 1) + 10 * n_late


def iteration_needs(trace, requests):
    """Experts each layer of each iteration needs, one request after the other."""
    for r in requests:
        stop = r.first_row + r.prompt_len
        rows = [(r.first_row, stop), *pairwise(range(stop, stop + r.outputs))]
        for a, b in rows:
            yield [len(set(trace.experts[a:b, layer].ravel().tolist())) for layer in range(trace.n_layers)]


@pytest.mark.parametrize("make", [OneSlot, Lru, Lfu])
def test_room_for_one_expert(trace, make):
    """Nothing overlaps: each layer takes attention + n (copy + expert) = 1 + 12 n, each iteration 1 s for the head.

    A cache of one expert never hits either, because the layers between two uses take its room.
    """
    made = setup(one_cache(make), trace, 1)
    needs = list(iteration_needs(trace, made.requests))
    assert execute_easy(made).end_s == sum(1 + sum(1 + 12 * n for n in layers) for layers in needs)


def test_on_demand_with_two_slots_hides_all_but_the_last_expert(trace):
    """The link never rests within a layer: attention + n copies + the last expert = 1 + 10 n + 2."""
    made = setup(OnDemand(slots=2), trace, 2)
    needs = list(iteration_needs(trace, made.requests))
    seen = execute_easy(made)
    assert seen.end_s == sum(1 + sum(1 + 10 * n + 2 for n in layers) for layers in needs)
    assert seen.result.h2d_bytes == EXPERT_BYTES * sum(map(sum, needs))


def test_gpu_only(trace):
    """Nothing is copied: attention + 2 n per layer, 1 s for the head."""
    made = setup(GpuOnly(), trace, LAYERS * EXPERTS)
    needs = list(iteration_needs(trace, made.requests))
    seen = execute_easy(made)
    assert seen.end_s == sum(1 + sum(1 + 2 * n for n in layers) for layers in needs)
    assert seen.result.h2d_bytes == 0
