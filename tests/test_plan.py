"""A plan says what trying everything says, with far fewer replays; what bounds rule out is never replayed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_help import mixtral_shaped, moesim
from grids import few_each_time

import moesim as face
from sim.base.units import show_seconds
from sim.figures import values_of
from sim.options import RunSpec
from sim.profiles.hardware import load_hardware
from sim.studies.plan import ways
from sim.studies.plan.axes import Axis
from sim.studies.runner import runner
from sim.studies.runner.work import carried_out

CARDS = ("rtx3090", "a6000", "rtx5090")
POLICIES = ("lru scope=global", "lfu scope=global", "lcp scope=global", "on_demand", "fiddler", "fifo scope=global")
BUDGETS = (16, 28, 40, 52)
LINK = "hw.h2d.bandwidth_bytes_per_s"
HW = ("--hw", "rtx3090,a6000,h200-sxm")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty requests to score."""
    return mixtral_shaped(tmp_path_factory.mktemp("plan"), n_requests=40, outputs=7)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[RunSpec]:
    """What is replayed, in this process."""
    found = []

    def counted(spec: RunSpec, *others: Any) -> Any:
        found.append(spec)
        return carried_out(spec, *others)

    monkeypatch.setattr(runner, "carried_out", counted)
    return found


Row = dict[str, Any]


@pytest.fixture(scope="module")
def brute(trace: Path) -> list[Row]:
    """Every point of the grid, by `moesim sweep`, in the order in which a plan climbs."""
    table = face.sweep(POLICIES, CARDS, trace=trace, cache=[f"{n}experts" for n in BUDGETS], workers=1)
    rows: list[Row] = table.to_dict("records")
    assert set(table["status"]) == {"ok"}

    def cost(row: Row) -> tuple[float, ...]:
        hw = load_hardware(row["hw"])
        return hw.vram_bytes.value, hw.h2d.bandwidth_bytes_per_s.value, int(row["cache"].removesuffix("experts"))

    return sorted(rows, key=cost)


def agrees(goal_s: float, rows: list[Row], policies: tuple[str, ...], trace: Path, ran: list[RunSpec]) -> float:
    """Hold a plan to all points; what share of their replays it made. One of few requests counts by its share."""
    frame = face.plan(
        f"tpot_s.mean <= {goal_s}",
        policies,
        CARDS,
        trace=trace,
        cache=[f"{n}experts" for n in BUDGETS],
        workers=1,
        no_suggestions=True,
    )
    reaching = [row for row in rows if row["tpot_s.mean"] <= goal_s]
    best = frame.attrs["plan"]["best"]
    if reaching:
        first = reaching[0]["hw"], reaching[0]["cache"]
        fastest = min(
            (row for row in reaching if (row["hw"], row["cache"]) == first), key=lambda row: row["tpot_s.mean"]
        )
        assert (best["hw"], best["cache"], best["policy"]) == (*first, fastest["label"])
        assert best["figures"][0]["value"] == fastest["tpot_s.mean"]
    else:
        assert best is None
    by_point = {(row["hw"], row["cache"], row["label"]): row for row in rows}
    assert len(frame) == len(rows) == len(by_point)
    for one in frame.to_dict("records"):
        row = by_point[one["hw"], one["cache"], one["policy"]]
        if one["state"] in ("reaches", "misses"):
            assert (one["state"] == "reaches") == (row["tpot_s.mean"] <= goal_s)
            assert (one["tpot_s.mean"], one["run_id"]) == (row["tpot_s.mean"], row["run_id"])
        if one["state"] == "excluded_by_bound":
            assert row["tpot_s.mean"] >= row["lower_bound.tpot_s"] > goal_s
    whole = sum(20 if spec.requests is None else spec.requests for spec in ran) / 20
    work = frame.attrs["plan"]["work"]
    assert (work["replays"], work["whole_replays"]) == (len(ran), whole)
    return whole / len(rows)


@pytest.mark.parametrize("goal_s", few_each_time([0.1, 0.2, 0.22, 0.3, 0.33, 0.35, 0.7], (0.1, 0.22, 0.33)))
def test_a_plan_agrees_with_brute_force_in_a_tenth_of_its_replays(
    goal_s: float, brute: list[Row], trace: Path, ran: list[RunSpec]
) -> None:
    """Three cards, five policies, four budgets."""
    rows = [row for row in brute if row["label"] in POLICIES[:5]]
    assert len(rows) == 60
    assert agrees(goal_s, rows, POLICIES[:5], trace, ran) <= 0.1


