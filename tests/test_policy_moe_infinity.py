"""MoE-Infinity: matching, priorities, evictions of the three behaviours by hand, and every parameter.

Numbers of `easy_numbers`: copying an expert takes 10 s, an expert 2 s, attention and head 1 s; lookups are made free.
"""

from __future__ import annotations

import numpy as np
import pytest
from easy_numbers import execute_easy, run, setup
from tiny_traces import from_rows, tiny_trace

from policies.lfu import Lfu
from policies.moe_infinity import Collection, MoeInfinity, activations, rows_normalised
from traces.format.reader import Trace


class TestMatrices:
    def test_activations(self):
        ids = np.array([[[0, 1], [2, 1]], [[0, 2], [2, 0]]])
        assert activations(ids, 3).tolist() == [[2, 1, 1], [1, 1, 2]]
        assert rows_normalised(np.array([[2.0, 2.0], [0.0, 0.0]])).tolist() == [[0.5, 0.5], [0, 0]]

    def test_a_newcomer_takes_the_place_of_its_likest(self):
        kept = Collection(2, 1, 3)
        for row in ([9, 0, 0], [0, 1, 1], [0, 0, 0], [0, 3, 2]):  # one without activations is none
            kept.add(np.array([row], dtype=np.float64))
        assert len(kept) == 2
        assert kept[0].tolist() == [[9, 0, 0]]
        assert kept[1].tolist() == [[0, 3, 2]]
        assert kept.shares(1).tolist() == [[0, 0.6, 0.4]]
        kept.add(np.array([[0.0, 1.0, 0.0]]))
        assert kept.shares(1).tolist() == [[0, 1, 0]]

    def test_partial_matrices_are_matched_by_cosine(self):
        """Of layer 0 = expert 1: cosines 3 / sqrt(9 + 16) and 4 / sqrt(16 + 64): .6 and .447."""
        kept = Collection(9, 2, 2)
        kept.add(np.array([[0.0, 3.0], [4.0, 0.0]]))
        kept.add(np.array([[0.0, 4.0], [0.0, 8.0]]))
        assert kept.likest(kept.products(0, np.array([0.0, 1.0]))) == 0
        assert kept.likest(np.zeros(2)) == 0
        assert kept.likest(kept.products(1, np.array([0.0, 1.0]))) == 1

    def test_the_code_of_2024_looks_at_later_rows_only(self):
        """Layer 0 tells them apart, and the code has overwritten it: at layer 0 rows 1 and 2 decide, at 2 nothing."""
        kept = Collection(9, 3, 2)
        kept.add(np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))
        kept.add(np.array([[0.0, 1.0], [1.0, 1.0], [1.0, 0.0]]))
        live = np.array([[1.0, 0.0], [2.0, 0.0], [5.0, 0.0]])
        # Rows 1 + 2: 1 + 0 and .707 + 1; row 2: 0 and 1; none.
        assert kept.likest_ahead(live) == [1, 1, 0]
        assert kept.likest_ahead(np.zeros((3, 2))) == [0, 0, 0]


def store_and(path, stored, rows, n_experts=4):
    """Requests of the store split (prompt of one token each), then the one that is scored."""
    lengths = [(1, len(request)) for request in stored] + [(1, len(rows))]
    splits = ["store"] * len(stored) + ["test"]
    return from_rows(path, [row for request in stored for row in request] + rows, n_experts, lengths, splits)


# Three layers of 4 experts, K = 1. Past: one request generates 0 1 2 twice, another 3 3 3 twice (prompts alike).
PAST = [[[[0], [0], [0]], [[0], [1], [2]], [[0], [1], [2]]], [[[0], [0], [0]], [[3], [3], [3]], [[3], [3], [3]]]]


