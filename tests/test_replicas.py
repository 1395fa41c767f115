"""Several replicas behind a router: each as it would be alone with the requests that were sent to it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from cli_help import moesim as moesim_cli
from cli_help import simulated
from click.testing import CliRunner
from easy_numbers import setup as easy_setup
from hypothesis import given, settings
from hypothesis import strategies as st
from test_load import Server, standard_error
from tiny_traces import from_rows

import moesim
from policies.gpu_only import GpuOnly
from sim.base.errors import BadInput, IllegalDecision, MoesimError
from sim.base.lanes import H2D
from sim.cli.run import command
from sim.engine.run_loop import Clockwork, Loop, RequestTimes
from sim.options import RunSpec
from sim.real.requirements import check
from sim.results.load import load, unstable
from sim.results.outcome import Watched
from sim.run import Outcome, assemble, execute, prepare
from sim.serving.service import Service
from sim.setup.replicas import SEED_STEP, setups_of
from sim.setup.setup import Setup
from sim.studies.runner.records import Records
from sim.studies.runner.runner import Runner
from sim.studies.saturate import saturate
from sim.workload import routers
from sim.workload.iterations import RequestInfo
from sim.workload.router import Router
from sim.workload.routers.task_affinity import TaskAffinity
from traces.format.reader import Trace

ROUTERS = list(routers.routers())


def made(**asked: Any) -> Setup:
    fields = {
        "policy": "lru",
        "hw": "rtx3090",
        "cache": "50experts",
        "arrivals": "poisson:0.02",
        "requests": 9,
        **asked,
    }
    return prepare(RunSpec(**fields))


def run(**asked: Any) -> Outcome:
    setup = made(**asked)
    try:
        return execute(setup, bounds=False)
    finally:
        setup.close()


def moments(served: list[RequestTimes]) -> list[tuple[Any, ...]]:
    return [
        (t.request.index, t.start_s, t.begun_s, t.first_token_s, t.last_token_s, t.until_last.prefill_s) for t in served
    ]


# -- a replica is a run of its own -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "more"),
    [
        ("lru", {}),
        ("lru", {"batch": 3}),
        ("lru", {"batch": 3, "kv_memory": 40_000_000, "arrivals": "poisson:1"}),
        ("random", {"seed": 5, "requests": 6}),
        ("pregated", {"requests": 4}),
        pytest.param("fine_moe", {}, marks=pytest.mark.thorough),
        ("lru", {"batch": 3, "scheduler": "batch_affinity", "arrivals": "poisson:1"}),
        ("lru", {"batch": 3, "scheduler": "emoe_slo", "slo": {"*": {"ttft_s": 30.0}}, "arrivals": "poisson:1"}),
        ("lru", {"batch": 3, "prefill_chunk": 8, "arrivals": "poisson:1"}),
        ("lru", {"batch": 2, "batch_static": True, "arrivals": "poisson:1"}),
        ("lru", {"gpus": 2, "gpus_dispatch": "all-to-all", "cache": "64experts"}),
        pytest.param("moe_infinity", {"batch": 2, "scheduler": "sjf"}, marks=pytest.mark.thorough),
        pytest.param("moepic", {}, marks=pytest.mark.thorough),  # prefetches while it is idle
        pytest.param("hybrimoe", {"sim_simulator": "simpy", "requests": 4}, marks=pytest.mark.thorough),
    ],
)
def test_round_robin_is_as_many_runs_of_their_own(policy: str, more: dict[str, Any]) -> None:
    n = 3
    together = run(policy=policy, replicas=n, **more)
    rows = together.result.replicas or []
    h2d_bytes = 0
    for number in range(n):
        setup = made(policy=policy, **more)
        setup = replace(setup, requests=setup.requests[number::n])
        if "seed" in setup.policy.settings:
            setup = replace(setup, policy=type(setup.policy)(seed=more.get("seed", 0) + number * SEED_STEP))
        alone = execute(setup, bounds=False)
        setup.close()
        mine = [t for t in together.report.requests if together.report.replica_of[t.request.index] == number]
        assert moments(mine) == moments(alone.report.requests)
        assert rows[number].hit_rate == alone.result.hit_rate
        assert rows[number].h2d_bytes == alone.result.h2d_bytes
        assert rows[number].policy_stats == alone.result.policy_stats
        assert rows[number].capacity_per_s == alone.result.load.capacity_per_s
        h2d_bytes += alone.result.h2d_bytes
    assert together.result.h2d_bytes == h2d_bytes


@pytest.mark.parametrize("arrivals", ["poisson:0.02", "poisson:0.003", "closed:2", "closed:3"])
@pytest.mark.parametrize("policy", ["lru", pytest.param("fine_moe", marks=pytest.mark.thorough)])
def test_one_replica_behind_a_router_is_a_run(policy: str, arrivals: str) -> None:
    """The processes around the loop change nothing: arrivals, clients that ask again, an instant for either."""
    expected = run(policy=policy, arrivals=arrivals, batch=2)
    setup = made(policy=policy, arrivals=arrivals, batch=2)
    (own,) = setups_of(setup)
    engine, machine = assemble(own)
    clockwork = Clockwork()
    loop = Loop(engine, machine, own.batching(), own.trace, clockwork, True)
    Service([loop], routers.find("least_loaded"), setup.requests, setup.clients).run()
    loop.finish()
    setup.close()
    assert moments(clockwork.requests) == moments(expected.report.requests)
    lanes = expected.report.lanes
    assert machine.h2d_bytes == lanes.h2d_bytes
    assert (machine.lane_busy_s(), machine.lane_ends_s()) == (lanes.busy_s, lanes.ends_s)
    for phase, times in clockwork.phases.items():
        assert times.parts_s == expected.report.phases[phase].parts_s


def test_replicas_draw_by_seeds_of_their_own() -> None:
    setup = made(policy="random", seed=7, replicas=3)
    setup.close()
    policies = [one.policy for one in setups_of(setup)]
    assert [policy.settings["seed"] for policy in policies] == [7, 7 + SEED_STEP, 7 + 2 * SEED_STEP]


# -- queues that theory knows ------------------------------------------------------------------------------------------


def test_equal_requests_in_turn_wait_as_in_one_queue(tmp_path: Path) -> None:
    """M/D/c: where all take as long, those sent to c servers in turn wait as they would in one queue before them."""
    server = Server(tmp_path, [(1, 3)])
    took_s = server.service_s()[0]
    served = server.run(f"poisson:{1.7 / took_s!r}", 300, replicas=2).report.requests
    served = sorted(served, key=lambda times: times.start_s)
    free_s = [0.0, 0.0]
    for times in served:
        begins_s = max(times.start_s, min(free_s))
        free_s[free_s.index(min(free_s))] = begins_s + took_s
        assert times.begun_s == pytest.approx(begins_s, abs=1e-9)
    assert sum(times.queue_s for times in served)


class AtRandom(Router):
    """Splits a Poisson stream into Poisson streams."""

    name = "at_random"

    def __init__(self, replicas: Any) -> None:
        super().__init__(replicas)
        self.rng = np.random.default_rng(3)

    def choose(self, request: RequestInfo) -> int:
        return int(self.rng.integers(len(self.replicas)))


@pytest.mark.thorough
def test_who_joins_the_shorter_queue_waits_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Split at random each of two replicas is an M/D/1 queue, whose mean wait Pollaczek and Khinchine have."""
    server = Server(tmp_path, [(1, 1)])
    took_s = server.service_s()[0]
    load_frac, n = 0.8, 4000
    waits = {}
    for router in ("round_robin", "least_loaded", "at_random"):
        if router == "at_random":
            monkeypatch.setattr(routers, "find", lambda name: AtRandom)
        outcome = server.run(f"poisson:{2 * load_frac / took_s!r}", n, replicas=2, router=router)
        waits[router] = [times.queue_s for times in outcome.report.requests]
    alone_s = load_frac / took_s * took_s**2 / (2 * (1 - load_frac))
    error_s = standard_error(waits["at_random"])
    assert abs(np.mean(waits["at_random"]) - alone_s) < 3.5 * error_s
    assert error_s < 0.2 * alone_s  # so that the line above can fail
    # In turn is one queue before both, for equal requests, and nothing beats that.
    assert np.mean(waits["round_robin"]) <= np.mean(waits["least_loaded"]) < np.mean(waits["at_random"]) - 3 * error_s


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("source", ["poisson:{}", "closed:7"])
def test_little(tmp_path: Path, router: str, source: str) -> None:
    """Of each replica and of all: requests there are their rate times what each takes; rows add up to the whole."""
    server = Server(tmp_path, [(1, 4), (2, 9)])
    rate_per_s = 4 / float(np.mean(server.service_s()))
    outcome = server.run(source.format(rate_per_s), 200, batch=2, replicas=3, router=router)
    result, served = outcome.result, outcome.report.requests
    span_s = max(t.last_token_s for t in served) - min(t.start_s for t in served)
    assert sum(row.requests for row in result.replicas) == 200 == len(served)
    for row in result.replicas:
        mine = [t for t in served if outcome.report.replica_of[t.request.index] == row.replica]
        events = sorted([(t.start_s, 1) for t in mine] + [(t.last_token_s, -1) for t in mine])
        area, there = 0.0, 0
        for (at_s, change), (until_s, _) in pairwise(events):
            there += change
            area += there * (until_s - at_s)
        assert row.requests_in_system == pytest.approx(area / span_s, rel=1e-9)
        mean_s = np.mean([t.e2e_s for t in mine]) if mine else 0.0
        assert row.requests_in_system == pytest.approx(row.requests / span_s * mean_s, rel=1e-9)
    for name in ("requests_in_system", "requests_waiting"):
        assert sum(getattr(row, name) for row in result.replicas) == pytest.approx(getattr(result.load, name))
    assert sum(row.throughput_tokens_per_s for row in result.replicas) == pytest.approx(result.throughput_tokens_per_s)
    assert np.mean([row.busy_frac for row in result.replicas]) == pytest.approx(result.load.busy_frac)
    assert sum(row.output_tokens for row in result.replicas) == result.n_outputs


