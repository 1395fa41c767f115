"""Options that change nothing are refused or told, and answers compare like with like."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_help import mixtral_shaped, moesim, simulated
from tiny_traces import tiny_trace


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return mixtral_shaped(tmp_path, n_requests=2)


@pytest.fixture
def prompts_only(tmp_path: Path) -> Path:
    """Requests of one output token: nothing decodes, so there is no TPOT."""
    return tiny_trace(tmp_path / "prompts.safetensors", 32, 8, 2, n_requests=4, prompt=3, outputs=1)


@pytest.mark.parametrize(
    ("verb", "words", "told"),
    [
        ("run", ["--router", "least_loaded"], "--router, got 'least_loaded' with one replica"),
        ("run", ["--set", "timeline.from=3"], "--set timeline.*, got it without --timeline"),
        (
            "run",
            ["--set", "sim.contention=off", "--set", "hw.contention.gpu_slowdown_by_h2d=0.5"],
            "--set hw.contention.gpu_slowdown_by_h2d, got it with --set sim.contention=off",
        ),
    ],
)
def test_what_would_do_nothing_is_refused(capsys, trace, verb, words, told):
    done = moesim(capsys, verb, "--policy", "lru", "--hw", "rtx3090", "--trace", trace, *words)
    assert done.code == 2
    assert told in done.error


def test_a_drive_that_nobody_reads_is_told(capsys, trace):
    words = ("--hw", "h200-sxm", "--trace", trace, "--drive", "gen4x4", "--json")
    resident = simulated(capsys, "--policy", "gpu_only", *words).json
    assert "drive not used: every expert is on the GPU" in resident["caveats"]
    read = simulated(capsys, "--policy", "lru", *words, "--ram", "40GB").json
    assert read["ram_peak_bytes"] == read["host_memory"]["peak_bytes"] <= read["host_memory"]["bytes"]


def test_without_decoding_nothing_is_called_a_tpot(capsys, trace, prompts_only):
    run = ("--policy", "lru", "--policy", "fiddler", "--hw", "rtx3090", "--arrivals", "none", "--workers", 1)
    done = moesim(capsys, "plan", *run, "--trace", prompts_only)
    assert done.code == 2
    assert "plan without --goal, got requests of one output token" in done.error
    swept = moesim(capsys, "sweep", *run, "--trace", prompts_only, "--cache", "20%,40%")
    assert "ms to the first token" in swept.out.replace("\n  ", " ")
    rows = [line for line in swept.out.splitlines() if "20%" in line]
    assert rows
    mixed = moesim(capsys, "sweep", *run, "--trace", f"{prompts_only},{trace}").out.replace("\n  ", " ")
    assert "x as fast with trace" not in mixed
    assert "per token" in mixed.partition("least of all")[2].partition("\n")[0]
    hits = moesim(capsys, "curve", "--policy", "lru", "--trace", prompts_only)
    assert "nothing decodes" in hits.out.replace("\n  ", " ")


def test_too_few_requests_to_keep_a_share_say_so(capsys, trace):
    """What nobody keeps at any rate is told by how many kept it at the lowest."""
    slo = ("--slo", "ttft_s <= 10us", "--requests", 12, "--draws", 1, "--workers", 1)
    done = moesim(capsys, "saturate", "--policy", "lru", "--hw", "rtx3090", "--trace", trace, *slo)
    assert "requests/s 0.0 % do); lru serves" in done.out.replace("\n  ", " ")


def test_another_engine_is_an_input(capsys, trace):
    words = ("diff", f"lru hw=rtx3090 requests=1 trace={trace}")
    assert "no input differs" not in moesim(capsys, *words, "sim.simulator=simpy").out
    done = moesim(capsys, *words, "host_memory_bytes=30GB")
    assert done.code == 2
    assert "host_memory_bytes, got it in a run's words: no such name any more; write ram" in done.error
