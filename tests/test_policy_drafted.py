"""Prefetching by the routing of drafts: SP-MoE up to a cutoff layer, MoE-SpeQ by a buffer some layers ahead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cpu_bench import seeded
from easy_numbers import Run, execute_easy, setup
from tiny_traces import from_rows

from policies.moe_speq import MoeSpeq
from policies.sp_moe import SpMoe
from sim.options import RunSpec
from sim.policy.api import Policy
from sim.run import Setup, execute, prepare
from sim.setup.drafting import Drafter
from traces.format.reader import Trace

ROWS = [[[0], [0]], [[1], [1]], [[2], [2]]]  # a prompt of one token, and two to decode, in two layers


def drafting(made: Setup, draft: str) -> Setup:
    spec = msgspec.structs.replace(made.spec, draft=draft)
    return replace(made, spec=spec, drafter=Drafter.of(spec))


def replay(policy: Policy, tmp_path: Path, room: int = 8, draft: str = "k=1,acceptance=1,draft_s=4") -> Run:
    with Trace(from_rows(tmp_path / "t.safetensors", ROWS, 4, [(1, 3)])) as trace:
        made = setup(policy, trace, room)
        return execute_easy(drafting(made, draft))


def copies(seen: Run) -> list[tuple[str, float, float]]:
    """Of the decode step: the prompt ends at 27 s."""
    return [span for span in seen.lane("h2d") if span[1] >= 27]


def test_sp_moe_by_hand(tmp_path: Path) -> None:
    """The draft reads the first of two tokens, 27..31, and then its expert of layer 0 is copied; the rest on demand."""
    seen = replay(SpMoe(cutoff=1, predictor="surrogate:1"), tmp_path)
    assert copies(seen) == [
        ("prefetch 0.1", 31, 41),
        ("demand 0.2", 41, 51),  # 0.2 computes 51..53, attention of layer 1 ..54
        ("demand 1.1", 54, 64),
        ("demand 1.2", 64, 74),
    ]
    assert seen.end_s == 74 + 2 + 1
    assert seen.classes("decode") == {"late": 1, "miss": 3}
    assert seen.result.policy_stats["predicted_right_frac"] == 1.0


def test_moe_speq_by_hand(tmp_path: Path) -> None:
    """Both layers' are copied, the second behind what layer 0 demands."""
    seen = replay(MoeSpeq(predictor="surrogate:1"), tmp_path)
    assert copies(seen) == [
        ("prefetch 0.1", 31, 41),
        ("demand 0.2", 41, 51),
        ("prefetch 1.1", 51, 61),
        ("demand 1.2", 61, 71),
    ]
    assert seen.end_s == 71 + 2 + 1
    assert seen.classes("decode") == {"late": 2, "miss": 2}


def test_what_is_named_is_not_replaced_by_what_is_named_later(tmp_path: Path) -> None:
    """Room for two, taken by 0.1 and 1.1: a demand takes the place of what is furthest ahead, before its copy starts; a
    prefetch never takes that of another."""
    seen = replay(MoeSpeq(predictor="surrogate:1", ahead=2), tmp_path, room=2)
    assert [what for what, _, _ in copies(seen)] == ["prefetch 0.1", "demand 0.2", "demand 1.1", "demand 1.2"]
    assert seen.prefetched()["cancelled"] == 1
    refused = replay(MoeSpeq(predictor="surrogate:1", ahead=2), tmp_path, room=1)
    assert refused.prefetched()["refused"] >= 1


KNOBS: dict[Any, dict[str, tuple[dict[str, Any], Any]]] = {
    SpMoe: {
        "cutoff": ({}, 3),
        "predictor": ({}, "surrogate:0"),
        "best": ({}, 2),
        "seed": ({"predictor": "surrogate:0.5"}, 1),
    },
    MoeSpeq: {
        "predictor": ({}, "surrogate:0.5"),
        "ahead": ({}, 1),
        "seed": ({"predictor": "surrogate:0.5"}, 1),
    },
}


@pytest.mark.parametrize(("kind", "knob"), [(kind, knob) for kind, knobs in KNOBS.items() for knob in knobs])
def test_every_parameter_matters(kind: Any, knob: str, tmp_path: Path) -> None:
    beside, other = KNOBS[kind][knob]
    with seeded(tmp_path, n_experts=8) as trace:
        logs = []
        for settings in (beside, beside | {knob: other}):
            made = setup(kind(**settings), trace, 20)
            seen = execute_easy(drafting(made, "k=2,acceptance=0.7,draft_s=3"))
            logs.append((seen.log, seen.spans))
    assert logs[0] != logs[1]


@pytest.mark.parametrize("kind", [SpMoe, MoeSpeq])
def test_without_drafts_they_are_lru(kind: Any) -> None:
    def run(policy: str, **more: Any) -> Any:
        made = prepare(RunSpec(policy=policy, hw="rtx3090", requests=1, **more))
        with made.trace:
            return execute(made).result

    assert run(kind.name).h2d_bytes == run("lru", set={"scope": "global"}).h2d_bytes
    drafted = run(kind.name, draft="k=3,acceptance=0.8,draft_s=0.02")
    assert drafted.prefetch.issued.n > 0
    published = {"sp_moe": 0.885, "moe_speq": 0.909}[kind.name]
    # Binomial over two experts; the surest of them is right more often than either.
    assert drafted.policy_stats["predicted_right_frac"] > published - 0.02
    assert "surrogate" in drafted.caveats
