"""Files that are cut, flipped or hostile: a clean load or one BadInput, never another exception, never a hang (M1)."""

import json
import os
import random
import struct

import numpy as np
import pytest
from fuzz_inputs import spoil_trace
from tiny_traces import tiny_trace

from sim.base.errors import BadInput
from sim.cli import main
from traces.format.check import check_trace, findings
from traces.format.container import read_file
from traces.format.layout import DTYPES, MAX_HEADER_BYTES
from traces.format.reader import Trace
from traces.format.squeeze import squeeze
from traces.format.writer import Layout
from traces.stats import figures as stats


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    path = tmp_path_factory.mktemp("robust") / "sound.safetensors"
    store = Layout(
        decode_only=frozenset({"next_scores_2"}), sparse={"next_scores_3": 2}, codes={"shared_scores": "u8_square"}
    )
    return tiny_trace(path, n_layers=4, store=store).read_bytes()


def use(path):
    """Everything a reader can be asked for, on a file that may hold anything."""
    with Trace(path) as trace:
        check_trace(trace, limit=3)
        n = trace.n_tokens
        list(trace.requests)
        asked = [
            lambda: trace.weights(0, n),
            lambda: trace.raw_weights(0, n),
            lambda: trace.scores(0, n),
            lambda: trace.shared_scores(0, n),
            lambda: trace.embeddings(0, n),
            lambda: trace.gate_inputs(0, n),
            lambda: trace.gate_input_norms(0, n),
            lambda: trace.token_ids,
            lambda: trace.iterations,
            *(lambda d=d: trace.next_scores(d, 0, n) for d in (1, 2, 3)),
            *(lambda d=d: stats.prediction_accuracy(trace, d) for d in (1, 2, 3)),
            *(lambda lag=lag: stats.next_token_overlap(trace, lag) for lag in stats.LAGS),
            lambda: stats.normalised_entropy(stats.popularity(trace)),
            lambda: stats.lengths(trace),
        ]
        for ask in asked:
            try:
                ask()
            except BadInput as error:
                assert "\n" not in str(error)


def read_whole(trace, level):
    """Every stored row of a level, as runs read them."""
    ask = {
        "experts": lambda a, b: trace.experts[a:b],
        "token_ids": lambda a, b: trace.token_ids[a:b],
        "iterations": lambda a, b: trace.iterations[a:b],
        **{f"next_scores_{d}": lambda a, b, d=d: trace.next_scores(d, a, b) for d in (1, 2, 3)},
    }.get(level) or getattr(trace, level)
    for request in trace.requests:
        ask(request.first_decode_row if trace.decode_only(level) else request.first_row, request.end_row)


def refused(read):
    try:
        read()
    except BadInput as error:
        return str(error)
    return ""


@pytest.mark.parametrize("squeezed", [False, True])
def test_check_finds_what_a_run_refuses_and_nothing_else(sound, tmp_path, squeezed, capsys):
    path, spoilt = tmp_path / "sound.safetensors", tmp_path / "spoilt.safetensors"
    path.write_bytes(sound)
    if squeezed:
        with Trace(path) as trace:
            path = squeeze(trace, tmp_path / "squeezed.safetensors")
    pairs, entries, data = read_file(path)
    arrays = {
        name: data[entry.start : entry.stop].view(DTYPES[entry.dtype]).reshape(entry.shape)
        for name, entry in entries.items()
    }
    exits = []
    for seed in range(150):
        spoilt.write_bytes(spoil_trace(pairs, arrays, random.Random(f"judgement {squeezed} {seed}")))
        said = {}
        if opened := not refused(lambda: Trace(spoilt)):
            with Trace(spoilt) as trace:
                for tensor, error in findings(trace):
                    said.setdefault(tensor.removesuffix(".ids"), []).append(str(error))
                for level in {name.removesuffix(".ids") for name in trace.entries if not name.startswith("req_")}:
                    told = refused(lambda trace=trace, level=level: read_whole(trace, level))
                    assert told in said.get(level, [""]), (seed, level, told, said)
        with pytest.raises(SystemExit) as stop:
            main(["traces", "check", str(spoilt)])
        exits.append(stop.value.code)
        assert exits[-1] == (2 if not opened or "experts" in said else 1 if said else 0), (seed, said)
    assert {0, 1, 2} == set(exits)
    assert capsys.readouterr().err.count("is refused, any other is not") > 5


def test_a_file_that_is_opened_again_is_read_again_once_it_has_changed(tmp_path):
    """What was found in it is kept by what tells a file from another one: changed in place, replaced, gone."""
    path, an_hour_ago = tmp_path / "t", 3600
    for turn, seed in enumerate((1, 2)):
        tiny_trace(path, seed=seed)
        then = path.stat().st_mtime - an_hour_ago + turn
        os.utime(path, (then, then))
        with Trace(path) as first, Trace(path) as second:
            assert second.requests is first.requests  # looked at once
            first.close()
            assert (second.experts == read_anew(path).experts).all()
    data = bytearray(path.read_bytes())
    data[20] ^= 0xFF
    path.write_bytes(data)
    os.utime(path, (then + 1, then + 1))
    with pytest.raises(BadInput):
        Trace(path)
    path.unlink()
    with pytest.raises(BadInput):
        Trace(path)


def read_anew(path):
    """Of a copy, which nobody has opened."""
    copy = path.with_name(f"copy-{path.stat().st_mtime_ns}")
    copy.write_bytes(path.read_bytes())
    return Trace(copy)