# -- routers by hand ---------------------------------------------------------------------------------------------------


def replicas(*there: int, batch: int = 2) -> list[Any]:
    return [SimpleNamespace(n_there=n, n_waiting=0, batch=batch) for n in there]


def request(task: str = "") -> RequestInfo:
    return RequestInfo(0, 0, 1, 1, task, 0.0)


def serve(server: Server, come_s: list[float], **spec: Any) -> tuple[list[int], list[RequestTimes]]:
    """Requests as recorded, one for each arrival: where each went, and when it was served."""
    with Trace(server.path) as trace:
        made = easy_setup(GpuOnly(), trace, 2, batch=spec.get("batch", 1))
        pairs = zip(made.requests, come_s, strict=True)
        requests = [one._replace(arrival_s=at_s) for one, at_s in pairs]
        asked = RunSpec(hw="easy", policy="gpu_only", **spec)
        made = replace(made, requests=requests, open_loop=True, spec=asked)
        outcome = execute(made, bounds=False)
    times = sorted(outcome.report.requests, key=lambda one: one.request.index)
    return [outcome.report.replica_of[one.request.index] for one in times], times


def test_least_loaded_by_hand(tmp_path: Path) -> None:
    """A long request holds replica 0. The second goes to replica 1 and is done; so does the third, and waits for none.
    The fourth finds one at either, and goes to the first, behind the long one."""
    server = Server(tmp_path, [(1, 20), (1, 1), (1, 4), (1, 1)])
    long_s, short_s, middle_s, _ = server.service_s()
    come_s = [0.0, 0.0, 2 * short_s, 2 * short_s]
    assert 2 * short_s + middle_s < long_s
    where, times = serve(server, come_s, replicas=2, router="least_loaded")
    assert where == [0, 1, 1, 0]
    assert [one.queue_s for one in times[:3]] == [0, 0, 0]
    assert times[3].begun_s == times[0].last_token_s
    assert serve(server, come_s, replicas=2, router="round_robin")[0] == [0, 1, 0, 1]


