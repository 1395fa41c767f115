"""A result as a typed record: the JSON object's keys as attributes, the tables of the run as DataFrames."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from sim.base.json import finite, to_json
from sim.results.schema import (
    Bound,
    BoundBy,
    Copies,
    HitRates,
    Lengths,
    Memory,
    Phases,
    PolicyFile,
    Prefetches,
    Provenance,
    Shape,
    Share,
    Statistic,
    Uncertainty,
    Union,
)

if TYPE_CHECKING:
    from pandas import DataFrame


class Kept(Protocol):
    """Where the tables of a run come from."""

    def table(self, name: str) -> DataFrame: ...


class Result(msgspec.Struct, kw_only=True, eq=False):
    """What a run gave. Attributes are the keys of `simulate --json` (docs/output.md), with their units in their names.

    `requests`, `iterations`, `layers`, `decisions` and `spans` are DataFrames, columns as in docs/output.md; the number
    of requests is `n_requests`. All but `requests` come from a second replay, made when one of them is first asked for
    and equal to the first, so that a run that nobody looks into costs no more and takes no more memory.
    """

    schema: int
    run_id: str
    name: str
    policy: str
    policy_file: PolicyFile | None
    params: dict[str, bool | int | float | str | None]
    hw: str
    model: str
    precision: str
    stack: str
    overrides: dict[str, bool | int | float | str | None]
    shape: Shape
    trace: str
    trace_sha256: str
    split: str
    seed: int
    gpus: int
    batch: int
    arrivals: str
    n_requests: int = msgspec.field(name="requests")
    decode_tokens: int
    ttft_s: Statistic
    tpot_s: Statistic
    e2e_s: Statistic
    throughput_tokens_per_s: float | None
    lengths: Lengths
    phases: Phases
    hit_definition: str
    hit_rate: Share
    partial_hit_rate: Share
    late_hit_rate: Share
    miss_rate: Share
    cpu_rate: Share
    substituted_rate: Share
    dropped_rate: Share
    prefill_hit_rates: HitRates
    token_hit_rates: HitRates
    served_hit_rates: HitRates
    cache_ratio: Share
    gate_mass_kept: Share
    activations_changed_frac: float
    activations_lowered_frac: float
    union_per_layer_step: Union
    prefetch: Prefetches
    demand_copies: Copies
    h2d_bytes: int
    d2h_bytes: int
    peak_vram_bytes: int
    peak_host_bytes: int
    memory: Memory
    expert_bytes: int
    expert_budget_bytes: list[int]
    peak_expert_bytes: list[int]
    bound: Bound | None
    bound_by: BoundBy
    provenance: Provenance
    uncertainty: Uncertainty
    labels: list[str]
    lane_utilisation: dict[str, Share]
    policy_stats: dict[str, Any]
    simulated_s: float
    wall_s: float
    engine: str
    version: str
    _facts: dict[str, Any] = {}  # the JSON object itself: what is added to it is in `to_dict` before it is here
    _kept: Any = None  # a `Kept`

    @classmethod
    def of(cls, facts: dict[str, Any], kept: Kept) -> Result:
        """The record of a finished run's JSON object."""
        plain = finite(facts)
        result = msgspec.convert(plain, cls)
        result._facts, result._kept = plain, kept
        return result

    def to_dict(self) -> dict[str, Any]:
        """The JSON object as plain data."""
        return dict(self._facts)

    def to_json(self, indent: int | None = None) -> str:
        """The JSON object as text: what `simulate --json` prints."""
        return to_json(self._facts, indent)

    @property
    def requests(self) -> DataFrame:
        """One row per request: tokens, and its times in seconds."""
        return self._table("requests")

    @property
    def iterations(self) -> DataFrame:
        """One row per iteration, in order. Replays the run once more."""
        return self._table("iterations")

    @property
    def layers(self) -> DataFrame:
        """One row per phase and MoE layer: experts run, fetched, prefetched, evicted. Replays the run once more."""
        return self._table("layers")

    @property
    def decisions(self) -> DataFrame:
        """One row per decision of the policy, in order. Replays the run once more."""
        return self._table("decisions")

    @property
    def spans(self) -> DataFrame:
        """One row per piece of work on a lane, some hundred a token. Replays the run once more."""
        return self._table("spans")

    def _table(self, name: str) -> DataFrame:
        found: DataFrame = self._kept.table(name)
        return found

    def __str__(self) -> str:
        from sim.base.tables import fold
        from sim.results.text import render, verdict

        return f"{fold(verdict(self._facts))}\n\n{render(self._facts)}"

    def __repr__(self) -> str:
        from sim.results.text import verdict

        return f"<moesim.Result {self.run_id}: {verdict(self._facts)}>"
