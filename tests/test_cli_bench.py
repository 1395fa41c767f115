"""`moesim bench`, with short rows: the numbers themselves belong to a quiet machine."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from cli_help import mixtral_shaped, moesim

from sim.cli import bench, bench_work
from sim.cli.bench import Row
from sim.cli.bench_policy import Plain
from sim.machine.events.copies import Copy, CopyEngine
from sim.policy.registry import find
from traces.format.check import check_trace
from traces.format.reader import Trace
from traces.synth.chat_lengths import load_lengths, write_drawn_log

BARE = Row("bare", "pass")


def told(tmp_path: Path, *rows: Row, repeat: int = 1) -> dict[str, dict[str, Any]]:
    log = tmp_path / "log.csv"
    log.touch()
    return {row["name"]: row for row in bench.measure(repeat, list(rows), log)["rows"]}


def test_a_ratio_is_a_figure_by_that_of_the_row_beside_and_held_to_its_bound(tmp_path: Path) -> None:
    base = Row("base", "found = {'value': 4.0}", unit="steps/s")
    rows = [
        Row(f"{at_most} {at_least}", "found = {'value': 8.0}", "base", at_most, at_least, unit="steps/s")
        for at_most, at_least in ((None, None), (2.5, None), (1.5, None), (None, 1.5), (None, 2.5))
    ]
    found = told(tmp_path, base, *rows)
    assert [found[row.name]["ratio"] for row in rows] == [2.0] * 5
    assert [found[row.name]["ok"] for row in rows] == [True, True, False, True, False]
    assert (found["base"]["ratio"], found["base"]["value"], found["base"]["ok"]) == (None, 4.0, True)


def test_rows_are_commands_in_processes_of_their_own(tmp_path: Path) -> None:
    trace = mixtral_shaped(tmp_path)
    kept = f"simulate --policy lru --hw rtx3090 --trace {trace}"
    run, wrong = f"{kept} --json", "simulate --policy"
    found = told(
        tmp_path,
        BARE,
        Row("run", run, "bare", 1e9, most_bytes=1e12),
        Row("fat", run, most_bytes=1.0),
        Row("each", run, unit="s/token"),
        Row("page", "moesim report {folder}/a -o {folder}/a.html", unit="B", first=f"{kept} --out {{folder}}/a"),
        Row("wrong", wrong),
        Row("after wrong", "pass", "wrong", 9.0),
        Row("wrong first", "pass", first=wrong),
    )
    assert found["run"]["ok"] and found["run"]["ratio"] == found["run"]["value"] / found["run"]["beside_value"] > 1
    assert found["run"]["peak_bytes"] is None or (1e7 < found["run"]["peak_bytes"] < 5e8 and not found["fat"]["ok"])
    assert 0 < found["each"]["value"] < found["run"]["value"] * 3
    assert found["page"]["value"] > 1e5
    for name in ("wrong", "wrong first"):
        assert "--policy" in found[name]["error"] and found[name]["value"] is None and not found[name]["ok"]
    assert (found["after wrong"]["ratio"], found["after wrong"]["ok"]) == (None, False)


def test_rows_are_chosen_by_how_they_begin_with_what_they_stand_beside(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = (BARE, Row("other", "1 / 0"), Row("mine", "pass", "bare", 1e-9))
    monkeypatch.setattr(bench, "ROWS", rows)
    said = moesim(capsys, "bench", "--repeat", 1, "--only", "mi", "--json").json
    assert [row["name"] for row in said["rows"]] == ["bare", "mine"]
    checked = moesim(capsys, "bench", "--repeat", 1, "--only", "mi", "--check")
    assert checked.code == 1 and "misses it" in checked.out and checked.err.startswith("error: bench")
    assert checked.out.startswith(f"engine compiled: {'yes' if bench.compiled() else 'no'}\n")
    assert "ZeroDivisionError" in moesim(capsys, "bench", "--repeat", 1, "--only", "other").out
    unknown = moesim(capsys, "bench", "--only", "mime")
    assert (unknown.code, unknown.out) == (2, "") and "did you mean 'mine'" in unknown.err


def test_every_row_stands_beside_one_that_runs_before_it_and_every_ratio_has_a_bound() -> None:
    names = [row.name for row in bench.ROWS]
    assert len(set(names)) == len(names)
    for at, row in enumerate(bench.ROWS):
        assert not row.beside or (row.beside in names[:at] and (row.at_most or row.at_least))


def test_short_replays_count_decode_tokens_alone(tmp_path: Path) -> None:
    assert bench_work.timeouts(2000)["value"] > 0
    for policy, n_store in ((bench_work.PLAIN, 0), ("fine_moe", 5)):
        found = bench_work.replay(str(tmp_path), policy, n_store, 6)
        assert found["value"] > 0 and "tokens/s" in found["note"]
    assert bench_work.bound(str(tmp_path), 20, 2)["value"] > 0


def test_engines_are_compared_key_by_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = bench_work.both(str(tmp_path), "fine_moe", n_test=4)
    assert found["value"] > 0 and "keys of both results equal" in found["note"]
    # One that differs must be told: a copy engine that takes a little longer.
    real = CopyEngine.submit

    def slower(self: CopyEngine, copy: Copy) -> None:
        copy.duration_s *= 1 + 1e-9
        real(self, copy)

    monkeypatch.setattr(CopyEngine, "submit", slower)
    wrong = bench_work.both(str(tmp_path), "lru", n_test=4)
    assert "tpot_s" in wrong["error"] and "h2d_bytes" not in wrong["error"]


def test_synthetic_traces_are_sound(tmp_path: Path) -> None:
    bench_work.synthetic_trace(tmp_path / "t.safetensors", (3, 8, 2), 4, 10, requests=2)
    with Trace(tmp_path / "t.safetensors") as trace:
        assert check_trace(trace) == []
        assert trace.header.labels == ("synthetic",)
        assert [request.outputs for request in trace.requests] == [5, 6, 6]


@pytest.mark.parametrize("said", [True, False, None])
def test_it_asks_the_engine_whether_it_is_compiled(monkeypatch: pytest.MonkeyPatch, said: bool | None) -> None:
    monkeypatch.setattr("sim.engine.compiled", None if said is None else lambda: said, raising=False)
    assert bench.compiled() is bool(said)


def test_the_plain_policy_answers_three_questions_and_one_hook() -> None:
    hooks = {name for name, value in vars(Plain).items() if inspect.isfunction(value)} - {"bind"}
    assert hooks == {"accessed", "victim", "evicted", "layer_done"}
    assert find(bench_work.PLAIN).name == Plain.name


def test_a_log_is_drawn_as_the_published_one(tmp_path: Path) -> None:
    """Read as Azure's own: its rate, and its lengths by their quantiles."""
    from traces.synth.arrivals import arrivals

    write_drawn_log(tmp_path / "azure.csv", 4000)
    found, published = arrivals(str(tmp_path / "azure.csv"), 4000), load_lengths()
    assert found[-1].at_s / (len(found) - 1) == pytest.approx(published.mean_gap_s, rel=0.05)
    for lengths, tokens in (
        ([one.prompt_len or 0 for one in found], published.prompt_tokens),
        ([one.outputs or 0 for one in found], published.output_tokens),
    ):
        middle = sorted(lengths)[len(lengths) // 2]
        assert middle == pytest.approx(tokens[published.shares.index(0.5)], rel=0.05)
        assert tokens[0] <= min(lengths) <= max(lengths) <= tokens[-1]


@pytest.mark.thorough
def test_the_rows_of_a_long_load_and_of_a_sweep_run(tmp_path: Path) -> None:
    """As they stand in the table, with few requests and two links."""
    write_drawn_log(tmp_path / "azure.csv", 8)
    rows = {row.name: row for row in bench.ROWS}
    load = rows["half of the long load"]
    load = load._replace(
        runs=load.runs.removesuffix(str(bench.N_LOGGED // 2)) + "8", first=load.first.removesuffix("200") + "3"
    )
    links = rows["64 links"]._replace(beside="", runs=",".join(rows["64 links"].runs.split(",")[:2]))
    found = bench.measure(1, [load, links], tmp_path / "azure.csv")
    assert found["log"] == "azure.csv"
    assert json.loads(json.dumps(found)) == found
    for row in found["rows"]:
        assert (row["error"], row["ok"]) == (None, True) and row["value"] > 0
