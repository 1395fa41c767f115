"""MoEpic: splits, prefetches and replacements by hand, its limits, and every parameter.

Numbers of `easy_numbers`: copying an expert takes 10 s, half of one 5 s; each segment 2 s on the GPU, attention and
head 1 s. The configurator has a test file of its own.
"""

from __future__ import annotations

import numpy as np
import pytest
from easy_numbers import EXPERT_BYTES, execute_easy, setup
from tiny_traces import from_rows, noise, tiny_header, tiny_trace

from policies.lcp import Lcp
from policies.moepic.policy import Moepic
from policies.random import Random
from sim.base.errors import DoesNotFit
from sim.policy.order import NEVER
from traces.format.reader import Trace
from traces.format.requests import Request
from traces.format.writer import write_trace

PLAIN = {"history": "none", "configure": False, "copies": 1}


def predicting(path, rows, guesses, n_experts=4):
    """Rows whose token t predicts, at layer l, `guesses[t][l]` in this order for layer l + 1."""
    experts = np.array(rows)
    n, n_layers, k = experts.shape
    scores = np.zeros((n, n_layers, n_experts))
    for token, layers in enumerate(guesses):
        for layer, order in enumerate(layers):
            for place, expert in enumerate(order):
                scores[token, layer, expert] = (2048 >> place) / 4095
            scores[token, layer, order[0]] += 1 - scores[token, layer].sum()
    header = tiny_header(n_layers, n_experts, k)
    requests = [Request(0, 0, 1, n, "", None, "test")]
    return write_trace(path, header, requests, None, experts=experts, next_scores_1=scores)


def cached(policy):
    return [list(tops.cached) for groups in policy._tops for tops in groups]


# Two layers of 4 experts, K = 1; room for 3: a buffer of 1, V_i = 1, theta 1/2, so 2 tops a layer.
STEPS = [[[0], [1]], [[0], [1]], [[2], [1]], [[0], [3]], [[1], [0]]]
GUESSES = [[[0, 1], [0, 1]], [[1, 0], [2, 0]], [[1, 2], [0, 1]], [[2, 3], [1, 0]], [[0, 1], [0, 1]]]


def test_five_steps(tmp_path):
    policy = Moepic(**PLAIN)
    with Trace(predicting(tmp_path / "t", STEPS, GUESSES)) as trace:
        made = setup(policy, trace, room=3)
        seen = execute_easy(made)
    # Drawn at the start: tops of 3 and 2 in layer 0, of 2 and 1 in layer 1. One activation counts by far more than
    # none.
    assert seen.log == [
        # 0, the prompt. Layer 0 wants 0: 2 leaves (no activations, lowest id), top and bottom come, the bottom goes
        # after use. Of a prompt nothing is predicted: layer 1 by priority, so 0, whole, fills the buffer. Wrong:
        # dropped; 1 only lacks its bottom, so its top goes ahead.
        ("evict", 0, 2),
        ("fetch", 0, 0),
        ("fetch", 0, 0),
        ("part", 0, 0),
        ("gpu", 0, 0),
        ("evict", 0, 0),
        ("prefetch", 1, 0),
        ("prefetch", 1, 0),
        ("evict", 1, 0),
        ("evict", 1, 0),
        ("fetch", 1, 1),
        ("part", 1, 1),
        ("gpu", 1, 1),
        ("evict", 1, 1),
        # 1. For layer 0 by priority still: the bottom of 0; 1, whole, does not fit behind it. Right, and on its way
        # when the gate asks: the top goes ahead. Layer 1: predicted 1 (its bottom), then 0 (does not fit). Right.
        ("prefetch", 0, 0),
        ("part", 0, 0),
        ("gpu", 0, 0),
        ("evict", 0, 0),
        ("prefetch", 1, 1),
        ("part", 1, 1),
        ("gpu", 1, 1),
        ("evict", 1, 1),
        # 2. The wrap-around predicts 2: whole, fills the buffer. Right: its top takes the place of 3's. Layer 1:
        # bottoms of 1 and 2; the gate wants 1.
        ("prefetch", 0, 2),
        ("prefetch", 0, 2),
        ("evict", 0, 3),
        ("part", 0, 2),
        ("gpu", 0, 2),
        ("evict", 0, 2),
        ("prefetch", 1, 1),
        ("prefetch", 1, 2),
        ("evict", 1, 2),
        ("part", 1, 1),
        ("gpu", 1, 1),
        ("evict", 1, 1),
        # 3. Bottom of 0: right. Layer 1: the bottom of 2 comes in vain; 3 is missing and takes the place of 2.
        ("prefetch", 0, 0),
        ("part", 0, 0),
        ("gpu", 0, 0),
        ("evict", 0, 0),
        ("prefetch", 1, 2),
        ("evict", 1, 2),
        ("evict", 1, 2),
        ("fetch", 1, 3),
        ("fetch", 1, 3),
        ("part", 1, 3),
        ("gpu", 1, 3),
        ("evict", 1, 3),
        # 4. 1, whole: right, but its top is still in flight, so each half runs when it comes; of 0 (used thrice) and 2
        # (once) the latter leaves. Layer 1: 0, whole; 3 leaves, not 1.
        ("prefetch", 0, 1),
        ("prefetch", 0, 1),
        ("evict", 0, 2),
        ("part", 0, 1),
        ("gpu", 0, 1),
        ("evict", 0, 1),
        ("prefetch", 1, 0),
        ("prefetch", 1, 0),
        ("evict", 1, 3),
        ("part", 1, 0),
        ("gpu", 1, 0),
        ("evict", 1, 0),
        ("prefetch", 0, 0),
        ("prefetch", 0, 1),
    ]
    assert cached(policy) == [[0, 1], [1, 0]]
    # Token 0: attention 0..1; top of 0 1..6, computed 6..8; bottom 6..11, computed 11..13. The guess's top is in flight
    # 11..16 when the gate speaks at 14 (its bottom is withdrawn): 1's top is computed 14..16, its bottom 16..21..23.
    assert seen.lane("h2d")[:4] == [
        ("demand 0.0", 1, 6),
        ("demand 0.0", 6, 11),
        ("prefetch 1.0", 11, 16),
        ("demand 1.1", 16, 21),
    ]
    assert seen.lane("gpu")[:7] == [
        ("attention 0", 0, 1),
        ("expert 0.0", 6, 8),
        ("expert 0.0", 11, 13),
        ("attention 1", 13, 14),
        ("expert 1.1", 14, 16),
        ("expert 1.1", 21, 23),
        ("head", 23, 24),
    ]
    # Token 1: the bottom of 0 comes 21..26 while the head runs; the top is computed 25..27 meanwhile, the bottom
    # 27..29.
    assert seen.lane("gpu")[7:10] == [("attention 0", 24, 25), ("expert 0.0", 25, 27), ("expert 0.0", 27, 29)]
    assert policy.stats()["top_hit_rate"] == 5 / 10


