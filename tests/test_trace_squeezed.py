"""Squeezed traces: the same rows in fewer bytes, and back; what is damaged or lies is refused in one line."""

from __future__ import annotations

import json
import lzma
import random
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from easy_numbers import execute_easy, setup
from tiny_traces import tiny_trace

from policies.hobbit import Hobbit
from sim.base.errors import BadInput
from sim.cli import main
from traces.format import blocks
from traces.format.check import check_trace
from traces.format.container import header_bytes, layout, read_file
from traces.format.layout import DTYPES
from traces.format.reader import Trace
from traces.format.squeeze import squeeze, unsqueeze
from traces.format.writer import Layout

ROWS = 2100  # three blocks of 1,024, the last of 52
READ = ("weights", "raw_weights", "scores", "shared_scores", "embeddings", "gate_inputs", "gate_input_norms")


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """A plain trace and the squeezed one."""
    folder = tmp_path_factory.mktemp("squeezed")
    codes = {"scores": "u6_square", "next_scores_1": "u4_square"}
    store = Layout(codes, frozenset({"next_scores_2"}), {"next_scores_3": 2})
    plain = tiny_trace(folder / "t.safetensors", 4, 7, n_requests=300, store=store)
    with Trace(plain) as trace:
        assert trace.n_tokens == ROWS
        squeeze(trace, folder / "s.safetensors")
    return plain, folder / "s.safetensors"


def surgery(path: Path, out: Path, edit) -> Path:
    """A squeezed file after `edit(metadata, tensors as they lie there)`."""
    pairs, entries, mapped = read_file(path)
    tensors = {
        name: mapped[fact.start : fact.stop].view(DTYPES[fact.dtype]).reshape(fact.shape).copy()
        for name, fact in entries.items()
    }
    edit(pairs, tensors)
    names = {dtype: name for name, dtype in DTYPES.items()}
    placed = layout({name: (names[values.dtype], values.shape) for name, values in tensors.items()})
    out.write_bytes(header_bytes(pairs, placed) + b"".join(tensors[name].tobytes() for name in placed))
    return out


def set_block(tensors, name: str, packed: bytes, raw: bytes | None = None) -> None:
    """Put other bytes in place of a tensor's first block, with the checksum of what they unpack to."""
    old = int(tensors[f"{name}.blocks"][0, 0])
    tensors[name] = np.concatenate([np.frombuffer(packed, "u1"), tensors[name][old:]])
    tensors[f"{name}.blocks"][:, 0] += len(packed) - old
    if raw is not None:
        tensors[f"{name}.blocks"][0, 1] = zlib.crc32(raw)


def lzma2(raw: bytes) -> bytes:
    return lzma.compress(raw, lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 20}])


def test_it_is_the_same_trace_in_fewer_bytes(both, tmp_path):
    with Trace(both[0]) as plain, Trace(both[1]) as squeezed:
        assert squeezed.path.stat().st_size < 0.85 * plain.path.stat().st_size
        assert read_file(both[1])[0]["version"] == "4"
        assert squeezed.squeezed and not plain.squeezed
        assert squeezed.sha256 == plain.sha256
        assert (squeezed.header, squeezed.levels, squeezed.levels_prefill) == (
            plain.header,
            plain.levels,
            plain.levels_prefill,
        )
        assert list(squeezed.requests) == list(plain.requests)
        assert check_trace(squeezed) == check_trace(plain) == []
        for a, b in ((0, ROWS), (5, 6), (1020, 1030), (2090, ROWS), (7, 7)):
            for name in READ:
                np.testing.assert_array_equal(getattr(squeezed, name)(a, b), getattr(plain, name)(a, b), name)
            for d in (1, 3):
                np.testing.assert_array_equal(squeezed.next_scores(d, a, b), plain.next_scores(d, a, b))
        row = plain.requests[200].first_decode_row
        np.testing.assert_array_equal(squeezed.next_scores(2, row, row + 4), plain.next_scores(2, row, row + 4))
        for one, other in ((squeezed.token_ids, plain.token_ids), (squeezed.iterations, plain.iterations)):
            np.testing.assert_array_equal(np.asarray(one), other)
        unsqueeze(squeezed, tmp_path / "back")
        squeeze(squeezed, tmp_path / "again")
    assert (tmp_path / "back").read_bytes() == both[0].read_bytes()
    assert (tmp_path / "again").read_bytes() == both[1].read_bytes()