def test_five_steps_of_the_paper(tmp_path):
    """Room for 6 of 12; a prompt and four tokens; two of them follow the first past request, two the second."""
    rows = [[[0], [0], [0]], [[3], [3], [3]], [[0], [1], [2]], [[0], [1], [3]], [[3], [3], [3]]]
    with Trace(store_and(tmp_path / "t", PAST, rows)) as trace:
        made = setup(MoeInfinity(lookup_s=0.0, queue=1), trace, room=6)
        seen = execute_easy(made)
    assert seen.log == [
        # Prompt: layer 0 misses 0. Both past prompts are 0 0 0: shares 1 for expert 0 of layers 1 (closeness 2/3) and
        # 2 (1/3): asked for in that order, one at a time, each used late.
        ("fetch", 0, 0),
        ("gpu", 0, 0),
        ("prefetch", 1, 0),
        ("gpu", 1, 0),
        ("prefetch", 2, 0),
        ("gpu", 2, 0),
        # 3 misses; the second request is likest: 3 of layer 1, then of layer 2.
        ("fetch", 0, 3),
        ("gpu", 0, 3),
        ("prefetch", 1, 3),
        ("gpu", 1, 3),
        ("prefetch", 2, 3),
        ("gpu", 2, 3),
        # 0 is there; the first request is likest: 1 of layer 1. Full: scores (share + eps)(1 - l / 3) of what is there:
        # 0.0 alone has a share; the rest eps: layer 2 goes first, its lowest expert: 2.0; then 2.3 for 2.2.
        ("gpu", 0, 0),
        ("evict", 2, 0),
        ("prefetch", 1, 1),
        ("gpu", 1, 1),
        ("evict", 2, 3),
        ("prefetch", 2, 2),
        ("gpu", 2, 2),
        # All there but 2.3: it takes the place of what scores least: 1.0, eps x 2/3.
        ("gpu", 0, 0),
        ("gpu", 1, 1),
        ("evict", 1, 0),
        ("fetch", 2, 3),
        ("gpu", 2, 3),
        # The second request is likest, and all of it there. Every other expert is queued too, for its eps: 1.0, eps x
        # 2/3 in either order, takes the place of 2.2, eps x 1/3.
        ("gpu", 0, 3),
        ("evict", 2, 2),
        ("prefetch", 1, 0),
        ("gpu", 1, 3),
        ("gpu", 2, 3),
    ]


def test_five_steps_of_the_code_of_2024(tmp_path):
    """One past request with its prompt: counts 3 of 0.0; 1 of 1.0, 2 of 1.1; 1 of 2.0, 2 of 2.2. Room for 3 of 12."""
    rows = [[[0], [1], [2]], [[0], [1], [2]], [[3], [1], [2]], [[0], [1], [2]], [[0], [3], [2]]]
    with Trace(store_and(tmp_path / "t", PAST[:1], rows)) as trace:
        seen = execute_easy(setup(MoeInfinity(variant="code2024", lookup_s=0.0), trace, room=3))
    assert seen.log[:19] == [
        # Predicted before anything is demanded, this layer included: 0.0 (3), 1.1 (2 x 3/4), 2.2 (2 x 2/4), 1.0, 2.0
        # ...
        ("prefetch", 0, 0),
        ("gpu", 0, 0),
        ("prefetch", 1, 1),
        ("gpu", 1, 1),
        ("prefetch", 2, 2),
        ("gpu", 2, 2),
        # In layer 2 layers 0 and 1 have run: the most visited (both once: the lower layer) makes way for 2.0 (1).
        ("evict", 0, 0),
        ("prefetch", 2, 0),
        # Token 1 wants 0.0 back. Nothing has run yet, so the most visited of all: 1.1 (2.2 as often, 2.0 never).
        ("evict", 1, 1),
        ("fetch", 0, 0),
        ("gpu", 0, 0),
        # The queue was made when 1.1 was still there: 1.0 is next, and once layer 1 is entered 0.0 may go for it.
        # Then 1.1 is missing; of 1.0, 2.0 and 2.2 the last has been visited most.
        ("evict", 0, 0),
        ("prefetch", 1, 0),
        ("evict", 2, 2),
        ("fetch", 1, 1),
        ("gpu", 1, 1),
        # Layer 2 misses 2.2: of layers that have run, 1.1 (whose count began anew) has more visits than 1.0.
        ("evict", 1, 1),
        ("fetch", 2, 2),
        ("gpu", 2, 2),
    ]
    # A prefetch in flight is not aborted: 2.0 34..44 holds up the demand of 0.0.
    assert ("prefetch 2.0", 34, 44) in seen.lane("h2d")
    assert ("demand 0.0", 44, 54) in seen.lane("h2d")