@pytest.mark.parametrize("goal_s", [0.33, 0.36, 0.75])
def test_where_many_nearly_reach_the_goal_it_still_agrees(
    goal_s: float, brute: list[Row], trace: Path, ran: list[RunSpec]
) -> None:
    """Caches alone: random routing leaves them within a few percent of one another, and of the goal."""
    policies = tuple(name for name in POLICIES if name != "fiddler")
    assert agrees(goal_s, [row for row in brute if row["label"] in policies], policies, trace, ran) <= 0.17


def test_a_goal_that_no_card_can_reach_takes_no_replay(capsys: Any, trace: Path, ran: list[RunSpec]) -> None:
    said = moesim(capsys, "plan", "--trace", trace, "--goal", "tpot_s.mean <= 1us", "--workers", 1, *HW)
    assert said.code == 1
    assert said.out.startswith("no machine reaches tpot_s.mean <= 1.00 us: ruled out by lower bounds alone, ")
    assert "no replay" in said.out
    assert ran == []


GOALS = ("tpot_s.mean", "tpot_s.p50", "ttft_s.mean", "ttft_s.p95", "e2e_s.p50", "e2e_s.mean", "tput")


@pytest.mark.parametrize("goal", few_each_time(GOALS, ("tpot_s.mean", "ttft_s.p95", "tput")))
def test_no_replay_is_better_than_its_bound(goal: str, trace: Path) -> None:
    """Percentiles and throughput, too; with a goal that all reach, so that nothing is ruled out."""
    text = "throughput_tokens_per_s >= 1e-9" if goal == "tput" else f"{goal} <= 1h"
    frame = face.plan(text, ("lru", "fiddler", "moe_infinity"), CARDS[:2], trace=trace, all_machines=True, workers=1)
    told = frame[frame["state"] == "reaches"]
    key = text.split()[0]
    assert len(told) >= 2
    sign = 1 if "<=" in text else -1
    assert (told[f"{key}.bound"] > 0).all()
    assert (sign * (told[key] - told[f"{key}.bound"]) >= 0).all()


