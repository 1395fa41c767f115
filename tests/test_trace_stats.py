"""Statistics on traces worked out by hand."""

import math

import numpy as np
import pytest
from tiny_traces import from_rows, requests_of, tiny_header, tiny_trace

from traces.format.reader import Trace
from traces.format.requests import Request
from traces.format.writer import Layout, TraceWriter, write_trace
from traces.stats import figures as stats

# Two requests of one layer, four experts, k = 2. Expert 3 is never chosen.
#   request 0 (prompt 1, then 3 decode rows):  {0,1} {1,0} {1,2} {2,0}   shared with the row before: 2, 1, 1 of 2
#   request 1 (prompt 2, then 1 decode row):   {0,1} {0,2} {0,1}         shared with the row before: 1, 1 of 2
ROWS = [[[0, 1]], [[1, 0]], [[1, 2]], [[2, 0]], [[0, 1]], [[0, 2]], [[0, 1]]]


@pytest.fixture
def trace(tmp_path):
    path = from_rows(tmp_path / "t.safetensors", ROWS, n_experts=4, lengths=[(1, 4), (2, 2)], splits=["store", "test"])
    with Trace(path) as opened:
        yield opened


def test_popularity(trace):
    assert stats.popularity(trace).tolist() == [[6, 5, 3, 0]]
    assert stats.popularity(trace, "store").tolist() == [[3, 3, 2, 0]]
    assert stats.popularity(trace, "test").tolist() == [[3, 2, 1, 0]]
    assert stats.dead_experts(stats.popularity(trace)) == [(0, 3)]


def test_normalised_entropy():
    counts = np.array([[5, 5, 5, 5], [8, 0, 0, 0], [3, 3, 0, 0], [0, 0, 0, 0]])
    entropy = stats.normalised_entropy(counts)
    assert entropy[:3] == pytest.approx([1.0, 0.0, 0.5])
    assert math.isnan(entropy[3])
    assert stats.normalised_entropy(np.array([[7]])).tolist() == [1.0]


def test_next_token_overlap_stays_within_a_request(trace):
    share, n_pairs = stats.next_token_overlap(trace)
    assert (share.tolist(), n_pairs) == ([6 / 10], 5)
    share, n_pairs = stats.next_token_overlap(trace, lag=2)  # {1,2}|{0,1}: 1, {2,0}|{1,0}: 1, {0,1}|{0,1}: 2
    assert (share.tolist(), n_pairs) == ([4 / 6], 3)
    share, n_pairs = stats.next_token_overlap(trace, decode=True)  # without row 5, which belongs to the prompt
    assert (share.tolist(), n_pairs) == ([5 / 8], 4)
    share, n_pairs = stats.next_token_overlap(trace, lag=4)
    assert n_pairs == 0
    assert math.isnan(share[0])


def test_statistics_do_not_depend_on_the_chunks(tmp_path, monkeypatch):
    with Trace(tiny_trace(tmp_path / "t.safetensors")) as trace:

        def everything():
            accuracy = [stats.prediction_accuracy(trace, d) for d in (1, 2)]
            arrays = [stats.popularity(trace), stats.next_token_overlap(trace, 2)[0]]
            arrays += [array for found in accuracy for array in (found.recorded, found.popular, found.n)]
            return [array.tolist() for array in arrays]

        whole = everything()
        monkeypatch.setattr(stats, "_CHUNK_VALUES", 40)
        assert str(everything()) == str(whole)


def predicted(path, next_scores, decode_only=frozenset()):
    """Two layers, three experts, k = 1; request 0 (store) has 2 rows, request 1 (test) has 3, all prompts of 1."""
    experts = np.array([[[0], [0]], [[0], [0]], [[1], [2]], [[0], [1]], [[0], [0]]])
    requests = [Request(0, 0, 1, 2, split="store"), Request(1, 2, 1, 3, split="test")]
    store = Layout(decode_only=decode_only)
    return write_trace(path, tiny_header(2, 3, 1), requests, store, experts=experts, next_scores_1=next_scores)


