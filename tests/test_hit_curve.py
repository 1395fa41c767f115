"""Hit rates of every budget from one pass are those of single runs, to the last hit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from cli_help import mixtral_shaped, moesim, simulated

import moesim as face
from sim.base.errors import BadInput
from sim.run import execute, prepare
from sim.setup.spec import RunSpec
from sim.studies.hit_curve import HitCurve, Stack, hit_curve
from sim.workload.iterations import PREFILL

ROOMY = {"hw.vram_bytes": 10**12}
PREFETCHING = """
from sim.policy import Policy, Prefetch, Recency


class Early(Policy):
    name = "early"

    def bind(self, view):
        self.order = Recency()

    def layer_enter(self, layer, view):
        yield Prefetch(view.piece(layer, 0))
"""
UNEVEN = """
from policies.lru import Lru


class Uneven(Lru):
    name = "uneven"

    def layer_budgets(self, view):
        even = super().layer_budgets(view)
        return even and [[2 * even[0][0], 0, *even[0][2:]]]
"""


def spec(trace: Path, n: int, scope: str, batch: int = 1, policy: str = "lru") -> RunSpec:
    options: dict[str, Any] = {"experts": n, "batch": batch, "trace": str(trace), "model": "mixtral-8x7b"}
    return RunSpec(policy=policy, hw="rtx3090", set={**ROOMY, "scope": scope}, split="all", **options)


def curve(asked: RunSpec) -> HitCurve:
    setup = prepare(asked)
    try:
        return hit_curve(setup)
    finally:
        setup.close()


@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("batch", [1, 3])
def test_every_budget_is_a_single_run(tmp_path: Path, scope: str, batch: int) -> None:
    """Also below what one layer asks for, where experts of a layer push one another out, and at the most."""
    trace = mixtral_shaped(tmp_path, n_requests=4, prompt=6, outputs=12)
    found = curve(spec(trace, 64, scope, batch))
    assert found.least == (1 if scope == "global" else 32)
    sizes = [*range(found.least, found.least + 20), *range(found.least + 20, 257, 17), 255, 256]
    for n in sizes:
        setup = prepare(spec(trace, n, scope, batch))
        result = execute(setup, bounds=False).result
        setup.close()
        told = (found.rate(n), found.rate(n, PREFILL), found.copies(n))
        assert told == (result.hit_rate, result.prefill_hit_rates.hit, result.demand_copies.n), n
    assert 0 < found.rate(128) < found.rate(256)  # type: ignore[operator]


def test_a_stack_is_many_caches() -> None:
    """Against a cache of every size written down by its rules: those that are there run first, then what is copied."""
    draws = random.Random(4)
    visits = [draws.sample(range(9), draws.choice((1, 2, 3, 6))) for _ in range(400)]
    stack, caches = Stack(len(visits)), {size: [] for size in range(1, 12)}
    for visit in visits:
        hits = stack.visit(visit)
        for size, cache in caches.items():
            there = [piece for piece in visit if piece in cache]
            assert [hit.at(size) for hit in hits] == [piece in there for piece in visit]
            ran = [*there, *(piece for piece in visit if piece not in there)]
            caches[size] = [*(piece for piece in cache if piece not in visit), *ran][-size:]


def test_the_command_says_what_simulate_says(capsys: Any, tmp_path: Path) -> None:
    trace = mixtral_shaped(tmp_path)
    words = ("sweep", "--hits-only", "--policy", "lru scope=global,layer", "--trace", trace, "--experts", "40,48")
    said = moesim(capsys, *words, "--out", tmp_path / "out")
    assert said.code == 0
    assert said.out.startswith("lru scope=")
    rows = pd.read_parquet(tmp_path / "out" / "hits.parquet")
    assert rows[["param.scope", "experts"]].to_numpy().tolist() == [
        [scope, n] for scope in ("global", "layer") for n in (40, 48)
    ]
    for row in rows.to_dict("records"):
        words = ("--policy", "lru", "--hw", "rtx3090", "--trace", trace, "--experts", row["experts"])
        alone = simulated(capsys, *words, "--set", f"scope={row['param.scope']}", "--json").json
        for column in ("hit_rate", "h2d_bytes", "trace_sha256", "expert_bytes", "version", "requests"):
            assert row[column] == alone[column]
        assert row["prefill_hit_rate"] == alone["prefill_hit_rates"]["hit"]
        assert row["demand_copies_n"] == alone["demand_copies"]["n"]
    pd.testing.assert_frame_equal(
        face.sweep("lru scope=global,layer", trace=trace, experts=[40, 48], hits_only=True), rows
    )


def test_all_budgets_are_told_unless_some_are_asked_for(tmp_path: Path) -> None:
    rows = face.sweep("lru", trace=mixtral_shaped(tmp_path), hits_only=True)
    assert rows["experts"].tolist() == list(range(1, 257))
    assert rows["hit_rate"].iloc[-1] == rows["hit_rate"].max()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--policy", "lfu"), "policy lfu: its order is not Recency"),
        (("--policy", "fiddler"), "policy fiddler: "),
        (("--policy", "lru", "--hw", "a6000"), "got --hw: these hits do not depend on it"),
        (("--policy", "lru", "--vram", "8GB"), "got --vram"),
        (("--policy", "lru", "--set", "hw.h2d.latency_s=1"), "got --set hw.h2d.latency_s"),
        (("--policy", "lru", "--cache-frac", "0,0.5"), "a share of all experts"),
        (("--policy", "lru", "--dry-run"), "leave them out"),
    ],
)
def test_what_has_no_such_curve(capsys: Any, tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    trace = mixtral_shaped(tmp_path)
    assert says in moesim(capsys, "sweep", "--hits-only", "--trace", trace, *words).error


@pytest.mark.parametrize(("code", "says"), [(PREFETCHING, "answers layer_enter"), (UNEVEN, "do not share the room")])
def test_a_policy_that_does_more_than_its_order_has_none(tmp_path: Path, code: str, says: str) -> None:
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    trace = mixtral_shaped(tmp_path)
    asked = spec(trace, 64, "layer", policy=str(tmp_path / "mine.py"))
    if "Early" in code:
        asked = RunSpec(policy=asked.policy, hw="rtx3090", trace=str(trace), set=ROOMY)
    with pytest.raises(BadInput, match=says):
        curve(asked)
