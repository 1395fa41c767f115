"""ExpertFlow: what tokens foretell, who gets the slots, and what happens when the forecast is wrong."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
from cpu_bench import check_knobs, failures, replay, resident, seeded, written
from easy_numbers import execute_easy, setup
from tiny_traces import from_rows

from policies.common.token_forecast import TokenPaths
from policies.expertflow.policy import ExpertFlow
from policies.expertflow.token_scheduler import as_bits, halves
from sim.base.errors import BadInput, IllegalDecision
from sim.conformance.world import iterations
from sim.policy.order import FREE, LAST
from sim.policy.pieces import Piece
from sim.workload.batching import Batching
from sim.workload.iterations import Range, RequestInfo
from sim.workload.learn_split import StoreSplit, requests_of
from sim.workload.schedulers.fcfs import FirstCome
from traces.format.reader import Trace

# Token 10 went to 0.0 and 1.0, 11 to 0.1 and 1.0, 12 to 0.2 and 1.1.
ROUTES = {10: [[0], [0]], 11: [[1], [0]], 12: [[2], [1]]}


def trace_of(tmp_path, tokens, prompt, routes=None, levels=None):
    """A store request of tokens 10, 11, 12, then one of `tokens`, routed as then or as `routes` says."""
    rows = [*ROUTES.values(), *(routes or [ROUTES[token] for token in tokens])]
    requests = [(3, 1, "store"), (prompt, len(tokens) - prompt + 1, "test")]
    more = {"token_ids": [10, 11, 12, *tokens], **(levels or {})}
    return written(tmp_path / "t.safetensors", requests, rows, 4, **more)


def test_a_forecast_weighs_a_token_against_all_tokens(tmp_path):
    with Trace(trace_of(tmp_path, [10], 1)) as trace:
        paths = TokenPaths(StoreSplit(trace, requests_of(trace, "store")), "expertflow")
    # Layer 1: two of three tokens went to 0. Token 12: 2 x 1 + 3 for expert 1; 2 x 2 for expert 0.
    ids, scores = paths.forecast(12)
    assert ids.tolist() == [[2], [1]]
    assert scores.tolist() == [[5], [5]]
    # One never seen goes where most went; in layer 0, where all are equal, to the lowest id.
    ids, scores = paths.forecast(99)
    assert ids.tolist() == [[0], [0]]
    assert scores.tolist() == [[2], [4]]


def test_room_for_four_needs_of_three_and_two(tmp_path):
    """The card's example: slots go to layers in order, three and one; the fifth expert takes the first free slot."""
    seen = replay(ExpertFlow(), trace_of(tmp_path, [10, 11, 12], 3), 4)
    assert seen.log == [
        # Layer 1: expert 0 is foretold by two tokens, 2 x (4 + 3), expert 1 by one.
        ("prefetch", 0, 0),
        ("prefetch", 0, 1),
        ("prefetch", 0, 2),
        ("prefetch", 1, 0),
        ("gpu", 0, 0),
        ("gpu", 0, 1),
        ("gpu", 0, 2),
        ("evict", 0, 0),
        ("prefetch", 1, 1),
        ("gpu", 1, 0),
        ("gpu", 1, 1),
    ]
    assert resident(seen) == [(0, 1), (0, 2), (1, 0), (1, 1)]
    assert seen.result.policy_stats == {"foretold_frac": 1.0}


def test_what_nobody_foretold_takes_the_slot_of_what_nobody_wanted(tmp_path):
    path = trace_of(tmp_path, [10], 1, [[[3], [0]]])
    # Room for both layers: 0.0 was foretold and not chosen, and leaves for 0.3.
    seen = replay(ExpertFlow(predict_s=0.0), path, 2)
    assert seen.log == [
        ("prefetch", 0, 0),
        ("prefetch", 1, 0),
        ("evict", 0, 0),
        ("fetch", 0, 3),
        ("gpu", 0, 3),
        ("gpu", 1, 0),
    ]
    # At second 1 the copy of 0.0 is under way and cannot be stopped; 0.3 goes before 1.0, which was asked for first.
    assert seen.lane("h2d") == [("prefetch 0.0", 0, 10), ("demand 0.3", 10, 20), ("prefetch 1.0", 20, 30)]
    assert seen.result.policy_stats == {"foretold_frac": 0.5}


