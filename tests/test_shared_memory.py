"""No memory gives more bytes per second than it has: conservation laws of runs, of either engine, and by hand."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from grids import few_each_time
from hypothesis import given, settings
from hypothesis import strategies as st
from test_contention import tiny as tiny
from untaught import UNTAUGHT

from sim.base.errors import BadInput, DoesNotFit
from sim.base.quantities import Quantity
from sim.figures import values_of
from sim.machine.events.clock import Clock
from sim.machine.events.flow import Flow, Rest
from sim.machine.lanes import OWED
from sim.machine.price import Launch, Operation, Price
from sim.machine.shared_memory import GpuMemory, HostMemory
from sim.options import RunSpec
from sim.policy.registry import policies
from sim.run import execute, prepare

# -- by hand -----------------------------------------------------------------------------------------------------------


def test_a_copy_beside_an_expert_pays_and_the_expert_owes() -> None:
    # 100 B/s in all. An expert of 10 s at 80 B/s starts at 0; a copy of 6 s at 40 at 2: 120 asked for, 1.2 times.
    memory = HostMemory(100.0, 1, -1.0, -1.0)
    assert memory.place(0, 0.0, 10.0, 80.0) == 10.0
    assert memory.place(1, 2.0, 6.0, 40.0) == pytest.approx(9.2)
    # In these 7.2 s the expert has done 6: it is free at 11.2. What comes after has nothing beside it.
    assert memory.paid_s(0, 10.0) == pytest.approx(11.2)
    assert memory.place(1, 11.2, 6.0, 40.0) == pytest.approx(17.2)


def test_a_term_that_was_measured_wins_over_the_law() -> None:
    # The CPU by a term of 0.5, copies by 0 (off): the copy runs 2..8 and adds 6 x (1 - 1 / 1.5) = 2 s to the expert.
    memory = HostMemory(100.0, 1, 0.5, 0.0)
    memory.place(0, 0.0, 10.0, 80.0)
    assert memory.place(1, 2.0, 6.0, 40.0) == 8.0
    assert memory.paid_s(0, 10.0) == pytest.approx(12.0)


def test_kernels_get_what_copies_leave() -> None:
    # 100 B/s, of which a copy takes 20 and one back 10. A kernel of 4 s at 100: 4 x 100 / 80 = 5, with both 5.714.
    memory, operation = GpuMemory(100.0, 20.0, 10.0, -1.0, -1.0), Operation(Launch(1, 0.0, 0.0))
    memory.slow(operation, Price(4.0, 0, 400.0))
    assert (operation.slowed_s, operation.more_s) == pytest.approx((1.0, 4 * 100 / 70 - 5.0))
    memory.slow(operation, Price(4.0, 0, 200.0))  # bound by something else, half of the memory idle
    assert (operation.slowed_s, operation.more_s) == (0.0, 0.0)


# -- laws --------------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(1, 3))
def test_static_shares_move_no_more_bytes_than_there_is_time_for(seed: int, n_links: int) -> None:
    """Bytes of everything placed, over the time in which any lane is busy, once all debts are paid."""
    rng = random.Random(seed)
    memory = HostMemory(100.0, n_links, -1.0, -1.0)
    free_s, busy, n_bytes, now_s = [0.0] * (n_links + 1), [], 0.0, 0.0

    def pay(lane: int) -> None:
        paid_s = memory.paid_s(lane, free_s[lane])
        busy.append((free_s[lane], paid_s))
        free_s[lane] = paid_s

    for _ in range(30):
        now_s += rng.choice((0.0, 0.5, 3.0))
        lane, seconds, draws = rng.randrange(n_links + 1), rng.uniform(0.1, 5.0), rng.uniform(10.0, 95.0)
        pay(lane)
        start_s = max(now_s, free_s[lane])
        free_s[lane] = memory.place(lane, start_s, seconds, draws)
        assert free_s[lane] >= start_s + seconds - 1e-12
        busy.append((start_s, free_s[lane]))
        n_bytes += seconds * draws
    for _ in range(200):
        for lane in range(n_links + 1):
            pay(lane)
    covered_s, until_s = 0.0, 0.0
    for start_s, end_s in sorted(busy):
        covered_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    assert n_bytes <= 100.0 * covered_s * (1 + 1e-9)


CPU_CARDS = ({"hw": "rtx4090"}, {"hw": "rtx3060"}, {"hw": "rtx5080"}, {"hw": "rtx3090", "gpus": 2})
"""Machines on which experts on the CPU and copies ask for more than there is."""


def run(tiny: Path, policy: str, spans: Any = None, plenty: bool = False, **rest: Any) -> Any:
    """The outcome of a run, where there is `plenty` with memories of infinite bandwidth; skips what has no room."""
    rest["set"] = UNTAUGHT.get(policy, {}) | rest.get("set", {})
    try:
        made = prepare(RunSpec(policy=policy, trace=str(tiny), model="mixtral-8x7b", split="all", **rest))
        if plenty:
            endless = Quantity(value=math.inf, source="assumed")
            made = replace(
                made,
                hw=msgspec.structs.replace(
                    made.hw,
                    cpu=msgspec.structs.replace(made.hw.cpu, total_bandwidth_bytes_per_s=endless),
                    gpu=msgspec.structs.replace(made.hw.gpu, memory_bandwidth_bytes_per_s=endless),
                ),
            )
        outcome = execute(made, spans)
        made.close()
    except (DoesNotFit, BadInput) as refusal:
        pytest.skip(str(refusal))
    return outcome


ON_CPU = sorted(name for name, kind in policies().items() if "cpu" in kind.traits)


def sharing_of(tiny: Path, **rest: Any) -> tuple[Any, Any]:
    """The profile of a run, and what its machine shares."""
    cost = run(tiny, "lru", **rest).report.lanes.figures.cost
    return cost.hw, cost.sharing


@pytest.mark.parametrize("hw", ["rtx4090", "rtx3060", "rtx5080", "rtx5090"])
def test_host_memory_gives_what_the_profile_says(tiny: Path, hw: str) -> None:
    """Also where a link both ways would take more: each way was measured by itself."""
    profile, sharing = sharing_of(tiny, hw=hw)
    assert sharing.host_bytes_per_s == profile.cpu.shared_by_all.value
    assert sharing.both_ways is (sharing.up_bytes_per_s + sharing.down_bytes_per_s > sharing.host_bytes_per_s)
    assert sharing.both_ways is (hw != "rtx4090")


def test_host_memory_gives_at_least_what_a_link_takes_one_way(tiny: Path) -> None:
    profile, sharing = sharing_of(tiny, hw="rtx3090", set={"hw.cpu.total_bandwidth_bytes_per_s": 1e10})
    assert sharing.host_bytes_per_s == profile.d2h.bandwidth_bytes_per_s.value > 1e10


def watch_pools(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """From here on, at every instant, of every memory: what flows draw at the rates they run at. The memories seen."""
    pools: dict[int, Any] = {}
    begun, stepped = Flow.work, Clock.step

    def work(flow: Flow, *rest: Any, **more: Any) -> Any:
        pools.update({id(pool): (pool, flow) for pool in flow.pools})
        return begun(flow, *rest, **more)

    def step(clock: Clock) -> None:
        stepped(clock)
        for pool, flow in pools.values():
            members = [*pool.first, flow] if isinstance(pool, Rest) else [one for one, _ in pool.members]
            drawn = sum(min(one.draws_per_s, pool.capacity_per_s) / one._stretch for one in members if one.busy)
            assert drawn <= pool.capacity_per_s * (1 + 1e-9)

    monkeypatch.setattr(Flow, "work", work)
    monkeypatch.setattr(Clock, "step", step)
    return pools


@pytest.mark.parametrize("world", CPU_CARDS, ids=str)
@pytest.mark.parametrize("policy", few_each_time([*ON_CPU, "mixtral_offloading", "lru"], ("hybrimoe", "dali", "lru")))
def test_dynamic_shares_are_never_more_than_all(
    tiny: Path, policy: str, world: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = watch_pools(monkeypatch)
    run(tiny, policy, sim_simulator="simpy", **world)
    assert pools


@pytest.mark.parametrize("world", CPU_CARDS, ids=str)
@pytest.mark.parametrize("policy", ON_CPU)
def test_a_static_run_takes_the_time_that_its_bytes_need(tiny: Path, policy: str, world: dict[str, Any]) -> None:
    """Of experts on the CPU and copies: bytes over the time in which any of these lanes is busy, but for one debt."""
    spans: list[Any] = []
    outcome = run(tiny, policy, lambda *span: spans.append(span), **world)
    sharing, expert_bytes = outcome.report.lanes.figures.cost.sharing, outcome.result.expert_bytes
    n_bytes, covered_s, until_s, longest_s = 0.0, 0.0, 0.0, 0.0
    for lane, op, _, _, _, moved, start_s, end_s in sorted(spans, key=lambda span: span[-2:]):
        if lane == "cpu" or lane.startswith("h2d"):
            n_bytes += 0 if op == OWED else expert_bytes if lane == "cpu" else moved  # what is owed was told before
            covered_s += max(0.0, end_s - max(start_s, until_s))
            until_s = max(until_s, end_s)
            longest_s = max(longest_s, end_s - start_s)
    assert n_bytes <= sharing.host_bytes_per_s * (covered_s + longest_s)


CHARGED = ("bottleneck", "provenance", "uncertainty")


def told(tiny: Path, policy: str, **rest: Any) -> dict[str, Any]:
    """A result where no memory has an end, but for what the critical path is charged: with contention on, the walk back
    along it settles no queued copies, so that what waits for one may be charged to another lane."""
    result = run(tiny, policy, plenty=True, hw="rtx4090", **rest).result.to_dict()
    return {key: value for key, value in result.items() if key not in ("wall_s", "run_id", "name", *CHARGED)}


@pytest.mark.parametrize(
    "policy",
    [pytest.param(name, marks=[] if name in (*ON_CPU, "lru") else [pytest.mark.thorough]) for name in policies()],
)
def test_where_there_is_plenty_nothing_is_shared(tiny: Path, policy: str) -> None:
    assert told(tiny, policy) == told(tiny, policy, sim_contention=False)


@pytest.mark.parametrize("engine", ["core", "simpy"])
@pytest.mark.parametrize("policy", ["llama_cpp_lru", "lru", "mixtral_offloading"])
def test_what_is_said_to_be_added_is_what_lanes_are_longer_busy(tiny: Path, policy: str, engine: str) -> None:
    """These decide alike whatever things take, so a lane does the same work with contention and without."""
    seen = run(tiny, policy, hw="rtx4090", sim_simulator=engine)
    alone = run(tiny, policy, hw="rtx4090", sim_simulator=engine, sim_contention=False)
    busy_s, alone_s = seen.report.lanes.busy_s, alone.report.lanes.busy_s
    assert seen.result.h2d_bytes == alone.result.h2d_bytes
    found = {name: one for name, one in values_of(seen.result.contention).items() if one is not None}
    assert ("cpu" in found) is (policy == "llama_cpp_lru")
    for lane in ("cpu", "h2d", "d2h", "gpu"):
        added_s = found[lane].added_s if lane in found else 0.0
        assert busy_s[lane] - alone_s[lane] == pytest.approx(added_s, abs=1e-9 * busy_s[lane] + 1e-12)
        if lane in found:
            assert found[lane].of_busy_frac == pytest.approx(added_s / busy_s[lane])
            assert found[lane].by == "law"
    assert "contention" not in alone.result.to_dict()


def test_a_term_says_what_it_is_from(tiny: Path) -> None:
    by_user = {"hw.contention.cpu_slowdown_by_h2d": 0.5, "hw.contention.gpu_slowdown_by_h2d": 0.0}
    found = run(tiny, "llama_cpp_lru", hw="rtx4090", set=by_user).result.contention
    assert (found.cpu.by, found.h2d.by, found.gpu) == ("set", "law", None)
    found = run(tiny, "llama_cpp_lru", hw="rtx4090-5955wx").result.contention
    assert found.cpu.by == "measured"


@pytest.mark.thorough
@pytest.mark.parametrize("policy", policies())
def test_static_and_dynamic_shares_add_about_the_same(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The table of docs/contention.md for every policy: what sharing adds, by the arithmetic engine and by SimPy."""
    times = []
    for asked in ({"sim_contention": False}, {}, {"sim_simulator": "simpy"}):
        try:
            made = prepare(RunSpec(policy=policy, hw="rtx4090", requests=1, **asked))
        except (DoesNotFit, BadInput) as refusal:
            pytest.skip(str(refusal))
        try:
            result = execute(made, bounds=False, by_layer=False).result
        except DoesNotFit as refusal:
            pytest.skip(str(refusal))
        finally:
            made.close()
        times.append((result.ttft_s.mean, result.tpot_s.mean))
    alone, static, dynamic = times
    static_frac, dynamic_frac = ([s / a - 1.0 for s, a in zip(one, alone, strict=True)] for one in (static, dynamic))
    with capsys.disabled():
        pairs = zip(("TTFT", "TPOT"), static_frac, dynamic_frac, strict=True)
        told = (f"{time} {100 * one:+6.2f} % {100 * other:+6.2f} %" for time, one, other in pairs)
        print(f"\n{policy:<22}", *told, end="")  # noqa: T201
    assert static_frac == pytest.approx(dynamic_frac, abs=0.02)


@pytest.mark.parametrize("policy", ON_CPU)
def test_the_bound_stays_a_bound(tiny: Path, policy: str) -> None:
    result = run(tiny, policy, hw="rtx4090").result
    if result.lower_bound is not None and "lossy" not in policies()[policy].traits:
        assert result.lower_bound.tpot_s <= result.tpot_s.mean
