"""Hit rates of every budget from one pass are those of single runs, to the last hit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from cli_help import mixtral_shaped, moesim, simulated
from grids import few_each_time

import moesim as face
from sim.base.errors import BadInput
from sim.base.stack_distance import RankStack, RecencyStack
from sim.options import RunSpec
from sim.run import execute, prepare
from sim.studies.curve import Curve, curve_of
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
BARRED = """
from policies.lfu import Lfu


class Barred(Lfu):
    name = "barred"

    def bind(self, view):
        super().bind(view)
        self.order.bar[0] = 3
"""


def spec(trace: Path, n: int, scope: str, batch: int = 1, policy: str = "lru") -> RunSpec:
    options: dict[str, Any] = {"cache": f"{n}experts", "batch": batch, "trace": str(trace), "model": "mixtral-8x7b"}
    name, *own = policy.split()
    params = {**ROOMY, "scope": scope, **dict(word.split("=") for word in own)}
    return RunSpec(policy=name, hw="rtx3090", set=params, split="all", **options)


def curve(asked: RunSpec) -> Curve:
    return curve_of(asked.policy, asked)


@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.thorough), 3])
@pytest.mark.parametrize(
    "policy", few_each_time(["lru", "lfu", "lfu counts=tokens", "lcp", "mrs"], ["lru", "lfu", "lcp"])
)
def test_every_budget_is_a_single_run(tmp_path: Path, scope: str, batch: int, policy: str) -> None:
    """Also below what one layer asks for, where experts of a layer push one another out, and at the most."""
    trace = mixtral_shaped(tmp_path, n_requests=4, prompt=6, outputs=12)
    found = curve(spec(trace, 64, scope, batch, policy))
    assert found.least == (1 if scope == "global" else 32)
    step = 1 if policy == "lru" else 4
    sizes = [*range(found.least, found.least + 20, step), *range(found.least + 20, 257, 17 * step), 255, 256]
    for n in sizes:
        setup = prepare(spec(trace, n, scope, batch, policy))
        result = execute(setup, bounds=False).result
        setup.close()
        told = (found.rate(n), found.rate(n, PREFILL), found.copies(n))
        assert told == (result.hit_rate, result.prefill_hit_rates.hit, result.demand_copies.n), n
    assert 0 < found.rate(128) < found.rate(256)  # type: ignore[operator]


def of_each_size(visits: list[list[int]], size: int, key: Any) -> int:
    """Hits of one cache, by its rules: what is missing is demanded while none of the group may leave; what finds no
    room follows one by one. `key(visit, piece)`: the least leaves first; None: least recently run."""
    here: list[int] = []
    n_hits = 0
    for now, visit in enumerate(visits):

        def least(of: list[int], now: int = now) -> int:
            return of[0] if key is None else min(of, key=lambda one: key(now, one))

        there = [piece for piece in visit if piece in here]
        n_hits += len(there)
        if key is None:
            here = [*(piece for piece in here if piece not in there), *there]
        later = []
        for piece in [piece for piece in visit if piece not in here]:
            others = [other for other in here if other not in visit]
            if len(here) >= size and not others:
                later.append(piece)
                continue
            if len(here) >= size:
                here.remove(least(others))
            here.append(piece)
        for piece in later:
            here.remove(least(here))
            here.append(piece)
    return n_hits


@pytest.mark.parametrize("seed", range(8))
def test_a_stack_is_a_cache_of_every_size(seed: int) -> None:
    """Groups of one to all, so that small sizes overflow; ranks that anything may change between visits, equal ones
    among them; enough visits to number the groups anew."""
    draws = random.Random(seed)
    n = draws.choice((5, 9, 14))
    most = draws.choice((min(n, 4), n))
    visits = [draws.sample(range(n), draws.choice([k for k in (1, 2, 3, 6, 9) if k <= most])) for _ in range(250)]
    ranks = []
    rank = np.zeros(n)
    for visit in visits:
        for piece in [*visit, *draws.sample(range(n), 2)]:
            rank[piece] = draws.randrange((3, 10**9)[seed % 2])
        ranks.append(rank.copy())
    recent, ranked = RecencyStack(n, most), RankStack(n, most, range(n))
    for visit, rank in zip(visits, ranks, strict=True):
        ids = np.array(visit, dtype=np.int64)
        recent.visit(ids, 0, len(visit), 0, 0)
        ranked.visit(ids, 0, len(visit), 0, 0, rank)
    sizes = range(1, n + 1)
    assert recent.hits(0)[1:] == [of_each_size(visits, size, None) for size in sizes]
    assert ranked.hits(0)[1:] == [of_each_size(visits, size, lambda at, one: (ranks[at][one], one)) for size in sizes]


def test_a_cache_that_forgets_is_no_stack() -> None:
    """Uses are forgotten where an expert leaves, so ranks differ by size, and more room hits less."""
    visits = [3, 1, 0, 1, 0, 2, 3, 2, 3]

    def hits(room: int) -> int:
        uses, here, n = dict.fromkeys(range(4), 0), set[int](), 0
        for piece in visits:
            n += piece in here
            if piece not in here and len(here) == room:
                gone = min(here, key=lambda one: (uses[one], one))
                here.remove(gone)
                uses[gone] = 0
            here.add(piece)
            uses[piece] += 1
        return n

    assert (hits(2), hits(3)) == (3, 2)


def test_the_command_says_what_simulate_says(capsys: Any, tmp_path: Path) -> None:
    trace = mixtral_shaped(tmp_path)
    words = ("curve", "--policy", "lru scope=global,layer", "--trace", trace, "--cache", "40experts,48experts")
    said = moesim(capsys, *words, "--out", tmp_path / "out")
    assert said.code == 0
    assert said.out.startswith("lru scope=")
    rows = pd.read_parquet(tmp_path / "out" / "curve.parquet")
    assert rows[["params.scope", "experts"]].to_numpy().tolist() == [
        [scope, n] for scope in ("global", "layer") for n in (40, 48)
    ]
    for row in rows.to_dict("records"):
        words = ("--policy", "lru", "--hw", "rtx3090", "--trace", trace, "--cache", f"{row['experts']}experts")
        alone = simulated(capsys, *words, "--set", f"scope={row['params.scope']}", "--json").json
        for column in ("hit_rate", "h2d_bytes", "trace_sha256", "expert_bytes", "version", "requests"):
            assert row[column] == alone[column]
        assert row["prefill_hit_rates.hit"] == alone["prefill_hit_rates"]["hit"]
        assert row["demand_copies_n"] == alone["demand_copies"]["n"]
    pd.testing.assert_frame_equal(
        face.curve("lru scope=global,layer", trace=trace, cache=["40experts", "48experts"]), rows
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--policy", "lfu reset_on_evict=true"), "policy lfu: with reset_on_evict it forgets"),
        (("--policy", "fifo"), "policy fifo: a larger room"),
        (("--policy", "slru"), "policy slru: which experts are protected"),
        (("--policy", "lfru"), "policy lfru: it counts uses since"),
        (("--policy", "least_stale"), "policy least_stale: experts of one layer are stamped"),
        (("--policy", "random"), "policy random: its draws"),
        (("--policy", "belady"), "policy belady: which missing expert"),
        (("--policy", "heat"), "policy heat: it answers "),
        (("--policy", "fiddler"), "policy fiddler: "),
        (
            ("--policy", "lru", "--hw", "a6000"),
            "--hw: no option of moesim curve; leave it out: hits of one cache are counted",
        ),
        (("--policy", "lru", "--set", "hw.h2d.latency_s=1"), "got --set hw.h2d.latency_s"),
        (("--policy", "lru", "--cache", "0%,50%"), "a share of all experts"),
        (("--policy", "lru", "--arrivals", "poisson:1", "--batch", "2"), "add --arrivals none"),
        (("--policy", "lru", "--set", "sim.energy=gpu"), "got --set sim.energy"),
        ((), "no policy"),
    ],
)
def test_what_has_no_such_curve(capsys: Any, tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    trace = mixtral_shaped(tmp_path)
    assert says in moesim(capsys, "curve", "--trace", trace, *words).error


@pytest.mark.parametrize(
    ("code", "says"),
    [(PREFETCHING, "answers layer_enter"), (UNEVEN, "do not share the room"), (BARRED, "bars experts")],
)
def test_a_policy_that_does_more_than_its_order_has_none(tmp_path: Path, code: str, says: str) -> None:
    (tmp_path / "mine.py").write_text(code, encoding="utf-8")
    trace = mixtral_shaped(tmp_path)
    asked = spec(trace, 64, "layer", policy=str(tmp_path / "mine.py"))
    if "Early" in code:
        asked = RunSpec(policy=asked.policy, hw="rtx3090", trace=str(trace), set=ROOMY)
    with pytest.raises(BadInput, match=says):
        curve(asked)


def test_without_cache_it_is_every_size(capsys: Any) -> None:
    told = " ".join(moesim(capsys, "curve", "--help").out.split())
    assert "default: every size." in told
    assert "all VRAM left" not in told
