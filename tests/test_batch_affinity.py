"""Which tokens run together: ExpertFlow's token scheduler by hand, and under which it was published."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from cpu_bench import replay, written
from tiny_traces import tiny_trace

from policies.expertflow import ExpertFlow
from policies.lru import Lru
from sim.base.errors import BadInput, IllegalDecision
from sim.conformance.world import iterations
from sim.options import RunSpec
from sim.run import prepare
from sim.workload.batching import Batching
from sim.workload.iterations import Range, RequestInfo
from sim.workload.schedulers.batch_affinity import BatchAffinity, as_bits, halves
from sim.workload.schedulers.fcfs import FirstCome


def test_like_paths_go_together():
    # Tokens 0, 2 and 4 pass experts 0 and 1, the others 2 and 3; five tokens, so that three come first.
    ids = np.array([[[at % 2 * 2], [at % 2 * 2 + 1]] for at in range(5)])
    assert as_bits(ids, 4)[:2].tolist() == [[1, 0, 0, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0, 0, 1]]
    assert halves(as_bits(ids, 4)) == ([0, 2, 4], [1, 3])
    assert halves(as_bits(ids[:4], 4)) == ([0, 2], [1, 3])
    assert halves(as_bits(ids[[0, 0, 0]], 4)) == ([0, 1], [2])  # all alike: in order


def test_it_is_no_worse_than_the_order_and_as_good_as_can_be_on_small_cases():
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


def test_against_plain_means():
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
                [sum(column) / len(part) for column in zip(*(tokens[t] for t in part), strict=True)] for part in parts
            ]
        assert halves(bits)[0] == first


def test_a_step_runs_in_two_passes(tmp_path, monkeypatch):
    """Four requests generate one token each, of paths 10, 12, 10, 12: two passes of one expert per layer."""
    routes = {10: [[0], [0]], 11: [[1], [0]], 12: [[2], [1]]}
    rows = [*routes.values()] + [routes[11], routes[10], routes[11], routes[12]] * 2
    tokens = [10, 11, 12] + [11, 10, 11, 12] * 2
    path = written(tmp_path / "t.safetensors", [(3, 1, "store"), *[(1, 2, "test")] * 4], rows, 4, token_ids=tokens)

    def decoded(scheduler, kind=ExpertFlow, **settings):
        seen = replay(kind(**settings), path, 8, batch=4, scheduler=scheduler)
        assert seen.outcome.report.counts.tally.n_executed == 4 * 2 * 2
        return [entry[1:] for entry in seen.log if entry[0] == "gpu"][8:], seen

    for kind in (ExpertFlow, Lru):
        assert decoded(None, kind)[0] == [(0, 0), (0, 2), (1, 0), (1, 1)]
        assert decoded("batch_affinity", kind)[0] == [(0, 0), (1, 0), (0, 2), (1, 1)]
    # Sharing out takes its time once a step, before its first pass.
    monkeypatch.setattr(BatchAffinity, "sharing_out_s", 0.0)
    free = decoded("batch_affinity", hidden=True)[1]
    monkeypatch.setattr(BatchAffinity, "sharing_out_s", 5.0)
    paid = decoded("batch_affinity", hidden=True)[1]
    assert paid.end_s == pytest.approx(free.end_s + 5)
    assert [end_s - start_s for what, start_s, end_s in paid.lane("host") if what == "predict"] == [5.0]
    assert [len(r.ranges) for r in iterations(paid.outcome.setup)] == [1, 1, 1, 1, 2, 2]


def test_every_token_runs_once():
    ranges = [Range(RequestInfo(i, 10 * i, 4, 3, "", None), 10 * i + 4, 10 * i + 5, "decode", 4) for i in range(3)]
    for bad in ([ranges[:2]] * 2, [ranges, []], [ranges[:1], ranges[1:2]]):
        wrong = type("Wrong", (FirstCome,), {"passes": lambda self, _, bad=bad: bad})
        batching = Batching(wrong([r.request for r in ranges]), 3)
        assert [len(batching.next(0.0)) for _ in range(3)] == [1, 1, 1]
        with pytest.raises(IllegalDecision, match="every token of a decode step runs in one pass"):
            batching.next(0.0)


def test_what_it_learns_from_is_asked_for(tmp_path):
    path = tiny_trace(tmp_path / "t.safetensors", 32, 8, 2, levels={"scores"})
    with pytest.raises(BadInput, match="--scheduler batch_affinity needs token_ids"):
        prepare(RunSpec(policy="lru", hw="rtx3090", trace=str(path), scheduler="batch_affinity"))
