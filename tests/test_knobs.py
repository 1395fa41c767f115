"""No dead knobs: for every parameter of every policy a test shows a value that changes decisions or times.

Tests of a policy keep a table `KNOBS` of the values they show it with. Here stand the tables of the plain policies, and
the count over all of them.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from cpu_bench import decided, replay
from tiny_traces import tiny_trace

from sim.policy.registry import policies

# parameter -> (settings beside it, the other value, whole experts of room)
PLAIN: dict[str, dict[str, tuple[dict[str, Any], Any, int]]] = {
    "belady": {"scope": ({}, "layer", 20)},
    "lfru": {"scope": ({}, "global", 20)},
    "fifo": {"scope": ({}, "global", 20)},
    "least_stale": {"scope": ({}, "global", 20), "prefetch": ({}, 2, 20)},
    "lru": {"scope": ({}, "global", 20)},
    "slru": {"scope": ({}, "global", 20), "protected_frac": ({}, 0.2, 20)},
    "lfu": {"scope": ({}, "global", 20), "reset_on_evict": ({}, True, 20), "counts": ({}, "tokens", 20)},
    "random": {"scope": ({}, "global", 20), "seed": ({}, 1, 20), "selection": ({}, "static", 20)},
    "on_demand": {
        "slots": ({}, 3, 20),
        "granularity": ({}, "layer", 20),
        "keep": ({}, "request", 20),
        "matrices": ({}, 3, 20),
    },
    "mixtral_offloading": {
        "variant": ({}, "code", 24),
        "offload_per_layer": ({}, 6, 40),
        "buffer_size": ({}, 2, 24),
        "guesses": ({}, 1, 24),
        "write_back": ({}, False, 24),
    },
    "fine_moe": {
        "variant": ({}, "code", 20),
        "distance": ({}, 1, 20),
        "capacity": ({}, 2, 20),
        "mode": ({}, "online", 20),
        "track": ({}, "map_t", 20),
        "evict": ({}, "lru", 20),
        "asynchronous": ({}, False, 20),
        "search_overhead_s": ({}, 5e-2, 20),
        "depth": ({}, 8, 20),
        "prefill": ({}, "mean", 20),
        "horizon": ({}, "distance", 20),
        "freq": ({}, "since_loaded", 20),
        "predictor": ({"track": "speculate"}, "surrogate:0.5", 20),
    },
}
TABLES = {  # policy -> module that holds its table, where the name does not say it
    "heat": "test_policy_hot_cold",
    "moe_speq": "test_policy_drafted",
    "sp_moe": "test_policy_drafted",
    "llama_cpp_lru": "test_policy_hot_cold",
    "moe_cache": "test_policy_hot_cold",
    "static_cache": "test_policy_hot_cold",
    "lcp": "test_policy_lcp_mrs",
    "mrs": "test_policy_lcp_mrs",
}
N_KNOBS = 298  # raise it with every parameter that is added


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    levels = {"scores", "weights", "embeddings", "next_scores_1", "next_scores_2", "next_scores_3"}
    return tiny_trace(
        tmp_path_factory.mktemp("t") / "t.safetensors", 8, 8, 2, n_requests=8, prompt=3, outputs=6, levels=levels
    )


@pytest.mark.parametrize(("name", "knob"), [(name, knob) for name, knobs in PLAIN.items() for knob in knobs])
def test_it_changes_something(name: str, knob: str, trace: Path) -> None:
    kind = policies()[name]
    beside, other, room = PLAIN[name][knob]
    before, after = (replay(kind(**settings), trace, room) for settings in (beside, beside | {knob: other}))
    changed = decided(before) != decided(after)
    assert changed, f"{knob}={other} changes nothing"


def table_of(name: str) -> set[str]:
    """The parameters that some test shows to matter."""
    if name in PLAIN:
        return set(PLAIN[name])
    kind = policies()[name]
    if not kind.params:
        return set()
    found = importlib.import_module(TABLES.get(name, f"test_policy_{name}")).KNOBS
    return set(found.get(kind, found))


def test_every_parameter_has_one() -> None:
    dead = {name: sorted({param.name for param in kind.params} ^ table_of(name)) for name, kind in policies().items()}
    assert {name: knobs for name, knobs in dead.items() if knobs} == {}
    assert sum(len(kind.params) for kind in policies().values()) == N_KNOBS