class TestOrder:
    """By what machines are ordered."""

    goal = ("--goal", "tpot_s.mean <= 1h", "--policy", "lru", "--workers", 1)

    def said(self, capsys: Any, trace: Path, *words: object) -> Any:
        return moesim(capsys, "plan", "--trace", trace, *self.goal, *words, "--json").json

    def test_by_memory_then_link_without_prices(self, capsys: Any, trace: Path) -> None:
        found = self.said(capsys, trace, "--hw", "a6000,a5000,rtx5090,l4")
        assert [one["hw"] for one in found["candidates"]] == ["l4", "a5000", "rtx5090", "a6000"]
        assert found["answer"].startswith(
            "smallest machine for tpot_s.mean <= 3600 s of mixtral-8x7b in bf16: l4 with lru"
        )

    def test_by_price_and_those_without_one_last(self, capsys: Any, trace: Path, tmp_path: Path) -> None:
        prices = tmp_path / "prices.yaml"
        prices.write_text("schema: 1\nunit: EUR\nprices:\n  rtx-5090: 3000\n  A6000: {price: 2500, note: used}\n")
        found = self.said(capsys, trace, "--hw", "l4,rtx5090,a6000", "--prices", prices)
        assert [(one["hw"], one["price"]) for one in found["candidates"]] == [
            ("a6000", 2500),
            ("rtx5090", 3000),
            ("l4", None),
        ]
        assert found["answer"].startswith(
            "cheapest machine for tpot_s.mean <= 3600 s of mixtral-8x7b in bf16: a6000 (2,500 EUR) with lru"
        )
        two = self.said(capsys, trace, "--hw", "rtx5090", "--prices", prices, "--gpus", 2)
        assert two["best"]["price"] == 6000

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("schema: 1\nunit: EUR\nprices: {rtx3091: 700}", "prices.rtx3091: "),
            ("schema: 1\nunit: EUR\nprices: {rtx3090: -1}", "prices[...]"),
            ("schema: 1\nunit: EUR\nprices: {rtx3090: .inf}", "prices"),
            ("schema: 1\nprices: {rtx3090: 1}", "unit"),
            ("schema: 2\nunit: EUR\nprices: {rtx3090: 1}", "schema"),
            ("schema: 1\nunit: EUR\nprices: {}", "there are none"),
            ("schema: 1\nunit: EUR\nprices: {rtx3090: 1, '3090': 2}", "has a price already"),
            ("- 1", "prices are a mapping"),
        ],
    )
    def test_a_file_that_is_wrong(self, capsys: Any, trace: Path, tmp_path: Path, text: str, message: str) -> None:
        (tmp_path / "prices.yaml").write_text(text)
        words = ("plan", "--trace", trace, *self.goal, "--hw", "l4", "--prices", tmp_path / "prices.yaml")
        error = moesim(capsys, *words).error
        assert str(tmp_path / "prices.yaml") in error
        assert message in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--goal", "tpot_s.men <= 1ms"), "did you mean 'tpot_s.mean'?"),
        (("--goal", "tpot_s <= 1ms"), "one of tpot_s.mean"),
        (("--goal", "tpot_s.mean == 1ms"), "write <= or >="),
        (("--goal", "tpot_s.mean <= fast"), "--goal, got 'fast'"),
        (("--goal", "tpot_s.p99 <= 1h"), "it takes 100 requests, and 20 are replayed"),
        (("--goal", "tpot_s.mean <= 1h", "--batch", "1,2"), "--batch, got 2 values"),
        (
            ("--goal", "tpot_s.mean <= 1h", "--set", "engine.per_layer_s=0,1e-6"),
            "--set engine.per_layer_s, got 2 values",
        ),
        (("--goal", "tpot_s.mean <= 1h", "--policy", "belady"), "a bound, no system"),
        (("--goal", "tpot_s.mean <= 1h", "--policy", "lruu"), "did you mean 'lru'?"),
        (("--goal", "tpot_s.mean <= 1h", "--hw", "rtx3091"), "rtx3091"),
        (("--goal", "tpot_s.mean <= 1h", "--cache", "999experts"), "--cache, got 999"),
    ],
)
def test_what_has_to_be_mended(capsys: Any, trace: Path, words: tuple[str, ...], message: str) -> None:
    hw = () if "--hw" in words else ("--hw", "rtx3090")
    policy = () if "--policy" in words else ("--policy", "lru")
    assert message in moesim(capsys, "plan", "--trace", trace, *words, *hw, *policy, "--workers", 1).error


def test_several_goals_all_have_to_be_reached(trace: Path) -> None:
    """A hit rate has no bound in time; the least margin of all decides between policies."""
    goals = ["tpot_s.mean <= 1s", "hit_rate >= 5%"]
    frame = face.plan(goals, ("lru scope=global", "lfu scope=global"), "rtx3090", trace=trace, workers=1)
    assert frame.attrs["plan"]["best"]["policy"] == "lfu scope=global"
    told = frame.set_index("policy")
    assert told.loc["lru scope=global", "state"] in ("misses", "screened_out")
    assert told.loc["lfu scope=global", "hit_rate"] >= 0.05


def experts(cache: str) -> int:
    """Of `51experts`."""
    return int(cache.removesuffix("experts"))


def tpot_s(**options: Any) -> float:
    """What a single run says, with VRAM enough for any room."""
    found = face.simulate(**options).tpot_s.mean
    assert found is not None
    return found


