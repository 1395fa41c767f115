"""A sweep on a real Dask scheduler and workers that are processes: the table of a local one, though one is killed."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from cli_help import mixtral_shaped, moesim

WITHOUT_DASK = """
import sys
sys.modules["distributed"] = None
from sim.cli import main
main(["sweep", "--policy", "lru", "--hw", "rtx3090", "--cluster", "tcp://127.0.0.1:1"])
"""
needs_dask = pytest.mark.skipif(importlib.util.find_spec("distributed") is None, reason="the extra `cluster`")


class Cluster:
    """A scheduler and its workers, each a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.file, self.folder = folder / "scheduler.json", folder
        self.processes: list[subprocess.Popen[bytes]] = []
        self.start("dask_scheduler", "--scheduler-file", str(self.file), "--port", "0", "--no-dashboard")
        deadline_s = time.monotonic() + 180
        while not self.file.exists():
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        self.address: str = json.loads(self.file.read_text(encoding="utf-8"))["address"]

    def start(self, what: str, *words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"distributed.cli.{what}", *words]
        process = subprocess.Popen(command, stdout=-3, stderr=-3, cwd=Path(__file__).parents[1])
        self.processes.append(process)
        return process

    def worker(self) -> subprocess.Popen[bytes]:
        words = ("--nthreads", "1", "--no-nanny", "--no-dashboard", "--local-directory", str(self.folder))
        return self.start("dask_worker", self.address, *words)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    found = Cluster(tmp_path)
    yield found
    for process in found.processes:
        process.kill()
        process.wait(timeout=30)


def random_seeds(folder: Path, seeds: str) -> list[object]:
    """A sweep of a point for each seed, every one of which takes a while."""
    trace = mixtral_shaped(folder, outputs=200)
    machine = ("--hw", "rtx3090", "--cache", "40experts")
    return ["sweep", "--policy", "random", *machine, "--seed", seeds, "--trace", trace]


@contextmanager
def under_way(cluster: Cluster, out: Path, words: list[object]) -> Iterator[subprocess.Popen[str]]:
    """A process of the sweep on the cluster, two points of which are done."""
    there = [*words, "--out", out, "--cluster", cluster.address]
    command = [sys.executable, "-m", "sim", *map(str, there)]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as sweep:
        deadline_s = time.monotonic() + 180
        while len(list(out.glob("points/*.json"))) < 2 and sweep.poll() is None:
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        yield sweep


@pytest.mark.thorough
@needs_dask
@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_worker_that_is_killed_loses_nothing(capsys: Any, cluster: Cluster, tmp_path: Path) -> None:
    words = random_seeds(tmp_path, "0:19")
    assert moesim(capsys, *words, "--out", tmp_path / "here").code == 0
    victim, _ = cluster.worker(), cluster.worker()
    with under_way(cluster, tmp_path / "there", words) as sweep:
        runs = sweep.poll() is None
        victim.kill()
        _, said = sweep.communicate(timeout=120)
    assert runs, said
    assert sweep.returncode == 0, said
    assert (tmp_path / "there" / "sweep.parquet").read_bytes() == (tmp_path / "here" / "sweep.parquet").read_bytes()


@pytest.mark.thorough
@needs_dask
def test_workers_share_a_recording(capsys: Any, cluster: Cluster, tmp_path: Path, monkeypatch: Any) -> None:
    """One of them runs, and what it recorded times the other points wherever these are carried out."""
    monkeypatch.setattr("sim.studies.runner.work._KEPT", {})
    words = ["sweep", "--policy", "lru", "--hw", "rtx3090", "--cache", "40experts", "--trace", mixtral_shaped(tmp_path)]
    words += ["--set", "hw.h2d.bandwidth_bytes_per_s=1e10:4e10:1e10", "--json"]
    here = moesim(capsys, *words, "--out", tmp_path / "here").json
    for _ in range(2):
        cluster.worker()
    there = moesim(capsys, *words, "--out", tmp_path / "there", "--cluster", cluster.address).json
    assert here == there
    assert there["work"] == {"there": 0, "replayed": 1, "timed_by_recording": 3}


@needs_dask
def test_an_address_where_nobody_answers(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sim.studies.runner.cluster.CONNECT_S", 0.5)
    words = ("sweep", "--policy", "lru", "--hw", "rtx3090", "--requests", "1")
    said = moesim(capsys, *words, "--cluster", "tcp://127.0.0.1:1").error
    assert "no scheduler answers there" in said
    assert "an address is tcp://HOST:PORT or tls://HOST:PORT" in moesim(capsys, *words, "--cluster", "localhost").error
    assert "leave one of them out" in moesim(capsys, *words, "--cluster", "tcp://x:1", "--workers", 2).error


@needs_dask
@pytest.mark.parametrize("says", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.2\r\n"])
def test_a_port_on_which_something_else_answers(capsys: Any, monkeypatch: pytest.MonkeyPatch, says: bytes) -> None:
    monkeypatch.setattr("sim.studies.runner.cluster.CONNECT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = []

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    held.append(connection)
                    connection.sendall(says)

        threading.Thread(target=serve, daemon=True).start()
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        said = moesim(
            capsys, "sweep", "--policy", "lru", "--hw", "rtx3090", "--requests", "1", "--cluster", address
        ).error
        server.shutdown(socket.SHUT_RDWR)
        for connection in held:
            connection.close()
    assert "no scheduler answers there" in said
    assert "start one with `dask scheduler`" in said


@pytest.mark.thorough
@needs_dask
@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_scheduler_that_is_killed_is_one_line(cluster: Cluster, tmp_path: Path) -> None:
    cluster.worker()
    with under_way(cluster, tmp_path / "there", random_seeds(tmp_path, "0:199")) as sweep:
        cluster.processes[0].kill()
        _, said = sweep.communicate(timeout=60)
    assert sweep.returncode == 1, said
    assert len(said.splitlines()) == 1, said
    assert "the scheduler has gone" in said
    assert "add --resume" in said


def test_without_dask_the_error_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_DASK], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install 'moe-offload-sim[cluster]'" in done.stderr
