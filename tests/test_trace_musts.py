"""Every MUST of FORMAT.md broken once: the error names the tensor, the place and the rule, in one line."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tiny_traces import ALL, surgery, tiny_trace

import traces
from sim.base.errors import BadInput
from traces.format.check import check_trace, findings
from traces.format.reader import Trace

PAGE = Path(traces.__file__).with_name("FORMAT.md")


def meta(**pairs):
    """Set metadata keys (`__` stands for a dot); None removes one."""

    def edit(metadata, arrays):
        for key, value in pairs.items():
            metadata.pop(key.replace("__", "."), None)
            if value is not None:
                metadata[key.replace("__", ".")] = value

    return edit


def drop(*names):
    def edit(metadata, arrays):
        for name in names:
            del arrays[name]

    return edit


def put(name, index, value):
    def edit(metadata, arrays):
        arrays[name][index] = value

    return edit


def swap(name, make):
    """Replace a tensor by `make(tensor)`."""

    def edit(metadata, arrays):
        arrays[name] = make(arrays[name])

    return edit


def both(*edits):
    def edit(metadata, arrays):
        for one in edits:
            one(metadata, arrays)

    return edit


def add(name, array):
    return lambda metadata, arrays: arrays.__setitem__(name, array)


# MUST -> what to do to a sound trace of 4 layers, 4 experts, k = 2, 28 rows in 4 requests of 3 + 4, and the message.
BREACHES = [
    ("M2", add("routing", np.zeros(3, "u1")), r"tensor 'routing': no such tensor; known: embedding_table"),
    ("M2", add("score", np.zeros(3, "u1")), r"tensor 'score': no such tensor; did you mean 'scores'"),
    ("M2", swap("experts", lambda a: a.astype("<i4")), r"experts, got type I32: U8 or U16"),
    ("M2", swap("experts", lambda a: a.astype("i1")), r"'experts', got type I8: a trace uses U8, U16"),
    ("M2", swap("req_offsets", lambda a: a.astype("<i4")), r"req_offsets, got type I32: I64"),
    ("M3", meta(format=None), r"metadata format, got '': a routing trace says 'moe-routing'"),
    ("M3", meta(version="5"), r"metadata version, got '5': this release reads versions 1, 2, 3 and 4; upgrade"),
    ("M3", meta(version="3", stands_for="mixtral-8x7b"), r"stands_for in a file of version 3: it came with version 4"),
    ("M4", meta(model=None), r"metadata model, got '': it is required and not empty"),
    ("M4", meta(created_by=""), r"metadata created_by, got '': it is required"),
    ("M4", meta(tokeniser="bpe"), r"metadata tokeniser, got 'bpe': no such key; did you mean 'tokenizer'"),
    ("M4", both(drop("scores"), drop("weights")), r"metadata scores.code: there is no tensor 'scores'"),
    ("M4", meta(experts__rows="decode"), r"metadata experts.rows, got 'decode': no such key"),
    ("M5", meta(notes="\x1b[31mred"), r"metadata notes, got .*: printable text of at most 65536 characters"),
    ("M5", meta(model="a\nb"), r"metadata model, got .*: printable text"),
    ("M5", meta(stands_for="../a.yaml"), r"metadata stands_for, got '../a.yaml': an id is lower-case letters"),
    ("M5", meta(n_layers="0"), r"metadata n_layers, got '0': a whole number from 1 to 1024"),
    ("M5", meta(n_experts="4.0"), r"metadata n_experts, got '4.0': a whole number from 1 to 4096"),
    ("M5", meta(top_k="5"), r"metadata top_k, got '5': a whole number from 1 to 4"),
    ("M5", meta(gate_score="relu"), r"metadata gate_score, got 'relu': one of softmax, sigmoid, sparsemixer"),
    ("M5", meta(gate_score="sparsemixer"), r"got 'sparsemixer': its weights are applied ones and not renormalised"),
    ("M5", meta(gate_renormalised="yes"), r"metadata gate_renormalised, got 'yes': one of true, false"),
    ("M5", meta(gate_scaling="-1"), r"metadata gate_scaling, got '-1': a positive decimal number"),
    ("M5", meta(labels='["Big Label"]'), r"metadata labels, got 'Big Label': a label is lower-case letters"),
    ("M5", meta(labels="synthetic"), r"metadata labels, got 'synthetic': a JSON list of strings"),
    ("M5", meta(tasks='["a", "a"]'), r"metadata tasks, got .*: names are distinct"),
    ("M5", meta(tasks=json.dumps(["a", "b\n"])), r"metadata tasks, got .*: names are printable"),
    ("M6", drop("req_split"), r"tensor 'req_split' is missing: every trace has it"),
    ("M7", swap("experts", lambda a: a[:, :3]), r"experts, got shape \(28, 3, 2\): axis 1 is L = 4 in \(T, L, K\)"),
    ("M7", swap("experts", lambda a: a[0]), r"experts, got shape \(4, 2\): \(T, L, K\)"),
    ("M7", swap("scores", lambda a: a[:, :, :3]), r"scores, got shape \(28, 4, 3\): axis 2 is E = 4"),
    ("M7", swap("next_scores_2", lambda a: a[:, :1]), r"next_scores_2, got shape \(28, 1, 4\): axis 1 is L-2 = 2"),
    ("M7", swap("token_ids", lambda a: a[:-1]), r"token_ids, got shape \(27\): axis 0 is T = 28"),
    ("M7", swap("embeddings", lambda a: a[:, :0]), r"embeddings, got shape \(28, 0\): axis 1 is H at least 1"),
    ("M7", swap("req_offsets", lambda a: a[:-1]), r"req_offsets, got shape \(4\): axis 0 is N\+1 = 5"),
    ("M7", swap("experts", lambda a: a[:0]), r"experts, got shape \(0, 4, 2\): at least one row"),
    ("M7", swap("req_prompt_len", lambda a: np.ones(29, "<i8")), r"req_prompt_len, got 29 requests for 28 rows"),
    ("M7", swap("next_scores_3.ids", lambda a: a[:, :, :1]), r"next_scores_3, got shape \(28, 1, 2\): axis 2 is M = 1"),
    (
        "M7",
        both(swap("next_scores_3.ids", lambda a: np.tile(a, 3)), swap("next_scores_3", lambda a: np.tile(a, 3))),
        r"next_scores_3.*, got shape \(28, 1, 6\): axis 2 is M",
    ),
    ("M8", meta(scores__code=None), r"metadata scores.code, got '': one of u16_linear, u8_square"),
    ("M8", meta(scores__code="u4"), r"metadata scores.code, got 'u4': one of u16_linear, u8_square"),
    ("M8", meta(scores__code="u8_square"), r"scores, got type U16: U8"),
    ("M9", meta(scores__rows="decode"), r"scores, got 28 rows: rows = decode means 16, one for each decode row"),
    ("M9", meta(scores__rows="prefill"), r"metadata scores.rows, got 'prefill': all or decode"),
    ("M10", both(drop("next_scores_3"), meta(next_scores_3__code=None)), r"next_scores_3.ids without next_scores_3"),
    ("M10", meta(tasks=None), r"req_task and metadata tasks, got one of them"),
    ("M10", add("embedding_table", np.zeros((100, 8), "<f2")), r"embeddings and embedding_table, got both"),
    (
        "M10",
        both(drop("token_ids", "embeddings"), add("embedding_table", np.zeros((100, 8), "<f2"))),
        r"embedding_table without token_ids",
    ),
    ("M11", put("req_offsets", 0, 1), r"req_offsets\[0\], got 1: offsets start at 0 and end at .* \(28\)"),
    ("M11", put("req_offsets", 4, 27), r"req_offsets\[4\], got 27: offsets start at 0 and end at"),
    ("M11", put("req_offsets", 2, 7), r"req_offsets\[2\], got 7: offsets increase"),
    ("M11", put("req_offsets", 2, -(2**63)), r"req_offsets\[2\], got -9223372036854775808: offsets increase"),
    ("M12", put("req_prompt_len", 1, 0), r"req_prompt_len\[1\], got 0: a prompt has at least one row"),
    ("M12", put("req_prompt_len", 1, 8), r"req_prompt_len\[1\], got 8: .* at most the request's"),
    ("M13", put("req_split", 3, 2), r"req_split\[3\], got 2: 0 \(store\) or 1 \(test\)"),
    ("M13", put("req_task", 1, 2), r"req_task\[1\], got 2: a position in metadata tasks, which lists 2"),
    ("M14", put("req_arrival_s", 2, np.nan), r"req_arrival_s\[2\], got nan: finite seconds"),
    ("M14", put("req_arrival_s", 0, -1.0), r"req_arrival_s\[0\], got -1.0: finite seconds, not negative"),
    ("M14", put("req_arrival_s", 2, 0.25), r"req_arrival_s\[2\], got 0.25: arrivals never go back in time"),
    ("M15", put("experts", (5, 2, 1), 4), r"experts\[5, 2, 1\], got 4: an expert id is below n_experts \(4\)"),
    ("M15", put("next_scores_3.ids", (5, 0, 1), 9), r"next_scores_3.ids\[5, 0, 1\], got 9: an expert id is below"),
    ("M16", put("experts", (5, 2), 3), r"experts\[5, 2\], got 3 3: distinct experts per token and layer"),
    ("M16", put("next_scores_3.ids", (5, 0), 3), r"next_scores_3.ids\[5, 0\], got 3 3: distinct experts per list"),
    ("M17", put("weights", (6, 1, 0), np.nan), r"weights\[6, 1, 0\], got nan: a finite number"),
    ("M17", put("weights", (6, 1, 1), -0.5), r"weights\[6, 1, 1\], got -0.5: a weight is not negative"),
    ("M17", put("weights", (6, 1), [0.25, 0.75]), r"weights\[6, 1, 1\], got 0.75: weights never rise along K"),
    ("M17", put("weights", (6, 1), [0.5, 0.25]), r"weights\[6, 1\], got 0.75: renormalised weights sum to 1"),
    ("M18", put("scores", (6, 1, 1), 4096), r"scores\[6, 1, 1\], got 4096: a u16_linear code is at most 4095"),
    ("M18", put("scores", (6, 1), 2000), r"scores\[6, 1\], got 1.953\d*: softmax scores over all experts sum to 1"),
    ("M18", put("shared_scores", (6, 1, 1), 4096), r"shared_scores\[6, 1, 1\], got 4096"),
    (
        "M19",
        both(drop("weights"), put("experts", (0, 0), [2, 3])),
        r"scores\[0, 0\], got \d+: the chosen experts have the highest scores",
    ),
    (
        "M19",
        both(drop("weights"), swap("experts", lambda a: a[..., ::-1].copy())),
        r"scores\[0, 0\], got \d+: experts are in router order, highest score first",
    ),
    ("M20", put("weights", (3, 0), [0.5, 0.5]), r"weights\[3, 0, 0\], got 0.5: weights follow from the scores"),
    ("M20", meta(weights_kind="raw"), r"weights\[0, 0, 0\], got .*: weights follow from the scores"),
    ("M21", put("embeddings", (3, 0), np.inf), r"embeddings\[3, 0\], got inf: a finite number"),
    ("M21", put("gate_inputs", (3, 0, 1), np.nan), r"gate_inputs\[3, 0, 1\], got nan: a finite number"),
    ("M21", put("gate_input_norms", (3, 0), -1.0), r"gate_input_norms\[3, 0\], got -1.0: a norm is not negative"),
    ("M22", put("token_ids", 3, -1), r"token_ids\[3\], got -1: a token id is not negative"),
    (
        "M22",
        both(
            drop("embeddings"),
            add("embedding_table", np.zeros((50, 8), "<f2")),
            put("token_ids", slice(None), 7),
            put("token_ids", 20, 50),
        ),
        r"token_ids\[20\], got 50: embedding_table has 50 rows",
    ),
    ("M22", put("iterations", 0, -1), r"iterations\[0\], got -1: an iteration is not negative"),
    ("M22", put("iterations", 5, 4), r"iterations\[5\], got 4: iterations of a request never go back"),
    ("M22", put("iterations", 2, 0), r"iterations\[2\], got 0: iterations of a request never go back"),
]
AT_OPENING = {f"M{n}" for n in range(1, 15)}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    from traces.format.writer import Layout

    path = tmp_path_factory.mktemp("musts") / "sound.safetensors"
    return tiny_trace(path, n_layers=4, store=Layout(sparse={"next_scores_3": 2})).read_bytes()


def broken(sound, tmp_path, edit):
    path = tmp_path / "broken.safetensors"
    path.write_bytes(sound)
    return surgery(path, edit)


def require_sound(trace):
    for _, error in findings(trace):
        raise error


@pytest.mark.parametrize(("must", "edit", "message"), BREACHES, ids=[f"{m[0]}-{i}" for i, m in enumerate(BREACHES)])
def test_a_breach_is_refused_by_name(sound, tmp_path, must, edit, message):
    path = broken(sound, tmp_path, edit)
    if must in AT_OPENING:
        with pytest.raises(BadInput, match=message) as caught:
            Trace(path)
    else:
        with Trace(path) as trace, pytest.raises(BadInput, match=message) as caught:
            require_sound(trace)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    assert ";" in text, "no way out"


def test_surgery_alone_changes_nothing(sound, tmp_path):
    path = broken(sound, tmp_path, lambda metadata, arrays: None)
    assert path.read_bytes() == sound
    with Trace(path) as trace:
        assert trace.levels == ALL | {"experts"}
        require_sound(trace)


def test_every_must_has_a_case_and_every_case_a_must():
    stated = set(re.findall(r"\*\*(M\d+)\*\*", PAGE.read_text(encoding="utf-8")))
    elsewhere = {"M1", "M23", "M24", "M25", "M26"}  # test_trace_robust.py's, and test_trace_squeezed.py's
    assert stated == {must for must, _, _ in BREACHES} | elsewhere


def test_first_fault_comes_first_and_all_come_with_a_limit(sound, tmp_path):
    edit = both(put("experts", (9, 2), 3), put("experts", (4, 1), 3), put("gate_inputs", (slice(None), 0, 0), np.nan))
    with Trace(broken(sound, tmp_path, edit)) as trace:
        faults = check_trace(trace, limit=20)
        assert (faults[0].tensor, faults[0].index) == ("experts", (4, 1))
        assert (faults[1].tensor, faults[1].index) == ("experts", (9, 2))
        assert len(faults) == 20
        assert check_trace(trace) == faults[:1]


def test_a_gate_with_another_selection_may_choose_lower_scores(sound, tmp_path):
    edit = both(drop("weights"), put("experts", (0, 0), [2, 3]), meta(gate_selection="other"))
    with Trace(broken(sound, tmp_path, edit)) as trace:
        require_sound(trace)


def test_an_id_out_of_range_is_caught_before_it_becomes_an_index_error(sound, tmp_path):
    with (
        Trace(broken(sound, tmp_path, put("experts", (5, 2, 1), 4))) as trace,
        pytest.raises(BadInput, match=r"experts\[5, 2, 1\], got 4: an expert id is below n_experts"),
    ):
        _ = trace.experts
    with (
        Trace(broken(sound, tmp_path, put("next_scores_3.ids", (5, 0, 1), 9))) as trace,
        pytest.raises(BadInput, match=r"next_scores_3\.ids\[5, 0, 1\], got 9: an expert id is below"),
    ):
        trace.next_scores(3, 0, 28)


GOOD = np.array([[[0, 1]]])
WRITER = [
    ({"experts": np.array([[[0, 0]]])}, r"experts\[0, 0\], got 0 0: distinct"),
    ({"experts": np.array([[[0, 4]]])}, r"experts\[0, 0, 1\], got 4: an expert id is below"),
    ({"experts": np.array([[[0, -1]]])}, r"experts, got a value that uint8 cannot hold"),
    ({"experts": np.array([[[0.0, 1.0]]])}, r"experts, got a value that uint8 cannot hold"),
    ({"experts": GOOD, "scores": np.array([[[0.5, np.nan, 0, 0.5]]])}, r"scores\[0, 0, 1\], got nan: a score"),
    ({"experts": GOOD, "scores": np.array([[[2.5, 1, 0, 0]]])}, r"scores\[0, 0, 0\], got 2.5: a score is a"),
    ({"experts": GOOD, "scores": np.array([[[4096, 0, 0, 0]]])}, r"scores\[0, 0, 0\], got 4096: a u16_linear"),
    ({"experts": GOOD, "weights": np.array([[[np.inf, 0]]])}, r"weights, got a value that float16 cannot"),
    ({"experts": GOOD, "token_ids": np.array([1, 2])}, r"token_ids, got shape \(2,\): this chunk has 1 rows"),
    ({"experts": GOOD, "tokens": np.array([1])}, r"rows of 'tokens': no such tensor"),
    ({"experts": GOOD, "req_split": np.array([1])}, r"rows of 'req_split': no such tensor of rows"),
    ({"experts": np.array([[[0, 1], [0, 1]]])}, r"experts, got shape \(1, 2, 2\)"),
    ({"token_ids": np.array([1])}, r"every chunk brings the same tensors, experts among them"),
]


@pytest.mark.parametrize(("rows", "message"), WRITER)
def test_the_writer_refuses_too(tmp_path, rows, message):
    from tiny_traces import tiny_header

    from traces.format.writer import TraceWriter

    with (
        pytest.raises(BadInput, match=message),
        TraceWriter(tmp_path / "t.safetensors", tiny_header(1, 4, 2)) as writer,
    ):
        writer.add_request(1, **rows)
    assert not list(tmp_path.iterdir())


def test_the_writer_refuses_requests_and_layouts(tmp_path):
    from tiny_traces import tiny_header

    from traces.format.writer import Layout, TraceWriter

    path, header = tmp_path / "t.safetensors", tiny_header(1, 4, 1, tasks=("a",))
    one = np.array([[[1]]])
    for call, message in [
        (lambda writer: writer.append(experts=one), "call start_request first"),
        (lambda writer: writer.start_request(1, split="train"), "split, got 'train': one of store, test"),
        (lambda writer: writer.start_request(1, task="b"), "task, got 'b'"),
        (
            lambda writer: writer.add_request(2, task="a", experts=one),
            "prompt_len, got 2: at least 1 and at most its 1 rows",
        ),
        (lambda writer: writer.add_request(0, task="a", experts=one), "prompt_len, got 0"),
        (lambda writer: None, "no request: a trace has at least one"),
    ]:
        with pytest.raises(BadInput, match=message), TraceWriter(path, header) as writer:
            call(writer)
    with (
        pytest.raises(BadInput, match=r"arrival_s, got 1\.0: all requests have one, or none"),
        TraceWriter(path, header) as writer,
    ):
        writer.add_request(1, task="a", experts=one)
        writer.start_request(1, task="a", arrival_s=1.0)
    for layout in (
        Layout(codes={"scores": "u4"}),
        Layout(sparse={"scores": 2}),
        Layout(decode_only=frozenset({"score"})),
    ):
        with pytest.raises(BadInput, match=r"got 'u4'|no such tensor|cannot be stored so"):
            TraceWriter(path, header, layout)
    assert not list(tmp_path.iterdir())
