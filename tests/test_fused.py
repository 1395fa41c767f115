"""Engine and machine in one say what engine and machine say: every result to the last bit, for every policy."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tiny_traces import ALL, tiny_trace
from untaught import UNTAUGHT

from sim.base.errors import MoesimError
from sim.engine import fast, fused
from sim.engine.engine import Engine
from sim.engine.fused import FusedEngine
from sim.policy.registry import policies
from sim.run import assemble, execute, prepare
from sim.setup.spec import RunSpec

SHAPES = {"mixtral-8x7b": (32, 8, 2), "qwen1.5-moe-a2.7b": (24, 60, 4)}
LINKS = (None, 2e9, 2e10, 5e12)  # bytes per second: experts arrive late, about in time, at once


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("fused")
    levels = ALL - {"arrivals"}
    return {
        model: str(tiny_trace(folder / model, *shape, n_requests=3, prompt=3, outputs=4, levels=levels))
        for model, shape in SHAPES.items()
    }


def outcome(spec: RunSpec) -> tuple[Any, Any]:
    """Everything the result says and the state at the end; or the message of what cannot run."""
    try:
        setup = prepare(spec)
        done = execute(setup, bounds=False)
        setup.close()
    except MoesimError as error:
        return None, str(error)
    done.result.pop("wall_s")
    lane, stream = done.machine.up[0], done.machine.streams[0]
    state = [(repr(piece), e.origin, e.used, e.arrival and e.arrival.end_s, e.last_use and e.last_use.end_s)
             for piece, e in done.engine.cache.entries.items()]  # fmt: skip
    return done.result, (state, done.machine.now_s, lane.free_s, lane.n_copies, stream.free_s, stream.gaps_s,
                         done.engine._clean_bytes)  # fmt: skip


@pytest.mark.parametrize("name", policies())
def test_fused_is_the_general_way(name: str, traces: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    pick, n_ran = random.Random(name), 0
    monkeypatch.setattr(fast, "applies", lambda *_: False)  # plain caches have a still shorter way
    for at in range(5 if "timing" in policies()[name].traits else 2):
        model = pick.choice(list(SHAPES))
        n_layers, n_experts, top_k = SHAPES[model]
        settings = dict(UNTAUGHT.get(name, {}))
        if bandwidth := pick.choice(LINKS):
            settings["hw.h2d.bandwidth_bytes_per_s"] = bandwidth
        spec = RunSpec(
            policy=name, hw=pick.choice(("a6000", "h200-sxm")), trace=traces[model], model=model, set=settings,
            batch=pick.choice((1, 1, 2)), stack=pick.choice(("bare", "hf")),
            experts=pick.choice((top_k, n_experts, 2 * n_experts + 1, n_layers * n_experts // 3)) if at else None,
        )  # fmt: skip
        in_one = outcome(spec)
        with monkeypatch.context() as patch:
            patch.setattr(fused, "applies", lambda *_: False)
            apart = outcome(spec)
        assert in_one == apart, spec
        n_ran += in_one[0] is not None
    assert n_ran, "it ran nowhere"


@pytest.mark.parametrize("change", [{"gpus": 2}, {"set": {"hw.contention.gpu_slowdown_by_h2d": 0.1}}])
def test_it_applies_to_one_gpu_without_contention_where_nobody_looks(change: dict, traces: dict[str, str]) -> None:
    def engine(log=None, **changes):
        setup = prepare(RunSpec(policy="fine_moe", hw="a6000", trace=traces["mixtral-8x7b"], **changes))
        return assemble(setup, None, log)[0]

    assert type(engine()) is FusedEngine
    assert type(engine(log=lambda *_: None)) is Engine
    assert type(engine(**change)) is Engine


def test_spans_and_logs_are_not_lost(tmp_path: Path, traces: dict[str, str]) -> None:
    setup = prepare(RunSpec(policy="fine_moe", hw="a6000", trace=traces["mixtral-8x7b"], experts=16))
    spans: list[Any] = []
    execute(setup, spans=lambda *span: spans.append(span), bounds=False)
    assert {lane for lane, *_ in spans} >= {"host", "gpu", "h2d"}
