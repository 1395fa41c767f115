"""A trace beside published ones: equal cuts, Belady against exhaustive search, and what a verdict says when."""

from __future__ import annotations

import json
from itertools import combinations

import msgspec
import numpy as np
import pytest
from tiny_traces import from_rows, tiny_header, tiny_trace

from traces.convert import Options, convert
from traces.format.reader import Trace
from traces.format.requests import Request
from traces.format.writer import write_trace
from traces.stats import observe, realism
from traces.stats.curves import CURVES, belady_curve
from traces.stats.cuts import cut_figures, definitions, gate_mass, of_one_request, union_by_chance, unions, windows
from traces.stats.public import Printed, public
from traces.stats.realism import beside_printed, judge


def fewest_misses(rows, n_experts, size):
    """The most hits of any cache that keeps a token's experts for one another: every set it could hold is tried."""
    best = {frozenset(): 0}
    for wanted in map(frozenset, rows):
        after = {}
        for held, hits in best.items():
            now, others = hits + len(held & wanted), sorted(held - wanted)
            room = size - len(wanted)
            for kept in combinations(others, min(room, len(others))):
                state = wanted | frozenset(kept)
                after[state] = max(after.get(state, 0), now)
        best = after
    return max(best.values())


@pytest.mark.parametrize("seed", range(12))
def test_belady_is_what_exhaustive_search_finds(seed):
    rng = np.random.default_rng(seed)
    n_experts, top_k, size = [(5, 2, 3), (6, 2, 4), (6, 1, 2), (7, 3, 4)][seed % 4]
    rows = np.array([rng.permutation(n_experts)[:top_k] for _ in range(14)])
    (found,) = belady_curve(rows[:, None], n_experts, [size])
    assert round(found[0] * rows.size) == fewest_misses(rows.tolist(), n_experts, size)


def test_no_curve_passes_belady_and_each_starts_cold_where_told():
    rng = np.random.default_rng(3)
    rows = np.array([[rng.permutation(12)[:3] for _ in range(2)] for _ in range(90)])
    best = belady_curve(rows, 12, [3, 5, 8])
    for name, curve in CURVES.items():
        assert (curve(rows, 12, [3, 5, 8], None) <= best + 1e-12).all(), name
        if name != "random":
            apart = np.mean([curve(rows[i : i + 30], 12, [5], None) for i in (0, 30, 60)], axis=0)
            np.testing.assert_allclose(curve(rows, 12, [5], np.array([0, 30, 60])), apart, err_msg=name)


def made(path, tasks, prompt=2, outputs=5, n_experts=4):
    """Requests of one layer that all ask for their task's two experts, four decode rows each."""
    rows = [[[2 * task, 2 * task + 1]] for task in tasks for _ in range(prompt + outputs - 1)]
    return from_rows(path, rows, n_experts, [(prompt, outputs)] * len(tasks))


def test_windows_hold_one_task_from_the_start_of_a_request(tmp_path):
    path = tiny_trace(tmp_path / "t.safetensors", 2, 8, 2, n_requests=6, prompt=3, outputs=5)
    with Trace(path) as trace:
        rows = observe.sample(trace)
        assert rows.task.max() > 0
        at = windows(rows, 8)
        assert (np.ptp(rows.task[at], axis=1) == 0).all()
        assert (rows.position[at[:, 0]] == 3).all(), "the first decode row"
        assert (rows.position[at] >= 3).all(), "decode rows only"
        assert windows(rows, 1000) is None
        assert cut_figures(rows, 1000) is None


def test_stretches_of_one_request_end_with_it(tmp_path):
    """Three requests of a task, of 5, 9 and 12 decode rows: of 8 rows two have one each, of the task three are made."""
    lengths = [(2, 6), (2, 10), (2, 13)]
    rows = [[[i, 3 - i]] for i, (prompt, outputs) in enumerate(lengths) for _ in range(prompt + outputs - 1)]
    with Trace(from_rows(tmp_path / "t.safetensors", rows, 4, lengths)) as trace:
        found = observe.sample(trace)
        assert [set(found.request[at]) for at in windows(found, 8, of_one=True)] == [{1}, {2}]
        assert {0, 1} in [set(found.request[at]) for at in windows(found, 8)]
        assert of_one_request(trace, 8)["lru_50"] == pytest.approx(14 / 16), "each asks for two of four, always"
        assert of_one_request(trace, 13) is None


