"""What goes in comes out: every level, every code, chunks, atomicity, constant memory."""

import pickle
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tiny_traces import ALL, tiny_arrays, tiny_header, tiny_trace

from sim.base.errors import BadInput
from traces import open_trace
from traces.format.check import check_trace
from traces.format.header import GateRule, Header
from traces.format.layout import U8_SQUARE, U16_LINEAR, common_scale
from traces.format.reader import Trace
from traces.format.requests import Request
from traces.format.writer import Layout, TraceWriter, write_trace

N_LAYERS, N_EXPERTS, TOP_K, N_ROWS = 5, 6, 2, 28


@pytest.fixture
def full(tmp_path):
    return tiny_trace(tmp_path / "full.safetensors", N_LAYERS, N_EXPERTS, TOP_K)


def arrays():
    return tiny_arrays(N_ROWS, N_LAYERS, N_EXPERTS, TOP_K, seed=0)


def test_every_level_comes_back(full):
    given = arrays()
    with Trace(full) as trace:
        assert trace.levels == trace.levels_prefill == ALL | {"experts"}
        assert (trace.n_tokens, trace.n_layers, trace.n_experts, trace.top_k) == (N_ROWS, N_LAYERS, N_EXPERTS, TOP_K)
        assert trace.score_scale == 4095
        assert np.array_equal(trace.experts, given["experts"])
        assert trace.experts.dtype == np.uint8
        assert np.array_equal(trace.scores(3, 9), np.rint(given["scores"][3:9] * 4095))
        assert np.array_equal(trace.scores(0, N_ROWS).sum(-1), np.full((N_ROWS, N_LAYERS), 4095.0))
        assert np.allclose(trace.weights(0, N_ROWS), given["weights"], atol=2**-11)
        assert np.array_equal(trace.token_ids, given["token_ids"])
        assert np.array_equal(trace.iterations, given["iterations"])
        assert np.allclose(trace.embeddings(2, 4), given["embeddings"][2:4], atol=2**-11)
        assert np.allclose(trace.gate_inputs(2, 4), given["gate_inputs"][2:4], atol=2**-11)
        assert np.array_equal(trace.gate_input_norms(2, 4), given["gate_input_norms"][2:4].astype(np.float32))
        assert trace.scores(4, 4).shape == (0, N_LAYERS, N_EXPERTS)


def test_rows_read_one_by_one_are_those_of_a_slice_whoever_writes_into_them(full):
    with Trace(full) as trace:
        whole = {"scores": trace.scores(0, N_ROWS), "next": trace.next_scores(2, 0, N_ROWS)}
        order = [*range(N_ROWS), 5, 6, 7, 8, 3, 4, 20, 21, 22, 0, 1, 2]  # over the ends of requests, and back again
        for _ in range(2):
            for row in order:
                for name, got in (("scores", trace.scores(row, row + 1)), ("next", trace.next_scores(2, row, row + 1))):
                    assert np.array_equal(got, whole[name][row : row + 1])
                    got[:] = -1.0
        assert np.array_equal(trace.scores(4, 9), whole["scores"][4:9])


@pytest.mark.parametrize("distance", [1, 2, 3])
def test_next_scores_have_a_row_per_layer_and_zeros_without_a_target(full, distance):
    given = np.rint(arrays()[f"next_scores_{distance}"] * 4095)
    with Trace(full) as trace:
        got = trace.next_scores(distance, 0, N_ROWS)
        shared = trace.shared_scores(0, N_ROWS)
    n_predicting = N_LAYERS if distance == 1 else N_LAYERS - distance
    assert got.shape == (N_ROWS, N_LAYERS, N_EXPERTS)
    assert np.array_equal(got[:, :n_predicting], given)
    assert not got[:, n_predicting:].any()
    assert shared[:, : N_LAYERS - 1].any(axis=-1).all()
    assert not shared[:, N_LAYERS - 1].any()