def test_the_paper_weighs_shares_by_closeness(tmp_path):
    """Past: of layer 1 three in five go to 1, of layer 2 four in five to 2: 3/5 x 2/3 before 4/5 x 1/3."""
    past = [[[0], [0], [0]], *[[[0], [int(at < 3)], [2 * int(at < 4)]] for at in range(5)]]
    with Trace(store_and(tmp_path / "t", [past], [[[3], [3], [3]], [[0], [1], [2]]])) as trace:
        seen = execute_easy(setup(MoeInfinity(lookup_s=0.0, queue=1), trace, room=12))
    first = seen.log.index(("fetch", 0, 0)) if ("fetch", 0, 0) in seen.log else 0
    later = [entry[1:] for entry in seen.log[first:] if entry[0] == "prefetch" and entry[1] in (1, 2)]
    assert later[0] == (1, 1)


@pytest.mark.parametrize("variant", ["paper", "code2024"])
def test_nothing_is_traced_of_requests_that_are_over(variant, tmp_path):
    with Trace(store_and(tmp_path / "t", PAST, [[[0], [1], [2]]] * 3)) as trace:
        policy = execute_easy(setup(MoeInfinity(variant=variant), trace, room=6)).outcome.setup.policy
    assert not policy._live.any()
    assert policy._traced == {}


def test_2024_counts_closeness_to_one_layer_more_than_there_are(tmp_path):
    """Past: 4 x 1.1, 7 x 2.2. From layer 0 of 3: 4 x 3/4 < 7 x 2/4, where 4 x 2/3 > 7 x 1/3 would put 1.1 first."""
    past = [[[0], [1] if at < 4 else [at - 4 if at > 5 else 0], [2]] for at in range(7)]
    with Trace(store_and(tmp_path / "t", [past], [[[0], [1], [2]]])) as trace:
        seen = execute_easy(setup(MoeInfinity(variant="code2024", lookup_s=0.0), trace, room=12))
    assert [entry[1:] for entry in seen.log if entry[0] == "prefetch"][:2] == [(0, 0), (2, 2)]


def test_2024_evicts_the_most_visited_of_layers_that_have_run(tmp_path):
    """No past, no prefetches: layers 0 1; room 3. After 0.0 x 3, 0.1 x 1: layer 1's new expert evicts 0.0, not 0.1."""
    rows = [[[0], [0]], [[0], [0]], [[1], [0]], [[0], [2]]]
    seen = run(MoeInfinity(variant="code2024"), tmp_path, rows, room=3, n_experts=4)
    assert seen.log[-3:] == [("evict", 0, 0), ("fetch", 1, 2), ("gpu", 1, 2)]
    head = run(MoeInfinity(variant="code_head"), tmp_path, rows, room=3, n_experts=4)
    assert head.log[-3:] == [("evict", 0, 1), ("fetch", 1, 2), ("gpu", 1, 2)]


@pytest.mark.parametrize("seed", range(3))
def test_head_is_lfu(tmp_path, seed):
    """No prediction, counts never reset, ties to the lowest expert, then layer."""
    with Trace(tiny_trace(tmp_path / "t", 3, 6, 2, prompt=1, outputs=30, levels=(), seed=seed)) as trace:
        for room in (5, 9, 14):
            mine = execute_easy(setup(MoeInfinity(variant="code_head"), trace, room))
            other = execute_easy(setup(Lfu(scope="global"), trace, room))
            kinds = ("evict", "fetch")
            assert sorted(e for e in mine.log if e[0] in kinds) == sorted(e for e in other.log if e[0] in kinds)
            assert not mine.prefetched()


