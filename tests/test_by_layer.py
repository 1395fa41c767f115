"""Counts and waiting by layer and expert: by hand in tiny worlds, against an observer of its own, and as identities."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import random_worlds
from easy_numbers import EXPERT_BYTES, run

from moesim import Policy
from policies.lru import Lru
from sim.figures import values_of
from sim.policy.decisions import Prefetch, RunCpu
from sim.results.by_layer import COUNTS, FOUND, MISSES, WAITS_S, expert_table
from sim.run import execute
from traces.format.reader import Trace

N_WORLDS, SLICES = 64, 4
NONE = dict.fromkeys((*FOUND, *(f"miss_{why}" for why in MISSES)), 0)


def rows_of(outcome: Any) -> dict[tuple[str, int], dict[str, Any]]:
    return {(row["phase"], row["layer"]): row for row in outcome.result.by_layer}


def found(seen: Any, phase: str, layer: int) -> dict[str, int]:
    """How the experts of a layer were found, and why not; what there was none of is left out."""
    row = rows_of(seen.outcome)[phase, layer]
    return {name: row[f"{name}_n"] for name in NONE if row[f"{name}_n"]}


def waited(seen: Any, phase: str, layer: int) -> dict[str, float]:
    row = rows_of(seen.outcome)[phase, layer]
    return {name: row[name] for name in WAITS_S if row[name]}


class Foretold(Policy):
    """Prefetches, when an iteration starts, what it was told to; the oldest leaves, never for a prefetch if `shy`."""

    name = "foretold"

    def __init__(self, wanted: dict[int, list[tuple[int, int]]], shy: bool = False) -> None:
        super().__init__()
        self.wanted, self.shy = wanted, shy

    def iteration_start(self, iteration: Any, view: Any) -> Iterator[Any]:
        for layer, expert in self.wanted.get(iteration.index, ()):
            yield Prefetch(view.piece(layer, expert))

    def victim(self, piece: Any, speculative: bool, view: Any) -> Any:
        if speculative and self.shy:
            return None
        return next((one for one in view.residents() if view.evictable(one)), None)


class Queueing(Foretold):
    name = "queueing"
    traits = frozenset({"timing"})
    prefetch_depth = 1


class AllOnCpu(Policy):
    name = "all_on_cpu"
    traits = frozenset({"cpu"})

    def gate_done(self, gate: Any, view: Any) -> Iterator[Any]:
        for expert in gate.needs:
            yield RunCpu(expert)


class TestByHand:
    def test_cold_capacity_and_evicted_in_the_same_pass(self, tmp_path: Path) -> None:
        # Room for 3. The prompt: 0.0 and 0.1, then 1.0 beside them and 1.1 in the place of 0.0. The next token: 0.0,
        # evicted a pass before, comes for 0.1 and 0.2 for 1.0, which layer 1 then asks for again; it comes for 0.0.
        seen = run(Lru(scope="global"), tmp_path, [[[0, 1], [0, 1]], [[0, 2], [0, 1]]], room=3, n_experts=3)
        assert found(seen, "prefill", 0) == {"miss": 2, "miss_cold": 2}
        assert found(seen, "prefill", 1) == {"miss": 2, "miss_cold": 2}
        assert found(seen, "decode", 0) == {"miss": 2, "miss_cold": 1, "miss_capacity": 1}
        assert found(seen, "decode", 1) == {"hit": 1, "miss": 1, "miss_evicted_unused": 1}
        evicted = {at: row["evict_n"] for at, row in rows_of(seen.outcome).items()}
        assert evicted == {("prefill", 0): 1, ("prefill", 1): 0, ("decode", 0): 2, ("decode", 1): 1}

    def test_a_wrong_prediction(self, tmp_path: Path) -> None:
        # Room for 2. In pass 1, 1.1 comes for 0.0. In pass 2, 0.1 is prefetched for 1.0; layer 0 asks for 0.0.
        rows = [[[0], [0]], [[0], [1]], [[0], [1]]]
        seen = run(Foretold({2: [(0, 1)]}), tmp_path, rows, room=2, n_experts=2)
        assert found(seen, "decode", 0) == {"hit": 1, "miss": 1, "miss_wrong_prediction": 1}
        assert found(run(Foretold({}), tmp_path, rows, room=2, n_experts=2), "decode", 0) == {
            "hit": 1,
            "miss": 1,
            "miss_capacity": 1,
        }

    def test_a_prediction_for_a_layer_blames_no_other(self, tmp_path: Path) -> None:
        # As before, but 1.0 is what was predicted: layer 0's miss is for want of room.
        rows = [[[0], [0]], [[0], [1]], [[0], [1]]]
        seen = run(Foretold({2: [(1, 0)]}), tmp_path, rows, room=2, n_experts=2)
        assert found(seen, "decode", 0) == {"hit": 1, "miss": 1, "miss_capacity": 1}

    def test_never_seen_is_cold_whatever_was_predicted(self, tmp_path: Path) -> None:
        seen = run(Foretold({0: [(0, 1)]}), tmp_path, [[[0]]], room=2, n_experts=2)
        assert found(seen, "prefill", 0) == {"miss": 1, "miss_cold": 1}

    def test_refused_comes_too_late(self, tmp_path: Path) -> None:
        rows = [[[0], [0]], [[0], [1]], [[0], [1]]]
        seen = run(Foretold({2: [(0, 0)]}, shy=True), tmp_path, rows, room=2, n_experts=2)
        assert found(seen, "decode", 0) == {"hit": 1, "miss": 1, "miss_too_late": 1}
        assert rows_of(seen.outcome)["decode", 0]["prefetch_refused_n"] == 1

    def test_queued_comes_too_late_and_under_way_is_late(self, tmp_path: Path) -> None:
        # One copy at a time is handed over: when the gate asks, 0.0 is under way and 0.1 has not begun.
        seen = run(Queueing({0: [(0, 0), (0, 1)]}), tmp_path, [[[0, 1]]], room=4, n_experts=4, copy_s=3.0)
        assert found(seen, "prefill", 0) == {"late_hit": 1, "miss": 1, "miss_too_late": 1}

    def test_prefetched_evicted_and_asked_for(self, tmp_path: Path) -> None:
        # Room for 1: the copy of 1.0 has begun when 0.0 takes its room. One that has not is withdrawn: 0.0's, for 0.1.
        seen = run(Foretold({0: [(1, 0)]}), tmp_path, [[[0], [0]]], room=1, n_experts=2, copy_s=3.0, kernel_s=1.0)
        assert found(seen, "prefill", 1) == {"miss": 1, "miss_evicted_unused": 1}
        row = rows_of(seen.outcome)["prefill", 1]
        assert (row["prefetch_issued_n"], row["prefetch_wasted_n"], row["evict_n"]) == (1, 1, 1)
        assert (row["demand_copies_n"], row["demand_copies_bytes"]) == (1, EXPERT_BYTES)
        seen = run(Foretold({0: [(0, 0), (0, 1)]}), tmp_path, [[[0]]], room=1, n_experts=2, copy_s=3.0)
        assert found(seen, "prefill", 0) == {"miss": 1, "miss_too_late": 1}
        assert rows_of(seen.outcome)["prefill", 0]["prefetch_cancelled_n"] == 1

    def test_waits_for_copies(self, tmp_path: Path) -> None:
        # A copy takes 3 s, attention and an expert 1. Layer 0's is prefetched when the iteration starts, layer 1's not.
        seen = run(Foretold({0: [(0, 0)]}), tmp_path, [[[0], [0]], [[0], [1]]], room=4, n_experts=2, copy_s=3.0)
        assert waited(seen, "prefill", 0) == {"wait_prefetch_s": 2.0}
        assert waited(seen, "prefill", 1) == {"wait_demand_s": 3.0}
        assert waited(seen, "decode", 0) == {}
        assert waited(seen, "decode", 1) == {"wait_demand_s": 3.0}

    def test_waits_for_the_cpu_count_for_the_layer_that_asked(self, tmp_path: Path) -> None:
        seen = run(AllOnCpu(), tmp_path, [[[0, 1], [0, 1]]], room=1, n_experts=2, copy_s=0.0, cpu_s=2.0)
        assert waited(seen, "prefill", 0) == {"wait_cpu_s": 4.0}
        assert waited(seen, "prefill", 1) == {"wait_cpu_s": 4.0}
        assert found(seen, "prefill", 1) == {"cpu": 2}
        row = rows_of(seen.outcome)["prefill", 1]
        assert (row["experts_n"], row["gpu_n"]) == (2, 0)


class Observer:
    """An LRU cache over all layers, slowly: what it finds, and why not, by phase, layer and expert."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.cache: OrderedDict[tuple[int, int], None] = OrderedDict()
        self.left_in: dict[tuple[int, int], int] = {}
        self.seen: Counter[tuple[str, int, int, str]] = Counter()

    def ask(self, phase: str, at: int, layer: int, wanted: list[int]) -> None:
        missing = [(layer, e) for e in wanted if (layer, e) not in self.cache]
        for e in wanted:
            if (layer, e) in self.cache:
                self.cache.move_to_end((layer, e))
                self.seen[phase, layer, e, "hit_n"] += 1
        for one in missing:
            left = self.left_in.get(one)
            why = "cold" if left is None else "evicted_unused" if left == at else "capacity"
            self.seen[phase, *one, f"miss_{why}_n"] += 1
            if len(self.cache) == self.room:
                gone = next(old for old in self.cache if old[0] != layer or old[1] not in wanted)
                del self.cache[gone]
                self.left_in[gone] = at
                self.seen[phase, *gone, "evict_n"] += 1
            self.cache[one] = None
            self.seen[phase, *one, "demand_copies_n"] += 1


