"""`--predictor surrogate:SHARE`: predictive policies on ids alone, right as often as told, seeded, labelled."""

from __future__ import annotations

import numpy as np
import pytest
from cpu_bench import written
from tiny_traces import from_rows, tiny_trace

from sim.base.errors import BadInput
from sim.options import RunSpec
from sim.run import execute, prepare
from sim.workload.drawn_levels import DRAWABLE, GATES, DrawnTrace, to_draw
from traces.format.reader import Trace
from traces.format.writer import Layout

N_LAYERS, N_EXPERTS, K, PROMPT, N_ROWS = 6, 32, 4, 5, 40
MINE = '''"""Copies what the next gates are expected to choose."""
from sim.policy import Prefetch, Serve
from policies.lru import Lru


class Mine(Lru):
    """An LRU that copies ahead."""

    name = "mine"
    title = "mine"
    source = "tests/test_drawn_levels.py"
    needs = frozenset({"experts", "next_scores_2"})

    def gate_done(self, gate, view):
        yield Serve()
        if gate.layer + 2 < view.n_layers:
            best = gate.next_scores(2).sum(axis=0).argsort(kind="stable")[::-1][: view.top_k]
            for expert in best.tolist():
                yield Prefetch(view.piece(gate.layer + 2, expert))
'''


def routed(path, **levels):
    """Two requests, one of them store, of experts drawn by chance."""
    rng = np.random.default_rng(3)
    rows = [[rng.permutation(N_EXPERTS)[:K].tolist() for _ in range(N_LAYERS)] for _ in range(2 * N_ROWS)]
    requests = [(PROMPT, N_ROWS - PROMPT + 1, "store"), (PROMPT, N_ROWS - PROMPT + 1, "test")]
    return written(path, requests, rows, N_EXPERTS, **levels)


def best(scores, k=K):
    """The k highest, as sets in an array of booleans."""
    found = np.zeros(scores.shape, bool)
    np.put_along_axis(found, np.argsort(-scores, axis=-1, kind="stable")[..., :k], True, axis=-1)
    return found


def chosen(trace):
    found = np.zeros((trace.n_tokens, N_LAYERS, N_EXPERTS), bool)
    np.put_along_axis(found, trace.experts[:].astype(int), True, axis=-1)
    return found


@pytest.mark.parametrize("share", [0.0, 0.6, 0.85, 1.0])
def test_each_expert_that_the_gate_chooses_is_among_the_k_highest_as_often_as_told(tmp_path, share):
    with DrawnTrace(routed(tmp_path / "t"), DRAWABLE, f"surrogate:{share}", 7) as trace:
        truth, n = chosen(trace), trace.n_tokens
        for distance in (1, 2, 3):
            said = best(trace.next_scores(distance, 0, n)[:, : N_LAYERS - distance])
            right = (said & truth[:, distance:]).sum() / truth[:, distance:].sum()
            error = 4 * np.sqrt(share * (1 - share) / truth[:, distance:].sum())
            assert abs(right - share) <= error  # no worse from afar
        assert not trace.next_scores(2, 0, n)[:, -2:].any()  # no layer there
        assert not trace.shared_scores(0, n)[:, -1].any()
        # The order of the named tells nothing: the first of them is right as often.
        first = trace.next_scores(1, 0, n)[:, :-1].argmax(axis=-1)
        hit = np.take_along_axis(truth[:, 1:], first[..., None], -1).mean()
        assert abs(hit - share) <= 4 * np.sqrt(share * (1 - share) / first.size)


def test_one_draw_for_all_distances_and_whatever_is_read_first(tmp_path):
    path = routed(tmp_path / "t")
    with DrawnTrace(path, DRAWABLE, "surrogate:0.7", 7) as trace, DrawnTrace(path, DRAWABLE, "surrogate:0.7", 7) as row:
        n = trace.n_tokens
        near, far = trace.next_scores(1, 0, n), trace.next_scores(3, 0, n)
        assert (near[:, 2:-1] == far[:, :-3]).all()
        assert (near[:, :-1] == trace.shared_scores(0, n)[:, :-1]).all()
        assert (near[PROMPT - 1, -1] > 0).any()  # the next token's first layer
        assert not near[[N_ROWS - 1, n - 1], -1].any()  # a request's last token has none after it
        for name in ("scores", "weights", "embeddings"):
            whole = getattr(trace, name)(0, n)
            assert all((getattr(row, name)(at, at + 1) == whole[at]).all() for at in reversed(range(0, n, 7)))
        assert all((row.next_scores(1, at, at + 1) == near[at]).all() for at in reversed(range(0, n, 7)))
    with DrawnTrace(path, DRAWABLE, "surrogate:0.7", 8) as other:
        assert (other.next_scores(1, 0, n) != near).any()


