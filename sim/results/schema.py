"""The nouns of a result, typed: what the nested objects of the JSON hold, with their units in the names."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from sim.base.lanes import CHARGED

Share = float | None
Timed = Literal["tpot_s", "ttft_s"]
Phased = Literal["prefill", "decode", "mixed"]
Ends = tuple[float, float] | None


class Errors(msgspec.Struct, frozen=True):
    """Where a figure of requests under load lies (95 %), from so many blocks of consecutive requests
    (`sim.results.blocks`); None where they say too little."""

    mean: Ends
    p50: Ends
    p90: Ends
    p95: Ends
    p99: Ends
    block_requests: int
    blocks: int


class Statistic(msgspec.Struct, frozen=True):
    """Of one figure over requests; a percentile without enough requests behind it is None.

    p90, sampling: of requests under load; the JSON of others has no such keys.
    """

    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None
    n: int
    p90: float | msgspec.UnsetType | None = msgspec.UNSET
    sampling: Errors | msgspec.UnsetType | None = msgspec.UNSET


class Load(msgspec.Struct, frozen=True):
    """Of requests that come at times of their own (`sim.results.load`).

    arrivals_per_s: how fast they came; capacity_per_s: how fast they were taken in while some waited (None where none
    did); stable: whether that is faster. served_per_s, busy_frac, requests_in_system, requests_waiting: over the time
    from the first arrival to the last token, the last two on average.
    """

    source: str
    arrivals_per_s: float | None
    served_per_s: float | None
    capacity_per_s: float | None
    stable: bool
    busy_frac: Share
    requests_in_system: float | None
    requests_waiting: float | None


class Replica(msgspec.Struct, frozen=True):
    """One of several replicas (`sim.results.replicas`).

    throughput_tokens_per_s, busy_frac, requests_in_system, requests_waiting: over the time of the whole run, so that
    they add up (busy_frac: to as many times the whole's). arrivals_per_s, capacity_per_s, stable: of its own queue.
    """

    replica: int
    requests: int
    output_tokens: int
    throughput_tokens_per_s: float | None
    hit_rate: Share
    busy_frac: Share
    requests_in_system: float | None
    requests_waiting: float | None
    queue_mean_s: float | None
    arrivals_per_s: float | None
    capacity_per_s: float | None
    stable: bool
    h2d_bytes: int
    policy_stats: dict[str, Any]
    scheduler_stats: dict[str, Any]


class Attained(msgspec.Struct, frozen=True):
    """Requests of one task that had an SLO, and that kept to it."""

    requests: int
    met: int
    attained_frac: float


class Violations(msgspec.Struct, frozen=True):
    """Requests that broke their SLO, by what took most of the time in question (`sim.results.attainment`)."""

    queue: int
    prefill: int
    copies: int
    compute: int
    drive: int = 0  # results of before have none


class SloAttainment(msgspec.Struct, frozen=True, kw_only=True):
    """What became of what was promised; goodput counts the requests that kept all of theirs, and their tokens.

    limits: of each task, `*` for all others, what its requests were promised, in seconds.
    """

    limits: dict[str, dict[str, float]] = {}  # results of before have none
    requests: int
    met: int
    attained_frac: Share
    attained_ends: Ends = None  # at 95 %, from blocks of requests; results of before have none
    goodput_requests_per_s: float | None
    goodput_tokens_per_s: float | None
    violations: Violations
    tasks: dict[str, Attained]


class KvUse(msgspec.Struct, frozen=True):
    """Of a pool of pages for keys and values (`--kv-memory`): what of it was held, and who had to make room.

    peak_pages, mean_pages: held at most, and on average over time. preempted_s: waited after that, summed over
    requests. recomputed_tokens: whose keys and values had been there and were computed again. peak_swapped_bytes: in
    host memory at most.
    """

    page_tokens: int
    page_bytes: int
    pages: int
    peak_pages: int
    mean_pages: float | None
    preempt: str
    preemptions: int
    preempted_requests: int
    preempted_s: float
    recomputed_tokens: int
    kv_swap_out_bytes: int
    kv_swap_in_bytes: int
    peak_swapped_bytes: int


class Slowed(msgspec.Struct, frozen=True):
    """What shared memory added to the time of one activity, and by what it was reckoned.

    added_s: over the whole run and all lanes of its kind, waited for or not. of_busy_frac: of what these lanes were
    busy, slowed as they were. by: `law`, or the source of the terms that stand in its place (`set` by the user).
    """

    added_s: float
    of_busy_frac: float
    by: str


class Contention(msgspec.Struct, frozen=True):
    """What was slowed by what ran beside it; None: it was not.

    Experts on the CPU, copies to GPUs and back, kernels, reads of a drive.
    """

    cpu: Slowed | None
    h2d: Slowed | None
    d2h: Slowed | None
    gpu: Slowed | None
    nvme: Slowed | None = None

    def by_activity(self) -> dict[str, Slowed]:
        """What was slowed -> by how much."""
        return {name: one for name, one in msgspec.structs.asdict(self).items() if one is not None}


class SizesByLayer(msgspec.Struct, frozen=True):
    """Of a file whose layers hold experts of unlike size: what it leaves out to take all for their mean, in decode.

    least_bytes, most_bytes: of an expert. h2d_frac, cpu_frac, gpu_frac: how many more bytes would be copied, read for
    experts on the CPU and on GPUs; None where none are. tpot_frac: how much longer decode would take, to first order;
    None with several GPUs or a drive.
    """

    least_bytes: int
    most_bytes: int
    h2d_frac: float | None
    cpu_frac: float | None
    gpu_frac: float | None
    tpot_frac: float | None


class Found(msgspec.Struct, frozen=True):
    """Experts that were asked of host memory: found there, found while they were being read, or read from the drive.

    read_bytes: of the last.
    """

    asked: int
    hit: int
    late: int
    miss: int
    read_bytes: int


class HostMemory(msgspec.Struct, frozen=True):
    """Of a run with a drive (`--drive`): host memory as a cache of experts.

    bytes, peak_bytes: for experts, and held at most. reads, read_bytes: all of the drive's; bytes_per_s: what it gives
    to reads in a row. copies, prefetches, cpu, read_ahead: who asked, in all phases; by_phase: copies and experts on
    the CPU. evicted: experts that left. passed: read past host memory, which had no room. withdrawn: reads that were
    taken back before they began.
    """

    drive: str
    reads_are: str
    depth: int
    block_bytes: int
    bytes_per_s: float | None
    start: str
    ram_policy: str
    bytes: int
    peak_bytes: int
    reads: int
    read_bytes: int
    hit_rate: Share
    copies: Found
    prefetches: Found
    cpu: Found
    read_ahead: Found
    by_phase: dict[str, Found]
    evicted: int
    passed: int
    withdrawn: int


class Shape(msgspec.Struct, frozen=True):
    """Routing shape of the model and the trace."""

    layers: int
    experts: int
    top_k: int


class Length(msgspec.Struct, frozen=True):
    """Tokens per request."""

    mean: float | None
    min: int | None
    max: int | None


class Lengths(msgspec.Struct, frozen=True):
    """Of the requests that were served."""

    prompt_tokens: Length
    output_tokens: Length
    longest_context_tokens: int | None


class Phase(msgspec.Struct, frozen=True):
    """Iterations of one phase, the tokens in them, and how long they took."""

    iterations: int
    tokens: int
    time_s: float


class MixedPhase(msgspec.Struct, frozen=True):
    """Iterations in which prompts and decode tokens ran together; of their tokens, those that were decoded."""

    iterations: int
    tokens: int
    decode_tokens: int
    time_s: float


class Phases(msgspec.Struct, frozen=True):
    """Prompts, and tokens after them; iterations that had both, where there were any."""

    prefill: Phase
    decode: Phase
    mixed: MixedPhase | None = None

    @property
    def n_iterations(self) -> int:
        """Iterations of all."""
        mixed = 0 if self.mixed is None else self.mixed.iterations
        return self.prefill.iterations + self.decode.iterations + mixed

    @property
    def main(self) -> Phased:
        """What a run is judged by: decode, else what runs beside prompts, else prompts."""
        if self.decode.iterations:
            return "decode"
        return "prefill" if self.mixed is None else "mixed"


class HitRates(msgspec.Struct, frozen=True):
    """How the gate found experts; shares sum to 1, None where nothing was asked for."""

    hit: Share
    partial_hit: Share
    late_hit: Share
    miss: Share
    cpu: Share
    substituted: Share
    dropped: Share

    @classmethod
    def of(cls, result: object) -> HitRates:
        """Those that a result has as keys of its own: of decode, under its `hit_definition`."""
        return cls(**{name: getattr(result, f"{name}_rate") for name in cls.__struct_fields__})

    def by_class(self) -> dict[str, Share]:
        """Class -> share."""
        return msgspec.structs.asdict(self)


class ServedRates(msgspec.Struct, frozen=True):
    """How the gate found the experts that served, however they were computed."""

    hit: Share
    partial_hit: Share
    late_hit: Share
    miss: Share


class Union(msgspec.Struct, frozen=True):
    """Different experts that a layer of a decode iteration executes, beside a layer's share of the room."""

    experts: float | None
    slots: float
    over_slots: float | None


class Copies(msgspec.Struct, frozen=True):
    """How many, and their bytes."""

    n: int
    bytes: int


class Prefetches(msgspec.Struct, frozen=True):
    """useful + late + wasted + cancelled = issued; harmful cuts across."""

    useful: Copies
    late: Copies
    wasted: Copies
    harmful: Copies
    issued: Copies
    cancelled: Copies
    refused: Copies

    def by_fate(self) -> dict[str, Copies]:
        """What became of them -> how many."""
        return msgspec.structs.asdict(self)


class Memory(msgspec.Struct, frozen=True):
    """GPU 0; where each GPU has whole layers, the one that was fullest."""

    dense_bytes: int
    kv_cache_bytes: int
    activation_bytes: int
    reserve_bytes: int
    predictor_bytes: int
    expert_budget_bytes: int
    peak_expert_bytes: int
    vram_bytes: int
    draft_bytes: int | None = None  # of a model that drafts

    @property
    def peak_bytes(self) -> int:
        """What was in use at most: all parts, and the most experts."""
        parts = self.dense_bytes + self.kv_cache_bytes + self.activation_bytes + self.reserve_bytes
        return parts + self.predictor_bytes + self.peak_expert_bytes + (self.draft_bytes or 0)

    @property
    def needed_bytes(self) -> int:
        """What a card has to have for that room for experts, of which a policy may leave some empty."""
        return self.peak_bytes - self.peak_expert_bytes + self.expert_budget_bytes


class Drafting(msgspec.Struct, frozen=True):
    """Of a run with drafts (`--draft`): what its decode steps verified, and what they took.

    tokens_per_step: put out by each step of a request, on average. acceptance: of all drafts, those taken;
    acceptance_by_position: of drafts all before which were taken. draft_time_s: that drafting took in all.
    h2d_bytes_per_token: copied to the GPU for each token put out by decode, in decode steps and prompts alike.
    """

    asked: str
    k: int
    steps: int
    drafted: int
    accepted: int
    tokens_per_step: float | None
    acceptance: Share
    acceptance_by_position: list[Share]
    draft_time_s: float
    draft_bytes: int
    h2d_bytes_per_token: float | None


class Bound(msgspec.Struct, frozen=True):
    """What no lossless policy can beat on these lanes."""

    tpot_s: float | None
    ttft_s: float | None
    lanes: str
    above_frac: float | None


TIED = 1e-9
"""Shares that differ by less are equal but for rounding."""


class Composition(msgspec.Struct, frozen=True):
    """Shares of a phase's time by what held it up: the GPU, copies to it, the host, the CPU, the predictor; the drive,
    if there is one; the link back and links between GPUs, where any time is charged to them."""

    gpu: Share
    copy: Share
    host: Share
    cpu: Share
    predictor: Share
    drive: Share | msgspec.UnsetType = msgspec.UNSET
    back: Share | msgspec.UnsetType = msgspec.UNSET
    peer: Share | msgspec.UnsetType = msgspec.UNSET

    def by_part(self) -> dict[str, Share]:
        """What the time went to -> share."""
        return {part: share for part, share in msgspec.structs.asdict(self).items() if share is not msgspec.UNSET}

    def largest(self) -> str | None:
        """The resource behind the largest share, or those that share it; None where no time went by."""
        known = {part: share for part, share in self.by_part().items() if share is not None}
        most = max(known.values(), default=0.0)
        return " and ".join(CHARGED[part][1].resource for part, share in known.items() if share >= most - TIED) or None


class BoundBy(msgspec.Struct, frozen=True):
    """`resource`: gpu, copy link, host, cpu, predictor, drive, link back or peer link; what takes the largest share of
    decode. Several, joined by "and", where none takes more than another."""

    resource: str | None
    prefill: Composition
    decode: Composition
    mixed: Composition | None = None

    def of(self, phase: Phased) -> Composition:
        """What a phase's time is composed of."""
        return {"prefill": self.prefill, "decode": self.decode, "mixed": self.mixed or self.decode}[phase]

    def by_phase(self) -> dict[Phased, Composition]:
        """Of the phases that there are."""
        found: dict[Phased, Composition] = {"prefill": self.prefill, "decode": self.decode}
        return found if self.mixed is None else {**found, "mixed": self.mixed}


class Figure(msgspec.Struct, frozen=True):
    """A figure of hardware or stack, and the share of simulated time that rests on it."""

    figure: str
    share: float
    source: str
    value: float | None
    ref: str


class Provenance(msgspec.Struct, frozen=True):
    """Shares of simulated time by the source of the figures they rest on; `figures`, largest share first."""

    measured: Share
    datasheet: Share
    assumed: Share
    figures: list[Figure]

    def by_source(self) -> dict[str, Share]:
        """Source -> share."""
        return {"measured": self.measured, "datasheet": self.datasheet, "assumed": self.assumed}


class Sampling(msgspec.Struct, frozen=True):
    """Of the uncertainty, what is for the choice of requests: 95 % over so many of them (batches of them)."""

    tpot_s: Ends
    ttft_s: Ends
    tpot_n: int
    ttft_n: int

    def of(self, time: Timed) -> tuple[Ends, int]:
        """The interval of a time, and how many (batches of) requests it is from."""
        return (self.tpot_s, self.tpot_n) if time == "tpot_s" else (self.ttft_s, self.ttft_n)


class Uncertainty(msgspec.Struct, frozen=True):
    """Bands [low, high] for figures and choice of requests together."""

    low_factor: float | None
    high_factor: float | None
    plus_minus_frac: float | None
    sampling: Sampling
    ttft_s: Ends
    tpot_s: Ends


class Energy(msgspec.Struct, frozen=True):
    """Joules of a run that asked for them (`--set sim.energy`), derived from the watts of its profile.

    missing: the blocks of watts that its profile lacks; where there is any, nothing else is known.
    range_joules_per_token: [low, high], were watts and times all off at once to the ends of their ranges. lanes_j: by
    part and state, which add up to energy_j. provenance: by share of energy_j.
    """

    counted: str
    missing: list[str]
    energy_j: float | None = None
    joules_per_token: float | None = None
    range_joules_per_token: Ends = None
    mean_w: float | None = None
    lanes_j: dict[str, float] = {}
    provenance: Provenance | None = None


class PolicyFile(msgspec.Struct, frozen=True):
    """The file of a policy that is not an installed one, and the digest that `run_id` holds."""

    name: str
    sha256: str


class Scheduling(msgspec.Struct, frozen=True):
    """A scheduler other than the default: what it went by, and what came of it; of replicas, each tells its own."""

    name: str
    file: PolicyFile | None
    stats: dict[str, Any]


class Spent(msgspec.Struct, frozen=True):
    """How often a real machine did something, and how long that took."""

    n: int
    busy_s: float


class Measurement(msgspec.Struct, frozen=True):
    """What only a real run has (docs/validate.md)."""

    output_digest: str
    policy_code_s: float
    policy_code_per_iteration_s: float | None
    predictor_asked_s: float
    distinct_host_experts: int
    spilt_arena_bytes: int
    operations: dict[str, Spent]
    host: dict[str, Spent]
    fault: str
    weights: str | None = None  # random, or of which checkpoint; not in the JSON where nobody said


class Prediction(msgspec.Struct, frozen=True):
    """Of a real run: what the simulation of the very same run says."""

    hw: str
    label: str | None
    ttft_s: Statistic
    tpot_s: Statistic
    e2e_s: Statistic
    throughput_tokens_per_s: float | None
    hit_rate: Share
    late_hit_rate: Share
    miss_rate: Share
    h2d_bytes: int
    d2h_bytes: int
    bound_by: BoundBy
    uncertainty: Uncertainty
    lane_utilisation: dict[str, Share]