def test_slots_are_filled_again_in_order(tmp_path):
    seen = replay(ExpertFlow(), trace_of(tmp_path, [10, 12], 1), 1)
    assert seen.log == [
        ("prefetch", 0, 0),
        ("gpu", 0, 0),
        ("evict", 0, 0),
        ("prefetch", 1, 0),
        ("gpu", 1, 0),
        ("evict", 1, 0),
        ("prefetch", 0, 2),
        ("gpu", 0, 2),
        ("evict", 0, 2),
        ("prefetch", 1, 1),
        ("gpu", 1, 1),
    ]


def test_five_steps(tmp_path):
    """Paths 10 (0.0, 1.0), 11 (0.1, 1.0), 12 (0.2, 1.1), room for two; token 11 goes to 1.3 instead."""
    routes = [ROUTES[10], [[1], [3]], ROUTES[12], ROUTES[10], ROUTES[10]]
    seen = replay(ExpertFlow(), trace_of(tmp_path, [10, 11, 12, 10, 10], 1, routes), 2)
    assert seen.log == [
        ("prefetch", 0, 0),
        ("prefetch", 1, 0),
        ("gpu", 0, 0),
        ("gpu", 1, 0),
        ("evict", 0, 0),
        ("prefetch", 0, 1),
        ("gpu", 0, 1),
        ("evict", 0, 1),
        ("fetch", 1, 3),
        ("gpu", 1, 3),  # 0.1 became free before 1.0 was found to be unwanted
        ("evict", 1, 0),
        ("prefetch", 0, 2),
        ("evict", 1, 3),
        ("prefetch", 1, 1),
        ("gpu", 0, 2),
        ("gpu", 1, 1),
        ("evict", 0, 2),
        ("prefetch", 0, 0),
        ("evict", 1, 1),
        ("prefetch", 1, 0),
        ("gpu", 0, 0),
        ("gpu", 1, 0),
        ("gpu", 0, 0),
        ("gpu", 1, 0),
    ]


def test_slots_leave_in_the_order_they_became_free(tmp_path):
    # 0.2 is foretold by two tokens and loaded before 0.0; 0.0 runs first (lowest id), and is the first to be free.
    seen = replay(ExpertFlow(), trace_of(tmp_path, [10, 12, 12], 3), 3)
    assert seen.log == [
        ("prefetch", 0, 2),
        ("prefetch", 0, 0),
        ("prefetch", 1, 1),
        ("gpu", 0, 0),
        ("gpu", 0, 2),
        ("evict", 0, 0),
        ("prefetch", 1, 0),
        ("gpu", 1, 0),
        ("gpu", 1, 1),
    ]


def test_where_all_is_foretold_the_last_of_the_forecast_leaves(tmp_path):
    """Three layers with room for two of what is to come: what nobody foretold takes the later one's slot."""
    rows = [[[0], [1], [2]], [[0], [1], [2]], [[3], [1], [2]]]
    requests = [(1, 2, "store"), (1, 1, "test")]
    path = written(tmp_path / "t.safetensors", requests, rows, 4, token_ids=[10, 10, 10])
    seen = replay(ExpertFlow(), path, 3)
    assert seen.log[:3] == [("prefetch", 0, 0), ("prefetch", 1, 1), ("prefetch", 2, 2)]
    assert seen.log[3:5] == [("evict", 0, 0), ("fetch", 0, 3)]
    policy = ExpertFlow()
    policy.bind(SimpleNamespace(n_layers=3, n_experts=1, n_gpus=1))
    pieces = [Piece(layer, 0, 0.0, 1.0, "bf16", 0, 1, layer) for layer in range(3)]
    for piece in reversed(pieces):
        policy.loaded(piece)
    policy.plan(pieces)
    assert policy.order.bar.tolist() == [LAST] * 3  # for no prefetch, and for a demand the last of the forecast
    assert policy.order.rank.argmin() == 2
    policy.passed(1)  # what is not foretold any more leaves first, the one loaded first before the other
    assert policy.order.bar.tolist() == [FREE, FREE, LAST]
    assert policy.order.rank[1] < policy.order.rank[0]