def test_what_would_have_to_be_true_is(trace: Path) -> None:
    """Each remedy, run once more by itself, reaches the goal; a twentieth less of it does not."""
    goal_s = 0.45
    frame = face.plan(f"tpot_s.mean <= {goal_s}", "lcp", "rtx3090", trace=trace, workers=1)
    assert frame.attrs["answer"].startswith("rtx3090 does not reach tpot_s.mean <= 450 ms; nearest: lcp on rtx3090")
    told = {one["what"]: one for one in frame.attrs["plan"]["suggestions"]["rtx3090"]}
    assert set(told) == {LINK, "run.cache", "hit_rate", "run.precision"}
    need = experts(told["run.cache"]["value"])
    run = {"policy": "lcp", "hw": "rtx3090", "trace": trace}
    for share, meets in ((1.0, True), (0.95, False)):
        link = {LINK: share * told[LINK]["value"]}
        assert (tpot_s(**run | {"set": link}) <= goal_s) is meets
        room = {"cache": f"{int(share * need)}experts", "set": {"hw.vram_bytes": 1e12}}
        assert (tpot_s(**run | room) <= goal_s) is meets
    with_room = face.simulate(**run, cache=told["run.cache"]["value"], set={"hw.vram_bytes": 1e12})
    assert told["hit_rate"]["value"] == with_room.hit_rate > told["hit_rate"]["now"]
    assert tpot_s(**run | {"precision": told["run.precision"]["value"]}) <= goal_s < tpot_s(**run)


def test_what_the_bound_says_is_needed_holds_for_the_bound(trace: Path) -> None:
    """A card that the bound rules out: what the bound needs, and nothing replayed."""
    goal_s = 0.25
    frame = face.plan(f"tpot_s.mean <= {goal_s}", "lru", "rtx3090", trace=trace, workers=1)
    told = {one["what"]: one for one in frame.attrs["plan"]["suggestions"]["rtx3090"]}
    assert {one["how"] for one in told.values()} == {"bound"}
    assert frame.attrs["plan"]["work"]["replays"] == frame.attrs["plan"]["work"]["replays_for_suggestions"] == 0
    for share, meets in ((1.0, True), (0.95, False)):
        link = {LINK: share * told[LINK]["value"]}
        bound = face.simulate(policy="lru", hw="rtx3090", trace=trace, set=link).lower_bound
        assert bound is not None
        assert bound.tpot_s is not None
        assert (bound.tpot_s <= goal_s) is meets


def test_the_least_memory_is_the_least_that_reaches_the_goal(capsys: Any, trace: Path) -> None:
    """Against every size below: for both policies each with fewer experts misses it."""
    words = ("plan", "--trace", trace, "--goal", "tpot_s.mean <= 800ms", "--hw", "rtx3090", "--workers", 1)
    words = (*words, "--policy", "lfu", "--policy", "lcp", "--least-memory", "--json")
    found = moesim(capsys, *words).json
    one = found["best"]
    assert [row["state"] for row in found["candidates"]].count("reaches") == 1
    n = experts(one["cache"])
    sizes = range(n - 6, n + 1)
    table = face.sweep(["lfu", "lcp"], "rtx3090", trace=trace, cache=[f"{n}experts" for n in sizes], workers=1)
    meets = table[table["tpot_s.mean"] <= 0.8]
    assert set(meets["cache"]) == {one["cache"]}
    assert one["policy"] in set(meets["label"])
    assert one["peak_vram_bytes"] == one["needed_vram_bytes"] == meets["peak_vram_bytes"].iloc[0]
    assert one["experts_by_the_bound"] <= n
    assert found["answer"].startswith("least memory for tpot_s.mean <= 800 ms of mixtral-8x7b in bf16: rtx3090 and ")
    assert f" and a cache of {n}experts ({one['peak_vram_bytes'] / 1e9:.1f} GB of VRAM) with" in found["answer"]
    assert "it looks for the capacity itself" in moesim(capsys, *words, "--cache", "3experts").error


def test_the_vram_named_for_a_room_gives_that_room(trace: Path) -> None:
    """Also under a policy that leaves some of it empty, as `fiddler` leaves an expert's for what passes through."""
    words: dict[str, Any] = {"policy": "fiddler", "hw": "rtx3090", "trace": trace}
    run = face.simulate(**words, cache="5experts")
    needed = run.memory.needed_bytes
    assert needed > run.peak_vram_bytes
    for vram_bytes, room in ((needed, 5), (needed - 1, 4)):
        there = face.simulate(**words, vram=vram_bytes)
        assert there.cache_capacity_bytes[0] // there.expert_bytes == room