# One layer of 8 experts, K = 2; room for 6: a buffer of 2, V = 4, theta 1/2, so all 8 tops are there. Copying a bottom
# takes 5 s, computing a segment 4 s, attention and head 2 s.
@pytest.mark.parametrize(
    ("compute", "gpu", "end_s"),
    [
        # Both tops run first; bottoms are there at 7 and 12, the second one while the first is computed.
        ("segments", [(2, 6), (6, 10), (10, 14), (14, 18)], 20),
        # 1's bottom is waited for before 3's top, which has been there all along.
        ("experts", [(2, 6), (7, 11), (11, 15), (15, 19)], 21),
    ],
)
def test_tops_are_computed_before_any_bottom(tmp_path, compute, gpu, end_s):
    """Section 2.3: top segments "can be processed first, even before their bottom segments are loaded"."""
    policy = Moepic(compute=compute, prefetch="none", **PLAIN)
    with Trace(from_rows(tmp_path / "t", [[[1, 3]]], 8)) as trace:
        seen = execute_easy(setup(policy, trace, room=6, kernel_s=2.0))
    assert sorted(cached(policy)[0]) == list(range(8))
    assert seen.lane("h2d") == [("demand 0.1", 2, 7), ("demand 0.3", 7, 12)]
    assert [(start_s, end_s) for what, start_s, end_s in seen.lane("gpu") if what.startswith("expert")] == gpu
    assert seen.end_s == end_s
    tops, rest = [[("part", 0, e)] for e in (1, 3)], [[("gpu", 0, e), ("evict", 0, e)] for e in (1, 3)]
    order = [*tops, *rest] if compute == "segments" else [tops[0], rest[0], tops[1], rest[1]]
    assert [entry for entry in seen.log if entry[0] != "fetch"] == [entry for entries in order for entry in entries]