def test_request_table(full):
    with Trace(full) as trace:
        assert len(trace.requests) == trace.n_requests == 4
        assert trace.requests[1] == Request(1, 7, 3, 7, "code", 0.5, "test")
        assert (trace.requests[1].n_decode, trace.requests[1].outputs) == (4, 5)
        assert trace.requests[-1].end_row == N_ROWS
        assert [request.index for request in trace.requests.in_split("store")] == [0, 2]
        assert trace.requests.decode_rows(0, 16).tolist() == [
            *range(3, 7),
            *range(10, 14),
            *range(17, 21),
            *range(24, 28),
        ]
        with pytest.raises(IndexError):
            trace.requests[4]


def test_header_comes_back_whole(tmp_path):
    header = Header(
        model="m",
        model_source="s",
        stands_for="qwen1.5-moe-a2.7b",
        n_layers=2,
        n_experts=300,
        top_k=1,
        created_by="c",
        gate=GateRule("sigmoid", renormalised=False, selection="other", scaling=2.5),
        expert_order="unranked",
        tokenizer="bpe",
        text_source="books",
        text_licence="CC0-1.0",
        labels=("synthetic", "spliced"),
        tasks=("größer", "b"),
        notes="two\nlines",
        extra={"seed": "7"},
    )
    experts = np.arange(6).reshape(3, 2, 1) * 50
    path = write_trace(tmp_path / "t.safetensors", header, [Request(0, 0, 1, 3, "b")], experts=experts)
    with Trace(path) as trace:
        assert trace.header == header
        assert trace.experts.dtype == np.uint16
        assert np.array_equal(trace.experts, experts)
        assert trace.requests[0].task == "b"


@pytest.mark.parametrize("name", ["scores", "next_scores_1", "shared_scores"])
def test_square_codes_share_one_scale_with_linear_ones(tmp_path, name):
    path = tiny_trace(tmp_path / "t.safetensors", store=Layout(codes={name: "u8_square"}))
    with Trace(path) as trace:
        assert trace.score_scale == common_scale([U8_SQUARE, U16_LINEAR]) == 5_917_275
        whole = trace.next_scores(1, 0, 28), trace.scores(0, 28), trace.shared_scores(0, 28)
        assert all(np.array_equal(values, np.rint(values)) for values in whole)
        assert not check_trace(trace)


@pytest.mark.parametrize("code", [U16_LINEAR, U8_SQUARE])
def test_codes_round_within_their_bound_and_keep_order(code):
    scores = np.concatenate([np.linspace(0, 1, 20_001), np.logspace(-9, 0, 5_000)])
    scores.sort()
    decoded = code.decode(code.encode(scores), code.scale)
    bound = np.array([code.max_error(score) for score in scores])
    assert (np.abs(decoded / code.scale - scores) <= bound + 1e-12).all()
    assert (np.diff(decoded) >= 0).all()
    assert np.array_equal(code.encode(decoded / code.scale), code.encode(scores))
    assert decoded[0] == 0 and decoded[-1] == code.scale


def test_decode_only_levels_refuse_prefill_rows(tmp_path):
    store = Layout(decode_only=frozenset({"scores", "next_scores_2"}), sparse={"next_scores_2": 2})
    path = tiny_trace(tmp_path / "t.safetensors", n_layers=4, store=store)
    whole = tiny_trace(tmp_path / "w.safetensors", n_layers=4)
    with Trace(path) as trace, Trace(whole) as all_rows:
        assert trace.levels - trace.levels_prefill == {"scores", "next_scores_2"}
        assert np.array_equal(trace.scores(10, 14), all_rows.scores(10, 14))
        assert trace.scores(3, 3).shape == (0, 4, 4)
        for a, b in ((0, 1), (9, 11), (6, 11), (3, 8)):
            with pytest.raises(
                BadInput, match=f"scores, got rows {a} to {b}: this trace stores it for the decode rows"
            ):
                trace.scores(a, b)
        dense, kept = all_rows.next_scores(2, 10, 14)[:, :2], trace.next_scores(2, 10, 14)[:, :2]
        assert ((kept > 0).sum(-1) <= 2).all()
        assert np.array_equal(kept.max(-1), dense.max(-1))
        assert np.array_equal(kept[kept > 0], dense[kept > 0])
        assert not check_trace(trace)