def test_at_one_instant_in_the_order_of_the_load(tmp_path: Path) -> None:
    """Equal arrivals go around; whoever ends at an instant has left it before anybody comes."""
    server = Server(tmp_path, [(1, 1)] * 7)
    took_s = server.service_s()[0]
    come_s = [0.0] * 4 + [took_s] * 3
    where, times = serve(server, come_s, replicas=3, router="least_loaded")
    assert where[:4] == [0, 1, 2, 0]
    assert where[4:] == [1, 2, 0]  # replica 0 still has the fourth, the others nobody
    assert [one.queue_s for one in times] == pytest.approx([0, 0, 0, took_s, 0, 0, took_s])
    (tmp_path / "two").mkdir()
    two = Server(tmp_path / "two", [(1, 1)] * 2)
    assert serve(two, [0.0, took_s], replicas=2, router="least_loaded")[0] == [0, 0]


def test_whoever_comes_as_another_ends_runs_next(tmp_path: Path) -> None:
    """Replica 0 goes on decoding; the prompt of the third, who comes when an iteration ends, is before that."""
    server = Server(tmp_path, [(1, 30), (1, 30), (1, 1)])
    _, alone = serve(server, [0.0, 0.0, 1e6], replicas=2, batch=2)
    first_s = alone[0].first_token_s
    where, times = serve(server, [0.0, 0.0, first_s], replicas=2, batch=2)
    assert where[2] == 0
    assert times[2].begun_s == first_s == times[0].first_token_s


