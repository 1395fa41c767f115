"""Converters on inputs written by hand: what comes out, by heart; what is refused, with file, line, field and remedy.

Samples of bigmoe, esft, moe_ocs and warp follow real files (`test_convert_extra.py` compares those token for token);
the ones of vllm, sglang, strata and hf follow the public code and documentation that their modules name.
"""

import gzip
import json
import re
import tracemalloc
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from convert_samples import EXPERTS, HF, SAMPLES, SHAPE, WEIGHTS, jsonl, logits, put, tokens, vllm

from sim.cli import main
from sim.errors import BadInput
from traces.check import check_trace
from traces.convert import Options, convert, detect, sources
from traces.reader import Trace

ROOT = Path(__file__).resolve().parent.parent
WEIGHTED = {"jsonl", "csv", "bigmoe", "esft", "moe_ocs", "vllm", "hf_npz", "hf_safetensors", "hf_jsonl"}
DECODE = {"warp": 3, "esft": 0}


def converted(tmp_path, path, options=SHAPE, **kwargs):
    """The open trace of one conversion."""
    done = convert(
        [path] if not isinstance(path, list) else path, tmp_path / "out.safetensors", options=options, **kwargs
    )
    return Trace(done.path)


def refused(tmp_path, path, options=SHAPE, **kwargs):
    """The one-line message of a conversion that must fail and leave nothing behind."""
    out = tmp_path / "out" / "t.safetensors"
    out.parent.mkdir(exist_ok=True)
    with pytest.raises(BadInput) as caught:
        convert([path], out, options=options, **kwargs)
    assert list(out.parent.iterdir()) == []
    message = str(caught.value)
    assert "\n" not in message
    return message


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

    def test_all_are_listed(self):
        assert sorted(sources()) == sorted({source for _, _, source in SAMPLES.values()})

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
        message = refused(tmp_path, path, Options(model="m"))
        assert "--n-experts, got none" in message
        assert "largest id is 3, so at least 4" in message
        assert "warp.jsonl:1: expert, got 3: ids are below the number of experts (3)" in refused(
            tmp_path, path, Options(model="m", n_experts=3))  # fmt: skip
        assert "--top-k, got none" in refused(tmp_path, SAMPLES["esft"][0](tmp_path), SHAPE)
        logits_path = SAMPLES["hf_npz"][0](tmp_path)
        assert "--top-k, got none" in refused(tmp_path, logits_path, SHAPE)
        assert "--renormalised or --no-renormalised" in refused(tmp_path, logits_path, replace(SHAPE, top_k=2))

    def test_contradictions_are_refused(self, tmp_path):
        path = SAMPLES["jsonl"][0](tmp_path)
        assert "--n-experts, got 8" in refused(tmp_path, path, Options(n_experts=8))
        with pytest.raises(BadInput, match="--store-frac, got 1"):
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
        rows = [{"request": "ab"[i % 2], "task": ("chat", "code")[i % 2], "arrival_s": (0.0, 1.5)[i % 2],
                 "phase": "prefill" if i < 2 else "decode", "experts": [[i]]} for i in range(4)]  # fmt: skip
        with converted(tmp_path, put(tmp_path / "t.jsonl", jsonl(*rows))) as trace:
            assert [(r.task, r.arrival_s, r.prompt_len, r.outputs) for r in trace.requests] == [
                ("chat", 0.0, 1, 2), ("code", 1.5, 1, 2)]  # fmt: skip
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


