"""Plans under load: promises as goals, bounds that hold with queues, how many replicas, and up to which rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_help import mixtral_shaped, moesim

import moesim as face
from sim.base.errors import BadInput
from sim.bounds.time_bound import LeastTimes
from sim.studies.plan.goal import Limit, goals_of
from sim.studies.plan.request import MOST_REPLICAS
from sim.studies.runner.searches import Replays
from sim.workload.slo import Slo

SLO = "ttft_s <= 4500ms, tpot_s <= 10s"
KEPT, GOOD = "slo.attained_frac", "slo.goodput_requests_per_s"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return mixtral_shaped(tmp_path, n_requests=20)


def value(limit: Limit, goal: str) -> float | None:
    (one,) = goals_of([goal])
    return limit.value(one)


def test_what_may_be_kept_by_hand() -> None:
    """Three requests at 0, 1 and 10 s that take 2 s to the first token and 5 s in all when alone; one has no SLO."""
    slo = Slo(ttft_s=4.0)
    least = tuple(LeastTimes(ttft_s, 1.0, ttft_s + 3.0, 4) for ttft_s in (2.0, 6.0, 2.0))
    alone = tuple(LeastTimes(2.0, 1.0, 5.0, 4) for _ in range(3))
    limit = Limit(least, False, (0.0, 1.0, 10.0), (slo, slo, None), alone)
    close = lambda found, true: found == pytest.approx(true, rel=1e-6)  # noqa: E731 - bounds are rounded in favour
    assert value(limit, f"{KEPT} >= 0.5") == 0.5
    assert value(limit, "slo_attainment >= 0.5") == 0.5
    assert close(value(limit, f"{GOOD} >= 1"), 1 / 15)  # the last one ends 15 s after the first came
    assert close(value(limit, "throughput_tokens_per_s >= 1"), 12 / 15)
    assert value(limit, f"{KEPT} <= 0.5") is None  # of the worst nothing is known
    several = limit.of_any_replicas
    assert value(several, f"{KEPT} >= 0.5") == 1.0  # each may have a machine to itself
    assert close(value(several, "ttft_s.mean <= 1"), 2.0)
    back_to_back = Limit(alone, True, (), (slo, slo, slo), alone)
    assert close(value(back_to_back, f"{GOOD} >= 1"), 3 / 15)
    assert value(back_to_back._replace(promised=()), f"{KEPT} >= 0.5") is None


@pytest.mark.parametrize(("slo", "rate"), [(SLO, 0.06), ("e2e_s <= 14s", 0.1), ("ttft_s <= 2500ms", 0.04)])
def test_no_policy_keeps_more_than_its_bound(slo: str, rate: float, trace: Path) -> None:
    """With goals that all reach, so that nothing is ruled out."""
    options: dict[str, Any] = {
        "trace": trace,
        "requests": 30,
        "all_machines": True,
        "no_suggestions": True,
        "workers": 1,
    }
    for goal in (f"{KEPT} >= 0", f"{GOOD} >= 0", "throughput_tokens_per_s >= 0"):
        key = goal.split()[0]
        frame = face.plan(
            goal, ("lru", "lfu", "fiddler"), "rtx3090", arrivals=f"poisson:{rate}", slo=slo, replicas=1, **options
        )
        told = frame[frame["state"] == "reaches"]
        assert len(told) >= 2
        assert (told[f"{key}.bound"] >= told[key]).all()
        assert (told[key] > 0).all()


def test_a_goal_beyond_the_bound_takes_no_replay(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A first token in a millisecond: no queue and no number of machines has a part in that."""
    args = ("--trace", trace, "--hw", "rtx3090", "--policy", "lru", "--arrivals", "poisson:0.01", "--requests", 20)
    said = moesim(capsys, "plan", *args, "--slo", "ttft_s <= 1ms", "--goal", f"{KEPT} >= 5%", "--no-suggestions")
    assert said.code == 1
    assert "ruled out by lower bounds alone, without a replay" in said.out


def test_a_goal_of_promises_needs_some(trace: Path) -> None:
    load: dict[str, Any] = {"trace": trace, "arrivals": "poisson:0.001", "requests": 3, "replicas": 1}
    with pytest.raises(BadInput, match="nothing is promised to any request; add --slo"):
        face.plan("slo_attainment >= 0.9", "lru", "rtx3090", no_suggestions=True, workers=1, **load)


def test_the_first_few_requests_of_a_load_tell_nothing() -> None:
    runner: Any = None
    assert Replays(runner, 200).few(10) == 20
    assert Replays(runner, 3).few(10) is None
    assert Replays(runner, 200, loaded=True).few(10) is None


def test_as_many_replicas_as_it_takes_and_no_more(trace: Path) -> None:
    """Held to single runs: with one less the goal is missed, whatever the policy."""
    load: dict[str, Any] = {"trace": trace, "arrivals": "poisson:0.2", "requests": 30, "slo": SLO}
    found = face.plan("slo_attainment >= 0.9", ("lru", "lfu"), "rtx3090", no_suggestions=True, workers=1, **load)
    best = found.attrs["plan"]["best"]
    n = best["replicas"]
    assert 1 < n <= MOST_REPLICAS
    kept = {
        (name, count): face.simulate(name, "rtx3090", replicas=count, **load).slo.attained_frac
        for name in ("lru", "lfu")
        for count in (n - 1, n)
    }
    assert kept[best["policy"], n] == best["figures"][0]["value"] >= 0.9
    assert kept[best["policy"], n] == max(kept["lru", n], kept["lfu", n])
    assert max(kept["lru", n - 1], kept["lfu", n - 1]) < 0.9
    assert f"{n} replicas of rtx3090" in found.attrs["answer"]


def test_up_to_which_rate(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rate that is told reaches the goal, the next one that was tried does not."""
    load: dict[str, Any] = {"trace": trace, "arrivals": "poisson:0.03", "requests": 20, "slo": SLO}
    found = face.plan("slo_attainment >= 0.7", "lfu", "rtx3090", workers=1, replicas=1, **load)
    told = found.attrs["plan"]["up_to_rate"]
    reaching = face.simulate("lfu", "rtx3090", arrivals_scale=told["times"], **load)
    losing = face.simulate("lfu", "rtx3090", arrivals_scale=told["lost_at"], **load)
    assert reaching.load.stable
    assert reaching.slo.attained_frac >= 0.7
    assert reaching.load.arrivals_per_s == told["per_s"]
    assert not losing.load.stable or losing.slo.attained_frac < 0.7
    assert 1 < told["lost_at"] / told["times"] <= 1.05
    args = ("--trace", trace, "--hw", "rtx3090", "--policy", "lfu", "--replicas", 1, "--goal", "slo_attainment >= 0.7")
    said = moesim(capsys, "plan", *args, "--arrivals", "poisson:0.03", "--requests", 20, "--slo", SLO, "--workers", 1)
    rates = f"up to {told['times']:.3g} times the rate asked for, when {told['per_s']:.3g} requests/s came"
    assert rates in " ".join(said.out.split())
