"""`moesim bench`, with short rows: the numbers themselves belong to a quiet machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_help import mixtral_shaped

from sim.cli import bench, bench_work
from sim.cli.bench import Row
from sim.machine.events.copies import Copy, CopyEngine
from traces.synth.chat_lengths import write_drawn_log

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