def test_a_column_is_indexed_as_an_array(both):
    rng = np.random.default_rng(3)
    with Trace(both[0]) as plain, Trace(both[1]) as squeezed:
        array, column = plain.experts, squeezed.experts
        assert (len(column), column.shape, column.dtype, column.size) == (ROWS, array.shape, array.dtype, array.size)
        picked = rng.integers(0, ROWS, 50)
        for key in (
            slice(None),
            slice(-5, None),
            slice(1000, 1100, 7),
            slice(9, 3),
            3,
            -1,
            picked,
            picked - ROWS,
            picked.tolist(),
            np.arange(1030, 1040),
            np.arange(ROWS) % 9 == 0,
            [],
            (picked, 2),
            (slice(1020, 1030), 1, 0),
            (np.array([5, 1500]), [0, 2]),
            (np.array([5, 7]), [0, 2]),
        ):
            np.testing.assert_array_equal(column[key], array[key], str(key))
        np.testing.assert_array_equal(np.asarray(column, np.int64), array)
        with pytest.raises(IndexError, match="2100"):
            column[ROWS]
        with pytest.raises(ValueError):
            column[0:3][0] = 1


def test_a_run_on_it_is_the_same_run(both):
    with Trace(both[0]) as plain, Trace(both[1]) as squeezed:
        runs = [execute_easy(setup(Hobbit(), trace, 6)) for trace in (plain, squeezed)]
    assert runs[0].log == runs[1].log
    assert runs[0].spans == runs[1].spans
    assert len(runs[0].log) > 50


def test_unpacked_blocks_take_a_constant_room(both, monkeypatch):
    monkeypatch.setattr(blocks, "_KEPT", blocks._Kept())
    monkeypatch.setattr(blocks, "KEPT_BYTES", 150_000)
    with Trace(both[0]) as plain, Trace(both[1]) as squeezed:
        for row in random.Random(1).choices(range(ROWS), k=40):
            np.testing.assert_array_equal(squeezed.scores(row, row + 1), plain.scores(row, row + 1))
            assert len(squeezed.experts[:]) == ROWS
            kept = blocks._KEPT._blocks.values()
            assert blocks._KEPT._bytes == sum(rows.nbytes for rows in kept) <= 150_000


def grown(pairs, tensors):
    """Block 0 of the scores unpacks to 64 MiB."""
    raw = bytes(1 << 26)
    set_block(tensors, "scores", lzma2(raw), raw)


DAMAGE = [
    (grown, r"scores, block 0, got more than the 28672 bytes of its 1024 rows"),
    (lambda _, t: set_block(t, "scores", lzma2(b"short")), r"scores, block 0, got 5 bytes in place of the 28672"),
    (lambda _, t: set_block(t, "scores", b"\xff" * 40), r"scores, block 0, got bytes that are not LZMA2"),
    (lambda _, t: set_block(t, "scores", lzma2(bytes(28672))), r"scores, block 0, got other bytes than its checksum"),
    (
        lambda _, t: set_block(t, "scores", lzma2(bytes(28672)) + b"more", bytes(28672)),
        r"scores, block 0, got 28672 bytes in place of",
    ),
    (
        lambda _, t: set_block(t, "scores", lzma2(bytes(28672))[:-1], bytes(28672)),
        r"scores, block 0, got 28672 bytes in place of",
    ),
]