@pytest.mark.parametrize("seed", range(6))
def test_an_observer_of_its_own_counts_the_same(seed: int, tmp_path: Path) -> None:
    rng = Random(seed)
    n_layers, n_experts, top_k = rng.randint(1, 4), rng.randint(4, 7), rng.randint(1, 3)
    room = rng.randint(top_k * 2, n_layers * n_experts)
    lengths = [(rng.randint(1, 2), rng.randint(1, 20)) for _ in range(4)]
    rows = [
        [rng.sample(range(n_experts), top_k) for _ in range(n_layers)]
        for _ in range(sum(prompt + outputs - 1 for prompt, outputs in lengths))
    ]
    seen = run(Lru(scope="global"), tmp_path, rows, room=room, n_experts=n_experts, lengths=lengths)
    observer, at, first = Observer(room), 0, 0
    for prompt, outputs in lengths:
        for phase, n in [("prefill", prompt), *[("decode", 1)] * (outputs - 1)]:
            for layer in range(n_layers):
                chosen = [expert for row in rows[first : first + n] for expert in row[layer]]
                observer.ask(phase, at, layer, sorted(set(chosen)) if n > 1 else chosen)
            at, first = at + 1, first + n
    table = expert_table(seen.outcome.report)
    told: Counter[tuple[str, int, int, str]] = Counter()
    for phase, layer, expert, *counts in table:
        for name, n in zip(COUNTS, counts, strict=True):
            if name in ("hit_n", "evict_n", "demand_copies_n") or (name.startswith("miss_") and name != "miss_n"):
                told[phase, layer, expert, name] = n
    assert +told == +observer.seen