def test_cut_figures_by_hand(tmp_path):
    """Every token wants experts 0 and 1 of four: a cache of two misses twice, the top quarter takes half."""
    with Trace(made(tmp_path / "t.safetensors", [0, 0, 0])) as trace:
        found = cut_figures(observe.sample(trace), 8)
    assert found["top_quarter"] == 0.5
    assert found["overlap_1"] == 1.0
    assert found["lru_50"] == found["belady_50"] == pytest.approx(14 / 16)
    assert "lru_25" not in found, "one expert cannot hold a token"
    assert "overlap_16" not in found, "eight rows have no pair so far apart"


def test_unions_are_counted(tmp_path):
    with Trace(made(tmp_path / "a.safetensors", [0] * 4)) as trace:
        assert unions(observe.sample(trace)) == {2: 2.0, 4: 2.0}, "all ask for the same two"
    with Trace(made(tmp_path / "b.safetensors", [0, 1, 2, 3], n_experts=8)) as trace:
        assert unions(observe.sample(trace)) == {2: 4.0, 4: 8.0}, "none shares any"
    assert union_by_chance(1, 128, 8) == pytest.approx(8)
    assert union_by_chance(2, 4, 1) == pytest.approx(4 * (1 - 9 / 16))


def held_against(monkeypatch, n_experts=4, /, **figures):
    """The only published trace there is: k=1, cut to 128 rows."""
    base = public().traces[0]
    facts = {"name": "real", "n_experts": n_experts, "top_k": 1, "cuts": {128: figures}, "unions": {}}
    facts["cuts_of_one"] = facts["cuts"]
    known = msgspec.structs.replace(public(), traces=[msgspec.structs.replace(base, **facts)])
    monkeypatch.setattr(realism, "public", lambda: known)


def skewed(path):
    """One request, 140 decode rows: three in five tokens want expert 0."""
    rows = [[[0 if i % 5 < 3 else 1 + i % 3]] for i in range(141)]
    return from_rows(path, rows, 4, [(1, 141)])


def test_a_verdict_follows_the_figures(tmp_path, monkeypatch):
    with Trace(skewed(tmp_path / "t.safetensors")) as trace:
        mine = cut_figures(observe.sample(trace), 128)
        held_against(monkeypatch, **mine)
        same = judge(trace)
        held = {finding.about: finding.holds for finding in same.findings}
        assert held["order of plain caches"] and held["hit rates"] and held["skew of popularity"]
        assert same.judged.rows == 128
        assert "held against real" in same.line
        assert judge(trace, quick=True).line == same.line
        assert "nothing on load" in same.line, "one request"

        turned = {**mine, "lru_25": mine["lfu_25"] + 0.2, "top_quarter": mine["top_quarter"] - 0.2}
        held_against(monkeypatch, **turned)
        other = judge(trace)
        held = {finding.about: finding.holds for finding in other.findings}
        assert held["order of plain caches"] is (mine["lfu_25"] < mine["lru_25"]) is False
        assert held["hit rates"] is False
        assert held["skew of popularity"] is False
        assert "LRU before LFU" in other.line
        assert f"({100 * turned['top_quarter']:.0f} %)" in other.line.replace("there ", "")


