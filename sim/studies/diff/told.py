"""What a recorded result says, as far as two runs are compared by it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from sim.base.errors import BadInput
from sim.base.files import read_object, to_struct
from sim.figures import (
    Bottleneck,
    Copies,
    HitRates,
    Load,
    Phases,
    PolicyFile,
    Prefetches,
    Provenance,
    Share,
    SloAttainment,
    Statistic,
    check_schema,
)
from sim.results.run_folder import MAX_RESULT_BYTES

MOST = 2.0**63
ANEW = "write it anew with simulate --out"
Value = bool | int | float | str | None


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of a result that a comparison reads (docs/output.md); whatever else it holds is left alone."""

    schema: int
    run_id: str
    name: str
    policy: str
    policy_file: PolicyFile | None
    params: dict[str, Value]
    hw: str
    model: str
    precision: str
    engine: str
    overrides: dict[str, Value]
    trace: str
    trace_sha256: str
    split: str
    seed: int
    gpus: int
    batch: Annotated[int, msgspec.Meta(ge=1)]
    arrivals: str
    n_requests: int = msgspec.field(name="requests")
    decode_tokens: int
    ttft_s: Statistic
    tpot_s: Statistic
    queue_s: Statistic
    service_s: Statistic
    load: Load | None
    slo: SloAttainment | None
    phases: Phases
    hit_definition: str
    hit_rate: Share
    partial_hit_rate: Share
    late_hit_rate: Share
    miss_rate: Share
    cpu_rate: Share
    substituted_rate: Share
    dropped_rate: Share
    prefetch: Prefetches
    demand_copies: Copies
    h2d_bytes: int
    d2h_bytes: int
    peak_vram_bytes: int
    cache_capacity_bytes: list[int]
    bottleneck: Bottleneck
    provenance: Provenance
    caveats: list[str]
    simulator: str
    version: str
    by_layer: list[dict[str, Any]] = []

    @property
    def hit_rates(self) -> HitRates:
        """Of decode, under `hit_definition`."""
        return HitRates.of(self)

    @property
    def n_outputs(self) -> int:
        """Tokens put out: the first of every request, and those that were decoded."""
        return self.decode_tokens + self.n_requests


def told_of(facts: dict[str, Any], where: str) -> Told:
    """The typed part of a result. Raises BadInput naming the field."""
    return to_struct(facts, Told, where)


def facts_of(path: Path) -> dict[str, Any]:
    """What a recorded result says. Raises BadInput."""
    found = read_object(path, MAX_RESULT_BYTES, ANEW)
    check_schema(found, path, ANEW)
    try:
        _check(found, "", path)
    except RecursionError:
        raise BadInput(f"{path}: nested deeper than any result; {ANEW}") from None
    return found


def _check(value: Any, key: str, path: Path) -> None:
    """Raises BadInput for a number that no figure is: sums of such would not be numbers any more."""
    if isinstance(value, dict):
        for name, child in value.items():
            _check(child, f"{key}.{name}" if key else name, path)
    elif isinstance(value, list):
        for at, child in enumerate(value):
            _check(child, f"{key}[{at}]", path)
    elif isinstance(value, int | float) and not -MOST < value < MOST:
        raise BadInput(f"{path}: {key}, got {str(value)[:20]}: no figure is so large; {ANEW}")
