"""The plain caches against twenty lines each, on tiny traces, the bundled one and public ones; random's hit rate.

Two models of access. *Layer by layer*, as the engine serves: what a layer needs is looked up at once, what is there is
used first, then what is missing takes room from what the layer does not still have to run. *One at a time*, as the
table of the public traces was made: each expert of a token is an access of its own, in file order, and may evict its
neighbours. The engine is compared with the first; the table with the second.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from easy_numbers import setup
from scopes import one_cache
from tiny_traces import from_rows, noise, tiny_trace

from policies.belady import Belady
from policies.fifo import Fifo
from policies.lfu import Lfu
from policies.lru import Lru
from policies.random import Random
from sim.base.errors import BadInput
from sim.options import RunSpec
from sim.run import execute, prepare
from sim.workload.iterations import Iteration
from traces.format.catalogue import open_trace
from traces.format.reader import Trace

BUNDLED = "mixtral-8x7b-small"


def layers_of(made):
    """[(layer, experts in the order the engine looks at them)] of every step."""
    batching, found = made.batching(), []
    for index, ranges in enumerate(iter(lambda: batching.next(float("inf")), None)):
        iteration = Iteration(index, ranges, made.trace, None)
        for layer in range(made.trace.n_layers):
            if iteration.n_tokens == 1:
                found.append((layer, iteration.ids(layer)[0].tolist()))
            else:
                found.append((layer, sorted(set(iteration.ids(layer).ravel().tolist()))))
    return found


def misses_layer_by_layer(steps, room, rank):
    """Copies of a cache that evicts the least `rank(expert, state)`; state keeps arrival, last use and uses."""
    there, state, clock, misses = {}, {}, 0, 0
    for layer, experts in steps:
        pending = {(layer, e) for e in experts}
        here = [(layer, e) for e in experts if (layer, e) in there]
        missing = [(layer, e) for e in experts if (layer, e) not in there]
        later, ran = [], []

        def use(x, hit):
            nonlocal clock
            clock += 1
            arrived, _, uses = state.get(x, (0, 0, 0))
            state[x] = (arrived if hit else clock, clock, uses + 1)
            there[x] = None

        for x in here:
            use(x, True)
        for at, x in enumerate(missing):
            if len(there) == room:
                free = [y for y in there if y not in pending]
                if not free:
                    later = missing[at:]
                    break
                del there[min(free, key=lambda y: rank(y, state))]
            use(x, False)
        for x in later:  # more than fit: whoever has run may leave
            done = [y for y in there if y not in later or y in ran]
            del there[min(done, key=lambda y: rank(y, state))]
            use(x, False)
            ran.append(x)
        misses += len(missing)
    return misses


def hits_one_at_a_time(rows, room):
    """LRU per layer over rows[token, layer, k], each expert an access of its own; share found."""
    found = 0
    for layer in range(rows.shape[1]):
        recent = OrderedDict()
        for expert in rows[:, layer].ravel().tolist():
            if expert in recent:
                found += 1
                recent.move_to_end(expert)
            else:
                if len(recent) == room:
                    recent.popitem(last=False)
                recent[expert] = None
    return found / rows.size


RANKS = {
    Lru: lambda x, state: state[x][1],
    Fifo: lambda x, state: state[x][0],
    Lfu: lambda x, state: (state[x][2], x[1], x[0]),
}


def fewest_copies(steps, room):
    """Uses less the most intervals between uses that can be kept: in order of their ends, each one that still fits.

    All that span a point between steps fit the room; all that cross a step leave one for who runs there.
    """
    uses = {}
    for at, (layer, experts) in enumerate(steps):
        for e in experts:
            uses.setdefault((layer, e), []).append(at)
    intervals = sorted((b, a) for found in uses.values() for a, b in pairwise(found))
    load_between, load_across, kept = [0] * len(steps), [0] * len(steps), 0
    for b, a in intervals:  # by end: keep what still fits everywhere
        between, across = range(a, b), range(a + 1, b)
        if all(load_between[i] < room for i in between) and all(load_across[i] < room - 1 for i in across):
            kept += 1
            for i in between:
                load_between[i] += 1
            for i in across:
                load_across[i] += 1
    return sum(map(len, uses.values())) - kept


def copies(policy, trace, room):
    made = setup(policy, trace, room)
    steps = layers_of(made)
    return execute(made).report.counts.tally.n_demand, steps


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    with Trace(tiny_trace(folder / "t", 3, 6, 2, n_requests=6, prompt=3, outputs=12, levels=set(), seed=5)) as trace:
        yield trace


@pytest.mark.parametrize("room", [1, 2, 3, 5, 8, 12, 18])
@pytest.mark.parametrize("make", RANKS, ids=lambda kind: kind.name)
def test_counts_on_a_tiny_trace(make, room, tiny):
    n, steps = copies(one_cache(make), tiny, room)
    assert n == misses_layer_by_layer(steps, room, RANKS[make])


@pytest.mark.parametrize("room", [1, 2, 3, 5, 8, 12, 18])
def test_belady_makes_hardly_more_copies_than_the_relaxed_problem(tiny, room):
    """The relaxed problem lets experts of one layer pass each other; `test_laws` has the exact minimum."""
    n, steps = copies(Belady(), tiny, room)
    least = fewest_copies(steps, room)
    assert least <= n <= least * 1.07 + 1
    assert n <= min(copies(one_cache(make), tiny, room)[0] for make in (Lru, Lfu, Fifo, Random))


def test_scopes(tiny):
    """Per layer: each layer is a cache of its own."""
    n, steps = copies(Fifo(scope="layer"), tiny, 9)
    alone = [misses_layer_by_layer([s for s in steps if s[0] == layer], 3, RANKS[Fifo]) for layer in range(3)]
    assert n == sum(alone)


# -- bundled and public traces -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", RANKS, ids=lambda kind: kind.name)
def test_counts_on_the_bundled_trace(make):
    try:
        trace = open_trace(BUNDLED)
    except BadInput as error:
        pytest.skip(f"no bundled trace: {error}")
    with trace:
        made = setup(one_cache(make), trace, 64)
        made = replace(made, requests=made.requests[:2])
        assert execute(made).report.counts.tally.n_demand == misses_layer_by_layer(layers_of(made), 64, RANKS[make])


# README of the public traces: LRU hit share at 25 % and 50 % cached, one access at a time.
PUBLIC = {
    "esft_dsv2lite_intent": (64, 0.473, 0.727),
    "esft_dsv2lite_law": (64, 0.473, 0.718),
    "bigmoe_qwen": (128, 0.775, 0.906),
    "bigmoe_gemma": (128, 0.769, 0.905),
    "ocs_qwen15moe_cooking_1": (60, 0.367, 0.670),
    "ocs_qwen15moe_history_1": (60, 0.383, 0.611),
    "warp_olmoe_299": (64, 0.571, 0.781),
}


def public(name):
    folder = os.environ.get("MOESIM_EXTRA_TRACES")
    if not folder:
        pytest.skip("MOESIM_EXTRA_TRACES is not set")
    return np.load(Path(folder) / "normalized" / f"{name}.npz")["experts"].astype(int)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_hit_rates_one_access_at_a_time(name):
    n_experts, quarter, half = PUBLIC[name]
    rows = public(name)
    assert hits_one_at_a_time(rows, n_experts // 4) == pytest.approx(quarter, abs=5.1e-4)
    assert hits_one_at_a_time(rows, n_experts // 2) == pytest.approx(half, abs=5.1e-4)


@pytest.mark.parametrize("name", ["bigmoe_qwen", "ocs_qwen15moe_cooking_1", "warp_olmoe_299"])
@pytest.mark.parametrize("make", RANKS, ids=lambda kind: kind.name)
def test_counts_on_public_traces(name, make, tmp_path):
    """The engine, layer by layer; and how far that is from one access at a time."""
    n_experts = PUBLIC[name][0]
    rows = public(name)
    with Trace(from_rows(tmp_path / "t", rows.tolist(), n_experts)) as trace:
        room = n_experts // 4 * rows.shape[1]
        n, steps = copies(one_cache(make), trace, room)
        assert n == misses_layer_by_layer(steps, room, RANKS[make])
        if make is Lru:
            per_layer, _ = copies(Lru(scope="layer"), trace, room)
            one_at_a_time = hits_one_at_a_time(rows, n_experts // 4)
            # Layer by layer, what a token shares with the one before is safe from its neighbours.
            assert one_at_a_time <= 1 - per_layer / rows.size <= one_at_a_time + 0.03


# -- random ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uniform(tmp_path_factory):
    """4,000 tokens that ask one of 20 experts, evenly and independently."""
    rows = (noise(11, 4000, 1, 1) % 20).tolist()
    with Trace(from_rows(tmp_path_factory.mktemp("even") / "t", rows, 20)) as trace:
        yield trace


@pytest.mark.parametrize("room", [2, 5, 10, 16])
def test_random_hits_as_often_as_it_caches(uniform, room):
    """MoEpic Table 1, RND: 16.4, 33.0, 49.7, 67.4, 83.2 % at 10 to 50 of 60 experts: the share cached."""
    result = execute(setup(Random(), uniform, room)).result
    # Standard deviation of the share: below sqrt(p (1 - p) / 4000) < 0.008.
    assert result.hit_rate == pytest.approx(room / 20, abs=0.025)


def test_random_is_a_function_of_its_seed(tiny, tmp_path):
    first, again = (execute(setup(Random(seed=3), tiny, 5)) for _ in range(2))
    assert first.result.tpot_s == again.result.tpot_s
    counts = {execute(setup(Random(seed=s), tiny, 5)).report.counts.tally.n_demand for s in range(8)}
    assert len(counts) > 1


def test_the_run_seed_reaches_it_unless_it_has_one_of_its_own(tmp_path):
    path = tiny_trace(tmp_path / "t", 32, 8, 2, levels=set())

    def seed(**given):
        with_own = {"seed": 7} if given.pop("own", False) else {}
        made = prepare(
            RunSpec(policy="random", hw="h200-sxm", trace=str(path), model="mixtral-8x7b", set=with_own, **given)
        )
        made.close()
        return made.policy.settings["seed"]

    assert (seed(), seed(seed=4), seed(seed=4, own=True)) == (0, 4, 7)


def test_random_draws_evenly():
    """Who stands where after others came and went does not matter: every resident leaves about as often."""

    class Room:
        n_gpus = 1

        def evictable(self, piece):
            return piece != 3

    policy, left = Random(seed=1), [0] * 6
    policy.bind(Room())
    policy.group = lambda piece: 0
    for piece in range(6):
        policy.accessed(piece, False, None)
    for _ in range(6000):
        out = policy.victim(None, False, Room())
        left[out] += 1
        policy.evicted(out, None)
        policy.accessed(out, False, None)
    assert left[3] == 0
    assert all(abs(n - 1200) < 150 for at, n in enumerate(left) if at != 3)