def in_turn(path, n_tasks):
    """Four requests of tasks in turn. A task wants its own two experts twice, then two of four that all share."""
    rows = [
        [[v]]
        for i in range(4)
        for j in range(161)
        for v in [(2 * (i % n_tasks) + j % 2) if j % 6 < 4 else 4 + (j // 3 + j) % 4]
    ]
    requests = [Request(i, 161 * i, 1, 161, f"task{i % n_tasks}") for i in range(4)]
    header = tiny_header(1, 8, 1, tasks=tuple(f"task{i}" for i in range(n_tasks)))
    return write_trace(path, header, requests, experts=np.array(rows))


def test_tasks_that_take_turns_are_told_from_one_at_a_time(tmp_path, monkeypatch):
    """Of one task, LFU keeps one of its two for good. In turns it keeps what the other task liked, and LRU wins."""
    for n_tasks in (1, 2):
        with Trace(in_turn(tmp_path / f"{n_tasks}.safetensors", n_tasks)) as trace:
            mine = cut_figures(observe.sample(trace), 128)
            assert mine["lfu_25"] > mine["lru_25"] + 0.1
            held_against(monkeypatch, 8, **mine)
            found = {finding.about: finding for finding in judge(trace).findings}
        assert found["order of plain caches"].holds, n_tasks
        assert ("one task at a time" in found) == (n_tasks == 2)
    assert "tasks in turn, LRU leads LFU by" in found["one task at a time"].says


def test_what_is_printed_has_a_source_and_a_span():
    known = public()
    for row in (*known.accuracies, *known.predictors, *known.unions, *known.reuse):
        assert row.source
        low, high = row.span
        assert 0 < low <= high
    assert Printed(model="x", n_experts=2, top_k=1, what="y", low=0.1, high=0.4, source="z").span == (0.1, 0.4)
    by_batch = {row.batch: row.mean for row in known.unions}
    for batch, mean in by_batch.items():
        assert 8 <= mean < union_by_chance(batch, 128, 8), "fewer than even, independent choices would ask for"


def test_reuse_by_every_definition(tmp_path):
    """Three decoded tokens behind a prompt of one, one layer of four experts, two each.

    {0,1}, {1,2}, {2,1}, {3,2}: one, two and one of two shared; Jaccard 1/3, 1, 1/3; the heaviest never stays. Choices
    of 0, 1, 2, 3: 1, 3, 3, 1 of four tokens, so 20/16 over 8/4 by popularity.
    """
    path = from_rows(tmp_path / "t.safetensors", [[[0, 1]], [[1, 2]], [[2, 1]], [[3, 2]]], 4, lengths=[(1, 4)])
    with Trace(path) as trace:
        found = definitions(observe.sample(trace))
    assert found == pytest.approx({"share": 4 / 6, "jaccard": 5 / 9, "first": 0.0, "popularity": 0.625, "even": 0.5})


def test_gate_mass_by_rank(tmp_path):
    """Two tokens, one layer: 3/4 and 1/4, 1/2 and 1/2 once divided by their sum, in whatever order they stand."""
    rows = [{"experts": [[0, 1]], "weights": [[0.6, 0.2]]}, {"experts": [[1, 2]], "weights": [[0.1, 0.1]]}]
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = Options(n_experts=4, model="m", renormalised=False)
    with Trace(convert([path], tmp_path / "t.safetensors", options=options).path) as trace:
        assert gate_mass(observe.sample(trace)) == pytest.approx([0.625, 0.375], abs=1e-3)
    path.write_text("".join(json.dumps({"experts": row["experts"]}) + "\n" for row in rows))
    with Trace(convert([path], tmp_path / "bare.safetensors", options=options).path) as trace:
        assert gate_mass(observe.sample(trace)) == []


def test_predictions_are_held_against_what_is_printed_layer_by_layer():
    row = Printed(model="m", n_experts=8, top_k=2, what="x", by_layer=[None, 0.5, 0.75, None], source="s")
    assert beside_printed([None, 0.625, 0.5, 0.9], row) == pytest.approx((-0.0625, -0.25, 2))
    assert beside_printed([None, 0.6], row) is None, "another number of layers"
    (table,) = (row for row in public().accuracies if row.by_layer)
    assert (len(table.by_layer), table.by_layer[0], min(table.by_layer[1:])) == (32, None, table.low)
    assert sum(table.by_layer[1:]) / 31 == pytest.approx(table.mean, abs=0.006)
