"""The core beside today's engine: each field of a report, each decision, each span is equal to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import random_worlds

import sim.run
from sim.core.supports import supports
from sim.engine.by_expert import COLUMNS, DEMAND, EXCHANGED, GPU, ByExpert
from sim.engine.counts import HitCounts, Loss, PrefetchTally, Tally
from sim.engine.run_loop import RequestTimes, Spent
from sim.machine.cost import Cost
from sim.machine.waiting import Waiting
from sim.options import RunSpec
from sim.run import execute, prepare
from sim.setup.setup import Setup
from sim.workload.draft_steps import Drafted
from traces.format.reader import Trace

PLAIN = ("lru", "fifo", "lfu", "gpu_only")
DECIDING = (
    *("fine_moe", "moe_infinity", "expertflow", "belady", "perfect_prefetch", "lcp", "mrs", "lfru", "slru", "random"),
    *("least_stale", "edgemoe", "duoserve", "moesys", "pregated", "seqmoe", "lynx", "speculating_experts", "swapmoe"),
)
SEEDS = range(64)
MISSES = ("miss_cold", "miss_capacity", "miss_evicted_unused")
FIELDS = {
    HitCounts: ("experts", "tokens", "aside", "prefetched"),
    Loss: ("activations", "changed", "dropped", "lowered", "mass_before", "mass_kept"),
    PrefetchTally: (
        *("n", "n_bytes", "n_issued", "n_cancelled", "n_dropped"),
        *("issued_bytes", "cancelled_bytes", "n_unused"),
    ),
    Tally: (
        *("by_expert", "hits", "prefetch", "loss", "n_demand", "n_evicted", "demand_bytes"),
        *("n_iterations", "n_executed"),
    ),
    Spent: ("prefill_s", "prefill_copies_s", "prefill_drive_s", "decode_copies_s", "decode_drive_s"),
    RequestTimes: (
        *("request", "start_s", "begun_s", "first_token_s", "last_token_s", "until_begun", "until_first", "until_last"),
        *("n_preemptions", "away_s", "away_before_first_s"),
    ),
}


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Everything in a report, by its path."""
    if isinstance(value, Cost) or path == "report.wall_s":
        return
    if isinstance(value, ByExpert):
        yield path, table(value).tolist()
    elif isinstance(value, Waiting):
        yield path, list(value.waited_s)
    elif type(value) in FIELDS or isinstance(value, msgspec.Struct) or hasattr(value, "_fields"):
        names = FIELDS.get(type(value)) or getattr(value, "_fields", None) or value.__struct_fields__
        for name in names:
            yield from leaves(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, Drafted):
        yield path, ({name: n for name, n in vars(value).items() if name != "_of"}, value.took_s)
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from leaves(one, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        yield f"{path}.n", len(value)
        for at, one in enumerate(value):
            yield from leaves(one, f"{path}[{at}]")
    else:
        yield path, sorted(value) if isinstance(value, set | frozenset) else value


def table(counts: ByExpert) -> np.ndarray:
    """Counts of experts; those that today's engine copies and runs together are counted as what happened to them."""
    found = np.array(counts.table())
    for at, miss in enumerate(MISSES):
        for column in (GPU, DEMAND, COLUMNS.index(miss)):
            found[column] += found[EXCHANGED + at]
        found[EXCHANGED + at] = 0
    return found


def seen(make: Callable[[], Setup], core: bool, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a run shows by the core, or by today's engine; what it raises is part of it."""
    log: list[Any] = []
    spans: list[Any] = []
    monkeypatch.setattr(sim.run, "use_core", core)
    setup = make()
    try:
        outcome = execute(setup, lambda *span: spans.append(span), lambda *entry: log.append(entry))
        found = dict(leaves(outcome.report, "report"))
        result = outcome.result.to_dict() | {"wall_s": None}
    except Exception as error:
        found, result = {"error": (type(error), str(error))}, {}
    return {**found, "result": repr(result), "log": log, "spans": sorted(spans)}


def differences(make: Callable[[], Setup], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where the two differ."""
    core, today = (seen(make, which, monkeypatch) for which in (True, False))
    found = []
    for key in sorted(core.keys() | today.keys()):
        mine, theirs = core.get(key), today.get(key)
        if mine == theirs:
            continue
        if key in ("log", "spans"):
            at = next(i for i, (one, other) in enumerate(zip_longest(mine, theirs)) if one != other)
            mine, theirs = mine[at : at + 3], theirs[at : at + 3]
            key = f"{key}[{at}]"
        found.append(f"{key}: core {str(mine)[:300]}, today {str(theirs)[:300]}")
    return found


@pytest.mark.parametrize("contention", [False, True])
@pytest.mark.parametrize("policy", PLAIN)
@pytest.mark.parametrize("scope", [{}, {"scope": "global"}])
def test_bundled_requests(
    policy: str, scope: dict[str, str], contention: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if scope and policy == "gpu_only":
        pytest.skip("it has no scope")

    def make() -> Setup:
        return prepare(RunSpec(policy=policy, hw="rtx3090", requests=3, set=scope, sim_contention=contention))

    assert supports(make())
    assert not differences(make, monkeypatch)


@pytest.mark.parametrize(
    ("policy", "asked"),
    [
        *((policy, {}) for policy in ("fine_moe", "moe_infinity", "duoserve", "seqmoe", "lynx", "swapmoe")),
        *((policy, {"draft": "k=4,acceptance=0.7,draft_s=0.001"}) for policy in ("lru", "moe_speq", "fine_moe")),
        ("lru", {"requests": 6, "replicas": 2, "arrivals": "poisson:2"}),
        ("fine_moe", {"requests": 3, "batch": 2, "arrivals": "poisson:2"}),
        # Operations that copies do not slow, but copies both ways would, have a part in what a stream remembers.
        ("fine_moe", {"hw": "a6000", "trace": "deepseek-moe-16b-chat", "precision": "q8_0", "cache": "1296experts"}),
    ],
)
def test_policies_that_decide(policy: str, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Setup:
        return prepare(RunSpec(policy=policy, **{"hw": "rtx3090", "requests": 1, **asked}))

    assert supports(make())
    assert not differences(make, monkeypatch)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_worlds(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small machines, models, serving engines, loads, batches and rooms, contention on and off."""
    world = random_worlds.world(seed, tmp_path, (*PLAIN, *DECIDING)[seed % len((*PLAIN, *DECIDING))])
    if world.facts["spec"].gpus > 1:
        pytest.skip("today's engine alone knows several GPUs")
    with Trace(world.trace) as trace:
        for contention in (False, True):

            def make(contention: bool = contention) -> Setup:
                made = random_worlds.setup_of(world, trace)
                return replace(made, spec=msgspec.structs.replace(made.spec, sim_contention=contention))

            assert supports(make())
            assert not differences(make, monkeypatch), world