def test_no_memory_is_enough_so_it_says_what_would_be(capsys: Any, trace: Path) -> None:
    """As a plan of the same goal says it; a goal that nothing reaches is not given a way out."""
    words = ("plan", "--trace", trace, "--hw", "rtx3090", "--policy", "lcp", "--workers", 1, "--json")
    goal = ("--goal", "tpot_s.mean <= 450ms")
    least = moesim(capsys, *words, *goal, "--least-memory")
    assert least.code == 1
    said = json.loads(least.out)
    told = {one["what"]: one for one in said["suggestions"]["rtx3090"]}
    assert list(told.values()) == json.loads(moesim(capsys, *words, *goal).out)["suggestions"]["rtx3090"]
    answer = said["answer"]
    assert answer.startswith("rtx3090 does not reach tpot_s.mean <= 450 ms with all its memory; alone it would take: ")
    assert f"expert cache {experts(told['run.cache']['value'])} experts (" in answer
    assert f"precision {told['run.precision']['value']}: tpot_s.mean " in answer
    hopeless = ("--goal", "tpot_s.mean <= 1us", "--least-memory")
    assert json.loads(moesim(capsys, *words, *hopeless).out)["answer"].endswith("with all its memory")
    assert json.loads(moesim(capsys, *words, *goal, "--least-memory", "--no-suggestions").out)["suggestions"] == {}


class TestMeasured:
    """A measurement beside prediction and bound."""

    words = ("explain", "--hw", "rtx3090", "--policy", "lcp", "--workers", 1, "--json")

    def test_slower_than_predicted(self, capsys: Any, trace: Path) -> None:
        """Which link would give that time: held to a run on that link; and 10 % of the tokens per second less."""
        at = face.simulate(policy="lcp", hw="rtx3090", trace=trace)
        assert at.tpot_s.mean is not None
        assert at.lower_bound is not None
        found = moesim(capsys, *self.words, "--trace", trace, "--measured", f"{0.5 / at.tpot_s.mean}tok/s").json
        assert found["predicted"]["value"] == at.tpot_s.mean
        assert found["measured_tpot_s"] == pytest.approx(2 * at.tpot_s.mean)
        assert found["lower_bound.tpot_s"] == at.lower_bound.tpot_s
        assert not found["inside_the_band"]
        told = {one["what"]: one for one in found["explanations"]}
        link = told["hw.h2d.bandwidth_bytes_per_s"]
        assert tpot_s(
            policy="lcp", hw="rtx3090", trace=trace, set={"hw.h2d.bandwidth_bytes_per_s": link["value"]}
        ) == pytest.approx(2 * at.tpot_s.mean, rel=0.05)
        assert f"{2 * at.tpot_s.mean:.2f} s per token" in found["answer"] or "ms per token" in found["answer"]

    def test_faster_than_predicted_and_than_can_be(self, capsys: Any, trace: Path) -> None:
        bound = face.simulate(policy="lcp", hw="rtx3090", trace=trace).lower_bound
        assert bound is not None
        assert bound.tpot_s is not None
        found = moesim(capsys, *self.words, "--trace", trace, "--measured", f"{bound.tpot_s * 0.99}s").json
        assert "faster than any lossless policy can be there" in found["answer"]
        assert "run.precision" in {one["what"] for one in found["explanations"]}

    def test_causes_move_an_input_and_say_how_far(self, capsys: Any, trace: Path) -> None:
        """In the words of a machine's owner, each by an input that was replayed; no other engine explains one's own."""
        words = ("explain", "--hw", "rtx3090", "--policy", "fiddler", "--workers", 1, "--trace", trace)
        at_s = tpot_s(policy="fiddler", hw="rtx3090", trace=trace)
        found = moesim(capsys, *words, "--measured", f"{2 * at_s}s", "--json").json["explanations"]
        assert "engine" not in {one["what"] for one in found}
        cpu, *_ = found
        assert all(one["causes"] for one in found)
        assert cpu["what"] == "hw.cpu.memory_bandwidth_bytes_per_s" and cpu["value"] < cpu["now"]
        half_s = tpot_s(policy="fiddler", hw="rtx3090", trace=trace, set={cpu["what"]: cpu["now"] / 2})
        assert show_seconds(half_s) in cpu["causes"][0]
        out = " ".join(moesim(capsys, *words, "--measured", f"{2 * at_s}s").out.split())
        told = out.index("what may slow a machine"), out.index("XMP or EXPO off"), out.index("would explain it")
        assert told == tuple(sorted(told))
        faster = moesim(capsys, *words, "--measured", f"{0.8 * at_s}s", "--json").json["explanations"]
        assert not any(one["causes"] for one in faster)

    @pytest.mark.parametrize("share", [0.5, 0.9, 0.99, 1.3, 2.0])
    def test_what_explains_it_comes_nearer(self, capsys: Any, trace: Path, share: float) -> None:
        """Each explanation is what a run of it says, and nearer to what was measured than the prediction is."""
        now_s = tpot_s(policy="lcp", hw="rtx3090", trace=trace)
        found = moesim(capsys, *self.words, "--trace", trace, "--measured", f"{share * now_s}s").json
        told = found["explanations"]
        assert bool(told) is (share != 0.99)  # within the noise there is nothing to explain
        for one in told:
            assert abs(one["tpot_s"] - share * now_s) < abs(1 - share) * now_s
            changed = {one["what"]: one["value"]}
            if one["what"] == "run.cache":
                changed |= {"hw.vram_bytes": 1e13}
            assert tpot_s(policy="lcp", hw="rtx3090", trace=trace, set=changed) == one["tpot_s"]

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--hw", "rtx3090", "--measured", "3tok/s"), "one machine and one policy"),
            (("--hw", "rtx3090,a6000", "--policy", "lru", "--measured", "3tok/s"), "one machine and one policy"),
            (("--hw", "rtx3090", "--policy", "lru", "--measured", "0tok/s"), "no token takes no time"),
            (("--hw", "rtx3090", "--policy", "lru", "--measured", "fast"), "--measured, got 'fast'"),
            (
                ("--hw", "rtx3090", "--policy", "lru", "--cache", "40experts,48experts", "--measured", "3tok/s"),
                "one capacity",
            ),
            (("--policy", "lru", "--measured", "3tok/s", "--arrivals", "poisson:1"), "no option of moesim explain"),
            (("--hw", "rtx3090", "--policy", "lru"), "Missing option '--measured'"),
        ],
    )
    def test_what_has_to_be_mended(self, capsys: Any, trace: Path, words: tuple[str, ...], message: str) -> None:
        assert message in moesim(capsys, "explain", "--trace", trace, *words, "--workers", 1).error


