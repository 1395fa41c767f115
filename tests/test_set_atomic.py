"""A layer's experts are one set: counts of the plain caches against a replay of their own, as a set and one by one.

Replaying a set expert by expert lets its first misses evict what it asks for next (arXiv 2608.07911, Tables 1 and 2).
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from tiny_traces import from_rows

from policies.lfu import Lfu
from policies.lru import Lru
from sim.options import RunSpec
from sim.run import execute
from sim.setup.prepare import prepare

N_LAYERS, N_EXPERTS, TOP_K, SLOTS, BATCH = 24, 60, 4, 26, 4


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Eight requests of one prompt token each, so that no set is larger than a layer's room; some experts are popular,
    and a token shares some with the one before."""
    draw = np.random.default_rng(3)
    rows = []
    for _ in range(8):
        liking = draw.normal(0, 1, (N_LAYERS, N_EXPERTS))
        for _ in range(30):
            liking = 0.8 * liking + 0.6 * draw.normal(0, 1, liking.shape)
            rows.append(np.argsort(-liking - np.linspace(0.8, 0, N_EXPERTS), axis=1)[:, :TOP_K])
    path = tmp_path_factory.mktemp("sets") / "t.safetensors"
    return str(from_rows(path, rows, n_experts=N_EXPERTS, lengths=[(1, 30)] * 8))


def as_set(sets: list[tuple[int, list[int]]], by_uses: bool) -> int:
    """Misses when what is wanted together is looked up together."""
    held: dict[int, dict[int, int]] = {layer: {} for layer in range(N_LAYERS)}  # layer -> expert -> last use
    uses, now, misses = Counter(), 0, 0
    for layer, wanted in sets:
        cache = held[layer]
        missing = [e for e in wanted if e not in cache]
        for e in [e for e in wanted if e in cache] + missing:
            if e not in cache and len(cache) == SLOTS:
                free = [c for c in cache if c not in wanted]
                del cache[min(free, key=lambda c: (uses[layer, c], c) if by_uses else cache[c])]
            cache[e] = now = now + 1
            uses[layer, e] += 1
        misses += len(missing)
    return misses


def one_by_one(sets: list[tuple[int, list[int]]], by_uses: bool) -> int:
    """Misses when each expert is looked up and brought in by itself."""
    return as_set([(layer, [e]) for layer, wanted in sets for e in wanted], by_uses)


def watched(kind: type, trace: str) -> tuple[dict, list[tuple[int, list[int]]]]:
    """Result of a run and the sets that its gates asked for, in turn."""
    seen: list[tuple[int, list[int]]] = []
    setup = prepare(
        RunSpec(
            policy=kind.name,
            hw="h200-sxm",
            trace=trace,
            model="qwen1.5-moe-a2.7b",
            split="all",
            batch=BATCH,
            cache=f"{SLOTS * N_LAYERS}experts",
            set={"scope": "layer"},
        )
    )
    policy = setup.policy
    inner = policy.assign

    class Watching(type(policy)):
        traits = frozenset({"lossy"})  # whoever looks at a gate before it is served may change it; this one does not

        def assign(self, gate, view):
            seen.append((gate.layer, list(gate.needs)))
            return inner(gate, view)

    policy.__class__ = Watching
    return execute(setup).result, seen


@pytest.mark.parametrize("kind", [Lru, Lfu])
def test_the_engine_serves_sets(kind: type, trace: str) -> None:
    result, sets = watched(kind, trace)
    assert max(len(wanted) for _, wanted in sets) <= SLOTS
    by_uses = kind is Lfu
    decode, prefill = sets_of(result, sets)
    misses = result.demand_copies.n
    assert misses == as_set(sets, by_uses)
    assert one_by_one(sets, by_uses) > 1.02 * misses
    assert result.hit_rate + result.miss_rate == pytest.approx(1)
    # r_bar: the union over the slots, from the sets themselves
    found = result.distinct_experts
    assert found.slots == SLOTS
    assert found.per_layer == pytest.approx(decode / (result.phases.decode.iterations * N_LAYERS), rel=1e-12)
    assert found.per_slot == pytest.approx(found.per_layer / SLOTS)
    assert prefill == 8 * N_LAYERS * TOP_K


def sets_of(result: dict, sets: list[tuple[int, list[int]]]) -> tuple[int, int]:
    """Experts wanted in decode and in prefill: a prompt is one token, so its sets have k experts and come first."""
    total = sum(len(wanted) for _, wanted in sets)
    prefill = result.phases.prefill.iterations * N_LAYERS * TOP_K
    return total - prefill, prefill