def test_phantom_slots(tmp_path):
    """Room for 4. 0 miss, 0 hit, 1 miss, 0 hit: the counter is used up with two experts there; a miss then evicts."""
    rows = [[[0]], [[0]], [[1]], [[0]], [[2]], [[3]], [[2]]]
    seen = run(MoeInfinity(variant="code_head", phantom_slots=True), tmp_path, rows, room=4, n_experts=4)
    assert [e for e in seen.log if e[0] != "gpu"] == [
        ("fetch", 0, 0),
        ("fetch", 0, 1),
        ("evict", 0, 1),
        ("fetch", 0, 2),
        ("evict", 0, 2),
        ("fetch", 0, 3),
        ("evict", 0, 3),
        ("fetch", 0, 2),
    ]
    assert len(list(seen.engine.view.residents())) == 2  # capacity less hits before exhaustion
    assert sum(e[0] == "evict" for e in run(MoeInfinity(variant="code_head"), tmp_path, rows, 4, n_experts=4).log) == 0


def test_simulator_caches(tmp_path):
    """Two layers, room 3: LRU takes the oldest use; sparing what comes leaves 0.0 and 0.1: the same."""
    rows = [[[0], [0]], [[0], [0]], [[1], [0]], [[0], [2]]]
    last = {
        evict: run(MoeInfinity(variant="code_head", evict=evict), tmp_path, rows, 3, n_experts=4).log[-3]
        for evict in ("lru", "lfu", "lru_ds")
    }
    assert last == {"lru": ("evict", 0, 1), "lfu": ("evict", 0, 1), "lru_ds": ("evict", 0, 1)}
    # At layer 0 of the fifth token 0 1 2 3 of three layers are there: LRU takes 0.1; sparing layers 0..2 of four, 3.0.
    rows = [[[0], [0], [0], [0]], [[1], [0], [0], [0]], [[2], [0], [0], [0]]]
    seen = {
        evict: run(MoeInfinity(variant="code_head", evict=evict), tmp_path, rows, 5, n_experts=4).log
        for evict in ("lru", "lru_ds")
    }
    assert ("evict", 0, 0) in seen["lru"]
    assert ("evict", 3, 0) in seen["lru_ds"]


def test_lookups_take_time(tmp_path):
    rows = [[[0], [1], [2]]] * 3
    ends = {}
    for variant in ("paper", "code2024"):
        for lookup_s in (0.0, 1.0):
            with Trace(store_and(tmp_path / "t", PAST, rows)) as trace:
                policy = MoeInfinity(variant=variant, lookup_s=lookup_s)
                ends[variant, lookup_s] = execute_easy(setup(policy, trace, 12)).end_s
    assert ends["code2024", 1.0] > ends["code2024", 0.0]
    assert ends["paper", 1.0] >= ends["paper", 0.0]


KNOBS = {
    "variant": "code2024",
    "capacity": 1,
    "epsilon": 0.5,
    "lookup_s": 0.5,
    "guarded": False,
    "phantom_slots": True,
    "evict": "lru",
    "queue": 1,
    "depth": 4,
    "mode": "online",
}


@pytest.mark.parametrize("knob", KNOBS)
def test_every_parameter_changes_decisions_or_times(tmp_path, knob):
    base = {"phantom_slots": {"variant": "code_head"}, "lookup_s": {"variant": "code2024"}}.get(knob, {})
    prompt = 1 if knob == "phantom_slots" else 3
    with Trace(tiny_trace(tmp_path / "t", 4, 6, 2, n_requests=8, prompt=prompt, outputs=20, levels=())) as trace:
        runs = [
            execute_easy(setup(MoeInfinity(**base, **other), trace, 11, copy_s=0.5))
            for other in ({}, {knob: KNOBS[knob]})
        ]
    assert runs[0].log != runs[1].log or (knob == "lookup_s" and runs[0].end_s != runs[1].end_s)
