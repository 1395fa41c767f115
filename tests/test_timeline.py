"""Timelines: valid trace events, arrows and counters that agree with what the engine has counted, windows, several."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cli_help import Said, called, mixtral_shaped, moesim, simulated

from sim.machine.lanes import OWED

WHOLE = ("--set", "timeline.iterations=10000")
ENDS = {"copied for": ("h2d", "gpu"), "sent to the CPU": ("d2h", "cpu"), "result of the CPU": ("cpu", "h2d")}


class Drawn:
    """A timeline as a viewer reads it: nanoseconds, slices by lane, arrows between slices, counters."""

    def __init__(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        events = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))["traceEvents"]
        self.titles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        self.order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
        self.lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        self.slices: dict[tuple[int, str], list[tuple[int, int, Any]]] = defaultdict(list)
        self.counters: dict[tuple[int, str], list[tuple[float, dict[str, int]]]] = defaultdict(list)
        ends: dict[int, list[Any]] = defaultdict(list)
        for e in events:
            assert e["ph"] in "MXCsf"
            assert e["ph"] == "M" or e["ts"] >= 0
            if e["ph"] == "X":
                start = int(e["ts"] * 1000)  # as Perfetto's importer does: begin and length, each cut to nanoseconds
                lane = e["pid"], self.lanes[e["pid"], e["tid"]]
                self.slices[lane].append((start, start + int(e["dur"] * 1000), e))
            elif e["ph"] == "C":
                self.counters[e["pid"], e["name"]].append((e["ts"], e["args"]))
            elif e["ph"] in "sf":
                ends[e["id"]].append(e)
        for found in self.slices.values():
            found.sort(key=lambda one: one[0])
        self.arrows = []
        for begin, end in ends.values():
            assert (begin["ph"], end["ph"], end["bp"]) == ("s", "f", "e")
            assert all(begin[key] == end[key] for key in ("name", "cat", "pid"))
            self.arrows.append((begin["name"], self._slice_at(begin), self._slice_at(end)))

    def _slice_at(self, e: Any) -> tuple[str, tuple[int, int, Any]]:
        """The slice of its lane that an end of an arrow lies in."""
        lane, at = self.lanes[e["pid"], e["tid"]], int(e["ts"] * 1000)
        slices = self.slices[e["pid"], lane]
        found = slices[bisect_right(slices, at, key=lambda one: one[0]) - 1]
        assert found[0] <= at < found[1], (e, found)
        return lane, found

    def check(self) -> None:
        for slices in self.slices.values():  # no lane does two things at once; overlapping slices are dropped
            assert all(one[1] <= other[0] for one, other in pairwise(slices))
        for kind, (lane, source), (to_lane, target) in self.arrows:
            facts, others = source[2]["args"], target[2]["args"]
            assert (facts["layer"], facts["expert"]) == (others["layer"], others["expert"])
            assert source[1] <= target[0]
            assert (lane.rstrip("0123456789"), to_lane.rstrip("0123456789")) == ENDS[kind]
        for samples in self.counters.values():
            assert all(one[0] < other[0] for one, other in pairwise(samples))
            assert all(value >= 0 for _, values in samples for value in values.values())

    def n_arrows(self, kind: str) -> int:
        """Arrows that begin at slices of a kind."""
        return sum(source[2]["cat"] == kind for _, (_, source), _ in self.arrows)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixtral_shaped(tmp_path_factory.mktemp("traces"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], trace: Path) -> Any:
    def call(*args: object, policy: str = "lru") -> Said:
        return simulated(capsys, "--policy", policy, "--hw", "rtx3090", "--trace", trace, *args)

    return call


@pytest.mark.parametrize(
    "args",
    [
        ("lru",),
        ("promoe",),
        pytest.param(("promoe", "--simpy"), marks=pytest.mark.thorough),
        ("moepic", "--requests", 1),
        pytest.param(("hobbit",), marks=pytest.mark.thorough),
        ("hybrimoe",),
        ("daop",),
        ("lfu", "--gpus", 2, "--cache", "64experts"),
        ("on_demand", "--batch", 2),
    ],
    ids=lambda args: "-".join(map(str, args)),
)
def test_it_agrees_with_the_counts(run: Any, tmp_path: Path, args: tuple[object, ...]) -> None:
    """Every copy that was of use has its arrow and no other; room, and bytes under way, are the engine's."""
    policy, *options = args
    path = tmp_path / "t.json"
    result = run(*options, "--timeline", path, *WHOLE, "--json", policy=policy).json
    drawn = Drawn(path)
    drawn.check()
    assert drawn.n_arrows("demand") == result["demand_copies"]["n"]
    assert drawn.n_arrows("prefetch") == result["prefetch"]["useful"]["n"] + result["prefetch"]["late"]["n"]
    on_cpu = [one for lane, slices in drawn.slices.items() if lane[1] == "cpu" for one in slices]
    on_cpu = [one for one in on_cpu if one[2]["name"] != OWED]
    assert drawn.n_arrows("activations") == drawn.n_arrows("expert") == len(on_cpu)

    def peaks(what: str, key: str) -> list[int]:
        found = {name: samples for (_, name), samples in drawn.counters.items() if name.endswith(what)}
        return [max(values[key] for _, values in samples) for _, samples in sorted(found.items())]

    assert peaks("expert bytes", "taken") == result["cache_peak_bytes"]
    for (_, name), samples in drawn.counters.items():
        if "in flight" in name or "waiting" in name:
            assert not any(samples[-1][1].values()), f"{name}: something is left at the end"
    moved = 0.0  # bytes x seconds of what moves, which is each copy's bytes times how long it took
    for (_, name), samples in drawn.counters.items():
        if "in flight" in name:
            for (at, values), (until, _) in pairwise(samples):
                moved += values["moving"] * (until - at)
    copies = [e for (_, lane), found in drawn.slices.items() if lane.startswith("h2d") for *_, e in found]
    assert moved == pytest.approx(sum(e["args"].get("bytes", 0) * e["dur"] for e in copies), rel=1e-6)