def test_the_prediction_is_waited_for_unless_hidden(tmp_path):
    path = trace_of(tmp_path, [10], 1)
    # Prediction 4, copy 10, expert 2, copy of the next until 24, expert 2, head 1.
    assert replay(ExpertFlow(predict_s=4.0), path, 2).end_s == 4 + 10 + 10 + 2 + 1
    assert replay(ExpertFlow(predict_s=4.0, hidden=True), path, 2).end_s == 10 + 10 + 2 + 1


def test_a_surrogate_is_labelled_and_as_right_as_told(tmp_path):
    with seeded(tmp_path, outputs=40) as trace:
        right = replay(ExpertFlow(predictor="surrogate:1.0"), trace.path, 6)
        wrong = replay(ExpertFlow(predictor="surrogate:0.0"), trace.path, 6)
    assert right.result.labels == ["surrogate", "synthetic"]
    assert right.result.policy_stats["foretold_frac"] == 1.0
    assert wrong.result.policy_stats["foretold_frac"] < 0.2
    assert right.end_s < wrong.end_s


def test_it_needs_a_store_split_or_a_surrogate(tmp_path):
    path = from_rows(tmp_path / "t", [[[0]]], 2)
    with pytest.raises(BadInput, match="split 'store' has no requests: expertflow learns there"):
        replay(ExpertFlow(), path, 2)
    assert replay(ExpertFlow(predictor="surrogate:0.9"), path, 2).end_s > 0
    with pytest.raises(BadInput, match=r"expertflow\.predictor, got 'trained': write tokens"):
        ExpertFlow(predictor="trained")


