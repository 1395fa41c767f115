"""Names of today, as the record has them, and what they have become: one row for each that changed.

A run of the record is asked for by `OPTIONS` and its result is read by `KEYS`, so the record is never taken anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

OPTIONS: dict[str, str | tuple[str, Callable[[Any], Any]] | None] = {
    "stack": "engine",
    "engine": ("sim_simulator", {"arithmetic": "core", "simpy": "simpy"}.__getitem__),
    "peer": "gpus_dispatch",
    "dense": "parallel",
    "placement": "gpus_map",
    "host_links": ("gpus_host_bandwidth", lambda word: {"apart": "per-link"}.get(word, word)),
    "contention": "sim_contention",
    "energy": "sim_energy",
    "hit_definition": ("sim_hit", lambda word: {"room": "slot"}.get(word, word)),
    "host_memory_bytes": "ram",
    "nvme": "drive",
    "ram_policy": "drive_evict",
    "link": ("pcie", lambda word: word.replace("pcie", "gen")),
    "rate_scale": "arrivals_scale",
    "kv_memory_bytes": "kv_memory",
    "preempt": "kv_preempt",
    "batching": ("batch_static", lambda word: word == "static"),
    "split": ("split", lambda word: {"store": "train"}.get(word, word)),
    "vram_bytes": "vram",
    "expert_cache_bytes": ("cache", lambda n: f"{n}B"),
    "experts": ("cache", lambda n: f"{n}experts"),
    "cache_frac": ("cache", lambda frac: f"{Decimal(repr(frac)) * 100}%"),
    "set.stack.": "set.engine.",
    "unstable": None,
}
"""Option of the record -> option of `moesim.simulate`, with what becomes of its value where that changed.

    "stack": "engine",
    "cache_frac": ("cache", lambda frac: f"{100 * frac}%"),
    "peer": "gpus.dispatch",        # a name with a dot is passed in `set`
    "set.stack.": "set.engine.",    # a name that ends in a dot stands for all that begin so
    "set.lookahead": "set.ahead",   # of every policy that has it
    "unstable": None,               # left out
"""

KEYS: dict[str, str | tuple[str, ...] | None] = {
    "lower_bound": "bound",
    "lower_bound.resource": "bound.lanes",
    "bottleneck": "bound_by",
    "cache_capacity_bytes": "expert_budget_bytes",
    "cache_peak_bytes": "peak_expert_bytes",
    "memory.cache_capacity_bytes": "memory.expert_budget_bytes",
    "memory.cache_peak_bytes": "memory.peak_expert_bytes",
    "ram_peak_bytes": "peak_host_bytes",
    "distinct_experts": "union_per_layer_step",
    "distinct_experts.per_layer": "union_per_layer_step.experts",
    "distinct_experts.per_slot": "union_per_layer_step.over_slots",
}
"""Key of a new result -> key of the record; a `*` stands for one part of a path, and a path for all below it.

    "lower_bound": "bound",                             # "lower_bound.tpot_s" is "bound.tpot_s"
    "lower_bound.above_frac": "above_frac",             # the longest path that fits is taken
    "replicas.*.cache_hits": "replicas.*.hit_rate",
    "cache_peak_bytes.0": ("peak_expert_bytes.0", "memory.peak_expert_bytes"),  # one key that was two
    "lower_bound.resource": None,                       # there was none: it is left out
"""

WORDS: dict[str, Mapping[str, str]] = {"bound.lanes": {}, "bound_by.resource": {}, "provenance.figures.*.source": {}}
"""Texts that are compared (all others are not): key of the record -> new word -> word of the record."""

DERIVED: dict[str, Callable[[dict[str, Any]], Any]] = {}
"""Key of the record that results no longer have -> its value, from the leaves that they do have (names of the record).

    "memory.expert_budget_bytes": lambda leaf: leaf["expert_budget_bytes.0"],
"""

MENDED: dict[tuple[str, str], str] = {
    ("emoe", "phi-3.5-moe-small"): "read weights of a gate that it had not declared; now the engine applies them",
}
"""Policy and trace of runs that the record has as refused by mistake -> the mistake."""

GONE: dict[str, str] = {}
"""Top-level key of the record that is no longer compared -> why."""

ROUNDED: dict[str, str] = {}
"""Top-level key of the record whose last digits may differ, by 1e-12 of a value -> why: which sum has another order."""