def test_a_task_stays_where_it_is_served_until_that_is_full() -> None:
    """LARD: its marks are 2 and 4 where two run together; at twice the high mark it moves wherever that is least."""
    there = replicas(0, 0, 0)
    router = TaskAffinity(there)

    def sent(task: str, *n: int) -> int:
        for one, now in zip(there, n, strict=True):
            one.n_there = now
        return router.choose(request(task))

    assert sent("code", 1, 0, 0) == 1  # new: the least loaded
    assert sent("code", 0, 4, 0) == 1  # more than the others have, but not more than the high mark
    assert sent("prose", 3, 4, 0) == 2
    assert sent("code", 2, 5, 2) == 1  # above it, but nobody is idle
    assert sent("code", 2, 7, 3) == 1
    assert sent("code", 2, 8, 3) == 0  # twice the high mark
    assert sent("code", 5, 0, 1) == 1  # above it while another is idle
    assert sent("code", 0, 1, 0) == 1
    assert sent("prose", 9, 9, 7) == 2


def test_what_a_router_may_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(tmp_path, [(1, 1)])
    for answer in (2, -1, None, "0", 0.0):
        kind = type("Wrong", (Router,), {"name": "wrong", "choose": lambda self, request, answer=answer: answer})
        monkeypatch.setattr(routers, "find", lambda name, kind=kind: kind)
        with pytest.raises(IllegalDecision) as error:
            server.run("poisson:1", 2, replicas=2)
        assert str(error.value) == (
            f"choose of router wrong, got {answer!r}: it answers with the number of a replica, 0 to 1"
        )


# -- any load ----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=9),
    gaps=st.lists(st.sampled_from([0.0, 0.0, 1.0, 3.0, 20.0]), min_size=9, max_size=9),
    n=st.integers(2, 4),
    batch=st.integers(1, 3),
    clients=st.integers(0, 5),
    router=st.sampled_from(ROUTERS),
)
def test_any_load_is_served_once(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[tuple[int, int]],
    gaps: list[float],
    n: int,
    batch: int,
    clients: int,
    router: str,
) -> None:
    """Every row of every request runs once, in order, at one replica, which never runs more than it has slots for."""
    rows = [[[0]] for prompt, outputs in lengths for _ in range(prompt + outputs - 1)]
    path = from_rows(tmp_path_factory.mktemp("any") / "t.safetensors", rows, 2, lengths)
    ran: list[list[tuple[int, int, int]]] = [[] for _ in range(n)]

    def watched(number: int) -> Watched:
        def step(done: Any) -> None:
            assert len(done.iteration.ranges) <= batch
            ran[number] += [(r.request.index, r.start_row, r.stop_row) for r in done.iteration.ranges]

        return Watched(on_step=step)

    with Trace(path) as trace:
        made = easy_setup(GpuOnly(), trace, 2, batch=batch)
        come_s = np.cumsum(gaps).tolist()
        made = replace(
            made,
            requests=[
                one._replace(arrival_s=None if clients else come_s[i], task=f"task {i % 3}")
                for i, one in enumerate(made.requests)
            ],
            open_loop=True,
            clients=clients,
            spec=RunSpec(hw="easy", policy="gpu_only", batch=batch, replicas=n, router=router),
        )
        outcome = execute(made, bounds=False, watched=watched)
        again = execute(made, bounds=False)
    served = outcome.report.requests
    assert sorted(t.request.index for t in served) == sorted(one.index for one in made.requests)
    where: dict[int, set[int]] = {}
    for number, rows_ran in enumerate(ran):
        for index, *_ in rows_ran:
            where.setdefault(index, set()).add(number)
    assert where == {index: {replica} for index, replica in outcome.report.replica_of.items()}
    for one in made.requests:
        mine = [(start, stop) for rows in ran for index, start, stop in rows if index == one.index]
        ends = [one.first_row, *(stop for _, stop in mine)]
        assert [start for start, _ in mine] == ends[:-1]
        assert ends[-1] == one.first_row + one.prompt_len + one.outputs - 1
    assert all(t.queue_s >= 0 for t in served)
    for number in range(n):  # first come, first served
        begun = [t.begun_s for t in sorted(served, key=lambda t: t.start_s) if where[t.request.index] == {number}]
        assert begun == sorted(begun)
    if clients:  # nobody asks before he is answered
        events = sorted([(t.start_s, 1) for t in served] + [(t.last_token_s, -1) for t in served])
        assert np.max(np.cumsum([change for _, change in events])) <= clients
    assert moments(again.report.requests) == moments(served)