def test_no_decode_rows_at_all(tmp_path):
    path = tiny_trace(tmp_path / "t.safetensors", outputs=1, store=Layout(decode_only=frozenset({"scores"})))
    with Trace(path) as trace:
        assert trace.requests.n_decode_rows == 0
        assert trace.stored("scores").shape == (0, 3, 4)
        assert not check_trace(trace)
        with pytest.raises(BadInput, match="decode rows"):
            trace.scores(0, 1)


@pytest.mark.parametrize(
    ("kind", "gate", "applied"),
    [
        ("raw", GateRule(renormalised=True), [0.75, 0.25]),
        ("raw", GateRule(renormalised=False), [0.375, 0.125]),
        ("raw", GateRule(renormalised=True, scaling=2.5), [1.875, 0.625]),
        ("applied", GateRule(renormalised=False, scaling=2.0), [0.75, 0.25]),
    ],
)
def test_weights_are_what_the_model_applies(tmp_path, kind, gate, applied):
    weights = np.array([[[0.375, 0.125]]]) if kind == "raw" else np.array([[[0.75, 0.25]]])
    header = tiny_header(1, 4, 2, gate=gate, weights_kind=kind)
    rows = {"experts": np.array([[[2, 0]]]), "weights": weights}
    path = write_trace(tmp_path / "t.safetensors", header, [Request(0, 0, 1, 1)], **rows)
    with Trace(path) as trace:
        assert trace.weights(0, 1)[0, 0].tolist() == applied
        assert trace.raw_weights(0, 1)[0, 0].tolist() == [0.375, 0.125]


def test_raw_weights_come_from_scores_or_not_at_all(tmp_path):
    with Trace(tiny_trace(tmp_path / "a.safetensors")) as trace:
        chosen = np.take_along_axis(trace.scores(0, 5), trace.experts[:5].astype(int), -1)
        assert np.array_equal(trace.raw_weights(0, 5), chosen / 4095)
    with (
        Trace(tiny_trace(tmp_path / "b.safetensors", levels={"weights"})) as trace,
        pytest.raises(BadInput, match=r"raw_weights \(the stored weights are renormalised\) needs scores"),
    ):
        trace.raw_weights(0, 5)


def test_embedding_table_serves_the_embeddings(tmp_path):
    table = np.arange(40).reshape(10, 4) / 8
    with TraceWriter(tmp_path / "t.safetensors", tiny_header(1, 4, 1), embedding_table=table) as writer:
        writer.add_request(2, experts=np.array([[[0]], [[1]], [[3]]]), token_ids=np.array([9, 0, 4]))
    with Trace(tmp_path / "t.safetensors") as trace:
        assert {"embeddings", "token_ids"} <= trace.levels
        assert np.array_equal(trace.embeddings(1, 3), table[[0, 4]].astype(np.float32))


def test_a_missing_level_is_named_with_its_remedy(tmp_path):
    with Trace(tiny_trace(tmp_path / "t.safetensors", levels={"scores"})) as trace:
        trace.require("scores", "fine_moe")
        with pytest.raises(
            BadInput, match=r"fine_moe needs next_scores_1, got experts, scores: not recorded; .*moesim record"
        ):
            trace.require("next_scores_1", "fine_moe")
        with pytest.raises(BadInput, match=r"emoe needs next_scores_1, tasks, got experts, scores: .*them.*; convert"):
            trace.require_all({"scores", "tasks", "next_scores_1"}, "emoe")
        trace.require_all({"scores", "experts"}, "emoe")
        with pytest.raises(BadInput, match="emoe needs tasks"):
            trace.require("tasks", "emoe")
        with pytest.raises(BadInput, match="next_scores_1"):
            trace.next_scores(1, 0, 1)


