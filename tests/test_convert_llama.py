"""Logs of llama.cpp's forks and of imp, by hand: requests told apart, prompt rows that are none, what is refused.

Layouts follow the public code that the modules of `traces.convert` name; every row here was written for the test.
"""

import json

import pytest
from convert_samples import SHAPE, converted, put, refused

from traces.convert import Options, convert

WIDE = Options(n_experts=8, model="hand")


def text(path, *rows):
    return put(path, "\n".join(rows).encode() + b"\n")


class TestLlamaCsv:
    def test_joined_runs_are_requests_and_prompts_keep_the_order_of_the_file(self, tmp_path):
        # `cat a.csv b.csv`: a prompt of three tokens computed as two and one, whose positions repeat; then one of one.
        path = text(
            tmp_path / "joined.csv",
            *("-2,3,0,1", "-1,3,1,2", "-2,5,2,3", "-1,5,3,0"),
            *("-1,3,0,2", "-1,5,1,3"),
            *("0,3,3,2", "0,5,0,1", "1,3,1,0", "1,5,2,0"),
            *("-1,3,2,1", "-1,5,0,3", "0,3,0,3", "0,5,3,1"),
        )
        with converted(tmp_path, path) as trace:
            assert [(r.prompt_len, r.n_decode) for r in trace.requests] == [(3, 2), (1, 1)]
            assert trace.experts[:, 0].tolist() == [[0, 1], [1, 2], [0, 2], [3, 2], [1, 0], [2, 1], [0, 3]]
            assert trace.experts[:, 1].tolist() == [[2, 3], [3, 0], [1, 3], [0, 1], [2, 0], [0, 3], [3, 1]]
            assert trace.header.extra["source_layers"] == "3, 5"
            assert trace.header.expert_order == "router"

    def test_prompt_rows_that_are_slices_of_a_ranking_are_left_out(self, tmp_path):
        # Four prompt rows of a layer hold all eight experts once: 0.0041 by chance, in three layers 7 in 100 million.
        rankings = ([3, 1, 4, 0, 5, 2, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1, 0])
        prompt = [
            f"{t - 4},{layer},{ranking[2 * t]},{ranking[2 * t + 1]}"
            for layer, ranking in enumerate(rankings)
            for t in range(4)
        ]
        decode = [f"{t},{layer},{t},{layer + 4}" for t in range(3) for layer in range(3)]
        done = convert([text(tmp_path / "s.csv", *prompt, *decode)], tmp_path / "s.safetensors", options=WIDE)
        assert (done.n_tokens, done.n_decode) == (3, 2)
        assert done.notes[0].startswith("Requests without prefill rows in the source: 1")
        assert done.notes[1].startswith("12 prompt rows are left out: they are slices of one token's ranking")
        with converted(tmp_path, tmp_path / "s.csv", WIDE) as trace:
            assert trace.experts.tolist() == [[[t, layer + 4] for layer in range(3)] for t in range(3)]
        # One expert that comes twice, and the rows are what they seem; a third layer makes no difference.
        prompt[1] = "-3,0,3,0"
        with converted(tmp_path, text(tmp_path / "sound.csv", *prompt, *decode), WIDE) as trace:
            assert trace.requests[0].prompt_len == 4

    def test_few_rows_that_never_repeat_are_kept(self, tmp_path):
        # Two rows, two layers: 0.29 by chance.
        rows = ("-2,0,0,1", "-1,0,2,3", "-2,1,4,5", "-1,1,6,7", "0,0,0,1", "0,1,2,3")
        with converted(tmp_path, text(tmp_path / "few.csv", *rows), WIDE) as trace:
            assert trace.requests[0].prompt_len == 2

    @pytest.mark.parametrize(
        ("rows", "said"),
        [
            (["0,0,0,1", "2,0,0,1"], ":2: position, got 2: 1 is next"),
            (["1,0,0,1"], ":1: position, got 1: 0 is next"),
            (["0,0,0,1", "1,0,0,1", "0,1,0,1"], "request 1, token 0, layer 0: no record"),
            (["-2,0,0,1", "-2,1,0,1", "-1,1,0,1"], ":3: layer 1, got one prompt row more than in layer 0"),
            (["0,0,0,1", "0,0,0,2"], ":2: layer 0, got a second record"),
            (["0,0,0,1", "0,70000,0,2"], ":2: layer, got '70000'"),
            (["0,0,0,1", "0,1,0,4"], ":2: expert, got 4: ids are below the number of experts (4)"),
            (["0,0,0,1", "0,1,0,99999"], ":2: expert, got '99999'"),
            (["0,0,0,1", "0,1"], ":2: row, got 2 columns"),
            (["0,0,0,1", "0,1,x,2"], ":2: expert, got 'x'"),
            (["0,0,0,1", "0,1,2"], ":2: experts, got 1 ids: 2 before"),
            (["0,0,1,1"], ":1: experts, got one expert twice"),
            (["0,0,0,1", "-9999999999,0,0,1"], ":2: position, got '-9999999999'"),
        ],
    )
    def test_refused(self, tmp_path, rows, said):
        assert said in refused(tmp_path, text(tmp_path / "t.csv", *rows))

    def test_not_text(self, tmp_path):
        assert ":2: not UTF-8 text" in refused(tmp_path, put(tmp_path / "t.csv", b"0,0,0,1\n0,1,\xff\n"))