# -- results -----------------------------------------------------------------------------------------------------------


def test_runs_of_one_replica_are_as_they_were() -> None:
    plain, named = run(requests=2), run(requests=2, replicas=1, router="least_loaded")
    assert plain.result.run_id == named.result.run_id
    assert not {"replicas", "router"} & plain.result.to_dict().keys()
    ids = [run(requests=2, replicas=2, router=router).result.run_id for router in (None, *ROUTERS)]
    assert len({plain.result.run_id, *ids}) == 1 + len(ROUTERS)
    assert ids[0] == ids[1 + ROUTERS.index("round_robin")]


def test_sums_over_replicas() -> None:
    outcome = run(replicas=2, batch=2, requests=6, arrivals="poisson:0.1")
    result, rows = outcome.result, outcome.result.replicas
    counts = Counter[str]()
    for layer in result.by_layer:
        counts.update({name: layer[name] for name in ("asked_n", "hit_n", "demand_copies_n", "demand_copies_bytes")})
    assert counts["demand_copies_bytes"] == result.demand_copies.bytes == result.h2d_bytes
    assert result.h2d_bytes == sum(row.h2d_bytes for row in rows)
    decode = [layer for layer in result.by_layer if layer["phase"] == "decode"]
    assert result.hit_rate == sum(one["hit_n"] for one in decode) / sum(one["asked_n"] for one in decode)
    assert min(row.hit_rate for row in rows) <= result.hit_rate <= max(row.hit_rate for row in rows)
    waited_s = sum(layer[f"wait_{why}_s"] for layer in result.by_layer for why in ("demand", "prefetch"))
    copies_s = sum(outcome.report.phases[phase].parts_s[H2D] for phase in ("prefill", "decode"))
    assert waited_s == pytest.approx(copies_s)
    assert result.simulated_s == max(t.last_token_s for t in outcome.report.requests)
    assert 0 < result.lane_utilisation["h2d"] <= 1
    assert result.cache_capacity_bytes == run(requests=2).result.cache_capacity_bytes  # of one
    assert result.lower_bound is None
    assert result.policy_stats == {}


def served_at(*moments_s: tuple[float, float, float]) -> list[Any]:
    return [SimpleNamespace(start_s=a, begun_s=b, last_token_s=c) for a, b, c in moments_s]


def test_the_scheduler_is_named() -> None:
    """One that tells nothing, and that of replicas, which each tell their own; the default one stays out."""
    for scheduler, replicas in (("sjf", 1), ("sjf", 2), ("emoe_slo", 2)):
        slo = {"*": {"ttft_s": 60.0}}
        told = run(requests=2, arrivals="poisson:0.1", scheduler=scheduler, replicas=replicas, slo=slo).result
        assert told.to_dict()["scheduling"] == {"name": scheduler, "file": None, "stats": {}}
        assert re.search(rf"^scheduler +{scheduler}$", str(told), re.MULTILINE)
    assert "scheduling" not in run(requests=2, arrivals="poisson:0.1", scheduler="fcfs").result.to_dict()