def test_stream_cpu_or_both(capsys: Any, trace: Path) -> None:
    """Ways are told by what happened; where the order changes it does: two runs on either side of each crossover."""
    policies = ("on_demand", "lcp", "fiddler")
    options = [word for name in policies for word in ("--policy", name)]
    said = moesim(capsys, "plan", "--trace", trace, "--hw", "rtx3090", *options, "--workers", 1, "--json")
    found = said.json
    own = {name: tpot_s(policy=name, hw="rtx3090", trace=trace) for name in policies}
    assert [(one["policy"], one["tpot_s"]) for one in found["ways"]] == sorted(own.items(), key=lambda item: item[1])
    assert {one["policy"]: one["way"] for one in found["ways"]} == {
        "on_demand": "stream",
        "lcp": "cache",
        "fiddler": "cpu",
    }
    assert found["answer"].startswith("caching and the CPU on rtx3090 with its tr-pro-3955wx: fiddler takes ")
    runs = moesim(capsys, "compare", "--trace", trace, "--hw", "rtx3090", *options, "--json").json["runs"]
    fiddler = next(run for run in runs if run["policy"] == "fiddler")
    apart = {one["policy"]: one["significant"] for one in found["ways"]}
    assert apart == {"fiddler": None} | {name: name not in fiddler["tied_with"] for name in ("lcp", "on_demand")}
    assert found["answer"].count(", not significant)") == list(apart.values()).count(False)
    few = moesim(capsys, "plan", "--trace", trace, "--hw", "rtx3090", *options, "--workers", 1, "--requests", 1)
    assert "of n = 1 no sampling error can be given" in " ".join(few.out.split())
    (link,) = (one for one in found["crossovers"] if one["what"] == "hw.h2d.bandwidth_bytes_per_s")
    assert (link["faster_now"], link["against"]) == ("fiddler", "lcp")
    assert link["value"] is not None
    for share, first in ((0.94, "fiddler"), (1.06, "lcp")):
        there = {
            name: tpot_s(policy=name, hw="rtx3090", trace=trace, set={link["what"]: share * link["value"]})
            for name in ("fiddler", "lcp")
        }
        assert min(there, key=lambda name: there[name]) == first


