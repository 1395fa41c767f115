"""More of what people and programs hand over: numbers out of range, odd files, odd places to write to, odd encodings.

One line each, `what, got what: rule; way out`, exit code 2, nothing on standard output and nothing written.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from cli_help import moesim
from test_bad_input import card, model
from tiny_traces import ALL, tiny_trace

from sim.base.errors import BadInput
from sim.base.files import replacing

POSIX = pytest.mark.skipif(os.name != "posix", reason="pipes, devices and links as POSIX has them")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    tiny_trace(folder / "t.safetensors", n_requests=6, levels=ALL - {"arrivals"})
    (folder / "m.yaml").write_text(model()())
    (folder / "dir.yaml").mkdir()
    return folder


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *args: Any, **instead: Any) -> str:
    """The one line that `moesim run` refuses this with; `instead`: other values for the sound options."""
    sound = {"policy": "lru", "hw": "rtx3090", "model": folder / "m.yaml", "trace": folder / "t.safetensors"} | instead
    before = sorted(folder.rglob("*"))
    options = [part for name, value in sound.items() if value is not None for part in (f"--{name}", value)]
    return refusal(capsys, folder, before, "run", *options, *args)


def refusal(capsys: pytest.CaptureFixture[str], folder: Path, before: list[Path], *args: Any) -> str:
    said = moesim(capsys, *args)
    assert (said.code, said.out) == (2, ""), said
    *table, line = said.err.splitlines()
    assert line.startswith("error: "), said.err
    assert all(row.startswith("  ") for row in table), said.err
    assert {";", "?"} & set(line), line
    assert sorted(folder.rglob("*")) == before
    return line


@pytest.mark.parametrize("option", ["--gpus", "--batch", "--requests", "--cache", "--vram", "--expert-cache"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "x", "", "1e400", "1e400experts", "1e400GB", "-inf"])
def test_numbers(capsys: pytest.CaptureFixture[str], folder: Path, option: str, value: str) -> None:
    line = refused(capsys, folder, f"{option}={value}")
    assert option in line or "dense parts need" in line


@pytest.mark.parametrize("name", ["policy", "hw", "model", "trace"])
def test_empty_names(capsys: pytest.CaptureFixture[str], folder: Path, name: str) -> None:
    assert {"hw": "hardware profile"}.get(name, name) in refused(capsys, folder, **{name: ""})


@pytest.mark.parametrize(
    "key",
    [
        "=1",
        "hw.=1",
        ".x=1",
        "hw.h2d.latency_s=",
        "hw.h2d.latency_s=nan",
        "hw.h2d.latency_s=-1",
        "hw.h2d.latency_s=[1]",
        "hw.h2d.latency_s=1e-5s",
        "hw.h2d={}",
        "hw.gpu.flops_per_s.bf16=0",
        "hw.h2d.bandwidth_bytes_per_s=1e-320",
        "hw.cpu.n_cores=0",
        "hw.contention.gpu_slowdown_by_h2d=-0.5",
        "hw.contention.gpu_slowdown_by_h2d=1e308",
        "model.n_experts=0",
        "model.n_experts=1e99",
        "model.id=",
        "engine.pinned=7",
        "engine.per_expert_s=-1",
        "engine.kernels.expert=-4",
        "engine.kernels.expert=0.5",
        "lru.x.y=1",
        "fine_moe.distance=3",
        "scope=nan",
        "a\nb=1",
    ],
)
def test_settings(capsys: pytest.CaptureFixture[str], folder: Path, key: str) -> None:
    refused(capsys, folder, "--set", key)


@pytest.mark.parametrize(
    "content",
    [
        card()().encode("utf-16"),
        b"# \xe9\n" + card()().encode(),
        b"",
        b"# nothing\n",
        b"\x00" * 100,
        b"42\n",
        card()().encode() * 2,
        (card()() + "\n---\n" + card()()).encode(),
        b"schema:\t1\n\tid: x\n",
        b"a: &a {b: 1}\nc:\n  <<: *a\n",
    ],
    ids=["utf16", "latin1", "empty", "comment", "NUL", "scalar", "twice", "documents", "tabs", "merge"],
)
def test_texts(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "hw.yaml").write_bytes(content)
    assert "hw.yaml" in refused(capsys, folder, hw=tmp_path / "hw.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "policy: lru\nhw: [rtx3090]\n",
        "{}",
        "policy: lru\nhw: rtx3090\nset: 3\n",
        "policy: null\nhw: rtx3090\n",
        "policy: lru\nhw: rtx3090\nset: {a: {b: 1}}\n",
        "policy: lru\nhw: rtx3090\nbatch: 0\n",
        "policy: lru\nhw: rtx3090\ngpus: -2\n",
        "policy: lru\nhw: rtx3090\nseed: 1.5\n",
        "policy: lru\nhw: rtx3090\ncache_frac: .nan\n",
        "policy: lru\nhw: rtx3090\nset: {hw.h2d.latency_s: .inf}\n",
    ],
)
def test_configurations(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    refused(capsys, folder, "--config", tmp_path / "c.yaml", policy=None, hw=None)


# -- what is no file ---------------------------------------------------------------------------------------------------


@pytest.fixture
def hurry() -> Any:
    """Who opens a pipe waits for ever."""

    def late(*_: Any) -> None:
        pytest.exit("it hangs", 1)

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@POSIX
@pytest.mark.parametrize("name", ["hw", "model", "trace", "config"])
@pytest.mark.parametrize("kind", ["folder", "pipe", "loop", "dangling", "/dev/zero", "/dev/null"])
@pytest.mark.usefixtures("hurry")
def test_odd_files(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / "odd.yaml"
    if (name, kind) == ("config", "pipe"):
        pytest.skip("--config <(command) is a pipe, and welcome")
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind.startswith("/"):
        path = Path(kind)
    else:
        path.symlink_to(path if kind == "loop" else tmp_path / "gone")
    assert str(path) in refused(capsys, folder, **{name: path})


@POSIX
@pytest.mark.parametrize("option", ["--out", "--timeline"])
@pytest.mark.usefixtures("hurry")
def test_odd_places_to_write_to(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, option: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "mine.txt").write_text("keep")
    (tmp_path / "file").write_text("keep")
    for place in ("pipe", "folder", "file/below", "x" * 300):
        refused(capsys, folder, option, tmp_path / place)
    if option == "--out":
        refused(capsys, folder, option, tmp_path / "file")
    assert (tmp_path / "pipe").is_fifo()
    assert [(tmp_path / at).read_text() for at in ("file", "folder/mine.txt")] == ["keep", "keep"]
    assert {p.name for p in tmp_path.iterdir()} == {"pipe", "folder", "file"}


@POSIX
def test_no_device_is_replaced(tmp_path: Path) -> None:
    """Root may rename a file over /dev/null; then the machine has no /dev/null."""
    os.mkfifo(tmp_path / "pipe")
    for place, what in ((tmp_path / "pipe", "a device or a pipe"), (tmp_path, "a folder")):
        with pytest.raises(BadInput, match=rf"{what}, and output replaces .*; name a file"), replacing(place):
            pytest.fail("it was opened")


# -- other commands ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        ("compare", "--policy", "lru,,fif", "--hw", "rtx3090"),
        ("compare", "--policy", "", "--hw", "rtx3090"),
        ("compare", "--policy", "lru", "--hw", "rtx3090", "--workers", "0"),
        ("bench", "--tokens", "-1"),
        ("hw", "FOLDER/dir.yaml"),
        ("models", "FOLDER/dir.yaml"),
        ("report", "FOLDER"),
        ("report", "FOLDER/none.yaml"),
        ("traces", "check", "FOLDER"),
        ("traces", "check", "FOLDER/m.yaml"),
        ("traces", "synth", "--requests", "-1"),
        ("calibrate", "--device", "gpu7"),
        ("calibrate", "--device", "cpu", "--model", "nope"),
        ("conformance", "nope"),
        ("train", "duoserve", "--trace", "nope", "--out", "x"),
        ("validate", "--policy", "nope"),
        ("nosuch",),
    ],
    ids=" ".join,
)
def test_commands(capsys: pytest.CaptureFixture[str], folder: Path, args: tuple[str, ...]) -> None:
    refusal(capsys, folder, sorted(folder.rglob("*")), *(arg.replace("FOLDER", str(folder)) for arg in args))
