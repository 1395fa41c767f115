"""Version 2 of the format: packed codes and sparse `shared_scores` come back, and are judged like all others."""

from __future__ import annotations

import numpy as np
import pytest
from easy_numbers import execute_easy, setup
from tiny_traces import surgery, tiny_arrays, tiny_trace

from policies.hobbit import Hobbit
from sim.base.errors import BadInput
from traces.format.check import check_trace
from traces.format.header import GateRule, Header
from traces.format.layout import CODES, U4_SQUARE, U6_SQUARE
from traces.format.reader import Trace
from traces.format.writer import Layout, TraceWriter
from traces.synth.arrivals import Arrival
from traces.synth.compose import compose, plan

PACKED = ("scores", "next_scores_1", "next_scores_2", "shared_scores")
STORE = Layout(dict.fromkeys(PACKED, "u6_square"), frozenset(PACKED[1:]), {"next_scores_2": 3, "shared_scores": 3})


@pytest.fixture
def packed(tmp_path):
    levels = {*PACKED, "weights", "tasks"}
    return tiny_trace(tmp_path / "t.safetensors", n_layers=4, n_experts=7, levels=levels, store=STORE)


def test_the_bytes_of_the_page():
    assert U6_SQUARE.store(np.array([1, 2, 3, 63])).tobytes().hex(" ") == "81 30 fc"
    assert U6_SQUARE.store(np.array([63])).tolist() == [63]
    assert U6_SQUARE.store(np.array([0, 63])).tolist() == [0b11000000, 0b1111]