# -- identities -----------------------------------------------------------------------------------------------------

DECISIONS = {
    "gpu": "gpu_n",
    "part": "part_n",
    "evict": "evict_n",
    "cancel": "cancel_n",
    "fetch": "demand_copies_n",
    "prefetch": "prefetch_issued_n",
    "write_back": "write_back_n",
    "cpu_ahead": "cpu_ahead_n",
}


def holds_together(outcome: Any, log: list[tuple[str, str, int, int]]) -> None:
    """Experts sum to layers, layers to the run's totals; and the counts are those of the decisions."""
    result, report = outcome.result, outcome.report
    tally = report.counts.tally
    rows = result.by_layer
    for row in rows:
        assert row["miss_n"] == sum(row[f"miss_{why}_n"] for why in MISSES)
        assert row["asked_n"] == sum(row[f"{name}_n"] for name in FOUND)
        assert min(row[name] for name in COUNTS) >= 0
    sums: Counter[tuple[str, int, str]] = Counter()
    for phase, layer, expert, *counts in expert_table(report):
        for name, n in zip(COUNTS, counts, strict=True):
            assert n >= 0, (phase, layer, expert, name)
            sums[phase, layer, name] += n
    assert +sums == +Counter({(row["phase"], row["layer"], name): row[name] for row in rows for name in COUNTS})
    for phase in ("prefill", "decode"):
        of = [row for row in rows if row["phase"] == phase]
        assert [sum(row[f"{name}_n"] for row in of) for name in FOUND] == tally.hits[phase].experts
        times = report.phases[phase]
        parts_s = times.parts_s
        for cause, names in enumerate((("gpu",), ("demand", "prefetch"), ("host",), ("cpu",), ("predictor",))):
            told_s = math.fsum(row[f"wait_{name}_s"] for row in of for name in names)
            if cause == 0:
                assert told_s <= parts_s[0] + 1e-9 * times.time_s
            else:
                assert told_s == pytest.approx(parts_s[cause], rel=1e-9, abs=1e-9 * times.time_s)

    def total(name: str) -> int:
        return sum(row[name] for row in rows)

    assert total("evict_n") == tally.n_evicted
    copies = result.demand_copies
    assert (total("demand_copies_n"), total("demand_copies_bytes")) == (copies.n, copies.bytes)
    for fate, copies in values_of(result.prefetch).items():
        assert total(f"prefetch_{fate}_n") == copies.n
        assert fate == "refused" or total(f"prefetch_{fate}_bytes") == copies.bytes
    decided = Counter((phase, layer, DECISIONS[kind]) for phase, kind, layer, _ in log if kind in DECISIONS)
    assert +decided == +Counter({at: n for at, n in sums.items() if at[2] in DECISIONS.values()})
    ran = Counter((phase, layer) for phase, kind, layer, _ in log if kind in ("gpu", "cpu"))
    assert +ran == +Counter({(row["phase"], row["layer"]): row["experts_n"] for row in rows})