def test_saturate_offers_no_option_that_it_refuses() -> None:
    from sim.cli.saturate import command as saturating

    offered = CliRunner().invoke(saturating, ["--help"]).output
    assert "--scheduler" in offered
    assert "--arrivals" not in offered
    assert "--arrivals" not in offered


def test_a_queue_that_grows_at_one_replica_is_told() -> None:
    """Replica 0 takes in one a second while others wait, and two come; at the other nobody waits."""
    busy = served_at(*((i / 2, float(i), i + 1.0) for i in range(10)))
    idle = served_at((0.0, 0.0, 0.1), (30.0, 30.0, 30.1))
    found = load([*busy, *idle], "poisson:1", [busy, idle])
    assert found is not None
    assert not found.stable
    assert found.capacity_per_s == pytest.approx(2.0)  # two of what takes in one
    assert found.arrivals_per_s == pytest.approx(11 / 30)
    alone = load(busy, "poisson:1")
    from sim.figures import Replica

    row = Replica(
        0, 10, 10, 1.0, None, 1.0, 1.0, 1.0, 1.0, alone.arrivals_per_s, alone.capacity_per_s, False, 0, {}, {}
    )
    assert unstable(found, [row]).startswith("unstable queue at replica 0: arrives 2/s, serves 1/s: percentiles")
    assert found.busy_frac == pytest.approx((10 + 0.2) / 2 / 30.1)


def test_tables_say_which_replica(tmp_path: Path) -> None:
    options = {"arrivals": "poisson:0.05", "requests": 2, "replicas": 2}
    asked = ["--policy", "lru", "--hw", "rtx3090", "--arrivals", "poisson:0.05", "--requests", "2", "--replicas", "2"]
    told = CliRunner().invoke(command, [*asked, "--out", str(tmp_path / "run"), "--timeline", str(tmp_path / "t.json")])
    assert told.exit_code == 0, told.output
    assert "replica  requests  tokens" in told.stdout
    result = moesim.simulate("lru", "rtx3090", **options)
    import pandas as pd

    for name in ("requests", "iterations", "decisions"):
        frame = getattr(result, name)
        assert sorted(frame["replica"].unique()) == [0, 1]
        pd.testing.assert_frame_equal(frame, pd.read_parquet(tmp_path / "run" / f"{name}.parquet"))
    assert list(result.requests.sort_values("request")["replica"]) == [0, 1]
    assert "replica" not in moesim.simulate("lru", "rtx3090", requests=2).requests
    timeline = (tmp_path / "t.json").read_text()
    assert "replica 0: lru" in timeline
    assert "replica 1: lru" in timeline


OWN = """
from sim.workload.router import Router

class Last(Router):
    name = "last"

    def choose(self, request):
        return len(self.replicas) - 1
"""
SENDS = OWN.replace('"last"', '"sends"').replace(
    "        return", "        self.replicas[0].send(request)\n        return"
)


def test_a_router_in_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    found = run(requests=3, replicas=2, router=str(path)).result
    assert [row.requests for row in found.replicas] == [0, 3]
    assert found.router == "last"
    assert "2 replicas, router last of mine.py" in found.name
    path.write_text(OWN + "# another")
    assert run(requests=3, replicas=2, router=str(path)).result.run_id != found.run_id
    with pytest.raises(BadInput, match="a router is a class derived from"):
        path.write_text("")
        run(requests=3, replicas=2, router=str(path))


def test_they_are_listed_where_they_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = json.loads(moesim_cli(capsys, "routers", "--json").out)
    assert [one["name"] for one in listed] == ROUTERS
    assert all(one["title"] and one["description"] for one in listed)
    assert "replica 0, the next to replica 1" in moesim_cli(capsys, "routers", "round_robin").out
    path = tmp_path / "mine.py"
    path.write_text('"""Last: all of them go to one replica."""' + OWN)
    assert moesim_cli(capsys, "routers", path).out.startswith("last: Last: all of them go to one replica\n")
    told = moesim_cli(capsys, "routers", "round_robbin")
    assert (told.code, told.err.count("\n")) == (2, 1)
    assert "no such router; did you mean 'round_robin'?" in told.err


