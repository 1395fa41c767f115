"""A result as a typed record: the JSON object's keys as attributes, the tables of the run as DataFrames."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, Self

import msgspec

from sim.base.json import finite, to_json
from sim.results.schema import (
    Bound,
    BoundBy,
    Contention,
    Copies,
    Drafting,
    Energy,
    HitRates,
    HostMemory,
    KvUse,
    Lengths,
    Load,
    Measurement,
    Memory,
    Phased,
    Phases,
    PolicyFile,
    Prediction,
    Prefetches,
    Provenance,
    Replica,
    Scheduling,
    ServedRates,
    Shape,
    Share,
    SizesByLayer,
    SloAttainment,
    Statistic,
    Timed,
    Uncertainty,
    Union,
)

if TYPE_CHECKING:
    from pandas import DataFrame

    from sim.bounds.time_bound import LowerBound


WHERE_THERE = (
    *("host_memory", "kv", "scheduling", "router", "replicas", "real", "device", "measured", "prediction", "weights"),
    *("batching", "prefill_chunk", "mixed_hit_rates", "draft", "contention", "sizes_by_layer", "energy"),
)
"""Keys of runs in which shared memory slowed something, of those that count joules, of files whose layers hold experts
of unlike size, with a drive below host memory or a pool of pages, with a batching that was asked for, or whose
scheduler has something to say, of several replicas, and of real runs; others have none of them."""
FURTHER_DOWN = ("mixed", "draft_bytes", "nvme")
"""Of runs in which prompts and decode tokens ran together, of those with a draft model, and of a drive's reads that
were slowed."""


def plain(value: Any) -> Any:
    """Records as dictionaries, in the order of their fields; everything else as it is."""
    if isinstance(value, msgspec.Struct):
        left_out = WHERE_THERE if isinstance(value, Result) else FURTHER_DOWN
        pairs = [(key, getattr(value, name)) for key, name in _fields(type(value))]
        return {key: plain(child) for key, child in pairs if _kept(key, child, left_out)}
    if isinstance(value, dict):
        return {key: plain(child) for key, child in value.items()}
    return [plain(child) for child in value] if isinstance(value, list | tuple) else value


@cache
def _fields(kind: type[msgspec.Struct]) -> list[tuple[str, str]]:
    """(key, attribute) of everything that a kind of record tells."""
    fields = zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True)
    return [(key, name) for key, name in fields if not name.startswith("_")]


def _kept(key: str, value: Any, left_out: tuple[str, ...]) -> bool:
    return value is not msgspec.UNSET and (value is not None or key not in left_out)


class Kept(Protocol):
    """Where the tables of a run come from."""

    def table(self, name: str) -> DataFrame: ...


class Result(msgspec.Struct, kw_only=True, eq=False):
    """What a run gave. Attributes are the keys of `simulate --json` (docs/output.md), with their units in their names.

    `requests`, `layers`, `experts`, `iterations`, `decisions` and `spans` are DataFrames, columns as in docs/output.md;
    the number of requests is `n_requests`. The last three come from a second replay, made when one of them is first
    asked for and equal to the first, so that a run that nobody looks into costs no more and takes no more memory.
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
    queue_s: Statistic
    service_s: Statistic
    throughput_tokens_per_s: float | None
    load: Load | None
    slo: SloAttainment | None
    lengths: Lengths
    phases: Phases
    hit_definition: str
    lookup: str
    hit_rate: Share
    partial_hit_rate: Share
    late_hit_rate: Share
    miss_rate: Share
    cpu_rate: Share
    substituted_rate: Share
    dropped_rate: Share
    prefill_hit_rates: HitRates
    token_hit_rates: HitRates
    served_hit_rates: ServedRates
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
    by_layer: list[dict[str, Any]] = []
    batching: str | None = None  # this and the next are of runs that ask for it
    prefill_chunk: int | None = None
    mixed_hit_rates: HitRates | None = None  # of iterations with prompts and decode tokens, where there were any
    draft: Drafting | None = None  # of a run with drafts; the JSON of others has no such key
    contention: Contention | None = None  # of a run in which something was slowed by what ran beside it
    energy: Energy | None = None  # of a run that counts joules
    sizes_by_layer: SizesByLayer | None = None  # of a precision that gives layers experts of unlike size
    host_memory: HostMemory | None = None  # of a run with a drive below it
    kv: KvUse | None = None  # of a run with a pool of pages; the JSON of others has no such key
    scheduling: Scheduling | None = None  # of a scheduler other than the default
    real: bool | None = None  # this and the next three are of real runs; the JSON of others has no such keys
    device: str | None = None
    measured: Measurement | None = None
    prediction: Prediction | None = None
    router: str | None = None  # this and the next are of several replicas
    replicas: list[Replica] | None = None
    _trace_kind: str = ""
    _kept: Any = None  # a `Kept`, once there are tables

    def with_tables(self, kept: Kept) -> Self:
        """The same, with somewhere to take its tables from."""
        self._kept = kept
        return self

    @property
    def kept(self) -> Kept | None:
        """Where its tables are taken from, if there is anything."""
        found: Kept | None = self._kept
        return found

    def set_beside(self, least: LowerBound | None) -> None:
        """Say what no lossless policy can beat, and how far this one lies above it."""
        if least is None:
            self.bound = None
            return
        self.bound = Bound(least.tpot_s, least.ttft_s, least.lanes, self.above_frac(least))

    def above_frac(self, least: LowerBound | Bound) -> float | None:
        """How far the mean TPOT lies above a bound, as a share of the bound."""
        measured_s, least_s = self.tpot_s.mean, least.tpot_s
        return measured_s / least_s - 1 if measured_s is not None and least_s else None

    def to_dict(self) -> dict[str, Any]:
        """The JSON object as plain data: the one place where a record becomes that."""
        found: dict[str, Any] = finite(plain(self))
        return found

    def to_json(self, indent: int | None = None) -> str:
        """The JSON object as text: what `simulate --json` prints."""
        return to_json(self.to_dict(), indent)

    @property
    def hit_rates(self) -> HitRates:
        """Of decode, under `hit_definition`."""
        return HitRates.of(self)

    @property
    def n_outputs(self) -> int:
        """Tokens put out: the first of every request, and those that were decoded."""
        return self.decode_tokens + self.n_requests

    @property
    def hit_rates_by_phase(self) -> dict[Phased, HitRates]:
        """Of the phases that there are: of decode under `hit_definition`, of others as their gates found experts."""
        found: dict[Phased, HitRates] = {"decode": self.hit_rates, "prefill": self.prefill_hit_rates}
        return found if self.mixed_hit_rates is None else {**found, "mixed": self.mixed_hit_rates}

    @property
    def trace_line(self) -> str:
        """What the figures rest on: the trace and its kind, in a line."""
        return f"trace {self.trace}: {self._trace_kind}"

    def time_s(self, time: Timed) -> Statistic:
        """One of the times per token."""
        return self.tpot_s if time == "tpot_s" else self.ttft_s

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
        """One row per phase and MoE layer: how experts were found and why not, copies, evictions, waiting by cause."""
        return self._table("layers")

    @property
    def experts(self) -> DataFrame:
        """One row per phase, MoE layer and expert: the same counts."""
        return self._table("experts")

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

        return f"{fold(verdict(self))}\n{fold(self.trace_line)}\n\n{render(self)}"

    def __repr__(self) -> str:
        from sim.results.text import verdict

        return f"<moesim.Result {self.run_id}: {verdict(self)}>"
