"""The caches `lcp` and `mrs` against a few plain lines each, by hand, and every parameter."""

from __future__ import annotations

import math

import numpy as np
import pytest
from cpu_bench import replay, written
from easy_numbers import execute_easy, run, setup
from scopes import one_cache
from tiny_traces import tiny_trace

from policies.lcp import Lcp
from policies.lfu import Lfu
from policies.mrs import Mrs
from traces.format.reader import Trace


def test_lcp_five_steps(tmp_path):
    """One layer, room for 2, rho 1/4, omega 1: P = uses x 4 ** -(tokens since). After 0 0 0 1 comes 2: 3/16 and 1/4."""
    rows = [[[0]], [[0]], [[0]], [[1]], [[2]]]
    assert run(Lcp(omega=1), tmp_path, rows, room=2, n_experts=3).log[-3:] == [
        ("evict", 0, 0),
        ("fetch", 0, 2),
        ("gpu", 0, 2),
    ]
    # With the published window of 128 tokens uses decide: 3 x .98 against 1 x .99.
    assert run(Lcp(scope="global"), tmp_path, rows, room=2, n_experts=3).log == [
        ("fetch", 0, 0),
        ("gpu", 0, 0),
        ("gpu", 0, 0),
        ("gpu", 0, 0),
        ("fetch", 0, 1),
        ("gpu", 0, 1),
        ("evict", 0, 1),
        ("fetch", 0, 2),
        ("gpu", 0, 2),
    ]


def test_lcp_remembers_what_has_left(tmp_path):
    """1 leaves for 2 and comes back with both of its uses: then 2, used once but later, leaves for 0, not 1."""
    rows = [[[1]], [[2]], [[1]], [[0]]]
    seen = run(Lcp(scope="global"), tmp_path, rows, room=1, n_experts=3)
    assert [e for e in seen.log if e[0] == "evict"] == [("evict", 0, 1), ("evict", 0, 2), ("evict", 0, 1)]
    seen = run(Lcp(scope="global"), tmp_path, [[[1]], [[0]], [[2]], [[1]], [[0]]], room=2, n_experts=3)
    assert [e for e in seen.log if e[0] == "evict"] == [("evict", 0, 1), ("evict", 0, 0), ("evict", 0, 2)]


@pytest.mark.parametrize(
    ("policy", "counts", "leaves"),
    [
        (Lcp(counts="iterations"), "iterations", 0),
        (Lfu(scope="global"), "iterations", 0),
        (Lcp(scope="global"), "tokens", 1),
        (Lfu(counts="tokens"), "tokens", 1),
    ],
)
def test_a_prompt_is_one_use_or_as_many_as_its_tokens(tmp_path, policy, counts, leaves):
    """A prompt asks for 0 three times and for 1 once; 1 is asked for again, then 2 comes: 1 has been used twice, 0 once
    or three times."""
    assert policy.settings["counts"] == counts
    rows = [[[0]], [[0]], [[0]], [[1]], [[1]], [[2]]]
    seen = run(policy, tmp_path, rows, room=2, n_experts=3, lengths=[(4, 3)])
    assert [e for e in seen.log if e[0] == "evict"] == [("evict", 0, leaves)]


# Scores per token; MRS with alpha 1/2 and p = 2 x K = 2 of 3 experts.
SCORES = [[0.6, 0.4, 0.0], [0.1, 0.5, 0.4], [0.0, 0.3, 0.7]]


def test_mrs_scores_by_hand():
    """S <- (S + TopP(s)) / 2: .3 .2 0; .15 .35 .2 (0's .1 does not count); .075 .325 .45."""

    class Fake:
        n_layers, n_experts, top_k, n_gpus = 1, 3, 1, 1

    class Gate:
        layer = 0

    # With alpha 1/4: .15 .1 0; .75 of that and .25 x (0 .5 .4); and so on.
    quarter = ([0.15, 0.1, 0], [0.1125, 0.2, 0.1], [0.084375, 0.225, 0.25])
    for alpha, all_of_them in ((0.5, ([0.3, 0.2, 0], [0.15, 0.35, 0.2], [0.075, 0.325, 0.45])), (0.25, quarter)):
        policy = Mrs(alpha=alpha)
        policy.bind(Fake())
        for row, expected in zip(SCORES, all_of_them, strict=True):
            gate = Gate()
            gate.by_layer = lambda work, row=row: work(np.array([[row]]))[0]
            list(policy.gate_done(gate, Fake()))
            assert policy.order.rank.tolist() == pytest.approx(expected)