# One layer, room for 3: a buffer of 1, V = 2, theta 1/2. Every token wants 1, whose top is there; its bottom takes 2 s.
# Token 0: top 1..3, bottom 3..5. It is foretold from then on, and its bottom there when the gates speak.
@pytest.mark.parametrize(
    ("concatenate", "gpu"),
    [
        (True, [(1, 3), (3, 5), (7, 9), (11, 13)]),
        (False, [(1, 3), (3, 5), (7, 9), (9, 11), (13, 15), (15, 17)]),
    ],
)
def test_what_is_all_there_is_computed_as_one(tmp_path, concatenate, gpu):
    """Section 3.1: "the cached top segment and the buffered bottom segment are concatenated"."""

    class First(Moepic):
        def _choose(self, tops, random):
            tops.cached = {1: None, 0: None}

    policy = First(concatenate=concatenate, **PLAIN)
    with Trace(predicting(tmp_path / "t", [[[1]]] * 3, [[[1, 0]]] * 3)) as trace:
        seen = execute_easy(setup(policy, trace, room=3, copy_s=4.0))
    assert [(start_s, end_s) for what, start_s, end_s in seen.lane("gpu") if what.startswith("expert")] == gpu
    later = ["gpu"] if concatenate else ["part", "gpu"]
    assert [kind for kind, _, _ in seen.log if kind in ("part", "gpu")] == ["part", "gpu", *later, *later]


# Two layers, room for the buffer of one expert: nothing is cached, all is copied, 10 s an expert. Layer 0 asks for 0: 1
# to 11 s, computed until 13 s. From then on there is room for what is guessed for layer 1, of a prompt expert 0. Its
# gate asks for 1 at 14 s: a copy under way ends, at 23 s or, being a fifth, at 15 s; what is queued behind it does not
# start.
@pytest.mark.parametrize(
    ("copies", "guessed", "asked", "end_s"),
    [
        (1, [(13, 23)], [(23, 33)], 36),
        (5, [(13, 15)], [(15 + 2 * i, 17 + 2 * i) for i in range(5)], 28),
    ],
)
def test_prefetching_is_terminated_between_two_copies(tmp_path, copies, guessed, asked, end_s):
    """Section 3.2: "upon obtaining the results from the router network, MoEpic terminates the prefetch operation"."""
    policy = Moepic(**PLAIN | {"copies": copies})
    with Trace(predicting(tmp_path / "t", [[[0], [1]]], [[[0], [0]]])) as trace:
        seen = execute_easy(setup(policy, trace, room=1))
    lanes = {what: [(a, b) for w, a, b in seen.lane("h2d") if w == what] for what in ("prefetch 1.0", "demand 1.1")}
    assert lanes == {"prefetch 1.0": guessed, "demand 1.1": asked}
    assert [span for span in seen.lane("gpu") if span[0].startswith("expert")] == [
        ("expert 0.0", 11, 13),
        ("expert 1.1", end_s - 3, end_s - 1),
    ]
    assert seen.end_s == end_s
    assert seen.prefetched().get("cancelled", 0) >= copies - 1


# One layer of 8 experts, K = 2; room for 6: V = 4, theta 1/2, all 8 tops there, a bottom in two copies of 2.5 s each.
def test_slices_are_computed_as_the_segment_they_make_up(tmp_path):
    """Tops in two slices run as one each; a bottom as one when its second slice has come, as in one copy."""
    timelines = []
    for copies in (1, 2):
        policy = Moepic(prefetch="none", **PLAIN | {"copies": copies})
        with Trace(from_rows(tmp_path / f"t{copies}", [[[1, 3]]], 8)) as trace:
            seen = execute_easy(setup(policy, trace, room=6, kernel_s=2.0))
        timelines.append((seen.lane("gpu"), seen.end_s))
        assert [kind for kind, _, _ in seen.log if kind in ("part", "gpu")] == ["part", "part", "gpu", "gpu"]
        assert len(seen.lane("h2d")) == 2 * copies
        assert seen.result.h2d_bytes == EXPERT_BYTES
    assert timelines[0] == timelines[1]


@pytest.mark.parametrize(("loading", "order"), [("bottoms", [3, 0, 0]), ("gate", [0, 0, 3])])
def test_the_order_of_loading(tmp_path, loading, order):
    """The gate ranks 0 before 3; only 3's top is cached: 3 lacks less, 0 ranks higher."""

    class Third(Moepic):
        def _choose(self, tops, random):
            tops.cached = {3: None}

    with Trace(from_rows(tmp_path / "t", [[[0, 3]]], 8)) as trace:
        policy = Third(loading=loading, prefetch="none", **PLAIN)
        seen = execute_easy(setup(policy, trace, room=6))
    assert [expert for kind, _, expert in seen.log if kind == "fetch"] == order
    assert [expert for kind, _, expert in seen.log if kind == "part"] == [3, 0]
    assert [expert for kind, _, expert in seen.log if kind == "gpu"] == list(dict.fromkeys(order))


