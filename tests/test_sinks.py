"""Kept tables and the folded result are two views of one run: every metric can be recomputed from the tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from cli_help import Said, mixtral_shaped, simulated

from sim.figures import numbers
from sim.machine.lanes import OWED
from sim.results import sinks, tables
from sim.results.run_folder import TABLES
from sim.results.tables import TableWriter, columns_of


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixtral_shaped(tmp_path_factory.mktemp("traces"), n_requests=6)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], trace: Path) -> Any:
    def call(*args: object, policy: str = "lru") -> Said:
        return simulated(capsys, "--policy", policy, "--hw", "rtx3090", "--trace", trace, *args)

    return call


def read(folder: Path) -> dict[str, pd.DataFrame]:
    return {name: pd.read_parquet(folder / f"{name}.parquet") for name in TABLES}


@pytest.mark.parametrize(
    "args",
    [
        ("lru",),
        ("fine_moe",),
        ("on_demand",),
        ("lfu", "--batch", 3),
        ("lru", "--gpus", 2, "--cache", "64experts"),
        ("gpu_only",),
        ("promoe",),
    ],
    ids=lambda args: "-".join(map(str, args)),
)
def test_kept_tables_give_the_folded_metrics(run: Any, tmp_path: Path, args: tuple[object, ...]) -> None:
    policy, *options = args
    result = run(*options, "--out", tmp_path / "a", "--set", "out.spans=on", "--json", policy=policy).json
    kept = read(tmp_path / "a")
    spans, requests, decisions, iterations = (kept[name] for name in ("spans", "requests", "decisions", "iterations"))
    near = {"rel": 1e-9, "abs": 1e-15}

    assert len(requests) == result["requests"] == result["ttft_s"]["n"]
    assert requests.ttft_s.mean() == pytest.approx(result["ttft_s"]["mean"], **near)
    assert (requests.first_token_s - requests.start_s).equals(requests.ttft_s)
    tpot_s = (requests.last_token_s - requests.first_token_s) / (requests.output_tokens - 1)
    assert tpot_s.mean() == pytest.approx(result["tpot_s"]["mean"], **near)
    assert requests.tpot_s.mean() == pytest.approx(result["tpot_s"]["mean"], **near)
    assert (requests.last_token_s - requests.start_s).mean() == pytest.approx(result["e2e_s"]["mean"], **near)
    span_s = requests.last_token_s.max() - requests.start_s.min()
    assert requests.output_tokens.sum() / span_s == pytest.approx(result["throughput_tokens_per_s"], **near)

    up = spans[spans.lane.str.startswith("h2d") & (spans.op != OWED)]
    assert up.n_bytes.sum() == result["h2d_bytes"]
    fetched = result["demand_copies"]["n"] + result["prefetch"]["issued"]["n"] - result["prefetch"]["cancelled"]["n"]
    assert len(up) == fetched
    assert (decisions.kind == "fetch").sum() == result["demand_copies"]["n"]
    assert (decisions.kind == "prefetch").sum() == result["prefetch"]["issued"]["n"]

    busy_s = (spans.end_s - spans.start_s).groupby(spans.lane).sum()
    ends_s = spans.end_s.groupby(spans.lane).max()
    for lane, share in result["lane_utilisation"].items():
        over_s = max(result["simulated_s"], ends_s.get(lane, 0.0))  # what nobody waits for goes on after the end
        assert busy_s.get(lane, 0.0) / over_s == pytest.approx(share, **near), lane
        assert share <= 1

    tokens = iterations.groupby("phase").n_tokens.sum()
    assert tokens["decode"] == result["decode_tokens"] == result["phases"]["decode"]["tokens"]
    time_s = (iterations.end_s - iterations.start_s).groupby(iterations.phase).sum()
    for phase, facts in result["phases"].items():
        assert time_s[phase] == pytest.approx(facts["time_s"], **near)
        assert (iterations.phase == phase).sum() == facts["iterations"]


def test_tables_are_tidy_and_share_one_id(run: Any, tmp_path: Path) -> None:
    result = run("--out", tmp_path / "a", "--set", "out.spans=on", "--json", policy="fine_moe").json
    kept = read(tmp_path / "a")
    for name, frame in kept.items():
        assert list(frame.columns) == list(columns_of(name))
        assert set(frame.run_id) == {result["run_id"]}
    assert len(kept["runs"]) == 1
    row = kept["runs"].iloc[0]
    assert json.loads(row.params) == result["params"]
    assert list(row.caveats) == result["caveats"]
    told = dict(numbers(result))
    assert len(told) > 150
    assert {key: None if pd.isna(row[key]) else row[key] for key in told if key in row} == {
        key: value for key, value in told.items() if key in row
    }
    assert kept["decisions"].iteration.is_monotonic_increasing
    assert kept["spans"].layer.min() == 0  # nothing is marked by a negative number
    assert (kept["spans"].end_s >= kept["spans"].start_s).all()
    assert json.loads((tmp_path / "a" / "result.json").read_text()) == result


def test_the_id_tells_inputs_apart_and_nothing_else(run: Any, tmp_path: Path) -> None:
    changes = (
        (),
        ("--seed", 1),
        ("--cache", "40experts"),
        ("--set", "scope=global"),
        ("--set", "hw.h2d.latency_s=1e-6"),
    )
    ids = {run(*args, "--json").json["run_id"] for args in changes}
    assert len(ids) == 5
    plain = run("--json").json["run_id"]
    assert plain in ids
    assert run("--json", "--model", "mixtral-8x7b", "--out", tmp_path / "a").json["run_id"] == plain


OVERRIDES = (
    "--set",
    "hw.h2d.bandwidth_bytes_per_s=5e10",
    "--set",
    "engine.per_layer_s=1e-4",
    "--vram",
    "20GB",
    "--set",
    "model.norm_bias=true",
    "--set",
    "scope=layer",
)


def test_what_was_set_is_in_everything_that_is_kept(run: Any, tmp_path: Path) -> None:
    result = run(*OVERRIDES, "--out", tmp_path / "a", "--json").json
    expected = {
        "vram": 20_000_000_000,
        "hw.h2d.bandwidth_bytes_per_s": 5e10,
        "engine.per_layer_s": 1e-4,
        "model.norm_bias": True,
        "scope": "layer",
    }
    assert result["overrides"] == expected
    name = (
        "lru scope=layer on rtx3090 with vram=20GB, h2d.bandwidth_bytes_per_s=5e10, engine.per_layer_s=0.0001 "
        "(mixtral-8x7b bf16 with norm_bias=true, mix)"
    )
    assert result["name"] == name
    row = pd.read_parquet(tmp_path / "a" / "runs.parquet").iloc[0]
    assert (json.loads(row.overrides), row["name"], row["memory.vram_bytes"]) == (expected, name, 20_000_000_000)
    again = simulated_again(run, tmp_path)
    assert (again["overrides"], again["name"]) == (expected, name)


def simulated_again(run: Any, tmp_path: Path) -> Any:
    return run("--config", tmp_path / "a" / "config.yaml", "--json").json


def test_lengths_are_those_of_what_was_served(run: Any, tmp_path: Path) -> None:
    result = run("--out", tmp_path / "a", "--requests", 2, "--json").json
    requests = pd.read_parquet(tmp_path / "a" / "requests.parquet")
    for name in ("prompt_tokens", "output_tokens"):
        column = requests[name]
        assert result["lengths"][name] == {"mean": column.mean(), "min": column.min(), "max": column.max()}
    longest = int((requests.prompt_tokens + requests.output_tokens).max())
    assert result["lengths"]["longest_context_tokens"] == longest
    row = pd.read_parquet(tmp_path / "a" / "runs.parquet").iloc[0]
    assert row["lengths.prompt_tokens.max"] == requests.prompt_tokens.max()
    assert row["lengths.output_tokens.min"] == requests.output_tokens.min()
    text = run("--requests", 2).out
    assert "lengths        prompts of 5 tokens, outputs of 9 tokens; longest context 14 tokens" in text.splitlines()


def test_writer_memory_does_not_grow_with_the_table(tmp_path: Path) -> None:
    with TableWriter(tmp_path, "decisions", "id", rows_per_group=10) as writer:
        for index in range(105):
            writer.add(index, 0, 1, 2, "fetch")
            assert len(writer._rows) < 10
    file = pq.ParquetFile(tmp_path / "decisions.parquet")
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [10] * 10 + [5]
    assert file.read().column("decision").to_pylist() == list(range(105))


class TestFolder:
    def test_a_folder_of_something_else_is_never_replaced(self, run: Any, tmp_path: Path) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "thesis.tex").write_text("precious")
        assert "thesis.tex" in run("--out", tmp_path / "a", "--overwrite").error
        assert (tmp_path / "a" / "thesis.tex").read_text() == "precious"

    def test_spans_are_kept_on_request_only(self, run: Any, tmp_path: Path) -> None:
        """They take far more room than all else: 1,200 requests would fill a disk that nobody offered."""
        with_spans = run("--out", tmp_path / "a", "--set", "out.spans=on", "--json").json
        said = run("--out", tmp_path / "b")
        assert "; --set out.spans=on adds what every lane did)" in said.out
        assert {path.name for path in (tmp_path / "b").iterdir()} == sinks.FILES - {"spans.parquet"}
        less = json.loads((tmp_path / "b" / "result.json").read_text())
        assert {**less, "wall_s": 0} == {**with_spans, "wall_s": 0}
        for table in ("decisions", "requests", "iterations"):
            one, other = (tmp_path / folder / f"{table}.parquet" for folder in "ab")
            assert one.read_bytes() == other.read_bytes()
        assert "with_spans" not in (tmp_path / "b" / "config.yaml").read_text()
        assert run("--out", tmp_path / "a", "--overwrite").code == 0
        assert not (tmp_path / "a" / "spans.parquet").exists()
        assert "add --out DIR" in run("--set", "out.spans=on").error

    def test_a_failing_run_leaves_nothing(self, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(tables.TableWriter, "_flush", full)
        timeline = tmp_path / "t.json"
        assert "No space left on device" in run("--out", tmp_path / "a", "--timeline", timeline).error
        assert list(tmp_path.iterdir()) == []


class TestTimeline:
    def test_both_at_once_agree(self, run: Any, tmp_path: Path) -> None:
        run(
            "--out",
            tmp_path / "a",
            "--set",
            "out.spans=on",
            "--timeline",
            tmp_path / "t.json",
            "--set",
            "timeline.iterations=10000",
        )
        events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
        spans = pd.read_parquet(tmp_path / "a" / "spans.parquet")
        drawn = [event for event in events if event["ph"] == "X" and event["cat"] not in ("prefill", "decode")]
        assert len(drawn) == len(spans)


def test_keeping_changes_no_number(run: Any, tmp_path: Path) -> None:
    for policy in ("lru", "fine_moe"):
        plain = run("--json", policy=policy).json
        kept = run("--json", "--out", tmp_path / policy, policy=policy).json
        assert {**plain, "wall_s": 0} == {**kept, "wall_s": 0}