def test_same_input_same_bytes_however_it_is_cut(tmp_path):
    given = {name: array for name, array in arrays().items() if name != "iterations"}
    header = tiny_header(N_LAYERS, N_EXPERTS, TOP_K)
    whole = write_trace(tmp_path / "a.safetensors", header, [Request(0, 0, 5, N_ROWS)], **given)
    with TraceWriter(tmp_path / "b.safetensors", header) as writer:
        writer.start_request(5)
        for start in range(0, N_ROWS, 3):
            writer.append(**{name: array[start : start + 3] for name, array in given.items()})
    assert whole.read_bytes() == (tmp_path / "b.safetensors").read_bytes()


@pytest.mark.parametrize("fails_at", ["append", "close", "rename"])
def test_an_error_leaves_nothing_behind_and_the_old_file_whole(tmp_path, fails_at, monkeypatch):
    path = tiny_trace(tmp_path / "t.safetensors")
    before = path.read_bytes()
    if fails_at == "rename":

        def refuse(self, target):
            raise OSError("disk full")

        monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises((BadInput, OSError)) as error, TraceWriter(path, tiny_header(1, 2, 1)) as writer:
        writer.add_request(3 if fails_at == "close" else 1, experts=np.array([[[1]], [[0]]]))
        if fails_at == "append":
            writer.append(experts=np.array([[[2]]]))
    assert path.read_bytes() == before
    # A trace that was finished and could not have its name is no waste: it lies beside, and the error says where.
    kept = ["t.safetensors.1"] if fails_at == "rename" else []
    assert sorted(left.name for left in tmp_path.iterdir()) == ["t.safetensors", *kept]
    assert all(name in str(error.value) for name in kept)


def test_many_readers_at_once_while_the_file_is_replaced(full):
    with Trace(full) as trace:
        expected = trace.scores(0, N_ROWS)

    def read(i):
        with pickle.loads(pickle.dumps(Trace(full))) as trace:
            return np.array_equal(trace.scores(0, N_ROWS), expected) and not check_trace(trace)

    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(read, i) for i in range(40)]
        for _ in range(5):
            tiny_trace(full, N_LAYERS, N_EXPERTS, TOP_K)
        assert all(future.result() for future in futures)


def test_slices_outlive_the_trace(full):
    trace = open_trace(full)
    experts = trace.experts
    trace.close()
    assert experts[0, 0, 0] < N_EXPERTS
    with pytest.raises(BadInput, match="closed"):
        trace.scores(0, 1)


def test_rows_outside_the_trace_are_an_index_error(full):
    with Trace(full) as trace:
        for a, b in ((-1, 2), (3, 2), (0, N_ROWS + 1)):
            with pytest.raises(IndexError, match=r"0 <= a <= b <= 28"):
                trace.scores(a, b)


def test_a_long_trace_needs_constant_memory(tmp_path):
    n_chunk, n_chunks = 2_000, 100
    experts = np.arange(n_chunk * 2).reshape(n_chunk, 2, 1) % 4
    scores = np.where(np.arange(4) == experts, 0.7, 0.1)
    path = tmp_path / "long.safetensors"
    tracemalloc.start()
    try:
        with TraceWriter(path, tiny_header(2, 4, 1)) as writer:
            for i in range(n_chunks):
                writer.add_request(10, split="store" if i % 2 else "test", experts=experts, scores=scores)
        wrote = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        began = time.perf_counter()
        trace = Trace(path)
        opened_s = time.perf_counter() - began
        opened = tracemalloc.get_traced_memory()[1]
        assert trace.n_tokens == n_chunk * n_chunks
        assert trace.scores(150_000, 150_100).shape == (100, 2, 4)
        assert not check_trace(trace)
        checked = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 3_600_000
    assert wrote < 3_000_000
    assert opened < 1_000_000
    assert opened_s < 0.5
    assert checked < 60_000_000  # a few arrays of one chunk of 2**20 values, however long the file