class TestForwardPasses:
    """What `llama_text` and `ggml_log` share."""

    def test_pieces_of_a_prompt_are_one_and_a_prompt_after_decoding_is_the_next(self, tmp_path):
        rows = [
            "0 0 0 1",
            "0 1 1 2",
            "1 0 2 3",
            "1 1 3 0",
            "0 0 0 2",
            "0 1 0 3",
            "0 2 1 3",
            "1 0 1 0",
            "1 1 2 1",
            "1 2 3 2",
        ]
        rows += ["0 0 3 1", "1 0 2 0", "0 0 1 0", "0 1 2 0", "1 0 0 3", "1 1 1 2", "0 0 3 2", "1 0 0 1"]
        with converted(tmp_path, text(tmp_path / "t.txt", *rows)) as trace:
            assert [(r.prompt_len, r.n_decode) for r in trace.requests] == [(5, 1), (2, 1)]
            assert trace.experts[:, 1].tolist() == [
                *([2, 3], [3, 0], [1, 0], [2, 1], [3, 2], [2, 0]),
                *([0, 3], [1, 2], [0, 1]),
            ]

    def test_more_experts_than_the_model_has_are_cut_to_k(self, tmp_path):
        path = text(tmp_path / "t.txt", "0 0 3:0.5 1:0.25 0:0.125", "1 0 2:0.75 0:0.125 1:0.0625")
        with converted(tmp_path, path, Options(n_experts=4, model="hand", top_k=2)) as trace:
            assert trace.experts.tolist() == [[[3, 1], [2, 0]]]
            assert trace.stored("weights").tolist() == [[[0.5, 0.25], [0.75, 0.125]]]
            assert trace.header.weights_kind == "raw"
        asked = Options(n_experts=4, model="hand", top_k=4)
        assert ":1: experts, got 3: --top-k asks for 4" in refused(tmp_path, path, asked)

    @pytest.mark.parametrize(
        ("rows", "said"),
        [
            (["0 0 0 1", "0 2 0 1"], ":2: token, got 2: 1 is next in layer 0"),
            (["0 0 0 1", "1 0 0 1", "1 1 0 1"], ":3: layer 1, got one token more than in layer 0"),
            (["0 0 0:0.5 1:x", "1 0 0 1"], ":1: score, got 'x'"),
            (["0 0 0:0.5 1:inf"], ":1: score, got 'inf'"),
            (["0 0 0:0.5 1"], ":1: weights, got 1"),
            (["0 0 0 1", "0"], ":2: line, got 1 values"),
        ],
    )
    def test_refused(self, tmp_path, rows, said):
        assert said in refused(tmp_path, text(tmp_path / "t.txt", *rows), source="llama_text")

    def test_drafted_tokens_and_batches_are_refused(self, tmp_path):
        one = ["blk.0.ffn_gate_exps.weight 0 1"] * 3 + ["blk.1.ffn_gate_exps.weight 2 3"] * 3
        message = refused(tmp_path, text(tmp_path / "t.log", *one * 3))
        assert ":13: forward pass, got 3 of 3 tokens in a row" in message
        # Pieces of a long prompt are of one size, too.
        long = ["blk.0.ffn_gate_exps.weight 0 1"] * 32 + ["blk.1.ffn_gate_exps.weight 2 3"] * 32
        with converted(tmp_path, text(tmp_path / "long.log", *long * 3)) as trace:
            assert [r.prompt_len for r in trace.requests] == [96]