class Empty(Moepic):
    """Starts with nothing cached, as the plain caches do."""

    def _choose(self, tops, random):
        tops.cached = {}


@pytest.mark.parametrize("seed", range(4))
def test_theta_1_without_prefetch_is_a_plain_cache(tmp_path, seed):
    """Section 2.3, cache only: the very decisions of `lcp` with a cache per layer, in the very time."""
    with Trace(tiny_trace(tmp_path / "t", 3, 6, 2, prompt=1, outputs=30, levels=(), seed=seed)) as trace:
        mine = execute_easy(setup(Empty(split=1.0, prefetch="none", **PLAIN), trace, room=2 + 9))
        plain = execute_easy(setup(Lcp(scope="layer"), trace, room=9))
        fewer = execute_easy(setup(Lcp(scope="layer"), trace, room=6))
    assert mine.log == plain.log != fewer.log
    assert mine.end_s == plain.end_s
    assert mine.result.hit_rate == plain.result.hit_rate
    counts = [plain.classes(phase) for phase in ("prefill", "decode")]  # of a prompt of one token, and of the others
    hits, uses = sum(c.get("hit", 0) for c in counts), sum(sum(c.values()) for c in counts)
    assert mine.engine.policy.stats()["top_hit_rate"] == hits / uses


@pytest.mark.parametrize(("replace", "stays"), [("lowest", True), ("idle", False)])
def test_a_prompt_keeps_the_expert_of_highest_priority(tmp_path, replace, stays):
    """Section 3.3: "evicts the lowest-priority expert". Expert 0 is the most used; a prompt of all experts runs it
    first, as it is there, and must not put a missed expert in its place only because the others are still to run."""
    rows = np.array([[[0]]] * 6 + [[[1]]] + [[[e]] for e in range(4)] + [[[0]]])
    requests = [Request(0, 0, 1, 7, "", None, "test"), Request(1, 7, 4, 5, "", None, "test")]
    path = write_trace(tmp_path / "t", tiny_header(1, 4, 1), requests, None, experts=rows)
    with Trace(path) as trace:
        policy = Moepic(split=1.0, prefetch="none", replace=replace, **PLAIN)
        seen = execute_easy(setup(policy, trace, room=1 + 2))
    assert (0 in cached(policy)[0]) and (("evict", 0, 0) not in seen.log) == stays


def test_theta_0_is_prefetching_only(tmp_path):
    """Section 2.3: nothing is cached, whatever the budget; every use is a copy of its own, and the buffer suffices."""
    with Trace(tiny_trace(tmp_path / "t", 3, 6, 2, levels={"next_scores_1"})) as trace:
        seen = execute_easy(setup(Moepic(split=0.0, **PLAIN), trace, room=12))
        least = execute_easy(setup(Moepic(split=0.0, **PLAIN), trace, room=2))
    assert seen.log == least.log
    p, tally = seen.outcome.report.counts.tally.prefetch, seen.outcome.report.counts.tally
    uses = sum(entry[0] == "gpu" for entry in seen.log)
    assert tally.n_demand + p.n["useful"] + p.n["late"] == uses
    assert p.n["useful"] + p.n["late"] > 0
    assert seen.outcome.report.counts.peak_bytes[0] <= 2 * EXPERT_BYTES
    assert seen.engine.policy.stats()["top_hit_rate"] == 0


def test_a_budget_of_the_buffer_alone_is_the_minimum(tmp_path):
    with Trace(tiny_trace(tmp_path / "t", 3, 4, 2, levels={"next_scores_1"})) as trace:
        execute_easy(setup(Moepic(), trace, room=2))
        with pytest.raises(DoesNotFit, match="at least 2 whole experts"):
            execute_easy(setup(Moepic(), trace, room=1))


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_table_1_random_row_is_a_choice_and_no_replacement(tmp_path, scope):
    """RND is 16.41 % with 10 of 60 cached, whoever is hot; replacement at random keeps more of what is hot."""
    pick, layers = noise(3, 400, 4, 2), 4
    ids = np.where(pick[..., 0] % 4 == 0, pick[..., 1] % 10, pick[..., 1] % 2)  # 0 and 1: three in four, and more
    shares, replaced = [], []
    with Trace(from_rows(tmp_path / "t", ids[..., None].tolist(), 10)) as trace:
        for seed in range(40):
            policy = Random(selection="static", scope=scope, seed=seed)
            made = setup(policy, trace, room=2 * layers + 1)  # and a buffer of K = 1
            seen = execute_easy(made)
            residents = seen.engine.residency.resident_pieces()
            stay = {(p.layer, p.expert) for p in residents if policy.order.bar[p.index] == NEVER}
            assert len(stay) == 2 * layers
            assert scope == "global" or {sum(at == layer for at, _ in stay) for layer in range(layers)} == {2}
            asked = [(layer, int(e)) for row in ids for layer, e in enumerate(row)]
            copies, passing = 0, None
            for one in asked:
                if one not in stay and one != passing:
                    copies, passing = copies + 1, one
            assert seen.result.demand_copies.n == copies
            shares.append(sum(one in stay for one in asked) / len(asked))
            if seed < 4:
                replaced.append(execute_easy(setup(Random(scope=scope, seed=seed), trace, room=8)).result.hit_rate)
    assert np.mean(shares) == pytest.approx(0.2, abs=0.06)
    assert np.mean(replaced) > 0.35