class TestVllm:
    def records(self, tmp_path):
        return [json.loads(line) for line in vllm(tmp_path).read_text().splitlines()]

    def test_profiling_rows_are_dropped_and_said(self, tmp_path):
        done = convert([vllm(tmp_path)], tmp_path / "out.safetensors")
        assert done.notes == ("65 rows of the engine's profiling passes were dropped.",)

    def test_each_prompt_begins_a_request(self, tmp_path):
        lines = self.records(tmp_path)
        path = put(tmp_path / "two.jsonl", jsonl(*lines, *lines[-8:]))  # prompt of two, two decode steps, again
        with converted(tmp_path, path, Options()) as trace:
            assert [(r.prompt_len, r.n_rows) for r in trace.requests] == [(2, 4), (2, 4)]
            assert trace.iterations.tolist() == [2, 2, 3, 4, 5, 5, 6, 7]

    def test_names_tell_requests_apart_in_a_batch(self, tmp_path):
        rows = []
        for forward, names in enumerate((["a", "a", "b"], ["a", "b"], ["a", "b"])):
            for layer in (0, 1):
                rows += [{"type": "route", "req_id": name, "token_idx": i, "layer": layer,
                          "topk_ids": [(forward + i + layer) % 4]} for i, name in enumerate(names)]  # fmt: skip
        path = put(tmp_path / "named.jsonl", jsonl(*rows))
        with converted(tmp_path, path) as trace:
            assert [(r.prompt_len, r.n_rows) for r in trace.requests] == [(2, 4), (1, 3)]
            assert trace.experts[:, 0, 0].tolist() == [0, 1, 1, 2, 2, 2, 3]

    def test_unnamed_batches_are_refused_or_one_stream(self, tmp_path):
        rows = [{"type": "route", "req_id": "r0", "token_idx": i, "layer": 0, "topk_ids": [(f + i) % 4]}
                for f in range(4) for i in range(3)]  # fmt: skip
        path = put(tmp_path / "batch.jsonl", jsonl(*rows))
        message = refused(tmp_path, path)
        assert "batch.jsonl:7: req_id" in message
        assert "--one-stream" in message
        with converted(tmp_path, path, replace(SHAPE, one_stream=True)) as trace:
            assert trace.header.labels == ("unsegmented",)
            assert (trace.n_tokens, trace.requests.n_decode_rows) == (12, 0)

    def test_one_counter_over_one_layer_shows_no_forwards(self, tmp_path):
        ids = [[3, 2]] * 100 + [[0, 1], [1, 2], [2, 3]]
        rows = [
            {"type": "route", "req_id": "r0", "token_idx": i, "layer": 0, "topk_ids": own} for i, own in enumerate(ids)
        ]
        path = put(tmp_path / "counter.jsonl", jsonl(*rows))
        assert "forward passes cannot be told apart" in refused(tmp_path, path)
        with converted(tmp_path, path, replace(SHAPE, one_stream=True)) as trace:
            assert trace.experts[:, 0].tolist() == [[0, 1], [1, 2], [2, 3]]

    def test_nothing_but_profiling(self, tmp_path):
        lines = self.records(tmp_path)[: 1 + 128 + 2]
        assert "no routing left" in refused(tmp_path, put(tmp_path / "t.jsonl", jsonl(*lines)), Options())


class TestSglang:
    def record(self, own, mode, lengths=None):
        ids = [[[position % 4] for position in own]]
        return {
            "forward_mode": mode,
            "input_ids": own,
            "positions": own,
            "extend_seq_lens": lengths,
            "topk_ids_of_layer": ids,
        }

    def test_batched_decode_follows_positions(self, tmp_path):
        lines = [self.record([0, 1, 2], 1, [3]), self.record([0], 1, [1]), self.record([3, 1], 2), self.record([2], 2)]
        with converted(tmp_path, put(tmp_path / "t.jsonl", jsonl(*lines))) as trace:
            assert [(r.prompt_len, r.n_rows) for r in trace.requests] == [(3, 4), (1, 3)]
            assert trace.token_ids.tolist() == [0, 1, 2, 3, 0, 1, 2]
            assert trace.iterations.tolist() == [0, 0, 0, 2, 1, 2, 3]

    def test_chunked_prefill_goes_on(self, tmp_path):
        lines = [self.record([0, 1], 1, [2]), self.record([2, 3], 1, [2]), self.record([4], 2)]
        with converted(tmp_path, put(tmp_path / "t.jsonl", jsonl(*lines))) as trace:
            assert [(r.prompt_len, r.n_rows) for r in trace.requests] == [(4, 5)]

    @pytest.mark.parametrize(("lines", "said"), [
        ([([0, 1, 0, 1], 1, [2, 2]), ([2], 2)], "different requests of one length"),
        ([([5, 6], 1, [2])], "--disable-radix-cache"),
        ([([4], 2)], "continues no running request"),
        ([([0, 1], 3)], "forward_mode, got 3"),
        ([([0, 2], 1, [2])], "gaps within a sequence"),
        ([([0, 1], 1, [3])], "sum of 3"),
    ])  # fmt: skip
    def test_refused(self, tmp_path, lines, said):
        path = put(tmp_path / "t.jsonl", jsonl(*(self.record(*line) for line in lines)))
        assert said in refused(tmp_path, path)

    def test_counts_only(self, tmp_path):
        path = put(tmp_path / "t.jsonl", jsonl({"rank": 0, "logical_count": [[1, 2]]}))
        assert "per_token" in refused(tmp_path, path)

    def test_physical_experts_become_logical(self, tmp_path):
        lines = [{"last_physical_to_logical_map": [[2, 0, 1, 2]]}, self.record([0, 1, 2, 3], 1, [4])]
        with converted(tmp_path, put(tmp_path / "t.jsonl", jsonl(*lines)), Options(model="m")) as trace:
            assert trace.experts[:, 0, 0].tolist() == [2, 0, 1, 2]
            assert trace.n_experts == 3