class TestGgmlLog:
    def test_decoding_alone_says_so(self, tmp_path):
        rows = [f"blk.{layer}.ffn_gate_exps.weight {t} {(t + layer) % 2 + 2}" for t in range(2) for layer in (4, 9)]
        done = convert([text(tmp_path / "t.log", *rows)], tmp_path / "t.safetensors", options=SHAPE)
        assert (done.n_tokens, done.n_decode) == (2, 1)
        assert any("their first row stands for the prompt" in note for note in done.notes)
        assert any("prompts that a GPU computed are not in it" in note for note in done.notes)
        with converted(tmp_path, tmp_path / "t.log") as trace:
            assert trace.experts.tolist() == [[[0, 2], [0, 3]], [[1, 3], [1, 2]]]
            assert trace.header.expert_order == "unranked"
            assert trace.header.extra["source_layers"] == "4, 9"

    @pytest.mark.parametrize(
        ("rows", "said"),
        [
            (["blk.0.ffn_gate_exps.weight 0 1"] * 4, "layers, got one: forward passes cannot be told apart"),
            (["blk.0.ffn_gate_exps.weight 0 -1"], ":1: expert, got -1: a cache served it"),
            (["blk.0.ffn_gate_exps.weight 0 1", "blk.0.ffn_up_exps.weight 0 1"], ":2: line, got"),
            (["blk.0.ffn_gate_exps.weight 0 1", "blk.1.ffn_gate_exps.weight"], ":2: line, got"),
            (["blk.0.ffn_gate_exps.weight 0 1", "blk.99999.ffn_gate_exps.weight 0 1"], ":2: layer, got 99999"),
            (["blk.0.ffn_gate_exps.weight 0 1", "blk.1.ffn_gate_exps.weight 0 7"], ":2: expert, got 7"),
        ],
    )
    def test_refused(self, tmp_path, rows, said):
        assert said in refused(tmp_path, text(tmp_path / "t.log", *rows))


class TestImp:
    RECORDS = ([1, 3, 0], [2, 1, 2], [1, 0, 2], [2, 3, 1])
    EXPERTS = ([[3, 0], [1, 2]], [[0, 2], [3, 1]])

    @pytest.mark.parametrize("name", ["trace", "entries", "data", ""])
    @pytest.mark.parametrize("flat", [False, True])
    def test_every_form_that_its_reader_takes(self, tmp_path, name, flat):
        records = [value for record in self.RECORDS for value in record] if flat else list(self.RECORDS)
        document = {"top_k": 2, name: records} if name else records
        path = put(tmp_path / "t.json", json.dumps(document).encode())
        with converted(tmp_path, path, Options(n_experts=4, model="hand", top_k=2)) as trace:
            assert trace.experts.tolist() == list(self.EXPERTS)
            assert (trace.header.expert_order, trace.header.extra["source_layers"]) == ("unranked", "1, 2")
            assert "decode rows only" in trace.header.notes

    @pytest.mark.parametrize(
        ("document", "said"),
        [
            ([0, 3, 1, 1, 2, 0], "--top-k, got none"),
            ({"trace": [0, 3, 1], "top_k": 2}, "--top-k, got none"),
            ({"top_k": 2, "trace": [0, 3, 1, 1, 2]}, "got 2 numbers at the end"),
            ({"top_k": 2, "trace": [0, 3, [1]]}, "record, got list among plain numbers"),
            ({"top_k": 2, "trace": [[0, 3, 1], [0]]}, "experts, got 0 ids: 2 before"),
            ({"top_k": 2, "trace": [[0, 3, 1], []]}, "record, got list: a list that is not empty"),
            ({"top_k": 2, "trace": [[0, 3, 1], [1, 3, 4]]}, "expert, got 4"),
            ({"top_k": 2, "trace": [[0, 3, 1], [99999, 3, 1]]}, "layer, got 99999"),
            ({"top_k": 0, "trace": [0, 3, 1]}, "top_k, got 0"),
            ([[0, 3, 1], [1, 2, 3], [0, 1, 2]], "request 0, token 1, layer 1: no record"),
        ],
    )
    def test_refused(self, tmp_path, document, said):
        path = put(tmp_path / "t.json", json.dumps(document).encode())
        assert said in refused(tmp_path, path, source="imp")

    def test_cut_and_followed(self, tmp_path):
        whole = json.dumps(list(self.RECORDS)).encode()
        assert "not JSON, or the file was cut" in refused(tmp_path, put(tmp_path / "t.json", whole[:-4]))
        assert "there is more behind it" in refused(tmp_path, put(tmp_path / "u.json", whole + b"[]"))
        told = put(tmp_path / "v.json", json.dumps({"top_k": 3, "trace": list(self.RECORDS)}).encode())
        asked = Options(n_experts=4, model="hand", top_k=2)
        assert "--top-k, got 2" in refused(tmp_path, told, asked)
