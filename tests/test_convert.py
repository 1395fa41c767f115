"""Converters on inputs written by hand: what comes out, by heart; what is refused, with file, line, field and remedy.

Samples of bigmoe, esft, moe_ocs and warp follow real files (`test_convert_extra.py` compares those token for token);
the ones of vllm, sglang, strata and hf follow the public code and documentation that their modules name.
`test_convert_engines.py` has what is special about those, `test_convert_hostile.py` broken and malicious files.
"""

import gzip
from dataclasses import replace

import pytest
from convert_samples import EXPERTS, SAMPLES, SHAPE, WEIGHTS, converted, jsonl, put, refused, tokens

from sim.base.errors import BadInput
from sim.cli import main
from traces.convert import Options, convert, detect, sources
from traces.format.check import check_trace

WEIGHTED = {"jsonl", "csv", "bigmoe", "esft", "moe_ocs", "vllm", "llama_text"}
WEIGHTED |= {"hf_npz", "hf_safetensors", "hf_jsonl"}
DECODE = {"warp": 3, "esft": 0, "imp": 3}


class TestEverySource:
    @pytest.mark.parametrize("name", SAMPLES)
    def test_what_comes_out(self, tmp_path, name):
        write, options, source = SAMPLES[name]
        path = write(tmp_path)
        assert detect(path) == source
        with converted(tmp_path, path, options) as trace:
            assert check_trace(trace) == []
            # BigMoE's third layer lacks a prefill row and is gone; the rest is what was said, heaviest first
            assert trace.experts.tolist() == EXPERTS
            assert (trace.n_experts, trace.top_k, trace.header.model) == (
                4,
                2,
                "hand" if name != "bigmoe" else "hand.gguf",
            )
            assert ("weights" in trace.levels) == (name in WEIGHTED)
            assert trace.requests.n_decode_rows == DECODE.get(name, 2)
            assert trace.n_requests == (2 if name == "esft" else 1)
            if name in WEIGHTED and not name.startswith("hf"):
                assert trace.stored("weights").tolist() == WEIGHTS  # exact in float16
            if name in ("jsonl", "moe_ocs", "sglang", "hf_npz", "hf_jsonl"):
                assert trace.token_ids.tolist() == [5, 6, 7, 8]
            assert trace.header.extra["converted_from"] == source

    @pytest.mark.parametrize("name", SAMPLES)
    def test_gzipped_is_the_same(self, tmp_path, name):
        write, options, _ = SAMPLES[name]
        path = write(tmp_path)
        if path.is_dir() or path.suffix in (".npz", ".safetensors"):
            pytest.skip("a folder, or compressed in itself")
        with converted(tmp_path, path, options) as trace:
            plain = [trace.stored(tensor).tolist() for tensor in trace.entries]
        packed = put(tmp_path / (path.name + ".gz"), gzip.compress(path.read_bytes()))
        with converted(tmp_path, packed, options) as trace:
            assert [trace.stored(tensor).tolist() for tensor in trace.entries] == plain

    @pytest.mark.parametrize("name", SAMPLES)
    def test_empty_files_are_refused(self, tmp_path, name):
        write, options, source = SAMPLES[name]
        path = write(tmp_path)
        if path.is_dir():
            for entry in path.iterdir():
                entry.write_bytes(b"")
        else:
            path.write_bytes(b"")
        said = "neither .npz nor .safetensors" if source == "hf" else "record it again"
        assert said in refused(tmp_path, path, options, source=source)