@pytest.mark.parametrize(("edit", "message"), DAMAGE)
def test_a_damaged_block_is_named_in_one_line(both, tmp_path, capsys, edit, message):
    """M24, when the block is read and by `moesim traces check`; no more is unpacked than its rows have room for."""
    path = surgery(both[1], tmp_path / "d", edit)
    tracemalloc.start()
    try:
        with Trace(path) as trace, pytest.raises(BadInput, match=message) as caught:
            assert trace.experts[0:1].size
            trace.scores(0, 1)
        assert tracemalloc.get_traced_memory()[1] < 3_000_000
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
    with pytest.raises(SystemExit, match="2" if message.startswith("experts") else "1"):
        main(["traces", "check", str(path)])
    error = capsys.readouterr().err
    assert str(caught.value).removeprefix(f"{path}: ").rpartition("; ")[0] in error and "Traceback" not in error
    with Trace(path) as trace:
        for write in (squeeze, unsqueeze):
            with pytest.raises(BadInput, match=message):
                write(trace, tmp_path / "again")
    assert list(tmp_path.iterdir()) == [path]


def pairs_of(**told):
    return lambda pairs, _: pairs.update({key.replace("__", "."): text for key, text in told.items()})


def without(name):
    return lambda pairs, tensors: (pairs.pop(name, None), tensors.pop(name, None))


def bomb(_, tensors):
    """Each block of the scores is what a constant makes of itself."""
    packed = [lzma2(bytes(rows * 28)) for rows in (1024, 1024, 52)]
    tensors["scores"] = np.frombuffer(b"".join(packed), "u1")
    tensors["scores.blocks"][:, 0] = np.cumsum([len(one) for one in packed])


def long_block(_, tensors):
    """60 kB in one block of 28,672 bytes, as a sparse file could have gigabytes."""
    set_block(tensors, "scores", bytes(60_000))


BREACHES = [
    (bomb, r"scores, got \d+ bytes for 58800: a squeezed tensor unpacks to at most 64 times its bytes"),
    (long_block, r"scores.blocks, got a block of 60000 bytes: one of 1024 rows takes at most 28764"),
    (without("plain_sha256"), r"plain_sha256 and squeezed tensors, got one of them"),
    (pairs_of(plain_sha256="abc"), r"metadata plain_sha256, got 'abc': 64 hexadecimal digits"),
    (without("scores"), r"scores squeezed, got no tensor scores: a squeezed tensor has both"),
    (without("scores.blocks"), r"scores squeezed, got no tensor scores.blocks"),
    (without("scores.squeezed"), r"tensor 'scores.blocks': no such tensor"),
    (pairs_of(version="3"), r"\.squeezed in a file of version 3: it came with version 4"),
    (pairs_of(version="5"), r"metadata version, got '5': this release reads versions 1, 2, 3 and 4"),
    (pairs_of(scores__squeezed="U8 2100 4 -7"), r"metadata scores.squeezed, got 'U8 2100 4 -7': the type and shape"),
    (pairs_of(scores__squeezed="I8 2100 4 7"), r"metadata scores.squeezed, got 'I8 2100 4 7'"),
    (pairs_of(scores__squeezed="U8 0 4 7"), r"scores, got 'U8 0 4 7' squeezed: tensors of rows, at least one"),
    (pairs_of(scores__squeezed="U8 2100 4 999999999999"), r"of at most 16777216 bytes each"),
    (pairs_of(scores__squeezed="U8 999999999999 4 7"), r"scores.blocks, got I64 of shape \(3, 2\)"),
    (pairs_of(scores__squeezed="U8 2100 4 6"), r"scores, got shape \(2100, 4, 6\): axis 2 is E = 7"),
    (pairs_of(req_split__squeezed="U8 300"), r"metadata req_split.squeezed, got 'U8 300': no such key"),
    (
        lambda _, t: t.update({"scores.blocks": t["scores.blocks"].astype("<i4")}),
        r"scores.blocks, got I32 of shape \(3, 2\)",
    ),
    (lambda _, t: t["scores.blocks"].__setitem__((0, 0), -1), r"scores.blocks, got ends that do not go up to"),
    (lambda _, t: t["scores.blocks"].__setitem__((1, 0), 3), r"scores.blocks, got ends that do not go up to"),
    (lambda _, t: t["scores.blocks"].__setitem__((2, 0), 2**62), r"scores.blocks, got ends that do not go up to"),
]