def test_prediction_accuracy_by_hand(tmp_path):
    # Scores that name experts: layer 0 predicts layer 1 of the same row, layer 1 predicts layer 0 of the next row.
    named = np.array([[2, 2], [2, 2], [2, 0], [1, 1], [2, 0]])
    scores = np.where(np.arange(3) == named[..., None], 0.8, 0.1)
    with Trace(predicted(tmp_path / "t.safetensors", scores)) as trace:
        found = stats.prediction_accuracy(trace, 1)
    # test rows 2, 3, 4: layer 1 chose 2, 1, 0 (named 2, 1, 2); the next rows' layer 0 chose 0, 0 (named 0, 1).
    # The store split made expert 0 popular in both layers.
    assert found.n.tolist() == [3, 2]
    assert found.recorded.tolist() == [2 / 3, 1 / 2]
    assert found.popular.tolist() == [1 / 3, 1.0]
    with Trace(predicted(tmp_path / "d.safetensors", scores, frozenset({"next_scores_1"}))) as trace:
        found = stats.prediction_accuracy(trace, 1)
    assert found.n.tolist() == [2, 1]  # rows 3 and 4; row 4 has no next token
    assert found.recorded.tolist() == [1 / 2, 0.0]


def test_ties_go_to_the_lowest_expert():
    assert stats.top_k_of(np.array([[2.0, 3.0, 2.0, 2.0]]), 2).tolist() == [[True, True, False, False]]
    assert stats.top_k_of(np.array([[0.0, 0.0, 0.0]]), 3).all()


def test_lengths_by_task(tmp_path):
    experts = np.zeros((10, 1, 1), int)
    requests = requests_of([(1, 3), (2, 4), (1, 2)], with_tasks=True, with_arrivals=False)
    path = write_trace(
        tmp_path / "t.safetensors", tiny_header(1, 2, 1, tasks=("chat", "code", "never")), requests, experts=experts
    )
    with Trace(path) as trace:
        everything, chat, code = stats.lengths(trace)
    assert everything == stats.TaskLengths("", 3, 10, 4 / 3, 2, 3.0, 4)
    assert chat == stats.TaskLengths("chat", 2, 5, 1.0, 1, 2.5, 3)
    assert code == stats.TaskLengths("code", 1, 5, 2.0, 2, 4.0, 4)


@pytest.mark.parametrize("decode_only", [False, True])
def test_some_requests_are_judged_as_if_they_were_the_trace(tmp_path, decode_only):
    """Every statistic over given requests equals that of a file that holds only those."""
    store = Layout(decode_only=frozenset({"next_scores_1"} if decode_only else ()))
    whole = tiny_trace(tmp_path / "a", n_requests=6, prompt=3, outputs=6, levels={"next_scores_1"}, store=store)
    with Trace(whole) as trace:
        kept = [trace.requests[i] for i in (1, 2, 5)]
        experts = np.concatenate([trace.experts[r.first_row : r.end_row] for r in kept])
        parts = [trace.next_scores(1, r.first_decode_row if decode_only else r.first_row, r.end_row) for r in kept]
        scores = np.concatenate(parts) / trace.score_scale
        again = [Request(i, 8 * i, 3, 8, "", None, r.split) for i, r in enumerate(kept)]
        with TraceWriter(tmp_path / "b", trace.header, store) as writer:
            for i, request in enumerate(again):
                n = 5 if decode_only else 8
                writer.add_request(
                    3, split=request.split, experts=experts[8 * i : 8 * i + 8], next_scores_1=scores[n * i : n * i + n]
                )
        with Trace(tmp_path / "b") as part:
            for split in (None, "store", "test"):
                np.testing.assert_array_equal(stats.popularity(trace, split, kept), stats.popularity(part, split))
            for lag in (1, 4):
                mine, true = (stats.next_token_overlap(t, lag, True, r) for t, r in ((trace, kept), (part, None)))
                np.testing.assert_array_equal(mine[0], true[0])
                assert mine[1] == true[1]
            mine, true = stats.prediction_accuracy(trace, 1, kept), stats.prediction_accuracy(part, 1)
            for field in ("recorded", "popular", "n"):
                np.testing.assert_array_equal(getattr(mine, field), getattr(true, field))