class TestFacts:
    def test_what_the_file_does_not_tell_is_asked_for(self, tmp_path):
        path = SAMPLES["warp"][0](tmp_path)
        assert "--model, got none" in refused(tmp_path, path, Options(n_experts=4))
        assert "--n-experts, got none" in refused(tmp_path, path, Options(model="m"))
        assert "warp.jsonl:1: expert, got 3: ids are below the number of experts (3)" in refused(
            tmp_path, path, Options(model="m", n_experts=3)
        )
        assert "--top-k, got none" in refused(tmp_path, SAMPLES["esft"][0](tmp_path), SHAPE)
        logits_path = SAMPLES["hf_npz"][0](tmp_path)
        assert "--renormalised or --no-renormalised" in refused(tmp_path, logits_path, replace(SHAPE, top_k=2))
        # What only the whole file tells is asked for behind it, with what was seen.
        message = refused(tmp_path, SAMPLES["sglang"][0](tmp_path), Options(model="m"))
        assert "--n-experts, got none" in message
        assert "largest id is 3, so at least 4" in message

    @pytest.mark.parametrize(
        ("name", "asked"),
        [
            ("warp", ("--model", "--n-experts")),
            ("csv", ("--model", "--n-experts")),
            ("esft", ("--model", "--n-experts", "--top-k")),
            ("hf_npz", ("--model", "--top-k", "--renormalised")),
        ],
    )
    def test_everything_that_is_missing_is_asked_for_at_once_and_before_work(self, tmp_path, name, asked, monkeypatch):
        path, source = SAMPLES[name][0](tmp_path), SAMPLES[name][2]
        monkeypatch.setattr(sources()[source], "read", lambda *_: pytest.fail("it was read"))
        message = refused(tmp_path, path, Options())
        assert message.startswith(" and ".join(asked) + ", got none: ")

    def test_prompt_len_is_refused_where_phases_are_told(self, tmp_path, monkeypatch):
        for name, message in (("jsonl", "plain.jsonl"), ("bigmoe", "(bigmoe)"), ("warp", "(warp)")):
            write, options, _ = SAMPLES[name]
            assert "--prompt-len, got 2" in refused(tmp_path, write(tmp_path), replace(options, prompt_len=2)), message

    def test_a_trace_without_decode_rows_says_what_it_lacks(self, tmp_path):
        path, options = SAMPLES["esft"][0](tmp_path), SAMPLES["esft"][1]
        notes = convert([path], tmp_path / "x.safetensors", options=options).notes
        assert any("No decode rows" in note and "--prompt-len" in note for note in notes)
        phased = convert([path], tmp_path / "y.safetensors", options=replace(options, prompt_len=1))
        assert phased.n_decode > 0
        assert not any("No decode rows" in note for note in phased.notes)

    def test_contradictions_are_refused(self, tmp_path):
        path = SAMPLES["jsonl"][0](tmp_path)
        assert "--n-experts, got 8" in refused(tmp_path, path, Options(n_experts=8))
        with pytest.raises(BadInput, match="--train-frac, got 1"):
            Options(store_frac=1.0)
        with pytest.raises(BadInput, match="--top-k, got 0"):
            Options(top_k=0)

    def test_renormalised_is_read_off_the_weights(self, tmp_path):
        with converted(tmp_path, SAMPLES["csv"][0](tmp_path)) as trace:
            assert trace.header.gate.renormalised
        off = tokens()
        off[3]["weights"] = [[0.75, 0.2], [0.5, 0.25]]
        path = put(tmp_path / "off.jsonl", jsonl(*off))
        with converted(tmp_path, path) as trace:
            assert not trace.header.gate.renormalised
        assert "renormalised weights sum to 1" in refused(tmp_path, path, replace(SHAPE, renormalised=True))
        with converted(tmp_path, path, replace(SHAPE, renormalised=True, weights_kind="raw")) as trace:
            assert trace.weights(3, 4)[0, 1].tolist() == pytest.approx([2 / 3, 1 / 3])

    def test_ties_keep_the_order_of_the_file(self, tmp_path):
        path = put(tmp_path / "t.jsonl", jsonl({"experts": [[3, 0, 2]], "weights": [[0.25, 0.5, 0.25]]}))
        with converted(tmp_path, path) as trace:
            assert trace.experts.tolist() == [[[0, 3, 2]]]

    def test_split_is_exact_seeded_and_by_request(self, tmp_path):
        path = put(tmp_path / "t.jsonl", jsonl(*({"request": i // 2, "experts": [[i % 4]]} for i in range(20))))
        drawn = {}
        for seed in (1, 1, 2):
            with converted(tmp_path, path, replace(SHAPE, store_frac=0.7, seed=seed)) as trace:
                splits = [request.split for request in trace.requests]
            assert splits.count("store") == 7
            assert drawn.setdefault(seed, splits) == splits
        assert drawn[1] != drawn[2]

    def test_tasks_arrivals_and_interleaved_requests(self, tmp_path):
        rows = [
            {
                "request": "ab"[i % 2],
                "task": ("chat", "code")[i % 2],
                "arrival_s": (0.0, 1.5)[i % 2],
                "phase": "prefill" if i < 2 else "decode",
                "experts": [[i]],
            }
            for i in range(4)
        ]
        with converted(tmp_path, put(tmp_path / "t.jsonl", jsonl(*rows))) as trace:
            assert [(r.task, r.arrival_s, r.prompt_len, r.outputs) for r in trace.requests] == [
                ("chat", 0.0, 1, 2),
                ("code", 1.5, 1, 2),
            ]
            assert trace.experts.tolist() == [[[0]], [[2]], [[1]], [[3]]]

    def test_several_files_are_several_requests(self, tmp_path):
        first, second = SAMPLES["jsonl"][0](tmp_path), tmp_path / "second.jsonl"
        second.write_bytes(first.read_bytes())
        with converted(tmp_path, [first, second], Options()) as trace:
            assert trace.n_requests == 2
            assert trace.experts.tolist() == EXPERTS + EXPERTS
        other = put(tmp_path / "other.jsonl", jsonl({"meta": {"model": "another", "n_experts": 4}}, *tokens()))
        with pytest.raises(BadInput, match="model, got 'another' after 'hand'"):
            convert([first, other], tmp_path / "x.safetensors")

    def test_prompt_len_marks_phases_where_there_are_none(self, tmp_path):
        path = SAMPLES["strata"][0](tmp_path)
        with converted(tmp_path, path, Options(prompt_len=3)) as trace:
            assert trace.requests[0].prompt_len == 3
        assert "has 4 rows" in refused(tmp_path, path, Options(prompt_len=5))


class TestPartialLayers:
    def test_a_layer_without_prefill_rows_is_left_out_and_said(self, tmp_path):
        done = convert([SAMPLES["bigmoe"][0](tmp_path)], tmp_path / "out.safetensors")
        assert done.notes == ("Layer 2 of the source lacks prefill rows and is left out.",)
        assert done.header.notes == done.notes[0]
        assert "source_layers" not in done.header.extra  # 0, 1 are what they were

    def test_a_missing_decode_row_is_an_error(self, tmp_path):
        path = SAMPLES["bigmoe"][0](tmp_path)
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:-4]))  # the last token's layers 1 and 2
        assert "request 0, token 3, layer 1: no record" in refused(tmp_path, path, Options())

    def test_prefill_only_logs_must_be_complete(self, tmp_path):
        rows = [f"{t},{layer},{t % 3}" for t in range(4) for layer in range(3) if (t, layer) != (1, 2)]
        path = put(tmp_path / "t.csv", "\n".join(["token,layer,expert", *rows]).encode())
        assert "request 0, token 1, layer 2: no record" in refused(tmp_path, path)

    def test_a_cell_that_comes_twice_is_named(self, tmp_path):
        path = SAMPLES["csv"][0](tmp_path)
        lines = path.read_text().splitlines()
        path.write_text("\n".join([*lines, *lines[1:3]]))
        assert "plain.csv:18: layer 0, got a second record" in refused(tmp_path, path)

    def test_turns_are_requests(self, tmp_path):
        path = SAMPLES["bigmoe"][0](tmp_path)
        text = path.read_text()
        again = [line.replace("0,", "1,", 1) for line in text.splitlines() if line.startswith("0,")]
        path.write_text(text + "\n".join(again) + "\n")
        with converted(tmp_path, path, Options()) as trace:
            assert [r.prompt_len for r in trace.requests] == [2, 2]

    def test_unknown_weights_are_no_weights(self, tmp_path):
        path = SAMPLES["bigmoe"][0](tmp_path)
        rows = [
            ",".join([*line.split(",")[:6], "nan", "0"]) if line[0] == "0" else line
            for line in path.read_text().splitlines()
        ]
        path.write_text("\n".join(rows))
        with converted(tmp_path, path, Options()) as trace:
            assert "weights" not in trace.levels
            assert trace.experts.tolist() == EXPERTS


class TestCommand:
    def run(self, capsys, *args):
        with pytest.raises(SystemExit) as stopped:
            main(["traces", "convert", *map(str, args)])
        return stopped.value.code, *capsys.readouterr()

    def test_nothing_is_replaced_unasked(self, capsys, tmp_path):
        path, out = SAMPLES["jsonl"][0](tmp_path), put(tmp_path / "t.safetensors", b"mine")
        code, _, err = self.run(capsys, path, "-o", out)
        assert code == 2
        assert "replace it with --overwrite" in err
        assert out.read_bytes() == b"mine"
        code, _, err = self.run(capsys, put(tmp_path / "bad.jsonl", b"{"), "-o", out, "--overwrite", "--from", "jsonl")
        assert code == 2
        assert out.read_bytes() == b"mine"  # a failed conversion leaves what was there
        assert self.run(capsys, path, "-o", path, "--overwrite")[0] == 2
        assert self.run(capsys, path, "-o", out, "--overwrite", "--train-frac", "0.5", "--task", "chat")[0] == 0