def test_waiting_and_the_policys_queue(run: Any, tmp_path: Path) -> None:
    """A policy with a queue of its own shows it; copies wait in the engine's no longer than until they move."""
    run("--timeline", tmp_path / "t.json", *WHOLE, policy="promoe")
    drawn = Drawn(tmp_path / "t.json")
    assert max(values["pieces"] for _, values in drawn.counters[1, "prefetch queue"]) > 1
    waiting = drawn.counters[1, "h2d copies waiting"]
    flight = dict(drawn.counters[1, "h2d bytes in flight"])
    assert max(values["copies"] for _, values in waiting) > 1
    assert all((values["copies"] > 0) == (flight[at]["waiting"] > 0) for at, values in waiting)
    run("--timeline", tmp_path / "u.json", *WHOLE)
    assert (1, "prefetch queue") not in Drawn(tmp_path / "u.json").counters


class TestWindow:
    def test_it_is_a_cut_of_the_whole(self, run: Any, tmp_path: Path) -> None:
        run("--timeline", tmp_path / "all", *WHOLE, policy="promoe")
        run(
            "--timeline",
            tmp_path / "cut",
            "--set",
            "timeline.from=4",
            "--set",
            "timeline.iterations=3",
            policy="promoe",
        )
        whole, cut = Drawn(tmp_path / "all"), Drawn(tmp_path / "cut")
        cut.check()
        steps = cut.slices[1, "iterations"]
        assert [e["name"] for *_, e in steps] == ["decode 4", "decode 5", "decode 6"]
        opens, closes = steps[0][0], steps[-1][1]
        for lane, slices in whole.slices.items():
            shown = [(start, end) for start, end, _ in slices if end > opens and start < closes]
            assert [(start, end) for start, end, _ in cut.slices[lane]] == shown, lane
        for name, samples in whole.counters.items():
            before = [values for at, values in samples if at * 1000 <= opens]
            assert cut.counters[name][0] == (pytest.approx(opens / 1000, abs=1e-3), before[-1]), name
            assert cut.counters[name][1:] == [one for one in samples if opens < one[0] * 1000 < closes], name

    def test_a_time(self, run: Any, tmp_path: Path) -> None:
        run("--timeline", tmp_path / "all", *WHOLE)
        steps = Drawn(tmp_path / "all").slices[1, "iterations"]
        middle_s = (steps[6][0] + steps[6][1]) / 2e9
        run(
            "--timeline",
            tmp_path / "t",
            "--set",
            f"timeline.from={middle_s * 1e3}ms",
            "--set",
            "timeline.iterations=2",
        )
        shown = Drawn(tmp_path / "t").slices[1, "iterations"]
        assert [e["name"] for *_, e in shown] == [e["name"] for *_, e in steps[6:8]]