def test_a_goal_of_prefill_names_what_binds_prefill(trace: Path) -> None:
    """On a CPU that reads faster than it computes, a prompt waits for it, and a token for the GPU."""
    options: dict[str, Any] = {
        "trace": trace,
        "set": {"hw.cpu.memory_bandwidth_bytes_per_s": 1e13, "hw.cpu.flops_per_s": 3e12},
    }
    bottleneck = face.simulate(policy="llama_cpp", hw="rtx3090", **options).bottleneck
    for phase, key, resource in (("prefill", "ttft_s", "cpu"), ("decode", "tpot_s", "gpu")):
        shares = values_of(bottleneck.of(phase))
        assert shares[resource] == max(shares.values())
        planned = face.plan(f"{key}.mean <= 10h", ("llama_cpp",), "rtx3090", no_suggestions=True, workers=1, **options)
        assert planned["bottleneck"][0] == resource
        assert f"; bound by the {resource}" in planned.attrs["answer"]


@pytest.mark.parametrize("goal", ["ttft_s.mean", "e2e_s.p50"])
def test_bounds_hold_under_load_and_a_queue_that_grows_reaches_no_goal(goal: str, trace: Path) -> None:
    options: dict[str, Any] = {
        "trace": trace,
        "all_machines": True,
        "no_suggestions": True,
        "workers": 1,
        "replicas": 1,
    }
    calm = face.plan(f"{goal} <= 10h", ("lru", "lfu"), "rtx3090", arrivals="poisson:0.02", **options)
    assert set(calm["state"]) == {"reaches"}
    assert (calm[goal] >= calm[f"{goal}.bound"]).all()
    assert (calm[f"{goal}.bound"] > 0).all()
    busy = face.plan(f"{goal} <= 10h", ("lru", "lfu"), "rtx3090", arrivals="poisson:0.5", **options)
    assert set(busy["state"]) == {"misses"}
    assert busy["reason"].str.startswith("unstable queue").all()
    assert "requests come faster than they are served" in busy.attrs["answer"]


class TestTheFolder:
    """A killed plan does not work out again what it has recorded, and answers what an undisturbed one answers."""

    words = (
        "plan",
        "--goal",
        "tpot_s.mean <= 300ms",
        "--policy",
        "lru",
        "--policy",
        "fiddler",
        "--cache",
        "28experts,40experts",
    )

    def asked(self, trace: Path, *words: object) -> tuple[object, ...]:
        return (*self.words, "--trace", trace, "--hw", "rtx3090,a6000", "--workers", 1, "--json", *words)

    @pytest.mark.thorough
    def test_it_goes_on(self, capsys: Any, trace: Path, tmp_path: Path, ran: list[RunSpec]) -> None:
        whole = moesim(capsys, *self.asked(trace)).json
        n_whole, out = len(ran), tmp_path / "out"
        assert moesim(capsys, *self.asked(trace, "--out", out)).json == whole
        kept = sorted(path for kind in ("points", "limits") for path in (out / kind).iterdir())
        assert {path.parent.name for path in kept} == {"points", "limits"}
        for path in kept[::2]:
            path.unlink()
        ran.clear()
        assert moesim(capsys, *self.asked(trace, "--out", out, "--resume")).json == whole
        assert 0 < len(ran) < n_whole
        ran.clear()
        assert moesim(capsys, *self.asked(trace, "--out", out, "--resume")).json == whole
        assert ran == []

    def test_a_damaged_record_is_none(self, capsys: Any, trace: Path, tmp_path: Path, ran: list[RunSpec]) -> None:
        """One that is JSON still, too: a digit that changed would be an answer, a name that is gone a traceback."""
        out = tmp_path / "out"
        words = (
            "plan",
            "--goal",
            "tpot_s.mean <= 1h",
            "--all-machines",
            "--policy",
            "lru",
            "--cache",
            "28experts,40experts",
        )
        words = (*words, "--hw", "rtx3090,a6000", "--trace", trace, "--workers", 1, "--json", "--out", out)
        whole = moesim(capsys, *words).json
        kept = {path: path.read_text() for path in out.glob("*/*.json")}
        n_whole = len(ran)
        assert len(kept) > 3
        ways = (
            lambda text: re.sub(r"(\d)\.(\d)", r"\g<2>1.\1", text),
            lambda text: json.dumps({name: json.loads(text)[name] for name in ("id", "schema")}),
            lambda text: text.replace("{", "[", 1),
        )
        for nth, (path, text) in enumerate(kept.items()):
            path.write_text(ways[nth % len(ways)](text))
            assert path.read_text() != text
        ran.clear()
        assert moesim(capsys, *words, "--resume").json == whole
        assert len(ran) == n_whole
        assert {path: path.read_text() for path in kept} == kept

    def test_it_holds_plans_alone(self, capsys: Any, trace: Path, tmp_path: Path) -> None:
        (tmp_path / "thesis.txt").write_text("mine", encoding="utf-8")
        said = moesim(capsys, *self.asked(trace, "--out", tmp_path, "--resume")).error
        assert "it holds 'thesis.txt', which is no part of a plan" in said