def test_a_router_answers_and_does_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    for text, wrong in (
        (OWN.replace("def choose(", "def chooses("), "without choose: it says who goes where"),
        (SENDS, r"^scheduler fcfs or router sends, got 6 requests served of 3: `waiting`"),
    ):
        path.write_text(text)
        with pytest.raises(MoesimError, match=wrong):
            run(requests=3, replicas=2, router=str(path))


def test_the_router_of_the_page(tmp_path: Path) -> None:
    """docs/replicas.md shows one: a third request goes where nobody waits, though as many are there."""
    page = (Path(__file__).resolve().parent.parent / "docs" / "replicas.md").read_text(encoding="utf-8")
    path = tmp_path / "mine.py"
    path.write_text(page.split("```python\n", 1)[1].split("```", 1)[0])
    kind = routers.find(str(path))
    there = replicas(2, 2)
    there[0].n_waiting = 1
    assert kind(there).choose(request()) == 1
    assert run(requests=3, replicas=2, router=str(path)).result.router == "fewest_waiting"


def test_differences_and_pages_take_runs_of_several_replicas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for policy in ("lru", "lfu"):
        asked = ["--policy", policy, "--hw", "rtx3090", "--arrivals", "poisson:0.05", "--requests", 2, "--replicas", 2]
        assert simulated(capsys, *asked, "--out", tmp_path / policy, "--set", "out.spans=on").code == 0
    told = moesim_cli(capsys, "diff", tmp_path / "lru", tmp_path / "lfu")
    assert told.code == 0
    assert (
        " ".join(told.out.split()).count("it has several replicas, whose requests, layers and decisions are not") == 2
    )
    page = moesim_cli(capsys, "report", tmp_path / "lru", "--json")
    assert page.code == 0
    assert "one process for each" in page.out
    assert "is shown of runs of one replica" in page.out


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"arrivals": None}, "--replicas, got 2 with requests back to back"),
        ({"arrivals": "none"}, "add --arrivals poisson:RATE, or closed:CLIENTS"),
        ({"policy": "belady"}, "policy belady with --replicas 2: which requests a replica gets depends on time"),
        ({"replicas": 0}, "--replicas, got 0: at least 1"),
        ({"replicas": 1000}, "--replicas, got 1000: at most 256"),
        ({"router": "least"}, "--router, got 'least': no such router; did you mean 'least_loaded'?"),
    ],
)
def test_refused_in_a_line(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as error:
        made(**{"replicas": 2, **asked})
    assert said in str(error.value)


def test_a_real_run_is_on_one_machine() -> None:
    setup = made(replicas=2)
    setup.close()
    with pytest.raises(BadInput, match="--replicas, got 2 with --real"):
        check(setup)


@pytest.mark.thorough
def test_sweeps_and_saturation_know_replicas() -> None:
    asked = {"requests": 12, "set": {"hw.h2d.bandwidth_bytes_per_s": 1e12}}
    table = moesim.sweep("lru", "rtx3090", arrivals="poisson:0.5", replicas="1:3:1", workers=1, **asked)
    assert list(table["replicas"]) == [1, 2, 3]
    waits = list(table["queue_s.mean"])
    assert waits == sorted(waits, reverse=True)
    assert waits[0] > waits[2]
    spec = RunSpec(policy="lru", hw="rtx3090", **asked)
    specs = [msgspec.structs.replace(spec, replicas=n, requests=40 * n) for n in (1, 2)]
    runner = Runner(Records(), 1, lambda *_: None)
    one, two = (saturate([("lru", spec)], 1, 0.95, runner).policies[0] for spec in specs)
    assert two.capacity_per_s.mean == pytest.approx(2 * one.capacity_per_s.mean, rel=0.1)


def test_one_replica_never_loads_simpy() -> None:
    run = "import moesim, sys; moesim.simulate('lru', 'rtx3090', requests=1, arrivals='poisson:1'{}); "
    for more, loaded in (("", False), (", replicas=2", True)):
        code = run.format(more) + f"assert ('simpy' in sys.modules) is {loaded}"
        subprocess.run([sys.executable, "-c", code], check=True)