def test_a_gates_own_scores_have_its_choice_first(tmp_path):
    with DrawnTrace(routed(tmp_path / "t"), {"scores", "weights"}, "surrogate:0.1", 7) as trace:
        scores = trace.scores(0, trace.n_tokens)
        assert (np.argsort(-scores, axis=-1, kind="stable")[..., :K] == trace.experts[:]).all()
        assert (best(scores) == chosen(trace)).all()
        assert (scores == np.rint(scores)).all()
        weights = trace.weights(0, trace.n_tokens)
        assert weights.sum(axis=-1) == pytest.approx(1.0)
        assert (np.diff(weights, axis=-1) <= 0).all()
    ascending = np.sort(np.random.default_rng(0).permutation(N_EXPERTS)[:K])
    path = from_rows(tmp_path / "u", [[ascending.tolist()] * 2] * 200, N_EXPERTS, expert_order="unranked")
    with DrawnTrace(path, {"scores"}, "surrogate:1", 7) as trace:  # ids in ascending order are no ranking
        heaviest = trace.scores(0, 200).argmax(axis=-1)
        assert {int(x) for x in heaviest.reshape(-1)} == set(ascending.tolist())


def test_recorded_weights_are_kept_and_scores_follow_them(tmp_path):
    weights = np.tile(np.array([0.7, 0.2, 0.06, 0.04]), (2 * N_ROWS, N_LAYERS, 1))
    with Trace(routed(tmp_path / "t", weights=weights)) as trace:
        drawn = to_draw(trace, {"experts", "weights", "scores", "next_scores_1"}, lossy=False)
    assert drawn == {"scores", "next_scores_1"}
    with DrawnTrace(tmp_path / "t", drawn, "surrogate:0.9", 7) as trace:
        scores = np.take_along_axis(trace.scores(3, 4), trace.experts[3:4].astype(int), -1)
        assert scores / scores.sum(axis=-1, keepdims=True) == pytest.approx(trace.weights(3, 4), abs=2e-3)
        assert (best(trace.scores(0, 20)) == chosen(trace)[:20]).all()


def test_gates_of_prompts_alone_where_those_of_decode_tokens_were_recorded(tmp_path):
    path = tiny_trace(tmp_path / "t", n_experts=8, prompt=4, outputs=9, store=Layout(decode_only=frozenset({"scores"})))
    with Trace(path) as trace:
        last, own = trace.requests[0].end_row, trace.scores(4, trace.requests[0].end_row)
        with pytest.raises(BadInput, match="decode rows"):
            trace.scores(0, last)
    with DrawnTrace(path, {"scores"}, "surrogate:0.9", 7) as trace:
        found = trace.scores(0, last)
        assert (found[4:] == own).all()
        assert (np.argsort(-found[:4], axis=-1, kind="stable")[..., :2] == trace.experts[:4]).all()


def test_a_lossy_policys_gates_are_never_drawn(tmp_path):
    with Trace(routed(tmp_path / "t")) as trace:
        assert to_draw(trace, DRAWABLE, lossy=True) == DRAWABLE - GATES
        assert to_draw(trace, DRAWABLE | {"token_ids", "tasks"}, lossy=False) == DRAWABLE


@pytest.fixture
def log(tmp_path, monkeypatch):
    """A log of ids alone, the geometry it is of, and a policy of one's own, in the current folder."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(5)
    rows = [[rng.permutation(8)[:2].tolist() for _ in range(32)] for _ in range(24)]
    from_rows(tmp_path / "log.safetensors", rows, 8, [(3, 10), (3, 10)], ["store", "test"])
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    return {"hw": "rtx3090", "model": "mixtral-8x7b", "trace": "log.safetensors"}


def result_of(**fields):
    setup = prepare(RunSpec(**fields))
    try:
        return setup.run_id, execute(setup).result
    finally:
        setup.close()


@pytest.mark.parametrize("policy", ["fine_moe", "promoe", "hybrimoe", "moepic", "./mine.py"])
def test_predictive_policies_run_on_ids_alone(log, policy):
    with pytest.raises(BadInput, match=r"or --predictor surrogate:0\.85, which draws [a-z_0-9, ]+ \(labelled\)"):
        prepare(RunSpec(**log, policy=policy))
    one, result = result_of(**log, policy=policy, predictor="surrogate:0.85")
    assert "surrogate" in result.caveats
    again, same = result_of(**log, policy=policy, predictor="surrogate:0.85")
    assert (one, result.tpot_s) == (again, same.tpot_s)
    ids = {one, result_of(**log, policy=policy, predictor="surrogate:0.2")[0]}
    ids.add(result_of(**log, policy=policy, predictor="surrogate:0.85", seed=1)[0])
    assert len(ids) == 3  # accuracy and seed are parts of what a run is
