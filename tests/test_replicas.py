"""Several replicas behind a router: each as it would be alone with the requests that were sent to it."""

from __future__ import annotations

from typing import Any

import pytest

from sim.engine.drive import Clockwork, Loop, RequestTimes
from sim.run import Outcome, assemble, execute, prepare
from sim.serving.service import Service
from sim.setup.prepare import Setup
from sim.setup.replicas import SEED_STEP, setups_of
from sim.setup.spec import RunSpec
from sim.workload import routers


def made(**given: Any) -> Setup:
    fields = {"policy": "lru", "hw": "rtx3090", "experts": 50, "arrivals": "poisson:0.02", "requests": 9, **given}
    return prepare(RunSpec(**fields))


def run(**given: Any) -> Outcome:
    setup = made(**given)
    try:
        return execute(setup, bounds=False)
    finally:
        setup.close()


def moments(served: list[RequestTimes]) -> list[tuple[Any, ...]]:
    return [
        (t.request.index, t.start_s, t.begun_s, t.first_token_s, t.last_token_s, t.until_last.decode_s) for t in served
    ]


def facts(outcome: Outcome) -> dict[str, Any]:
    found = outcome.result.to_dict()
    return {key: found[key] for key in found if key not in ("wall_s", "run_id", "name", "params", "overrides")}


# -- a replica is a run of its own -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "more"),
    [
        ("lru", {}),
        ("lru", {"batch": 3}),
        ("fine_moe", {}),
        ("random", {"seed": 5}),
        ("moe_infinity", {"batch": 2, "scheduler": "sjf"}),
        ("hybrimoe", {"engine": "simpy", "requests": 4}),
    ],
)
def test_round_robin_is_as_many_runs_of_their_own(policy: str, more: dict[str, Any]) -> None:
    n = 3
    together = run(policy=policy, replicas=n, **more)
    rows = together.result.replicas or []
    h2d_bytes = 0
    for number in range(n):
        setup = made(policy=policy, **more)
        setup.requests = setup.requests[number::n]
        if "seed" in setup.policy.settings:
            setup.policy = type(setup.policy)(seed=more.get("seed", 0) + number * SEED_STEP)
        alone = execute(setup, bounds=False)
        setup.close()
        mine = [t for t in together.clockwork.requests if together.clockwork.replica_of[t.request.index] == number]
        assert moments(mine) == moments(alone.clockwork.requests)
        assert rows[number].hit_rate == alone.result.hit_rate
        assert rows[number].h2d_bytes == alone.result.h2d_bytes
        assert rows[number].policy_stats == alone.result.policy_stats
        assert rows[number].capacity_per_s == alone.result.load.capacity_per_s
        h2d_bytes += alone.result.h2d_bytes
    assert together.result.h2d_bytes == h2d_bytes


@pytest.mark.parametrize("arrivals", ["poisson:0.02", "closed:3", "gamma:0.05,3"])
@pytest.mark.parametrize("policy", ["lru", "fine_moe"])
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
    assert moments(clockwork.requests) == moments(expected.clockwork.requests)
    assert machine.h2d_bytes == expected.machine.h2d_bytes
    assert machine.parts_s() == expected.machine.parts_s()