class TestHf:
    def test_scores_are_the_softmax_in_fixed_point(self, tmp_path):
        with converted(tmp_path, SAMPLES["hf_npz"][0](tmp_path), HF) as trace:
            e = np.exp([2.0, 1.0, -2.0, -2.0])
            expected = e / e.sum()
            assert trace.scores(0, 1)[0, 0, [3, 1, 0, 2]].tolist() == [round(p * 4095) for p in expected]
            assert trace.header.weights_kind == "raw"
            assert trace.weights(0, 1)[0, 0].tolist() == pytest.approx(
                (expected[:2] / expected[:2].sum()).tolist(), abs=1e-3
            )

    def test_sigmoid(self, tmp_path):
        with converted(
            tmp_path, SAMPLES["hf_npz"][0](tmp_path), replace(HF, gate="sigmoid", renormalised=False)
        ) as trace:
            assert check_trace(trace) == []
            assert trace.stored("weights")[0, 0].tolist() == pytest.approx(
                [1 / (1 + np.exp(-2)), 1 / (1 + np.exp(-1))], abs=1e-3
            )

    def test_batches_lose_their_padding(self, tmp_path):
        path = tmp_path / "b.npz"
        mask = np.array([[0, 1], [1, 1]])
        np.savez(path, **{f"router_logits_{i}": logits()[:, i].reshape(2, 2, 4) for i in range(2)}, attention_mask=mask)
        with converted(tmp_path, path, HF) as trace:
            assert [r.n_rows for r in trace.requests] == [1, 2]
            assert trace.experts.tolist() == EXPERTS[1:]

    def test_bfloat16(self, tmp_path):
        torch = pytest.importorskip("torch")
        from safetensors.torch import save_file

        path = tmp_path / "b.safetensors"
        save_file({"router_logits": torch.from_numpy(logits()).to(torch.bfloat16)}, path)
        with converted(tmp_path, path, HF) as trace:
            assert trace.experts.tolist() == EXPERTS

    def test_pickles_are_never_opened(self, tmp_path):
        torch = pytest.importorskip("torch")
        for legacy in (False, True):
            path = tmp_path / "dump.pt"
            torch.save({"router_logits": torch.zeros(3)}, path, _use_new_zipfile_serialization=not legacy)
            message = refused(tmp_path, path, HF)
            assert "a pickle" in message
            assert "docs/convert.md" in message

    @pytest.mark.parametrize(("arrays", "said"), [
        ({"x": np.zeros(3)}, "one array router_logits"),
        ({"router_logits": np.zeros((3, 4))}, "[T, L, E]"),
        ({"router_logits": np.zeros((2, 3, 4)), "input_ids": np.zeros((1, 3), int)}, "stack the layers on dimension 1"),
        ({"router_logits": np.full((1, 1, 4), np.nan)}, "row 0: router_logits, got NaN"),
        ({"router_logits": np.zeros((2, 1, 4)), "prompt_len": np.array([3])}, "prompt_len, got 3"),
        ({"router_logits": np.array([["a"]])}, "got type <U1"),
        ({"router_logits": np.asfortranarray(np.ones((2, 3, 4)))}, "Fortran"),
    ])  # fmt: skip
    def test_refused(self, tmp_path, arrays, said):
        path = tmp_path / "x.npz"
        np.savez(path, **arrays)
        assert said in refused(tmp_path, path, HF, source="hf")


