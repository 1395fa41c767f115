"""What ended in a traceback once: values that a tag does not fit, headers NumPy stumbles over, no stderr, no memory."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from cli_help import mixtral_shaped, moesim, simulated

from sim.base.errors import BadInput, did_you_mean
from sim.base.files import parse_yaml
from traces.convert import Options, convert

ROOT = Path(__file__).parents[1]
OPTIONS = Options(top_k=2, model="m", renormalised=True)
POSIX = pytest.mark.skipif(os.name != "posix", reason="streams and limits as POSIX has them")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("!!bool x", "'x' is no !!bool"),
        ("!!int ''", "not a value of !!int"),
        ("!!float ''", "not a value of !!float"),
        ("!!int _", "'_' is no !!int"),
        ("!!timestamp x", "'x' is no !!timestamp"),
        ("!!map [a]", "not a value of !!map"),
    ],
)
def test_a_tag_on_a_value_that_it_does_not_fit(text: str, said: str) -> None:
    with pytest.raises(BadInput, match=r"c\.yaml line 2, column 4: ") as refused:
        parse_yaml(f"x: 1\na: {text}\n", "c.yaml")
    assert said in str(refused.value)


def test_half_a_character_in_a_file() -> None:
    r"""JSON writes one character beyond U+FFFF as two escapes, and YAML is to read what JSON wrote; a half is none."""
    assert parse_yaml(r'{"a": "\ud83d\ude00"}', "c.yaml") == {"a": "\U0001f600"}
    for text in (r'a: "lru\ud800"', r'"\udc00": 1', r'a: ["\ude00\ud83d"]'):
        with pytest.raises(BadInput, match=r"c\.yaml line 1, .* holds half a character .*; fix the file") as refused:
            parse_yaml(text, "c.yaml")
        assert str(refused.value).isprintable()


@POSIX
def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    """A word of the command line, and the folder that results name; said before any work."""
    odd = os.fsencode(tmp_path) + b"/caf\xe9"
    try:
        Path(os.fsdecode(odd)).mkdir()
    except OSError:
        pytest.skip("this file system takes UTF-8 alone")
    words = [sys.executable, "-m", "moesim", "run", "--policy", "lru", "--out"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for args, folder, said in (
        ([*words, odd], ROOT, "word 5, got "),
        ([*words, "out"], odd, "the folder this runs in, got "),
    ):
        done = subprocess.run(args, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert done.stderr.startswith(f"error: {said}")
        assert r"caf\udce9': bytes that are no UTF-8; " in done.stderr


def test_a_number_of_many_digits_is_not_worked_out() -> None:
    """Nor is one of base 60, which is text: with 170,000 places it took 14 seconds."""
    with pytest.raises(BadInput, match="a number of 601 characters: at most 100"):
        parse_yaml("a: " + "1" * 601, "c.yaml")
    assert parse_yaml("a: 1" + ":59" * 200, "c.yaml") == {"a": "1" + ":59" * 200}


@pytest.mark.parametrize(
    "words", [("--{}",), ("--policy", "lru", "--batch", "{}"), ("--policy", "lru", "--split", "{}")]
)
def test_an_error_quotes_the_ends_of_what_it_was_given(capsys: pytest.CaptureFixture[str], words: tuple[str]) -> None:
    said = simulated(capsys, "--hw", "rtx3090", *(word.format("y\x1b[31m" * 5_000) for word in words)).error
    assert len(said) < 2_000
    assert said.rstrip("\n").isprintable()
    assert said.endswith(("--help\n", "known: all, test, train\n", "write e.g. --batch 4\n"))


def test_titles_do_not_reach_the_terminal_as_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from policies.lru import Lru\nclass Mine(Lru):\n    name, title = 'mine', 'red \\x1b[31m \\x9b2J \\u202e'\n"
    )
    said = moesim(capsys, "policies", tmp_path / "mine.py").out
    assert "red \\x1b[31m \\x9b2J \\u202e" in said
    assert all(line.isprintable() for line in said.splitlines())


def test_nothing_known_is_said_so() -> None:
    assert did_you_mean("x", []) == "there is none"


def npz(path: Path, header: bytes) -> Path:
    member = io.BytesIO()
    member.write(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + b"\0" * 64)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("router_logits.npy", member.getvalue())
    return path


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (True, 2, 4)}",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2, 4",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (1L, 2, '''",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"-" * 9000 + b"1, 2, 4)}",
        b"{'descr': 7, 'fortran_order': False, 'shape': (1, 2, 4)}",
        b"\\",
        b"  1\n 2\n",
        b"",
    ],
)
def test_a_damaged_header_of_an_array(tmp_path: Path, header: bytes) -> None:
    path = npz(tmp_path / "t.npz", header)
    with pytest.raises(BadInput, match="router_logits: not a plain NumPy array; save it with"):
        convert([path], tmp_path / "t.safetensors", options=OPTIONS)


def test_a_sound_header_is_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", router_logits=np.random.default_rng(0).normal(size=(5, 2, 4)).astype(np.float32))
    found = convert([tmp_path / "t.npz"], tmp_path / "t.safetensors", options=OPTIONS)
    assert found.n_tokens == 5


def shell(tmp_path: Path, before: str, after: str) -> subprocess.CompletedProcess[str]:
    trace = mixtral_shaped(tmp_path)
    words = f"{sys.executable} -m sim run --policy lru --hw rtx3090 --trace {trace}"
    return subprocess.run(["sh", "-c", f"{before} {words} {after}"], capture_output=True, text=True, cwd=ROOT)


@POSIX
def test_a_closed_standard_error(tmp_path: Path) -> None:
    done = shell(tmp_path, "", "2>&-")
    assert done.returncode == 0
    assert "TPOT" in done.stdout
    assert shell(tmp_path, "", "--policy nobody 2>&-").returncode == 2


@POSIX
def test_what_is_opened_does_not_become_standard_error(tmp_path: Path) -> None:
    """The first file that is opened takes the lowest free number, and warnings would be written into it."""
    out = tmp_path / "out"
    done = shell(tmp_path, "", f"--requests 1 --out {out} 2>&-")
    assert done.returncode == 0
    assert (out / "result.json").read_text().startswith("{")


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space as Linux has them")
@pytest.mark.parametrize("limit_kib", [60_000, 100_000, 105_000, 115_000, 125_000])
def test_too_little_memory(tmp_path: Path, limit_kib: int) -> None:
    """NumPy fails in another way at each; with the last there may be enough elsewhere."""
    done = shell(tmp_path, f"ulimit -v {limit_kib};", "")
    assert done.returncode in ((2,) if limit_kib < 110_000 else (0, 2)), done.stderr
    if done.returncode:
        (line,) = done.stderr.splitlines()
        assert line.startswith("error: out of memory")