def test_mrs_five_steps(tmp_path):
    """One layer, room for 2. S at the third token: .075 .325 .45; the fourth: .39 .16 .33; the fifth: .24 .48 .16."""
    scores = [*SCORES, [0.7, 0.1, 0.2], [0.1, 0.8, 0.1]]
    path = written(tmp_path / "t", [(1, 5, "test")], [[[e]] for e in (0, 1, 2, 0, 1)], 3, scores=[[s] for s in scores])
    assert replay(Mrs(scope="global"), path, 2).log == [
        ("fetch", 0, 0),
        ("gpu", 0, 0),
        ("fetch", 0, 1),
        ("gpu", 0, 1),
        ("evict", 0, 0),
        ("fetch", 0, 2),
        ("gpu", 0, 2),
        ("evict", 0, 1),
        ("fetch", 0, 0),
        ("gpu", 0, 0),
        ("evict", 0, 2),
        ("fetch", 0, 1),
        ("gpu", 0, 1),
    ]


def tokens_of(trace, n_prompt):
    """[(tokens of an iteration [n, L, K], rows)] of the only scored requests, one at a time."""
    for request in trace.requests:
        if request.split == "test":
            first, end = request.first_row, request.first_row + request.n_rows
            yield slice(first, first + n_prompt)
            for row in range(first + n_prompt, end):
                yield slice(row, row + 1)


def lcp_ranks(omega, rho):
    uses, last, now = {}, {}, [0]

    def see(layer, ids, scores):
        for token, chosen in enumerate(ids):
            for e in chosen:
                uses[layer, e] = uses.get((layer, e), 0) + 1
                last[layer, e] = now[0] + token

    def rank(x):
        # log P, times omega; equal to eq. 4's order, without its rounding
        return (round(omega * math.log(uses[x]) / -math.log(rho) + last[x], 5), x[1], x[0])

    return see, rank, now


def mrs_ranks(alpha, top_p, n_experts):
    kept = {}

    def see(layer, ids, scores):
        s = kept.setdefault(layer, [0.0] * n_experts)
        top = sorted(range(n_experts), key=lambda e: (-scores[0][e], e))[:top_p]
        for e in range(n_experts):
            s[e] = alpha * (scores[0][e] if e in top else 0.0) + (1 - alpha) * s[e]

    return see, lambda x: (kept[x[0]][x[1]], x[1], x[0]), [0]


def naive_misses(trace, n_prompt, room, per_layer, see, rank, now):
    """A cache that serves residents first, then what is missing as room allows; returns copies."""
    there, misses = set(), 0
    for rows in tokens_of(trace, n_prompt):
        scores = trace.scores(rows.start, rows.stop)
        for layer in range(trace.n_layers):
            ids = trace.experts[rows, layer].astype(int).tolist()
            see(layer, ids, scores[:, layer].tolist())
            needed = ids[0] if len(ids) == 1 else sorted({e for row in ids for e in row})
            pending = {(layer, e) for e in needed}
            missing = [(layer, e) for e in needed if (layer, e) not in there]
            misses += len(missing)
            left = list(missing)

            def make_room(x, pending=pending, layer=layer):
                mine = [y for y in there if not per_layer or y[0] == layer]
                if len(mine) < room:
                    return True
                free = [y for y in mine if y not in pending]
                if not free:
                    return False
                there.remove(min(free, key=rank))
                return True

            while left and make_room(left[0]):
                there.add(left.pop(0))
            ran = [x for x in pending if x in there and x not in missing]
            for x in ran:
                pending.discard(x)
            for x in missing:
                while left and make_room(left[0]):
                    there.add(left.pop(0))
                pending.discard(x)
        now[0] += rows.stop - rows.start
    return misses


@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("seed", range(3))
def test_against_plain_lines(tmp_path, scope, seed):
    with Trace(
        tiny_trace(tmp_path / "t", 3, 6, 2, n_requests=4, prompt=2, outputs=20, levels={"scores"}, seed=seed)
    ) as t:
        for room in (4, 5):
            whole = room * (3 if scope == "layer" else 1)
            for policy, ranks in (
                (Lcp(scope=scope, omega=8), lcp_ranks(8, 0.25)),
                (Mrs(scope=scope), mrs_ranks(0.5, 4, 6)),
            ):
                seen = execute_easy(setup(policy, t, whole))
                copies = sum(entry[0] == "fetch" for entry in seen.log)
                assert copies == naive_misses(t, 2, room, scope == "layer", *ranks), (policy.name, room)


KNOBS = {
    Lcp: {"scope": "layer", "omega": 2, "rho": 0.9999, "counts": "iterations"},
    Mrs: {"scope": "layer", "alpha": 0.05, "top_p": 1, "tokens": "mean"},
}


@pytest.mark.parametrize(("kind", "knob"), [(kind, knob) for kind, knobs in KNOBS.items() for knob in knobs])
def test_every_parameter_changes_decisions(tmp_path, kind, knob):
    with Trace(tiny_trace(tmp_path / "t", 3, 6, 2, n_requests=6, outputs=25, levels={"scores"})) as trace:
        base, other = one_cache(kind), kind(**{knob: KNOBS[kind][knob]})
        assert execute_easy(setup(base, trace, 9)).log != execute_easy(setup(other, trace, 9)).log
