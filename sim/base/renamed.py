"""Names that went, with what stands for them now: each is refused in one line, and nothing else of it is left."""

from __future__ import annotations

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
    "unstable": "",
}
"""Names of options of a run, without dashes, and the name, or name and value, of today; nothing: it is no more."""

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
    "--unstable": "",
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


def refuse_old(name: str, what: str) -> None:
    """Raises BadInput, with the name of today, for the name of an option that went."""
    if (now := OPTIONS.get(name, FLAGS.get(f"--{name.replace('_', '-')}"))) is not None:
        raise BadInput(f"{what}: no such name any more; {f'write {now}' if now else 'leave it out'}")
