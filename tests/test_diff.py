"""`moesim diff`: two runs beside each other; parts that sum to the difference, planted differences that are found."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cli_help import Said, mixtral_shaped, moesim, simulated
from tiny_traces import ALL

import moesim as face
from sim.cli.verbs import VERBS
from sim.options import RunSpec
from sim.results.by_layer import WAITS_S
from sim.results.tables import columns_of
from sim.setup.naming import REPLACES
from sim.studies.diff.diff import Diff
from sim.studies.diff.inputs import ASKED, TOLD
from sim.studies.diff.named import both
from sim.studies.diff.side import PARTS

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return mixtral_shaped(tmp_path, n_requests=8)


@pytest.fixture
def diff(capsys: pytest.CaptureFixture[str]):
    return lambda *args: moesim(capsys, "diff", *args)


@pytest.fixture
def run(tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]):
    def make(name: str, *args: object, policy: str = "lru") -> Path:
        out = tmp_path / name
        said = simulated(capsys, "--policy", policy, "--hw", "rtx3090", "--trace", trace, "--out", out, *args)
        assert said.code == 0, said.err
        return out

    return make


def close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-15)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("lru", "lfu"),
        ("lru", "fiddler"),
        ("lru batch=2", "lru batch=4"),
        ("lfu gpus=2", "lru batch=2"),
        ("lru", "hw=a6000"),
        ("lru split=all", "lfu"),
    ],
)
def test_parts_sum_to_each_mean_and_to_the_difference(trace: Path, a: str, b: str) -> None:
    found = face.diff(f"{a} hw=rtx3090 trace={trace}", b)
    for time in found.times.values():
        assert time.basis == "requests"
        assert time.a_s is not None
        assert time.b_s is not None
        assert [part.part for part in time.parts] == [part for part in PARTS if part != "drive"]
        assert close(math.fsum(part.a_s for part in time.parts), time.a_s)
        assert close(math.fsum(part.b_s for part in time.parts), time.b_s)
        assert abs(math.fsum(part.difference_s for part in time.parts) - (time.b_s - time.a_s)) <= 1e-9 * time.a_s
    assert close(found.times["tpot_s"].a_s or 0.0, found.a.result.tpot_s.mean or 0.0)
    assert close(found.times["ttft_s"].b_s or 0.0, found.b.result.ttft_s.mean or 0.0)


@pytest.mark.parametrize("b", ["fiddler", "promoe"])
def test_parts_are_those_of_the_phases_where_requests_run_one_by_one(trace: Path, b: str) -> None:
    """A second way to the same figures: what GPU 0 waited for in decode, layer by layer, and the time of decode."""
    found = face.diff(f"lru hw=rtx3090 trace={trace}", b)
    for side in (found.a, found.b):
        told, requests = side.result, side.requests
        assert requests is not None
        spent_s = {
            part: math.fsum(one.parts_s["tpot_s"][at] * (one.output_tokens - 1) for one in requests.values())
            for at, part in enumerate(PARTS)
        }
        decoded = [row for row in told.by_layer if row["phase"] == "decode"]
        for part in ("demand", "prefetch"):
            waited_s = math.fsum(row[f"wait_{part}_s"] for row in decoded)
            assert math.isclose(spent_s[part], waited_s, rel_tol=1e-9, abs_tol=1e-9)
        for part in ("host", "cpu", "predictor"):
            waited_s = math.fsum(row[f"wait_{part}_s"] for row in decoded)
            assert math.isclose(spent_s[part], waited_s, rel_tol=1e-9, abs_tol=1e-9)
        assert math.isclose(math.fsum(spent_s.values()), told.phases.decode.time_s, rel_tol=1e-9)
    assert found.times["tpot_s"].parts[2].part == "prefetch"
    assert (found.times["tpot_s"].parts[2].b_s > 0) == (b == "promoe")


@pytest.mark.parametrize("b", ["promoe", "fiddler", "lfu batch=2"])
def test_waits_of_layers_and_reasons_of_misses_are_those_of_the_results(trace: Path, b: str) -> None:
    found = face.diff(f"lru hw=rtx3090 trace={trace}", b)
    for which, side in (("a", found.a), ("b", found.b)):
        told = side.result
        decoded = [row for row in told.by_layer if row["phase"] == "decode"]
        waited = math.fsum(getattr(one, f"{which}_s") for one in found.layer_waits) * told.phases.decode.iterations
        waits_s = math.fsum(row[name] for row in decoded for name in WAITS_S)
        assert len(found.layer_waits) == 32
        assert math.isclose(waited, waits_s, rel_tol=1e-9)
        assert math.isclose(
            math.fsum(getattr(one, which) for one in found.misses), told.miss_rate or 0.0, abs_tol=1e-12
        )
    differences = [one.difference_s for one in found.layer_waits]
    assert sorted(differences, key=abs, reverse=True) == differences


def test_arrivals_a_request_waits_for_others_and_all_of_it_is_told(tmp_path: Path) -> None:
    trace = mixtral_shaped(tmp_path, n_requests=8, levels=ALL)
    found = face.diff(f"lru hw=rtx3090 trace={trace}", "batch=2")
    for time in found.times.values():
        assert close(math.fsum(part.a_s for part in time.parts), time.a_s or 0.0)
        assert close(math.fsum(part.b_s for part in time.parts), time.b_s or 0.0)
    waited = {(time, part.part): part for time, one in found.times.items() for part in one.parts}
    assert waited["ttft_s", "queue"].a_s > 0.0  # the second arrives while the first runs
    assert waited["tpot_s", "others"].a_s == 0.0  # one at a time
    assert waited["tpot_s", "others"].b_s > 0.0  # the second's prompt between tokens of the first


def test_a_faster_link_changes_no_decision_and_copies_alone(diff: Any, run: Any) -> None:
    a = run("a")
    found = diff(a, "hw.h2d.bandwidth_bytes_per_s=5e10", "--json").json
    assert found["first_decision"] is None
    assert found["decisions_not_compared"] is None
    assert {one["key"] for one in found["inputs"]} == {"set.hw.h2d.bandwidth_bytes_per_s", "hw_sha256"}
    parts = {one["part"]: one["difference_s"] for one in found["tpot_s"]["parts"]}
    assert parts["demand"] < 0.99 * found["tpot_s"]["difference"] < 0
    assert {one["key"] for one in found["machine_figures"]} == {"hw.h2d.bandwidth_bytes_per_s"}
    verdicts = {one["key"]: one["verdict"] for one in found["figures"]}
    assert verdicts["tpot_s.mean"] == "better"
    assert "hit_rate" not in verdicts
    text = diff(a, "hw.h2d.bandwidth_bytes_per_s=5e10").out
    assert "every decision is the same" in text
    first = text.splitlines()[0]
    assert re.match(r"B is [\d.]+ times as fast per token as A \(.+ against .+\): .+ less waiting for copies", first)


def test_equal_runs_are_said_to_be_equal_and_exit_code_tells(diff: Any, run: Any) -> None:
    a, b, other = run("a"), run("b"), run("c", "--cache", "15%")
    said = diff(a, b, "--exit-code")
    assert (said.code, said.out.splitlines()[0]) == (
        0,
        "A and B are equal, every figure to the last bit: nothing that decides them differs",
    )
    assert diff(a, other).code == 0
    assert diff(a, other, "--exit-code").code == 1
    assert diff(a, b, "--json").json["equal"] is True


def rewritten(folder: Path, name: str, change: Any) -> None:
    path = folder / f"{name}.parquet"
    pq.write_table(change(pq.read_table(path)), path)


@pytest.mark.parametrize("row", [0, 7, 1000, -1])
def test_a_planted_decision_is_found_where_it_is(diff: Any, run: Any, row: int) -> None:
    a, b = run("a"), run("b")

    def other(table: pa.Table) -> pa.Table:
        experts = table["expert"].to_pylist()
        experts[row] = 7 - experts[row]
        return table.set_column(table.schema.get_field_index("expert"), "expert", pa.array(experts, pa.int32()))

    rewritten(b, "decisions", other)
    rows = pq.read_table(a / "decisions.parquet").to_pylist()
    at = row % len(rows)
    found = diff(a, b, "--json").json["first_decision"]
    fields = ("iteration", "layer", "expert", "kind")
    assert found["at"] == at
    assert [found["a"][name] for name in fields] == [rows[at][name] for name in fields]
    assert found["b"]["expert"] == 7 - rows[at]["expert"]
    assert [one["expert"] for one in found["before"]] == [one["expert"] for one in rows[max(0, at - 5) : at]]
    assert [one["expert"] for one in found["then_a"]] == [one["expert"] for one in rows[at + 1 : at + 4]]
    used = [
        one["iteration"]
        for one in rows[:at]
        if one["kind"] == "gpu" and (one["layer"], one["expert"]) == (rows[at]["layer"], rows[at]["expert"])
    ]
    assert found["a"]["used_before"] == (used[-1] if used else None)


def test_a_record_that_a_replay_does_not_give_is_taken_as_it_is_and_said_so(diff: Any, run: Any) -> None:
    a, b = run("a"), run("b")
    facts = json.loads((b / "result.json").read_text("utf-8"))
    facts["tpot_s"]["mean"] *= 2
    (b / "result.json").write_text(json.dumps(facts), "utf-8")
    found = diff(a, b, "--json").json
    assert "a replay gives other figures, the first tpot_s.mean" in found["b"]["notes"][0]
    assert found["b"]["replayed"] is False
    assert found["figures"][0]["key"] == "tpot_s.mean"
    assert found["tpot_s"]["basis"] == "phase"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": "0.0.1"}, "made by version 0.0.1"),
        ({"run_id": "0" * 12}, "no longer those it was made of"),
        ({"simulator": "real"}, "measured on hardware"),
    ],
)
def test_why_a_record_is_not_replayed(diff: Any, run: Any, change: dict[str, Any], said: str) -> None:
    a, b = run("a"), run("b", policy="lfu")
    facts = json.loads((b / "result.json").read_text("utf-8"))
    (b / "result.json").write_text(json.dumps(facts | change), "utf-8")
    if "run_id" in change:
        for name in ("requests", "iterations", "decisions"):
            (b / f"{name}.parquet").unlink()
    found = diff(a, b, "--json").json
    assert said in found["b"]["notes"][0]
    total_s = math.fsum(one["b_s"] for one in found["tpot_s"]["parts"])
    assert close(total_s, found["tpot_s"]["b"])
    assert found["tpot_s"]["basis"] == "phase"


def test_a_trace_that_changed_is_named(diff: Any, run: Any, trace: Path, tmp_path: Path) -> None:
    a, b = run("a"), run("b", policy="lfu")
    mixtral_shaped(tmp_path, outputs=7, n_requests=8)
    assert trace.exists()
    note = diff(a, b, "--json").json["a"]["notes"][0]
    assert "changed since: trace" in note


def test_other_requests_cannot_be_paired(diff: Any, run: Any, tmp_path: Path) -> None:
    other = mixtral_shaped(tmp_path / "other", outputs=6) if (tmp_path / "other").mkdir() is None else None
    a = run("a")
    found = diff(a, f"trace={other}", "--json").json
    assert found["tpot_s"]["paired"] is False
    assert found["requests"] == []
    assert "their traces differ, so requests cannot be paired" in found["answer"]
    assert found["decisions_not_compared"].startswith("the trace differs")
    assert close(math.fsum(one["b_s"] for one in found["tpot_s"]["parts"]), found["tpot_s"]["b"])


def test_means_are_over_the_requests_that_both_served(diff: Any, run: Any) -> None:
    a, b = run("a", "--requests", 2), run("b", policy="lfu")
    found = diff(a, b, "--json").json
    table = pq.read_table(b / "requests.parquet").to_pylist()
    common = {one["request"] for one in found["requests"]}
    assert len(common) == 2 < len(table)
    assert close(found["tpot_s"]["b"], sum(one["tpot_s"] for one in table if one["request"] in common) / 2)
    assert "over the 2 requests that both served" in found["answer"]


def test_words_are_over_the_other_run(trace: Path, run: Any) -> None:
    a = run("a", "--cache", "20%", "--set", "scope=layer")
    spec = both(str(a), "lfu", {})[1].spec
    assert spec is not None
    assert (spec.policy, spec.cache, spec.set) == ("lfu", "20%", {})  # another policy's scope is not lfu's
    spec = both(str(a), "cache=40experts", {})[1].spec
    assert spec is not None
    assert (spec.policy, spec.cache, spec.set) == ("lru", "40experts", {"scope": "layer"})
    spec = both("hw.h2d.latency_s=1e-3 vram=20GB", str(a), {})[0].spec
    assert spec is not None
    assert (spec.vram, spec.set) == (20_000_000_000, {"scope": "layer", "hw.h2d.latency_s": 1e-3})
    first, second = both("moepic split=uniform requests=1", "lru", {"hw": "rtx3090", "set": {"hw.h2d.latency_s": 0.1}})
    assert first.spec is not None
    assert second.spec is not None
    assert (first.spec.split, first.spec.set) == ("test", {"hw.h2d.latency_s": 0.1, "split": "uniform"})
    assert (second.spec.requests, second.spec.set) == (1, {"hw.h2d.latency_s": 0.1})


def test_every_field_of_a_run_is_compared() -> None:
    """But for what a result tells as `set.*`."""
    as_set = {"set", "predictor", *REPLACES}
    told = {"sim_hit": "hit_definition"}
    assert {told.get(name, name) for name in RunSpec.__struct_fields__ if name not in as_set} <= {*TOLD, *ASKED}


def test_one_at_a_time_is_what_each_run_gives(diff: Any, trace: Path) -> None:
    a = f"lru hw=rtx3090 trace={trace} requests=1"
    found = diff(a, "lfu hw=a6000 cache=15% hw.h2d.latency_s=1e-3", "--one-at-a-time", "--json").json
    rows = {one["input"]: one for one in found["one_at_a_time"]}
    assert list(rows) == ["policy", "hw", "cache", "hw.h2d.latency_s"]
    changes: dict[str, dict[str, Any]] = {
        "policy": {"policy": "lfu"},
        "hw": {"hw": "a6000"},
        "cache": {"cache": "15%"},
        "hw.h2d.latency_s": {"set": {"hw.h2d.latency_s": 1e-3}},
    }
    for name, change in changes.items():
        alone = face.simulate(**{"policy": "lru", "hw": "rtx3090", "trace": trace, "requests": 1} | change)
        assert rows[name]["tpot_s"] == alone.tpot_s.mean, name


def test_results_of_simulate_and_classes(trace: Path) -> None:
    class Oldest(face.Policy):
        name = "oldest"

        def bind(self, view: Any) -> None:
            self._order: dict[Any, None] = {}

        def accessed(self, piece: Any, hit: bool, view: Any) -> None:
            self._order.setdefault(piece)

        def evicted(self, piece: Any, view: Any) -> None:
            del self._order[piece]

        def victim(self, piece: Any, speculative: bool, view: Any) -> Any:
            return view.first_evictable(self._order)

    a = face.simulate("lru", "rtx3090", trace=trace)
    b = face.simulate(Oldest, "rtx3090", trace=trace)
    found = face.diff(a, b)
    assert isinstance(found, Diff)
    assert found.a.replayed
    assert found.b.replayed
    assert len(found.requests) == a.n_requests
    assert list(found.parts.columns) == ["time", "part", "a_s", "b_s", "difference_s"]
    assert str(found).startswith(found.answer[:20])
    assert face.diff(a, a).equal


def test_points_of_a_sweep(capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path, diff: Any) -> None:
    out = tmp_path / "sweep"
    said = moesim(
        capsys, "sweep", "--policy", "lru", "--policy", "lfu", "--hw", "rtx3090", "--trace", trace, "--out", out
    )
    assert said.code == 0, said.err
    points = sorted((out / "points").iterdir())
    found = diff(*points, "--json").json
    assert found["tpot_s"]["paired"] is True
    assert {found["a"]["result"]["policy"], found["b"]["result"]["policy"]} == {"lru", "lfu"}
    assert "its configuration is not beside it" in found["a"]["notes"][0]
    assert "it holds a sweep; name one of its points" in diff(out, points[0]).error


class TestUntrusted:
    def test_no_such_thing(self, diff: Any, tmp_path: Path, trace: Path) -> None:
        lru = f"lru hw=rtx3090 trace={trace}"
        assert "no such file or folder" in diff(tmp_path / "none", lru).error
        assert "it holds no result.json" in diff(tmp_path, lru).error
        assert "on which GPU?" in diff("lru", "lfu").error
        assert "got no policy" in diff("hw=rtx3090", "hw=a6000").error
        assert "an empty name" in diff("", lru).error
        assert "did you mean" in diff(lru, "lruu").error

    @pytest.mark.parametrize("name", ["requests", "iterations", "decisions"])
    def test_a_table_that_is_none_or_another_runs(self, diff: Any, run: Any, name: str) -> None:
        a, b = run("a"), run("b", policy="lfu")
        path = b / f"{name}.parquet"
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        error = diff(a, b, "--no-replay").error
        assert str(path) in error
        assert "not a table of a run" in error
        shutil.copy(a / f"{name}.parquet", path)
        assert "is not its result's" in diff(a, b, "--no-replay").error
        rewritten(b, name, lambda table: table.drop_columns([[*columns_of(name)][-1]]))
        assert f"{[*columns_of(name)][-1]}: no such column" in diff(a, b, "--no-replay").error

    def test_requests_that_are_not_those_of_the_result(self, diff: Any, run: Any) -> None:
        a, b = run("a"), run("b")
        rewritten(b, "requests", lambda table: table.slice(0, 1))
        assert "its result has" in diff(a, b).error

        def nulls(table: pa.Table) -> pa.Table:
            at = table.schema.get_field_index("ttft_s")
            return table.set_column(at, "ttft_s", pa.nulls(len(table), pa.float64()))

        shutil.copy(a / "requests.parquet", b / "requests.parquet")
        rewritten(b, "requests", nulls)
        assert "requests.parquet: ttft_s: a null" in diff(a, b).error


def test_the_page_has_every_key(diff: Any, run: Any) -> None:
    page = (ROOT / "docs" / "diff.md").read_text("utf-8")
    found: Said = diff(run("a"), "lfu cache=15%", "--one-at-a-time", "--json")
    named = set(re.findall(r"`(\w+)`", page))
    told = found.json
    keys = (
        set(told) | set(told["a"]) | set(told["tpot_s"]) | set(told["first_decision"]) | set(told["one_at_a_time"][0])
    )
    keys |= set(told["requests"][0]) | set(told["misses"][0]) | set(told["layer_waits"][0])
    keys |= set(told["tpot_s"]["parts"][0]) | set(told["layers"][0]) | set(told["figures"][0])
    assert keys - named == set()
    assert "diff" in VERBS


def test_decisions_are_compared_as_far_as_the_same_requests_run_together(diff: Any, run: Any) -> None:
    a, b = run("a"), run("b", "--batch", 2)
    found = diff(a, b, "--json").json
    assert found["first_decision"] is None
    assert found["decisions_not_compared"].startswith("from iteration 1 on, other requests")  # a prompt, not a token
    found = diff(a, run("c", "--batch", 2, policy="fiddler"), "--json").json
    assert found["first_decision"]["a"]["iteration"] == 0


def test_times_cut_otherwise_stand_in_rows_of_their_own(diff: Any, run: Any) -> None:
    """Layers that are recorded of one phase only: copies of the other are not told apart."""
    a, b = run("a", "--requests", 1), run("b", "--requests", 1, policy="lfu")
    facts = json.loads((b / "result.json").read_text("utf-8"))
    facts["by_layer"] = [row for row in facts["by_layer"] if row["phase"] == "decode"]
    (b / "result.json").write_text(json.dumps(facts), "utf-8")
    found = diff(a, b, "--no-replay", "--json").json
    assert [[one["part"] for one in found[time]["parts"]][1] for time in ("tpot_s", "ttft_s")] == ["demand", "copy"]
    assert close(math.fsum(one["b_s"] for one in found["ttft_s"]["parts"]), found["ttft_s"]["b"])
    text = diff(a, b, "--no-replay").out
    assert "waiting for copies on demand" in text
    assert re.search(r"^waiting for copies +\d", text, re.MULTILINE)


def test_requests_that_are_drawn_otherwise_are_not_paired(diff: Any, trace: Path) -> None:
    a = f"lru hw=rtx3090 trace={trace} arrivals=poisson:1 requests=6"
    same = diff(a, "lfu", "--json").json
    assert same["tpot_s"]["paired"] is True
    assert len(same["requests"]) == 6
    for time in ("tpot_s", "ttft_s"):
        assert close(math.fsum(one["b_s"] for one in same[time]["parts"]), same[time]["b"])
    other = diff(a, "seed=1", "--json").json
    assert other["tpot_s"]["paired"] is False
    assert "drawn otherwise" in other["answer"]
    assert diff(a, "arrivals.scale=2", "--json").json["inputs"] == [{"key": "arrivals_scale", "a": 1.0, "b": 2.0}]