# A world in which each parameter matters: the configurator runs every 12 tokens, and copies are quick enough for
# windows.
BASE = {"tau": 12}
KNOBS = {
    "omega": 1,
    "rho": 0.9,
    "tau": 10**6,
    "zeta": 0.2,
    "split": 0.9,
    "buffer": 4,
    "prefetch": "none",
    "evict": "random",
    "configure": False,
    "admission": "priority",
    "replace": "idle",
    "compute": "experts",
    "concatenate": False,
    "loading": "gate",
    "copies": 1,
    "history": "none",
    "seed": 1,
}


def replay(path, settings, room=8, **world):
    with Trace(path) as trace:
        return execute_easy(setup(Moepic(**settings), trace, room=room, **{"copy_s": 5.0, **world}))


@pytest.mark.parametrize("knob", KNOBS)
def test_every_parameter_changes_decisions(tmp_path, knob):
    path = tiny_trace(tmp_path / "t", 4, 6, 2, n_requests=8, outputs=14, levels={"next_scores_1"})
    base = BASE | {"seed": {"evict": "random"}, "split": {"history": "none"}}.get(knob, {})
    one, two = replay(path, base | {knob: KNOBS[knob]}), replay(path, base)
    assert one.log != two.log


def test_the_end_of_the_store_split_configures(tmp_path):
    """Fewer tokens than tau have been served, and the device is idle: no run judges equal halves for MoEpic."""
    path = tiny_trace(tmp_path / "t", 4, 6, 2, n_requests=8, outputs=14, levels={"next_scores_1"})

    def stats(**settings):
        return replay(path, settings).engine.policy.stats()

    assert stats()["configured"] == 1
    assert stats()["split_mean_frac"] != 0.5
    for still in ({"history": "none"}, {"configure": False}):
        assert stats(**still)["configured"] == 0
        assert stats(**still)["split_mean_frac"] == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("world", [{}, {"batch": 3}, {"gpus": 2}, {"gpus": 2, "batch": 3}])
def test_budgets_hold_through_reconfiguration(tmp_path, world, copies):
    """Tops never take more than V_e and are never more than C; what is cached is resident when a request has ended."""

    class Watched(Moepic):
        def request_end(self, request, view):
            yield from super().request_end(request, view)
            for tops in (tops for groups in self._tops for tops in groups):
                assert len(tops.cached) <= tops.n_cached
                assert all(view.holds(piece) for e in tops.cached for piece in tops.top_slices(e))
            for gpu in range(view.n_gpus):
                taken = sum(piece.n_bytes for g in self._tops for e in g[gpu].cached for piece in g[gpu].top_slices(e))
                assert taken <= (view.capacity_of(gpu) - 2 * (not self._fits)) * view.expert_bytes

    path = tiny_trace(tmp_path / "t", 4, 6, 2, n_requests=8, outputs=14, levels={"next_scores_1"})
    with Trace(path) as trace:
        for room in (2, 3, 7, 11, 18, 24):
            seen = execute_easy(setup(Watched(tau=12, zeta=0.05, copies=copies), trace, room=room, copy_s=3.0, **world))
            assert seen.engine.policy.stats()["configured"] >= 2 or room * world.get("gpus", 1) >= 24


def test_no_request_pays_for_an_update(tmp_path):
    """The cache is updated between requests (section 3.4.2: on an idle device): the makespan grows, no TPOT does."""
    path = tiny_trace(tmp_path / "t", 4, 6, 2, n_requests=8, outputs=14, levels={"next_scores_1"})
    seen = replay(path, BASE | {"zeta": 0.05})
    spent_s = sum(e.n * e.mean for e in (seen.result.e2e_s,))
    assert seen.end_s > spent_s + 1.0
    still = replay(path, BASE | {"configure": False})
    assert still.end_s == pytest.approx(sum(e.n * e.mean for e in (still.result.e2e_s,)))