@pytest.mark.parametrize(("edit", "message"), BREACHES)
def test_what_does_not_fit_is_refused_when_it_is_opened(both, tmp_path, edit, message):
    """M23 and M26, and what M3 to M7 say of it."""
    with pytest.raises(BadInput, match=message) as caught:
        Trace(surgery(both[1], tmp_path / "b", edit))
    assert "\n" not in str(caught.value)


def test_a_tensor_that_is_too_good_to_squeeze_stays_plain(both, tmp_path):
    """M26, by who writes it; noise stays plain, too, and takes less above its rows than M26 has room for."""
    plain = surgery(both[0], tmp_path / "p", lambda _, t: t["token_ids"].fill(0))
    with Trace(plain) as trace:
        squeeze(trace, tmp_path / "s")
    assert "token_ids.squeezed" not in read_file(tmp_path / "s")[0]
    with Trace(tmp_path / "s") as trace:
        assert trace.squeezed and check_trace(trace) == []
    noise = np.random.default_rng(1).integers(0, 256, 1 << 20).astype("u1")
    assert len(blocks.pack(noise)[0]) < blocks._most_packed(noise.size)


def test_a_tensor_that_is_to_stay_plain_does(both, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main(["traces", "squeeze", str(both[0]), str(tmp_path / "s"), "--plain", "experts"])
    assert ended.value.code == 0
    with Trace(tmp_path / "s") as trace, Trace(both[1]) as whole:
        assert "experts.squeezed" not in read_file(tmp_path / "s")[0]
        assert trace.squeezed and trace.sha256 == whole.sha256 and check_trace(trace) == []


def test_a_digest_that_is_another_traces_is_found_out(both, tmp_path):
    """M25."""
    path = surgery(both[1], tmp_path / "b", pairs_of(plain_sha256="0" * 64))
    with Trace(path) as trace:
        (fault,) = check_trace(trace)
        assert str(fault).startswith("plain_sha256, got 0000000000000000: the digest of the plain file")
        with pytest.raises(BadInput, match=r"metadata plain_sha256, got 0{16}\.\.\. for a trace of"):
            unsqueeze(trace, tmp_path / "plain")
    assert not (tmp_path / "plain").exists()


def test_values_are_judged_as_in_a_plain_file(both, tmp_path):
    def edit(_, tensors):
        rows = np.full((1024, 4, 7), 70, "u1")
        set_block(tensors, "scores", lzma2(rows.tobytes()), rows.tobytes())
        ids = np.zeros((1024, 4, 2), "u1")
        set_block(tensors, "experts", lzma2(ids.tobytes()), ids.tobytes())

    with Trace(surgery(both[1], tmp_path / "b", edit)) as trace:
        with pytest.raises(BadInput, match=r"experts\[0, 0\], got 0 0: distinct experts per token"):
            trace.experts[3:4]
        assert trace.experts[1024:1025].size
        with pytest.raises(BadInput, match=r"scores\[0, 0, 0\], got 70: a u6_square code is at most 63"):
            trace.scores(0, 1)


def test_the_verbs(both, tmp_path, capsys):
    back, squeezed = str(tmp_path / "p.safetensors"), str(tmp_path / "s.safetensors")
    for args in (["unsqueeze", str(both[1]), back], ["squeeze", back, squeezed], ["show", squeezed, "--json"]):
        with pytest.raises(SystemExit, match="0"):
            main(["traces", *args])
    assert Path(back).read_bytes() == both[0].read_bytes()
    assert Path(squeezed).read_bytes() == both[1].read_bytes()
    lines = capsys.readouterr().out.splitlines()
    assert ", before " in lines[0]
    with Trace(both[0]) as plain:
        assert json.loads(lines[-1])["sha256"] == plain.sha256
    for args, message in (
        (["squeeze", back, squeezed], "exists; replace it with --overwrite"),
        (["squeeze", back, back, "--overwrite"], "is the trace itself"),
        (["squeeze", back, str(tmp_path / "no" / "t")], "there is no folder"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["traces", *args])
        assert message in capsys.readouterr().err