@pytest.mark.parametrize(
    ("slower", "found", "looked"),
    [
        (range(500, 3000), 500.0, (316.0, 1000.0, 10000.0)),  # there and back: no end shows it
        (range(0), None, (1.0, 3.0, 10.0, 32.0, 316.0, 1000.0, 3162.0, 10000.0)),
        (range(5000, 10001), 5000.0, (10000.0,)),
    ],
)
def test_an_order_that_changes_between_the_ends_is_found(
    slower: range, found: float | None, looked: tuple[float, ...]
) -> None:
    """100 experts now; the one that is faster takes 2 s where it is the slower one, else 0.5, the other 1 s."""

    spec: Any = SimpleNamespace

    class Lever(Axis):
        def at(self, value: float) -> Any:
            faster = (2.0 if value in slower else 0.5) if self.key == "faster" else 1.0
            return SimpleNamespace(tpot_s=SimpleNamespace(mean=faster))

    levers = [Lever(key, "x", spec, 100.0, 1.0, 10000.0, show="{:g}".format, whole=True) for key in ("faster", "other")]
    search = ways.between(("x", "y"), levers, None)
    asked = next(search)
    with pytest.raises(StopIteration) as end:
        while True:
            asked = search.send(asked)
    crossing = end.value.value
    assert (crossing.value, crossing.looked_at) == (found, list(looked))
    assert crossing.text == ("at none of 8 values from 1 to 10000" if found is None else f"{found:g}")


def test_the_bound_of_a_machine_holds_for_every_policy_tried_there(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row of a machine that reaches by copies had the bound of copies, which a policy that uses the CPU beats."""
    monkeypatch.setenv("COLUMNS", "250")
    words = ("plan", "--hw", "rtx3090", "--policy", "lfu", "--policy", "fiddler", "--trace", trace, "--no-suggestions")
    goals = ("--goal", "tpot_s.mean <= 1h", "--goal", "h2d_bytes >= 1GB")  # fiddler copies nearly nothing
    told = moesim(capsys, *words, *goals, "--json").json
    least = {one["policy"]: one["bounds"][0]["value"] for one in told["candidates"]}
    assert told["best"]["policy"] == "lfu"
    assert least["fiddler"] < least["lfu"]
    (row,) = [line for line in moesim(capsys, *words, *goals).out.splitlines() if line.startswith("rtx3090 ")]
    assert show_seconds(least["fiddler"]) in row
    assert show_seconds(least["lfu"]) not in row


def test_report_reads_what_out_keeps(capsys: Any, trace: Path, tmp_path: Path) -> None:
    words: list[object] = ["plan", "--trace", trace, "--hw", "rtx3090", "--policy", "lru", "--out", tmp_path / "kept"]
    goal = ["--goal", "tpot_s.mean <= 9s"]
    first = moesim(capsys, *words, *goal, "--json")
    page = json.loads(moesim(capsys, "report", tmp_path / "kept", "--json").out)
    assert page["verdict"] == json.loads(first.out)["answer"]
    again = moesim(capsys, *words, "--goal", "tpot_s.mean <= 8s", "--resume", "--json")  # another goal, another answer
    page = json.loads(moesim(capsys, "report", tmp_path / "kept", "--json").out)
    assert page["verdict"] == json.loads(again.out)["answer"] != json.loads(first.out)["answer"]
