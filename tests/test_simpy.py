"""The machine on SimPy events as users ask for it: every key of a result is what the arithmetic one says.

`test_references` compares the two in random worlds and under every policy. Where lanes slow one another there is no
arithmetic to compare with: `test_contention` has other oracles for that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grids import MANY_KINDS, few_each_time
from tiny_traces import ALL, tiny_trace
from untaught import UNTAUGHT

from sim.base.errors import BadInput, MoesimError
from sim.options import RunSpec
from sim.policy.registry import policies
from sim.results.by_layer import WAITS_S
from sim.run import assemble, execute, prepare

ACTIVE = {"hw.contention.h2d_slowdown_by_gpu": 0.1}


# -- whole results, of runs as users ask for them --------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_trace(
        tmp_path_factory.mktemp("t") / "t.safetensors",
        32,
        8,
        2,
        n_requests=2,
        prompt=4,
        outputs=6,
        levels=ALL - {"arrivals"},
    )


def result_of(tiny: Path, engine: str | None, policy: str, **rest: Any) -> Any:
    """All of a result but how long it took; or what it says of a run that cannot be."""
    rest["set"] = UNTAUGHT.get(policy, {}) | rest.get("set", {})
    rest |= {"hw": "rtx3090", "trace": str(tiny), "model": "mixtral-8x7b", "split": "all", "sim_contention": False}
    spec = RunSpec(policy=policy, sim_simulator=engine, **rest)
    try:
        made = prepare(spec)
        result = execute(made).result.to_dict()
        made.close()
    except MoesimError as error:
        return str(error)
    del result["wall_s"]
    return result


WORLDS = [{"gpus": 2, "batch": 2}, {"cache": "40experts", "set": {"hw.host.launch_s": 1e-3}}]


@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("policy", few_each_time(policies(), MANY_KINDS))
def test_every_key_of_a_result(tiny: Path, policy: str, world: dict[str, Any]) -> None:
    arithmetic, simpy = (result_of(tiny, engine, policy, **world) for engine in ("core", "simpy"))
    if not isinstance(arithmetic, str):
        assert (arithmetic.pop("simulator"), simpy.pop("simulator")) == ("core", "simpy")
        # Each engine sums what a layer waits in an order of its own: the last digits differ.
        waits = [[[row.pop(name) for name in WAITS_S] for row in one["by_layer"]] for one in (arithmetic, simpy)]
        np.testing.assert_allclose(*waits, rtol=1e-9, atol=1e-12)
    assert simpy == arithmetic


# -- which one replays -----------------------------------------------------------------------------------------------


def machine_of(tiny: Path, engine: str | None = None, **rest: Any) -> str:
    made = prepare(RunSpec(policy="lru", hw="rtx3090", trace=str(tiny), split="all", sim_simulator=engine, **rest))
    _, machine = assemble(made)
    made.close()
    return type(machine).__name__


def test_which_one_replays(tiny: Path) -> None:
    assert machine_of(tiny) == machine_of(tiny, "core") != "EventMachine"
    assert machine_of(tiny, "simpy") == machine_of(tiny, set=ACTIVE) == "EventMachine"
    with pytest.raises(BadInput, match="another coefficient"):
        machine_of(tiny, "core", set=ACTIVE)
    with pytest.raises(BadInput, match="no such value; did you mean 'simpy'"):
        machine_of(tiny, "simpi")
