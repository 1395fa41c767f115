"""A run as data: what the command line resolves to, what is saved beside the results, what `--config` accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from sim.data import read_yaml, to_struct
from sim.errors import BadInput


class RunSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=False):
    """Everything that decides a run's numbers. Sizes are bytes."""

    policy: str
    hw: str
    model: str | None = None  # None: the model whose shape the trace has
    trace: str | None = None  # None: the default trace
    precision: str = "bf16"
    stack: str = "bare"
    set: dict[str, bool | int | float | str | None] = {}
    gpus: int = 1
    batch: int = 1
    split: str = "test"
    requests: int | None = None  # at most this many, in order
    seed: int = 0
    vram_bytes: int | None = None
    expert_cache_bytes: int | None = None
    experts: int | None = None
    cache_frac: float | None = None
    hit_definition: str = "gate"


def read_spec(path: Path) -> dict[str, Any]:
    """The fields of a saved configuration. Raises BadInput naming file and field."""
    data = read_yaml(path)
    if not isinstance(data, dict):
        raise BadInput(f"{path}, got {type(data).__name__}: a configuration is a mapping; save one with --out")
    data.pop("resolved", None)  # what the names meant when it was saved; informative only
    to_struct({"policy": "x", "hw": "x", **data}, RunSpec, str(path))
    return data
