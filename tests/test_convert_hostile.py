"""Converters on broken and malicious files: refused with file and line, in little memory."""

import gzip
import json
import tracemalloc
import zipfile

import numpy as np
import pytest
from convert_samples import HF, SAMPLES, converted, jsonl, put, refused

from traces.convert import Options, convert


class TestHostile:
    @pytest.mark.parametrize(
        ("name", "number", "edit", "said"),
        [
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
        ],
    )
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
        path = put(tmp_path / "t.jsonl.gz", gzip.compress(b'{"experts": [[0]]}\n' + (b" " * 1_000_000 + b"\n") * 70))
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


@pytest.mark.thorough
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
    small, large = peak(500), peak(4_000)
    assert large - small < 3_500 * 16 * 2 * 2  # bytes: what the rows themselves would take as 16-bit numbers, twice


class TestMoreMemoryThanText:
    """What is read takes many times its text, so limits are on what is read."""

    def document(self, tmp_path, n_names, name="t.json"):
        junk = {f"name{i}": [[]] * 2000 for i in range(n_names)}
        routes = [
            {
                "token_pos": t,
                "phase": "decode" if t else "prefill",
                "layers": {"0": {"experts": [t % 4, 5], "weights": [0.6, 0.4]}},
            }
            for t in range(4)
        ]
        meta = {"num_moe_layers": 1, "num_experts": 8, "model_id": "m"}
        return put(tmp_path / name, json.dumps({"meta": meta, **junk, "routes": routes}).encode())

    @pytest.mark.thorough
    def test_names_that_nobody_asks_for_are_not_kept(self, tmp_path):
        def peak(n_names):
            path = self.document(tmp_path, n_names)
            tracemalloc.start()
            convert([path], tmp_path / "t.safetensors", options=Options())
            highest = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            return highest

        peak(1)
        assert peak(400) < peak(100) + 4_000_000, "300 x 2,000 lists of 56 bytes are 34 MB"

    @pytest.mark.thorough
    def test_one_huge_value_beside_the_array(self, tmp_path):
        other = b"[]," * 1_500_000
        path = put(tmp_path / "t.json", b'{"meta": {"num_experts": 8}, "other": [' + other + b'0], "routes": []}')
        assert "one value of more than 4194304 characters" in refused(tmp_path, path, source="moe_ocs")

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            (
                b'{"experts": [' + b"[]," * 1_100_000 + b"[0]]}",
                "lists, objects and names in one record: at most 1000000",
            ),
            (b'{"experts": [[' + b"0," * 8_100_000 + b"0]]}", "values in one record: at most 8000000"),
            (b'{"experts": ' + b"[" * 40 + b"]" * 40 + b"}", "nested deeper than 32 levels"),
            (
                b'{"experts": [[0]], "task": "' + b"[" * 50 + b'", "iteration": ' + b"[" * 40 + b"]" * 40 + b"}",
                "nested deeper than 32 levels",
            ),
            (b'{"experts": [[0]], "task": "' + b"x" * 34_000_000 + b'"}', "a line of more than 33554432 bytes"),
        ],
    )
    def test_one_record(self, tmp_path, text, said):
        message = refused(tmp_path, put(tmp_path / "t.jsonl", text + b"\n"), source="jsonl")
        assert said in message
        assert "t.jsonl:1" in message

    def test_brackets_in_a_string_are_no_nesting(self, tmp_path):
        text = json.dumps({"experts": [[0]], "task": "[" * 60}).encode()
        with converted(tmp_path, put(tmp_path / "t.jsonl", text + b"\n"), Options(n_experts=8, model="m")) as trace:
            assert trace.n_tokens == 1