@pytest.mark.parametrize("n", range(1, 14))
def test_packing_is_undone(n):
    codes = np.random.default_rng(n).integers(0, 64, (3, 2, n))
    stored = U6_SQUARE.store(codes)
    assert stored.shape == (3, 2, U6_SQUARE.width(n)) == (3, 2, -(-6 * n // 8))
    np.testing.assert_array_equal(U6_SQUARE.unstore(stored, n), codes)
    for row, line in zip(codes.reshape(-1, n), stored.reshape(-1, stored.shape[-1]), strict=True):
        number = sum(int(code) << 6 * i for i, code in enumerate(row))  # the definition, independently
        assert line.tobytes() == number.to_bytes(len(line), "little")


def test_scores_come_back_within_the_bound(packed):
    """Against the floats that were written, with the error that FORMAT.md states; left-out scores are 0."""
    with Trace(packed) as trace:
        assert trace.header.n_experts == 7
        assert check_trace(trace) == []
        source = tiny_arrays(trace.n_tokens, 4, 7, 2, 0)
        got = trace.scores(0, trace.n_tokens) / trace.score_scale
        assert trace.score_scale == 3969
        assert (abs(got - source["scores"]) <= np.sqrt(source["scores"]) / 63 + 0.25 / 3969 + 1e-12).all()
        row = trace.requests[1].first_decode_row
        read = {"shared_scores": trace.shared_scores, "next_scores_2": lambda a, b: trace.next_scores(2, a, b)}
        for name in read:
            made = read[name](row, row + 2) / trace.score_scale
            wanted = source[name][row : row + 2]
            assert ((made > 0).sum(axis=-1) <= 3).all()
            assert not made[:, wanted.shape[1] :].any()
            kept = np.sort(wanted, axis=-1)[..., -3:]
            np.testing.assert_allclose(np.sort(made, axis=-1)[:, : wanted.shape[1], -3:], kept, atol=0.0159)
        with pytest.raises(BadInput, match="decode rows"):
            trace.shared_scores(0, 1)


def test_versions_are_as_low_as_they_can_be(packed, tmp_path):
    def version(path):
        seen = {}
        surgery(path, lambda meta, _: seen.update(meta))
        return seen["version"]

    assert version(packed) == "2"
    assert version(tiny_trace(tmp_path / "a", levels={"scores"}, store=Layout({"scores": "u8_square"}))) == "1"
    assert version(tiny_trace(tmp_path / "c", levels={"scores"}, store=Layout({"scores": "u4_square"}))) == "3"
    sparse = Layout(sparse={"shared_scores": 2})
    assert version(tiny_trace(tmp_path / "b", levels={"shared_scores"}, store=sparse)) == "2"


@pytest.mark.parametrize(
    "levels, store",
    [({"scores"}, Layout({"scores": "u6_square"})), ({"shared_scores"}, Layout(sparse={"shared_scores": 2}))],
)
def test_version_1_cannot_have_it(tmp_path, levels, store):
    path = surgery(tiny_trace(tmp_path / "t", levels=levels, store=store), lambda meta, _: meta.update(version="1"))
    with pytest.raises(BadInput, match="in a file of version 1: it came with version 2"):
        Trace(path)


def test_wrong_widths_and_loose_bits_are_refused(packed):
    def loose(_, arrays):
        arrays["scores"][5, 1, -1] |= 0b10000000  # 7 codes are 42 bits of 48

    with Trace(surgery(packed, loose)) as trace:
        (fault,) = check_trace(trace)
        assert str(fault) == "scores[5, 1], got a bit behind the last code: unused bits are 0"
    with pytest.raises(BadInput, match=r"scores, got shape .*: axis 2 is E = 6"):
        Trace(surgery(packed, lambda _, arrays: arrays.update(scores=arrays["scores"][..., :-1].copy())))


def test_composing_keeps_what_is_packed(packed, tmp_path):
    with Trace(packed) as trace:
        plans = plan(trace, [Arrival(float(i)) for i in range(4)], split="all")
        out = compose(trace, plans, tmp_path / "o.safetensors", "hand", spliced=False)
    with Trace(packed) as one, Trace(out) as other:
        assert other.entries.keys() >= set(one.entries)
        for name in PACKED:
            np.testing.assert_array_equal(one.stored(name), other.stored(name), err_msg=name)


def test_every_code_has_a_row_of_its_own():
    assert {code.dtype for code in CODES.values()} == {"U16", "U8"}
    assert [code.width(60) for code in CODES.values()] == [60, 60, 45, 30]


@pytest.mark.parametrize("n", range(1, 9))
def test_four_bit_codes_lie_two_to_a_byte(n):
    codes = np.random.default_rng(n).integers(0, 16, (3, 2, n))
    stored = U4_SQUARE.store(codes)
    assert stored.shape == (3, 2, -(-n // 2))
    np.testing.assert_array_equal(U4_SQUARE.unstore(stored, n), codes)
    for row, line in zip(codes.reshape(-1, n), stored.reshape(-1, stored.shape[-1]), strict=True):
        number = sum(int(code) << 4 * i for i, code in enumerate(row))
        assert line.tobytes() == number.to_bytes(len(line), "little")


@pytest.mark.parametrize("renormalised", [True, False])
def test_weights_that_are_not_stored_follow_from_the_scores(tmp_path, renormalised):
    gate = GateRule(score="softmax", renormalised=renormalised, scaling=2.5)
    header = Header("m", "here", 1, 4, 2, gate, "test", weights_kind="derived")
    scores = np.array([[[0.5, 0.3, 0.15, 0.05]], [[0.04, 0.16, 0.2, 0.6]], [[0.25, 0.25, 0.25, 0.25]]])
    experts = np.array([[[0, 1]], [[3, 2]], [[0, 1]]])
    with TraceWriter(tmp_path / "t.safetensors", header, Layout({"scores": "u6_square"})) as writer:
        writer.add_request(1, experts=experts, scores=scores)
    with Trace(tmp_path / "t.safetensors") as trace:
        assert check_trace(trace) == []
        assert {"weights"} <= trace.levels_prefill
        # codes of 0.5 and 0.3 are rint(63 * sqrt(p)) = 45 and 35, of 0.6 and 0.2 they are 49 and 28
        chosen = np.array([[45, 35], [49, 28], [32, 32]]) ** 2.0
        wanted = chosen / (chosen.sum(axis=1, keepdims=True) if renormalised else 3969) * 2.5
        assert trace.weights(0, 3)[:, 0].tolist() == wanted.tolist()
        assert trace.weights(1, 2)[:, 0].tolist() == wanted[1:2].tolist()


def test_derived_weights_want_scores_and_no_weights(tmp_path):
    gate = GateRule(score="softmax", renormalised=True)
    header = Header("m", "here", 1, 4, 2, gate, "test", weights_kind="derived")
    rows = {"experts": np.array([[[0, 1]]]), "weights": np.array([[[0.6, 0.4]]])}
    with (
        pytest.raises(BadInput, match="without weights"),
        TraceWriter(tmp_path / "t.safetensors", header) as writer,
    ):
        writer.add_request(1, **rows)
    mixer = Header("m", "here", 1, 4, 2, GateRule("sparsemixer", renormalised=False), "test", weights_kind="derived")
    with pytest.raises(BadInput, match="do not follow"):
        TraceWriter(tmp_path / "t.safetensors", mixer)


def test_a_run_on_derived_weights_is_the_run_on_stored_ones(tmp_path):
    """HOBBIT's thresholds on weights decide alike, and composing carries what follows from the scores along."""
    levels = {"scores", "tasks", *(f"next_scores_{d}" for d in (1, 2, 3))}
    store = Layout({"next_scores_1": "u4_square"})
    stored = tiny_trace(tmp_path / "a.safetensors", n_layers=5, levels={*levels, "weights"}, store=store)
    derived = tiny_trace(tmp_path / "b.safetensors", n_layers=5, levels=levels, store=store, weights_kind="derived")
    with Trace(stored) as one, Trace(derived) as other:
        np.testing.assert_allclose(one.weights(0, one.n_tokens), other.weights(0, other.n_tokens), atol=2**-11)
        compose(other, plan(other, [Arrival(0.0), Arrival(1.0)]), tmp_path / "c.safetensors", "hand", False)
        runs = [execute_easy(setup(Hobbit(), trace, 6)) for trace in (one, other)]
    assert runs[0].log == runs[1].log
    assert runs[0].spans == runs[1].spans
    assert len(runs[0].log) > 50
    with Trace(tmp_path / "c.safetensors") as composed, Trace(derived) as source:
        assert "weights" in composed.levels
        first = composed.requests[0].first_row
        assert composed.weights(first, first + 7).tolist() == source.weights(0, 7).tolist()