def test_a_sound_file_can_be_used(sound, tmp_path):
    (tmp_path / "t").write_bytes(sound)
    use(tmp_path / "t")


def test_truncated_anywhere(sound, tmp_path):
    path = tmp_path / "cut.safetensors"
    n_header = 8 + struct.unpack("<Q", sound[:8])[0]
    cuts = {*range(12), *range(n_header - 3, n_header + 3), *range(0, len(sound), 61), len(sound) - 1}
    for cut in sorted(cuts):
        path.write_bytes(sound[:cut])
        with pytest.raises(BadInput, match=r"cut\.safetensors.*; copy or record it again"):
            Trace(path)
    path.write_bytes(sound + b"\0")
    with pytest.raises(BadInput):
        Trace(path)


@pytest.mark.parametrize("region", ["prefix", "header", "data"])
def test_bit_flips(sound, tmp_path, region):
    rng, path = random.Random(20), tmp_path / "flipped"
    n_header = 8 + struct.unpack("<Q", sound[:8])[0]
    low, high = {"prefix": (0, 8), "header": (8, n_header), "data": (n_header, len(sound))}[region]
    loaded = 0
    for _ in range({"prefix": 64, "header": 250, "data": 120}[region]):
        changed = bytearray(sound)
        for _ in range(rng.choice((1, 1, 1, 2, 8))):
            changed[rng.randrange(low, high)] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        try:
            use(path)
            loaded += 1
        except BadInput as error:
            assert "\n" not in str(error)
    assert region != "data" or loaded > 60  # most flips in the data leave a file that opens


def raw(header, data=b"", n_header=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if n_header is None else n_header) + text + data


HOSTILE = {
    "empty": b"",
    "text": b"token,layer,expert\n0,0,1\n" * 10,
    "zip": b"PK\x03\x04" + bytes(200),
    "huge header": raw(b"{}", n_header=2**63),
    "header past the end": raw(b"{}", n_header=3),
    "not JSON": raw(b"{nope}"),
    "a list": raw(b"[1, 2]"),
    "deep JSON": raw(b"[" * 50_000 + b"]" * 50_000),
    "deep in metadata": raw(b'{"__metadata__":' + b"[" * 9_000 + b"]" * 9_000 + b"}"),
    "not UTF-8": raw(b'{"\xff\xfe":1}'),
    "no metadata": raw({"experts": {"dtype": "U8", "shape": [1, 1, 1], "data_offsets": [0, 1]}}, b"\0"),
    "numbers as metadata": raw({"__metadata__": {"version": 1}}),
    "null metadata": raw(b'{"__metadata__":null}'),
    "metadata twice": raw(b'{"__metadata__":{"format":"moe-routing"},"__metadata__":{"format":"moe-routing"}}'),
    "key twice": raw(b'{"__metadata__":{"format":"moe-routing","format":"x"}}'),
    "shape overflow": raw({"experts": {"dtype": "U8", "shape": [2**62, 2**62, 1], "data_offsets": [0, 1]}}, b"\0"),
    "negative": raw({"experts": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}}, b"\0"),
    "hole": raw({"experts": {"dtype": "U8", "shape": [1, 1, 1], "data_offsets": [1, 2]}}, b"\0\0"),
    "overlap": raw(
        {
            "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "b": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        },
        b"\0",
    ),
    "unknown type": raw({"experts": {"dtype": "U5", "shape": [1], "data_offsets": [0, 1]}}, b"\0"),
    "unused type": raw({"experts": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}}, b"\0\0"),
    "nan": raw(b'{"experts":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}', b"\0"),
    "big integer": raw(b'{"experts":{"dtype":"U8","shape":[1e400],"data_offsets":[0,1]}}', b"\0"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files(tmp_path, name):
    path = tmp_path / "t.safetensors"
    path.write_bytes(HOSTILE[name])
    with pytest.raises(BadInput) as caught:
        Trace(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_header_beyond_the_limit_is_not_parsed(tmp_path):
    path = tmp_path / "t.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", MAX_HEADER_BYTES + 1))
        file.truncate(MAX_HEADER_BYTES + 100)
    with pytest.raises(BadInput, match=f"got a header of {MAX_HEADER_BYTES + 1} bytes: at most {MAX_HEADER_BYTES}"):
        Trace(path)


def test_paths_that_are_no_files(tmp_path):
    with pytest.raises(BadInput, match="No such file"):
        Trace(tmp_path / "missing")
    with pytest.raises(BadInput, match="not a regular file"):
        Trace(tmp_path)
    os.mkfifo(tmp_path / "pipe")  # opening one would wait forever
    with pytest.raises(BadInput, match="not a regular file"):
        Trace(tmp_path / "pipe")
    with pytest.raises(BadInput):
        Trace("bad\0name")


def test_names_from_the_file_cannot_flood_the_message(tmp_path):
    path = tmp_path / "t.safetensors"
    name = "x" * 100_000
    path.write_bytes(raw({"__metadata__": {name: "y" * 100_000}}))
    with pytest.raises(BadInput) as caught:
        Trace(path)
    assert len(str(caught.value)) < 1_000


def test_values_read_are_never_writable(sound, tmp_path):
    (tmp_path / "t").write_bytes(sound)
    with Trace(tmp_path / "t") as trace, pytest.raises(ValueError, match="read-only"):
        np.add(trace.experts, 1, out=trace.experts, casting="unsafe")
