"""Importance matrices by hand: counts out of GGUF, laid out as llama.cpp's tools/imatrix/imatrix.cpp writes it."""

import json
import random
import re
import struct

import pytest

from sim.base.errors import BadInput
from sim.cli import main
from traces.convert import imatrix
from traces.stats import counts

COUNTS = {0: [6, 2, 0, 0], 3: [1, 3, 2, 2]}


def text(value):
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def gguf(tensors, facts=None, align=32):
    """Tensors by name: lists of numbers, shaped [1, n]."""
    known = {
        "general.type": "imatrix",
        "imatrix.datasets": ["a.txt"],
        "imatrix.chunk_count": 2,
        "imatrix.chunk_size": 2,
    }
    known = facts if facts is not None else known
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(known))
    for name, value in known.items():
        head += text(name)
        if isinstance(value, str):
            head += struct.pack("<I", 8) + text(value)
        elif isinstance(value, list):
            head += struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
        else:
            head += struct.pack("<II", 4, value)
    data = b""
    for name, values in tensors.items():
        head += text(name) + struct.pack("<IQQIQ", 2, 1, len(values), 0, len(data))
        data += struct.pack(f"<{len(values)}f", *values)
        data += b"\0" * (-len(data) % align)
    return head + b"\0" * (-len(head) % align) + data


def tensors(**changes):
    found = {}
    for layer, own in COUNTS.items():
        for kind in ("down", "gate", "up"):  # sorted by name, as it writes them
            found[f"blk.{layer}.ffn_{kind}_exps.weight.counts"] = own if kind == "gate" else [9, 9, 9, 9]
            found[f"blk.{layer}.ffn_{kind}_exps.weight.in_sum2"] = [0.5] * 4
        found[f"blk.{layer}.attn_k.weight.counts"] = [4]
    return found | changes


def run(capsys, *args):
    with pytest.raises(SystemExit) as stopped:
        main([*map(str, args)])
    return stopped.value.code or 0, *capsys.readouterr()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "imatrix.gguf"
    path.write_bytes(gguf(tensors()))
    return path


def test_counts_are_read_to_the_last_one(file):
    found = imatrix.read(file, "mine")
    assert found.layers == [0, 3]
    assert found.counts == [[6, 2, 0, 0], [1, 3, 2, 2]]
    assert found.tokens == 4
    told = found.summary("x")
    assert told.shape == "2x4, k=2", "eight choices of four tokens"
    # The most used one serves 6/8 and 3/8, two 8/8 and 5/8, three 8/8 and 7/8.
    assert [told.figures[f"static_{n}"] for n in (25, 50, 75)] == pytest.approx([9 / 16, 13 / 16, 15 / 16])