def replayed(of: random_worlds.World, watched: bool, engine: str = "core") -> tuple[Any, list[Any]]:
    """A run of a world, with its decisions by the phase that they count for; None where it is refused."""
    log: list[Any] = []
    with Trace(of.trace) as trace:
        try:
            setup = random_worlds.setup_of(of, trace)
            setup = replace(setup, spec=msgspec.structs.replace(setup.spec, sim_simulator=engine))
            views: list[Any] = []

            def told(kind: str, layer: int, expert: int) -> None:
                log.append((views[0].phase, kind, layer, expert))

            class Noting(type(setup.policy)):  # type: ignore[misc]
                def bind(self, view: Any) -> None:
                    views.append(view)
                    super().bind(view)

            setup.policy.__class__ = Noting
            spans = (lambda *_: None) if watched else None
            return execute(setup, spans, told if watched else None, bounds=False), log
        except Exception:
            return None, log


@pytest.mark.parametrize("at", range(SLICES))
def test_identities_in_random_worlds(at: int, tmp_path: Path) -> None:
    n_run = 0
    for seed in range(at, N_WORLDS, SLICES):
        of = random_worlds.world(5000 + seed, tmp_path)
        outcome, log = replayed(of, watched=True)
        if outcome is None:
            continue
        n_run += 1
        holds_together(outcome, log)
        alone, _ = replayed(of, watched=False)
        assert alone.result.by_layer == outcome.result.by_layer  # to the last bit, whoever looks
    assert n_run > N_WORLDS // SLICES // 2
