"""`moesim saturate`: the rate that a server takes, found again by what one request takes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner
from tiny_traces import from_rows

from sim.base.errors import BadInput
from sim.cli.saturate import command
from sim.options import RunSpec
from sim.run import execute, prepare
from sim.studies.runner.records import Records
from sim.studies.runner.runner import Runner
from sim.studies.runner.searches import Replays, narrowed
from sim.studies.runner.work import carried_out
from sim.studies.saturate import STEPS, Range, Rates, one_draw, over, said, saturate

LENGTHS = [(1, 2), (3, 6), (2, 3), (1, 9), (1, 1), (2, 5), (4, 2), (1, 4)]


def runner() -> Runner:
    return Runner(Records(), 1, lambda *_: None)


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    """Mixtral's shape, all of it on the card, and requests of a few tokens."""
    n_rows = sum(prompt + outputs - 1 for prompt, outputs in LENGTHS)
    path = from_rows(tmp_path / "short.safetensors", [[[0, 1]] * 32] * n_rows, 8, LENGTHS)
    return RunSpec(policy="gpu_only", hw="a100-80g-sxm", precision="int4_g128", trace=str(path), requests=len(LENGTHS))


@pytest.mark.parametrize("true", [0.004, 0.3, 3.0, 9.99])
def test_bisection_by_hand(true: float) -> None:
    asked: list[float] = []

    def holds(step: float):
        asked.append(10.0 * step / 2**STEPS)
        yield from ()
        return asked[-1] <= true

    with pytest.raises(StopIteration) as end:
        next(narrowed(holds, 2**STEPS, 0, whole=True))
    found = 10.0 * end.value.value[1] / 2**STEPS
    assert found <= true
    assert true - found <= 10.0 / 2**STEPS
    assert len(asked) == STEPS


def test_one_server_takes_what_one_request_takes(spec: RunSpec) -> None:
    """Alone, one after the other: requests per second are the inverse of what one takes on average."""
    setup = prepare(spec)
    with setup.trace:
        served = execute(setup, bounds=False).report.requests
    took_s = [times.last_token_s - times.begun_s for times in served]
    (found,) = saturate([("alone", spec)], 1, 0.95, runner()).policies
    # Of two clients the second has to wait, and so has everybody after it: from its begin to the last one's.
    assert found.capacity_per_s.mean == pytest.approx(1 / (math.fsum(took_s[1:-1]) / (len(took_s) - 2)))
    assert found.kept_per_s is None
    shares = [point["arrivals_per_s"] / found.capacity_per_s.mean for point in found.curve]
    assert shares == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.9])
    waits = [point["queue_s.mean"] for point in found.curve]
    assert waits == sorted(waits)
    assert waits[-1] > 0


def test_a_promise_is_kept_up_to_some_rate(spec: RunSpec) -> None:
    import msgspec

    setup = prepare(spec)
    with setup.trace:
        e2e_s = execute(setup, bounds=False).result.e2e_s.mean
    searches = [
        one_draw(msgspec.structs.replace(spec, slo={"*": {"ttft_s": limit_s}}), 0.95)
        for limit_s in (1e6, 2.5 * e2e_s, 1e-6 * e2e_s)
    ]
    loose, tight, never = Replays(runner(), len(LENGTHS)).together(searches, "")
    assert loose.kept_per_s == loose.capacity_per_s * (1 - 1 / 2**STEPS)
    assert 0 < tight.kept_per_s < loose.kept_per_s
    assert never.kept_per_s == 0
    rows = [over("a", [loose, tight]), over("b", [never])]
    assert rows[0].kept_per_s == Range.of([loose.kept_per_s, tight.kept_per_s])
    assert said(rows[0], "ttft_s <= 1s", 0.95).startswith("a: 95.0 % keep to ttft_s <= 1s up to ")
    assert said(rows[1], "ttft_s <= 1s", 0.95).startswith(
        "no rate at which 95.0 % keep to ttft_s <= 1s (at 0.268 requests/s 0.0 % do); b serves"
    )
    most, rates = Rates(
        first_line="", attain_frac=0.95, draws=2, requests=8, policies=rows, slo={"*": {"ttft_s": 1.0}}
    ).tables()
    assert len(most.text.splitlines()) == 2 + 2
    assert len(rates.text.splitlines()) == 2 + 10


def test_the_command(spec: RunSpec) -> None:
    words = [
        "--policy",
        "gpu_only",
        "--hw",
        "a100-80g-sxm",
        "--trace",
        "qwen1.5-moe-chat",
        "--draws",
        "2",
        "--workers",
    ]
    done = CliRunner().invoke(command, [*words, "1", "--requests", "4", "--json"], catch_exceptions=False)
    told = json.loads(done.output)
    assert told["draws"] == 2
    assert told["requests"] == 4
    (row,) = told["policies"]
    assert row["capacity_per_s"]["least"] <= row["capacity_per_s"]["mean"] <= row["capacity_per_s"]["most"]
    assert told["answer"].startswith("gpu_only serves up to ")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--set", "run.arrivals=poisson:1"], "the rate is what is looked for"),
        (["--set", "sim.energy=gpu"], "--set sim.energy, got 'gpu': rates are looked for"),
        (["--slo", "ttft_s <= 60s:attain=2"], "--slo attain, got '2': slo.attained_frac is a share, 1 at most"),
        (["--slo", "ttft_s <= 60s:attain=0%"], "--slo attain, got '0%': more than nobody, such as 95%; raise it"),
        (["--slo", "ttft_s <= 60s:attend=9%"], "60s:attend=9%"),
        (["--slo", ":attain=50%"], "--slo, got ':attain=50%': nothing is promised"),
        (["--attain", "0.9"], "--attain: no such option any more; write --slo '...:attain=95%'"),
        (["--requests", "1"], "--requests, got 1: too few for most of them to wait; give 3 or more"),
        (["--requests", "0"], "--requests, got 0"),
        (["--policy", "nobody"], "nobody"),
    ],
)
def test_what_is_refused(options: list[str], said: str) -> None:
    done = CliRunner().invoke(command, ["--hw", "rtx3090", "--policy", "lru", "--draws", "1", *options])
    assert isinstance(done.exception, BadInput), done.output
    assert said in str(done.exception)


def test_it_goes_on_from_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed search has replayed is not replayed again, and the answer is that of an undisturbed one."""
    ran: list[RunSpec] = []

    def counted(spec: RunSpec, *others: object) -> object:
        ran.append(spec)
        return carried_out(spec, *others)

    monkeypatch.setattr("sim.studies.runner.runner.carried_out", counted)
    words = ["--policy", "lru", "--hw", "rtx3090", "--requests", "4", "--draws", "1", "--json", "--workers", "1"]

    def told(*more: str) -> object:
        ran.clear()
        done = CliRunner().invoke(command, [*words, "--slo", "ttft_s <= 60s", *more], catch_exceptions=False)
        return json.loads(done.output)

    whole = told()
    n_whole, out = len(ran), tmp_path / "out"
    assert n_whole == 1 + 5 + STEPS
    assert told("--out", str(out)) == whole == json.loads((out / "answer.json").read_text())
    for path in list((out / "points").iterdir())[::2]:
        path.unlink()
    assert told("--out", str(out), "--resume") == whole
    assert 0 < len(ran) < n_whole
    assert told("--out", str(out), "--resume") == whole
    assert ran == []