def test_it_becomes_counts_that_no_run_takes(tmp_path, capsys, monkeypatch, file):
    monkeypatch.setenv("COLUMNS", "400")
    out = tmp_path / "counts.yaml"
    code, said, err = run(capsys, "traces", "convert", file, "-o", out, "--model", "mine")
    assert (code, err) == (0, "")
    assert said.splitlines()[0] == f"{out}: 2x4, k=2, 4 tokens read, counts by expert (from imatrix)"
    assert "what a placement fixed in advance would serve, and nothing of caches" in said.splitlines()[1]
    assert counts.load(out) == imatrix.read(file, "mine")
    code, said, _ = run(capsys, "traces", "stats", out, "--json")
    (told,) = json.loads(said)["traces"]
    assert told["figures"]["static_50"] == pytest.approx(13 / 16)
    code, said, _ = run(capsys, "traces", "stats", out)
    assert re.search(r"fixed, most used: hits, 50 % cached +81.2 %", said)
    for command in (
        ("run", "--policy", "lru", "--hw", "rtx3090", "--trace"),
        ("traces", "realism"),
        ("traces", "synth"),
    ):
        code, _, err = run(capsys, *command, out)
        assert (code, err.count("\n")) == (2, 1)
        assert "no routes" in err


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (gguf(tensors())[:-400], "the file was cut"),
        (gguf(tensors())[:60], "the header ends early"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "tensors, got"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "facts, got"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62), "header, got a text of"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 12, 1 << 60),
            "header, got more than",
        ),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<I", 77), "header, got type 77"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "GGUF version, got 1"),
        (gguf(tensors(), {"general.type": "model"}), "general.type, got 'model'"),
        (gguf({"blk.0.attn_k.weight.counts": [4]}), "counts, got none by expert"),
        (gguf(tensors(**{"blk.0.ffn_gate_exps.weight.counts": [1.5, 0, 0, 0]})), "no whole numbers"),
        (gguf(tensors(**{"blk.0.ffn_gate_exps.weight.counts": [-1, 0, 0, 0]})), "no whole numbers"),
        (gguf(tensors(**{"blk.0.ffn_gate_exps.weight.counts": [float("inf"), 0, 0, 0]})), "no whole numbers"),
        (gguf(tensors(**{"blk.0.ffn_gate_exps.weight.counts": [1e30, 0, 0, 0]})), "got 1e+30: at most 2^53"),
        (gguf(tensors(**{"blk.0.ffn_gate_exps.weight.counts": [0, 0, 0, 0]})), "counts, got none at all"),
        (gguf(tensors(**{"blk.0.ffn_gate_exps.weight.counts": [1, 2, 3]})), "got [3, 4] experts"),
    ],
)
def test_refused(tmp_path, capsys, monkeypatch, data, said):
    monkeypatch.setenv("COLUMNS", "400")
    path = tmp_path / "imatrix.gguf"
    path.write_bytes(data)
    code, _, err = run(capsys, "traces", "convert", path, "-o", tmp_path / "x.yaml", "--from", "imatrix")
    assert (code, err.count("\n")) == (2, 1)
    assert said in err
    assert not (tmp_path / "x.yaml").exists()


def test_the_older_format_keeps_no_counts(tmp_path, capsys, monkeypatch, file):
    monkeypatch.setenv("COLUMNS", "400")
    name = b"blk.0.ffn_gate_exps.weight"
    old = tmp_path / "imatrix.dat"
    old.write_bytes(struct.pack("<ii", 1, len(name)) + name + struct.pack("<ii4f", 1, 4, 0.1, 0.2, 0.3, 0.4))
    code, _, err = run(capsys, "traces", "convert", old, "-o", tmp_path / "x.yaml")
    assert (code, err.count("\n")) == (2, 1)
    assert "older .dat format, which keeps no counts" in err
    for args, message in (
        (("-o", tmp_path / "x.safetensors"), "name it .yaml"),
        (("-o", tmp_path / "x.yaml", "--top-k", "2"), "--top-k: an importance matrix has no routes for it"),
        ((file, "-o", tmp_path / "x.yaml"), "a second importance matrix"),
    ):
        assert message in run(capsys, "traces", "convert", file, *args)[2]


def test_a_file_of_counts_is_checked(tmp_path, file):
    out = tmp_path / "c.yaml"
    counts.save(out, imatrix.read(file))
    good = out.read_text()
    for old, new, said in (
        ("- [1, 3, 2, 2]", "- [1, 3, 2]", "other layers or experts"),
        ("layers: [0, 3]", "layers: [0]", "other layers or experts"),
        ("- [1, 3, 2, 2]", "- [0, 0, 0, 0]", "a layer that no token used"),
        ("- [1, 3, 2, 2]", "- [1, 3, 2, -2]", "counts"),
    ):
        out.write_text(good.replace(old, new))
        with pytest.raises(BadInput, match=said):
            counts.load(out)


def test_damage_is_refused_in_words(tmp_path):
    """Seeded cuts, flips and insertions: counts that are sound, or one line of BadInput, nothing else."""
    rng, whole, path = random.Random(7), gguf(tensors()), tmp_path / "damaged.gguf"
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 3))):
            at = rng.randrange(len(data))
            how = rng.randrange(3)
            if how == 0:
                del data[at : at + rng.randrange(1, 40)]
            elif how == 1:
                data[at] ^= 1 << rng.randrange(8)
            else:
                data[at:at] = rng.choice((b"\xff" * 8, b"\x00" * 8, b"GGUF"))
        path.write_bytes(data)
        try:
            found = imatrix.read(path)
        except BadInput as error:
            assert "\n" not in str(error)
            refused += 1
        else:
            counts.save(tmp_path / "c.yaml", found)
            assert counts.load(tmp_path / "c.yaml") == found
    assert 50 < refused < 300
