"""Names that went, with what stands for them now: each is refused in one line, and nothing else of it is left."""

from __future__ import annotations

import re

from sim.base.errors import BadInput

OPTIONS = {
    "stack": "engine",
    "link": "pcie",
    "expert_cache": "cache=12GB",
    "expert_cache_bytes": "cache=12GB",
    "experts": "cache=60experts",
    "cache_frac": "cache=20%",
    "vram_bytes": "vram",
    "host_memory": "ram",
    "host_memory_bytes": "ram",
    "nvme": "drive",
    "ram_policy": "drive.evict",
    "dense": "parallel",
    "peer": "gpus.dispatch",
    "placement": "gpus.map",
    "host_links": "gpus.host_bandwidth",
    "rate_scale": "arrivals.scale",
    "kv_memory_bytes": "kv_memory",
    "kv_page": "kv.page",
    "preempt": "kv.preempt",
    "batching": "batch.static",
    "contention": "sim.contention",
    "energy": "sim.energy",
    "hit_definition": "sim.hit",
}
"""Names of options of a run, without dashes, and the name, or name and value, of today."""

GONE = {"unstable": "percentiles are always shown; leave it out"}
"""Names of options that nothing stands for now, and why."""

FLAGS = {
    "--timeline-from": "--timeline FILE:from=2.5s",
    "--timeline-iterations": "--timeline FILE:iterations=40",
    "--spans": "--set out.spans=on",
    "--force": "--overwrite",
    "--device": "--real=DEVICE",
    "--attain": "--slo '...:attain=95%'",
    "--quick": "--no-suggestions",
    "--every": "--all-machines",
    "--all": "--verbose",
    "--measured": "moesim explain --measured",
    "--hits-only": "moesim curve",
    "--store-frac": "--train-frac",
    "--output": "--out",
}
"""Options of verbs that are no options of a run."""

VALUES = {
    ("engine", "simpy"): "a serving engine is meant here; the event-by-event simulator is --simpy",
    ("engine", "core"): "a serving engine is meant here; core is what runs without --simpy; leave it out",
    ("engine", "arithmetic"): "a serving engine is meant here; arithmetic is what runs without --simpy; leave it out",
    ("sim_simulator", "arithmetic"): "it is called core now; leave it out, or write core",
    ("split", "store"): "it is called train now; write --split train",
    ("sim_hit", "room"): "it is called slot now; write --set sim.hit=slot",
    ("gpus_host_bandwidth", "apart"): "it is called per-link now; write --set gpus.host_bandwidth=per-link",
}
"""(field of a run, value that went) -> what to do."""

GROUPS = {"stack": "engine"}
"""Beginnings of keys of `--set`."""

KEYS = {
    "bound": "lower_bound",
    "lower_bound.lanes": "lower_bound.resource",
    "bound_by": "bottleneck",
    "stack": "engine",
    "labels": "caveats",
    "expert_budget_bytes": "cache_capacity_bytes",
    "peak_expert_bytes": "cache_peak_bytes",
    "peak_host_bytes": "ram_peak_bytes",
    "union_per_layer_step": "distinct_experts",
    "distinct_experts.experts": "distinct_experts.per_layer",
    "distinct_experts.over_slots": "distinct_experts.per_slot",
    "told_apart": "significant",
    "not_told_apart": "tied_with",
    "as": "applied_as",
    "param": "params",
    "above_bound_frac": "lower_bound.above_frac",
    r"bound_(tpot_s|ttft_s)": r"lower_bound.\1",
    r"(tpot|ttft|e2e|queue|service)_(mean|p50|p90|p95|p99)_s": r"\1_s.\2",
    r"(prefill|decode|mixed)_(gpu|copy|host|cpu|predictor|drive|back|peer)_frac": r"bottleneck.\1.\2",
    "slo_attained_frac": "slo.attained_frac",
    r"(?<!\.)(goodput_(?:requests|tokens)_per_s)": r"slo.\1",
}
"""Keys of a result, or columns of a table, and those of today, from the first to the last: patterns of whole words."""


def refuse_old(name: str, what: str) -> None:
    """Raises BadInput, with the name of today, for the name of an option that went."""
    if name in GONE:
        raise BadInput(f"{what}: no such name any more; {GONE[name]}")
    if (now := OPTIONS.get(name, FLAGS.get(f"--{name.replace('_', '-')}"))) is not None:
        raise BadInput(f"{what}: no such name any more; write {now}")


def key_now(key: str) -> str:
    """What a figure of a result is called today; the same where it was not renamed."""
    for old, now in KEYS.items():
        key = re.sub(rf"(?<![^.])(?:{old})(?![^.])", now, key)
    return key