class TestTokenScheduler:
    def test_like_paths_go_together(self):
        # Tokens 0, 2 and 4 pass experts 0 and 1, the others 2 and 3; five tokens, so that three come first.
        ids = np.array([[[at % 2 * 2], [at % 2 * 2 + 1]] for at in range(5)])
        assert as_bits(ids, 4)[:2].tolist() == [[1, 0, 0, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0, 0, 1]]
        assert halves(as_bits(ids, 4)) == ([0, 2, 4], [1, 3])
        assert halves(as_bits(ids[:4], 4)) == ([0, 2], [1, 3])
        assert halves(as_bits(ids[[0, 0, 0]], 4)) == ([0, 1], [2])  # all alike: in order

    def test_it_is_no_worse_than_the_order_and_as_good_as_can_be_on_small_cases(self):
        """Spread of the two halves (Hamming distance of each pair inside them) against every way to halve."""
        found, best, ordered = [], [], []
        for seed in range(40):
            bits = as_bits(np.argsort(np.random.default_rng(seed).random((6, 3, 4)), axis=2)[:, :, :2], 4)

            def spread(half, bits=bits):
                other = [t for t in range(6) if t not in half]
                return sum(int((bits[a] != bits[b]).sum()) for part in (half, other) for a, b in combinations(part, 2))

            found.append(spread(halves(bits)[0]))
            best.append(min(spread(half) for half in combinations(range(6), 3)))
            ordered.append(spread((0, 1, 2)))
        assert sum(best) <= sum(found) < 1.05 * sum(best) < sum(ordered)

    def test_against_plain_means(self):
        """Distances to means as fractions, one token and one bit at a time."""
        for seed in range(30):
            n = 8 + seed % 6
            bits = as_bits(np.argsort(np.random.default_rng(seed).random((n, 3, 5)), axis=2)[:, :, :2], 5)
            tokens = [[Fraction(bit) for bit in row] for row in bits.tolist()]

            def distance(token, mean, tokens=tokens):
                return sum(abs(x - m) for x, m in zip(tokens[token], mean, strict=True))

            far = max(range(n), key=lambda t: (distance(t, tokens[0]), -t))
            means, first = [tokens[0], tokens[far]], []
            for _ in range(10):
                lean = {t: distance(t, means[0]) - distance(t, means[1]) for t in range(n)}
                now = sorted(sorted(range(n), key=lambda t: (lean[t], t))[: (n + 1) // 2])
                if now == first:
                    break
                first = now
                parts = first, [t for t in range(n) if t not in first]
                means = [
                    [sum(column) / len(part) for column in zip(*(tokens[t] for t in part), strict=True)]
                    for part in parts
                ]
            assert halves(bits)[0] == first

    def test_a_step_runs_in_two_passes(self, tmp_path):
        """Four requests generate one token each, of paths 10, 12, 10, 12: two passes of one expert per layer."""
        rows = [*ROUTES.values()] + [ROUTES[11], ROUTES[10], ROUTES[11], ROUTES[12]] * 2
        tokens = [10, 11, 12] + [11, 10, 11, 12] * 2
        path = written(tmp_path / "t.safetensors", [(3, 1, "store"), *[(1, 2, "test")] * 4], rows, 4, token_ids=tokens)

        def decoded(grouping, **settings):
            seen = replay(ExpertFlow(grouping=grouping, **settings), path, 8, batch=4)
            assert seen.outcome.engine.tally.n_executed == 4 * 2 * 2
            return [entry[1:] for entry in seen.log if entry[0] == "gpu"][8:], seen

        assert decoded("off")[0] == [(0, 0), (0, 2), (1, 0), (1, 1)]
        assert decoded("order")[0] == [(0, 0), (0, 2), (1, 0), (1, 1)] * 2
        assert decoded("paths")[0] == [(0, 0), (1, 0), (0, 2), (1, 1)]
        # Regrouping takes its time once a step, unless the pipeline hides it.
        paths = decoded("paths", regroup_s=0.0)[1]
        assert decoded("paths", regroup_s=5.0)[1].end_s == pytest.approx(paths.end_s + 5)
        hidden = [decoded("paths", regroup_s=regroup_s, hidden=True)[1].end_s for regroup_s in (0.0, 5.0)]
        assert hidden[0] == hidden[1] < paths.end_s
        assert [len(r.ranges) for r in iterations(paths.outcome.setup)] == [1, 1, 1, 1, 2, 2]

    def test_every_token_runs_once(self):
        ranges = [Range(RequestInfo(i, 10 * i, 4, 3, "", None), 10 * i + 4, 10 * i + 5, "decode", 4) for i in range(3)]
        for bad in ([ranges[:2]] * 2, [ranges, []], [ranges[:1], ranges[1:2]]):
            batching = Batching(FirstCome([r.request for r in ranges], split=lambda _, bad=bad: bad), 3)
            assert [len(batching.next(0.0)) for _ in range(3)] == [1, 1, 1]
            with pytest.raises(IllegalDecision, match="every token of a decode step runs in one pass"):
                batching.next(0.0)


KNOBS = {
    "predictor": ({}, "surrogate:0.9"),
    "seed": ({"predictor": "surrogate:0.5"}, 1),
    "predict_s": ({}, 3.0),
    "hidden": ({"predict_s": 3.0}, True),
    "grouping": ({}, "order"),
    "regroup_s": ({"grouping": "paths"}, 3.0),
}


def test_every_parameter_matters(tmp_path):
    with seeded(tmp_path, outputs=12, levels={"token_ids"}) as trace:
        check_knobs(ExpertFlow, trace.path, 6, KNOBS, batch=2)


def test_batches_and_gpus(tmp_path):
    with seeded(tmp_path, levels={"token_ids"}) as trace:
        for world in ({"batch": 2}, {"gpus": 2}, {"gpus": 2, "batch": 2}):
            for room in (1, 5):
                assert sum(execute_easy(setup(ExpertFlow(), trace, room, **world)).classes("decode").values()) > 0


def test_conformance():
    assert failures(ExpertFlow) == []
