"""A run as data: what the command line resolves to, what is saved beside the results, what `--config` accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import yaml

from sim.base.errors import BadInput
from sim.base.files import FLOAT, read_yaml, to_struct
from sim.machine.several import Several, way_of

# At most one of these caps the expert part.
CAPS = ("expert_cache_bytes", "experts", "cache_frac")

# What a hit is: `--hit-definition`.
HIT_DEFINITIONS = {
    "gate": "usable on the GPU when the gate asks (FineMoE release 2; the default)",
    "room": "has its room when the gate asks, in flight or not (cache look-up: HybriMoE figure 9, MoE-Infinity head)",
    "cached": "usable when the gate asks and not brought by an unused prefetch (MoEpic, AdapMoE code)",
    "token": "as gate, but every (token, expert) counts (MoEpic's tokens x K)",
}


class RunSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=False):
    """Everything that decides a run's numbers. Sizes are bytes."""

    policy: str
    hw: str
    model: str | None = None  # None: the model whose shape the trace has
    trace: str | None = None  # None: the default trace
    precision: str = "bf16"
    stack: str = "bare"
    set: dict[str, bool | int | float | str | None] = {}
    gpus: int = 1  # of each replica
    peer: str = "per-expert"  # how hidden states cross to experts on other GPUs
    dense: str | None = None  # who computes what is dense; None: as the stack's engine has it, else gpu0
    placement: str | None = None  # a file: the GPU of each expert; None: dealt round-robin
    host_links: str = "apart"  # whether links share its bandwidth
    contention: str = "on"  # whether what runs at once shares memory: on or off
    energy: str | None = None  # whose joules are counted: gpu or machine; None: nobody's
    replicas: int = 1  # equal machines behind a router
    router: str | None = None  # None: round robin
    batch: int = 1
    arrivals: str | None = None  # poisson:RATE, gamma:RATE,CV, closed:CLIENTS, a log, none; None: the trace's
    rate_scale: float = 1.0  # times the rate of `arrivals`
    scheduler: str | None = None  # None: first come, first served
    kv_memory_bytes: int | None = (
        None  # a pool for keys and values; None: as much as the longest contexts together take
    )
    kv_page: int = 16  # tokens of a page of it
    preempt: str = "recompute"  # what becomes of who makes room: recompute or swap
    batching: str | None = None  # continuous or static; None: continuous
    prefill_chunk: int | None = None  # at most so many tokens run in an iteration; None: a prompt is one of its own
    draft: str | None = None  # speculative decoding: k=4,acceptance=0.7; None: a token at a time
    slo: dict[str, dict[str, float]] = {}  # task -> limit -> seconds; `*`: all tasks without their own
    unstable: bool = False  # show percentiles of a queue that grows as long as requests come
    split: str = "test"
    requests: int | None = None  # at most this many, in order
    seed: int = 0
    host_memory_bytes: int | None = None  # for experts; None: all that the profile's host has
    nvme: str | None = None  # a drive that holds the experts which host memory does not: a word and its terms
    ram_policy: str | None = None  # which experts stay in host memory above a drive; None: lru
    link: str | None = None  # a word for what copies reach: pcie5x16; None: as in the profile
    vram_bytes: int | None = None
    expert_cache_bytes: int | None = None
    experts: int | None = None
    cache_frac: float | None = None
    hit_definition: str = "gate"
    predictor: str | None = None  # None: the one the policy was published with
    engine: str | None = None  # arithmetic or simpy; None: arithmetic, and simpy where lanes slow one another

    def __post_init__(self) -> None:
        if (folded := self.precision.lower()) != self.precision:  # files are called Q4_K_M
            msgspec.structs.force_setattr(self, "precision", folded)

    @property
    def together(self) -> int:
        """Neighbours in the order of arrival of which any may share iterations."""
        return self.batch * self.replicas if self.batch > 1 else 1

    @property
    def several(self) -> Several:
        """How its GPUs work together, all but where experts live. Raises BadInput for a way that cannot be read."""
        way = way_of(self.dense)
        return Several(self.gpus, self.peer, self.host_links, way.name, way.shares)


def read_spec(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of a saved configuration, and what its names meant when it was saved (informative only).

    Raises:
        BadInput: naming file and field.
    """
    data = read_yaml(path)
    if not isinstance(data, dict):
        raise BadInput(f"{path}, got {type(data).__name__}: a configuration is a mapping; save one with --out")
    resolved = data.pop("resolved", None)
    data = as_words(data)
    to_struct({"policy": "x", "hw": "x", **data}, RunSpec, str(path))
    return data, resolved if isinstance(resolved, dict) else {}


def as_words(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a run with `contention` as a word: YAML reads a bare `off` as a truth value."""
    said = fields.get("contention")
    return {**fields, "contention": "on" if said else "off"} if isinstance(said, bool) else fields


class _Dumper(yaml.SafeDumper):
    """Quotes text that our reader, with YAML 1.2 numbers, would take for a number (`5e10`)."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", *FLOAT)


def dump_spec(spec: RunSpec, resolved: dict[str, Any]) -> str:
    """The specification as YAML that `read_spec` reads back to the same values, with the `resolved` block."""
    return yaml.dump(
        {**msgspec.to_builtins(spec), "resolved": resolved}, Dumper=_Dumper, sort_keys=False, allow_unicode=True
    )