class TestSeveral:
    @pytest.mark.thorough
    def test_runs_below_one_another(self, run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for policy in ("lru", "promoe"):
            run("--out", tmp_path / policy, "--timeline", tmp_path / f"{policy}.json", policy=policy)
        both = tmp_path / "both.json"
        said = moesim(capsys, "timeline", tmp_path / "promoe", tmp_path / "lru" / "config.yaml", "-o", both)
        assert said.code == 0
        drawn = Drawn(both)
        drawn.check()
        assert [title.split()[:2] for title in drawn.titles.values()] == [
            ["promoe:", "promoe"],
            ["config.yaml:", "lru"],
        ]
        assert drawn.order == {1: 1, 2: 2}
        for pid, policy in enumerate(("promoe", "lru"), 1):
            alone = Drawn(tmp_path / f"{policy}.json")
            for (_, lane), slices in alone.slices.items():
                assert [one[:2] for one in drawn.slices[pid, lane]] == [one[:2] for one in slices]
            assert {n for p, n in drawn.counters if p == pid} == {n for _, n in alone.counters}
        assert "it exists" in moesim(capsys, "timeline", tmp_path / "lru", "-o", both).error


def test_a_real_run_and_its_prediction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two processes with the same lanes; the arrows of both are the copies that were of use."""
    pytest.importorskip("torch")
    from real_world import tiny_model
    from tiny_traces import tiny_trace

    from sim.cli import simulate

    model, path = tiny_model(tmp_path), tmp_path / "t.json"
    routing = tiny_trace(tmp_path / "r.safetensors", n_layers=4, n_experts=4, top_k=2, n_requests=4, outputs=6)
    args = ("--policy", "lru", "--hw", "rtx3090", "--model", model, "--trace", routing, "--precision", "fp32")
    real = ("--cache", "8experts", "--real=cpu", "--timeline", path, *WHOLE, "--json")
    said = called(capsys, simulate, *args, *real)
    result = said.json
    drawn = Drawn(path)
    drawn.check()
    assert [title.split(":")[0] for title in drawn.titles.values()] == ["measured", "predicted"]
    assert {lane for pid, lane in drawn.slices if pid == 2} <= {lane for pid, lane in drawn.slices if pid == 1}
    steps = [[e["name"] for *_, e in drawn.slices[pid, "iterations"]] for pid in (1, 2)]
    assert steps[0] == steps[1]
    assert drawn.n_arrows("demand") == 2 * result["demand_copies"]["n"] > 0
    for pid in (1, 2):
        samples = drawn.counters[pid, "gpu expert bytes"]
        assert max(values["taken"] for _, values in samples) == result["cache_peak_bytes"][0]
        assert drawn.counters[pid, "h2d bytes in flight"][-1][1] == {"moving": 0, "waiting": 0}