class TestHostile:
    @pytest.mark.parametrize(("name", "number", "edit", "said"), [
        ("warp", 2, lambda line: line.replace("[1, 0]", "[1, 1]"), "one expert twice"),
        ("warp", 2, lambda line: line.replace("[1, 0]", "[1, -1]"), "layers[0], got -1"),
        ("warp", 2, lambda line: line.replace("[1, 0]", "[1, true]"), "layers[0], got True"),
        ("warp", 2, lambda line: line.replace("[1, 0]", "[1]"), "got 1 ids: 2 before"),
        ("warp", 3, lambda line: line[: len(line) // 2], "not a line of JSON"),
        ("warp", 1, lambda line: line.replace('"tok": 1', '"tok": "1e9"'), "tok, got '1e9'"),
        ("warp", 4, lambda line: '{"tok": 9}', "layers, got no such field"),
        ("jsonl", 3, lambda line: line.replace("0.625", "-0.625"), "weights[0], got -0.625"),
        ("jsonl", 3, lambda line: line.replace("0.625", "1e999"), "Number out of range"),
        ("jsonl", 3, lambda line: line.replace("experts", "expert"), "no such field"),
        ("jsonl", 2, lambda line: line.replace("prefill", "later"), "phase, got 'later'"),
        ("csv", 5, lambda line: line + ",9", "got 8 columns: the header has 7"),
        ("csv", 5, lambda line: line.replace("a,", "a\x01,"), "request, got"),
        ("csv", 6, lambda line: line.replace(",1,0,0,", ",1,0,7,"), "rank, got '7': 0 is next"),
        ("bigmoe", 9, lambda line: line.replace("0,0,0,1,0", "0,0,0,1,5"), "slot, got '5': 0 is next"),
        ("bigmoe", 9, lambda line: line.replace("0,0,0", "0,0,-1"), "step, got '-1'"),
        ("vllm", 2, lambda line: line.replace('"layer": 0', '"layer": 3.5'), "layer, got 3.5"),
        ("sglang", 2, lambda line: line.replace("[[-1, -1, -1]]", "[[-1, -1]]"), "lists of different lengths"),
    ])  # fmt: skip
    def test_a_broken_line_is_named(self, tmp_path, name, number, edit, said):
        write, options, source = SAMPLES[name]
        path = write(tmp_path)
        lines = path.read_text().splitlines()
        broken = edit(lines[number - 1])
        assert broken != lines[number - 1]
        path.write_text("\n".join([*lines[: number - 1], broken, *lines[number:]]) + "\n")
        message = refused(tmp_path, path, options, source=source)
        assert said in message
        assert f"{path}:{number}: " in message

    def test_not_utf8(self, tmp_path):
        path = put(tmp_path / "t.jsonl", b'{"experts": [[0]]}\n{"experts": [[\xff]]}\n')
        assert "t.jsonl:2: not UTF-8" in refused(tmp_path, path)

    def test_a_cut_gzip_file(self, tmp_path):
        data = gzip.compress(jsonl(*({"experts": [[i % 4], [i % 3]], "request": i * 7919 % 1000} for i in range(5000))))
        path = put(tmp_path / "t.jsonl.gz", data[: len(data) // 2])
        assert "ends early" in refused(tmp_path, path, source="jsonl")
        path.write_bytes(data[: len(data) // 2] + b"\0" * 40)
        assert "t.jsonl.gz" in refused(tmp_path, path, source="jsonl")

    def test_a_gzip_bomb(self, tmp_path):
        path = put(tmp_path / "t.jsonl.gz", gzip.compress(b'{"experts": [[0]]}\n' + b" " * 70_000_000))
        assert "400-fold" in refused(tmp_path, path, source="jsonl")

    def test_a_line_without_end(self, tmp_path, monkeypatch):
        monkeypatch.setattr("traces.convert.text.MAX_LINE_BYTES", 1000)
        path = put(tmp_path / "t.jsonl", b'{"experts": [[' + b"0, " * 1000)
        assert "more than 1000 bytes" in refused(tmp_path, path, source="jsonl")

    def test_a_zip_bomb(self, tmp_path):
        path = tmp_path / "t.npz"
        header = np.lib.format.header_data_from_array_1_0(np.zeros((1, 1, 8)))
        with (
            zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
            archive.open("router_logits.npy", "w") as file,
        ):
            np.lib.format.write_array_header_1_0(file, header | {"shape": (70 * 1024, 16, 8)})
            for _ in range(70):
                file.write(b"\0" * (1 << 20))
        assert "400-fold" in refused(tmp_path, path, HF)

    def test_an_array_that_claims_more_than_the_file_has(self, tmp_path):
        path = tmp_path / "t.npz"
        header = np.lib.format.header_data_from_array_1_0(np.zeros((1, 1, 8)))
        with zipfile.ZipFile(path, "w") as archive, archive.open("router_logits.npy", "w") as file:
            np.lib.format.write_array_header_1_0(file, header | {"shape": (10**12, 1000, 8)})
        assert "the file was cut" in refused(tmp_path, path, HF)

    def test_many_layers_of_few_records_are_refused_before_allocation(self, tmp_path):
        rows = [f"{t},{t % 1000},0" for t in range(3000)]
        path = put(tmp_path / "t.csv", "\n".join(["token,layer,expert", *rows]).encode())
        assert "more than half are missing" in refused(tmp_path, path)

    def test_what_is_no_log(self, tmp_path):
        assert "no known routing log" in refused(tmp_path, put(tmp_path / "t.txt", b"hello\n"))
        assert "No such file" in refused(tmp_path, tmp_path / "absent")
        assert "no such format" in refused(tmp_path, put(tmp_path / "t.jsonl", b"{}\n"), source="pickle")
        with converted(tmp_path, SAMPLES["jsonl"][0](tmp_path), Options()) as trace:
            assert "already a trace" in refused(tmp_path, trace.path)


class TestCommand:
    def run(self, capsys, *args):
        with pytest.raises(SystemExit) as stopped:
            main(["traces", "convert", *map(str, args)])
        return stopped.value.code, *capsys.readouterr()

    def test_said(self, capsys, tmp_path):
        path, out = SAMPLES["bigmoe"][0](tmp_path), tmp_path / "t.safetensors"
        code, said, err = self.run(capsys, path, "-o", out)
        assert (code, err) == (0, "")
        assert said == (
            f"{out}: 2x4, k=2, 1 request, 4 tokens, 2 of them decode (from bigmoe)\nlevels: experts, weights\n"
            "note: Layer 2 of the source lacks prefill rows and is left out.\n"
        )
        with pytest.raises(SystemExit) as stopped:
            main(["traces", "check", str(out)])
        assert stopped.value.code == 0

    def test_nothing_is_replaced_unasked(self, capsys, tmp_path):
        path, out = SAMPLES["jsonl"][0](tmp_path), put(tmp_path / "t.safetensors", b"mine")
        code, _, err = self.run(capsys, path, "-o", out)
        assert code == 2
        assert "replace it with --force" in err
        assert out.read_bytes() == b"mine"
        code, _, err = self.run(capsys, put(tmp_path / "bad.jsonl", b"{"), "-o", out, "--force", "--from", "jsonl")
        assert code == 2
        assert out.read_bytes() == b"mine"  # a failed conversion leaves what was there
        assert self.run(capsys, path, "-o", path, "--force")[0] == 2
        assert self.run(capsys, path, "-o", out, "--force", "--store-frac", "0.5", "--task", "chat")[0] == 0


def test_memory_does_not_grow_with_the_log(tmp_path):
    """Eight times the rows, the same buffers: what grows is a few bytes a token."""

    def peak(n_tokens):
        row = json.dumps({"experts": [[i % 8, (i + 1) % 8] for i in range(16)]}).encode() + b"\n"
        path = put(tmp_path / "t.jsonl", row * n_tokens)
        tracemalloc.start()
        convert([path], tmp_path / "t.safetensors", options=Options(n_experts=8, model="m"))
        highest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return highest

    peak(10)  # imports
    small, large = peak(1_000), peak(8_000)
    assert large - small < 7_000 * 16 * 2 * 2  # bytes: what the rows themselves would take as 16-bit numbers, twice


class TestRecipes:
    """The lines of docs/convert.md that turn a pickle into an input."""

    blocks = re.findall(
        r"^```py\n(.*?)^```$", (ROOT / "docs" / "convert.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )

    def run(self, index, **scope):
        exec(self.blocks[index], scope)

    def test_hugging_face(self, tmp_path, monkeypatch):
        torch = pytest.importorskip("torch")
        monkeypatch.chdir(tmp_path)
        layers = tuple(torch.from_numpy(np.ascontiguousarray(logits()[:, layer])) for layer in range(2))
        answer = SimpleNamespace(router_logits=layers)
        model = lambda input_ids, output_router_logits: answer  # noqa: E731 - stands in for a model
        self.run(0, model=model, input_ids=torch.tensor([[5, 6, 7, 8]]), prompt_len=2)
        with converted(tmp_path, tmp_path / "router_logits.safetensors", HF) as trace:
            assert trace.experts.tolist() == EXPERTS
            assert trace.token_ids.tolist() == [5, 6, 7, 8]
            assert trace.requests[0].prompt_len == 2

    def test_sglang(self, tmp_path, monkeypatch):
        torch = pytest.importorskip("torch")
        monkeypatch.chdir(tmp_path)
        lines = [json.loads(line) for line in SAMPLES["sglang"][0](tmp_path).read_text().splitlines()]
        for line in lines:
            line["topk_ids_of_layer"] = torch.tensor(line["topk_ids_of_layer"], dtype=torch.int32)
        names = torch.arange(4).repeat(3, 1)
        torch.save({"records": lines, "last_physical_to_logical_map": names}, "expert_distribution_recorder.pt")
        self.run(1)
        with converted(tmp_path, tmp_path / "sglang.jsonl", Options(model="m")) as trace:
            assert trace.experts.tolist() == EXPERTS
            assert (trace.n_experts, trace.header.extra["source_layers"]) == (4, "1, 2")
