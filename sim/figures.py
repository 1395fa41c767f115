"""The figures of a result, each said once: its key, type, unit, which way is better, label, meaning and where it shows.

A row is a field of one of the records below. `Result` (`sim.results.record`), its JSON, the columns of all tables, the
labels of text and pages, `--expect`, `check`, goals and the reference (docs/figures.md) are read from here.
"""

from __future__ import annotations  # a row is worked out when it is asked for: a plain run asks for five

import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from inspect import get_annotations
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec
from msgspec import UNSET

from sim.base.errors import BadInput
from sim.base.lanes import CHARGED

SCHEMA = 2
"""Of a result's JSON, and of every file that holds results or their figures."""

Value = bool | int | float | str | None
Share = float | None
Timed = Literal["tpot_s", "ttft_s"]
Phased = Literal["prefill", "decode", "mixed"]
Ends = tuple[float, float] | None
Shown = Literal["json", "tables", "first"]
Unit = Literal["", "s", "bytes", "j", "w", "frac", "share", "per_s", "none"]
Kind = Literal["int", "float", "text", "bool", "list", "open"]


class Figure(NamedTuple):
    """What a row of the table says beside its key and type.

    Attributes:
        about: what it means, as the reference prints it.
        better: 1 where more is better, -1 where less is, 0 where a change is neither; of a record, also of its fields.
        unit: where the name's ending does not say it; of a record, what its fields are in unless they say otherwise.
            `frac` is a ratio, `share` one that is 1 at most, `none` a number without a unit below one that has one.
        label: what text and pages call it; below a record with a label, what is added to that.
        shown: `json` only there; `tables` also a column of tables; `first` also among the columns that a sweep shows
            unless it is asked for others.
        first: of a record, which of its fields are `first`.
        line: of a result's own: whether the text of a run has a line for it, `label  value`; others stand in sentences,
            or nowhere.
    """

    about: str
    better: int = 0
    unit: Unit = ""
    label: str = ""
    shown: Shown = "tables"
    first: tuple[str, ...] = ()
    line: bool = False


def values_of(record: msgspec.Struct) -> dict[str, Any]:
    """Name -> value of each field that a record of this run has."""
    values = ((name, getattr(record, name)) for name in record.__struct_fields__)
    return {name: value for name, value in values if value is not UNSET}


class Errors(msgspec.Struct, frozen=True):
    """Where a figure of requests under load lies, [low, high] at 95 %, from blocks of consecutive requests
    ([slo.md](slo.md)); null where too few blocks say too little."""

    mean: Annotated[Ends, Figure("of the mean")]
    p50: Annotated[Ends, Figure("of the median")]
    p90: Annotated[Ends, Figure("of the 90th percentile")]
    p95: Annotated[Ends, Figure("of the 95th percentile")]
    p99: Annotated[Ends, Figure("of the 99th percentile")]
    block_requests: Annotated[int, Figure("requests of a block", unit="none")]
    blocks: Annotated[int, Figure("blocks", unit="none")]


class Statistic(msgspec.Struct, frozen=True):
    """One figure over requests; a percentile without enough requests behind it is null."""

    mean: Annotated[float | None, Figure("mean over requests", -1)]
    p50: Annotated[float | None, Figure("median; from 2 requests", -1, label="p50")]
    p95: Annotated[float | None, Figure("95th percentile; from 20 requests", -1, label="p95")]
    p99: Annotated[float | None, Figure("99th percentile; from 100 requests", -1, label="p99")]
    n: Annotated[int, Figure("requests behind it", unit="none", label="requests")]
    p90: Annotated[
        float | msgspec.UnsetType | None, Figure("90th percentile, of requests under load; from 10", -1, label="p90")
    ] = UNSET
    sampling: Annotated[Errors | msgspec.UnsetType | None, Figure("where these lie, of requests under load")] = UNSET


class Load(msgspec.Struct, frozen=True):
    """Requests that come at times of their own ([load.md](load.md)), from the first arrival to the last token."""

    source: Annotated[str, Figure("what the arrivals are from")]
    arrivals_per_s: Annotated[float | None, Figure("how fast requests came; null in a closed loop", label="arrivals")]
    served_per_s: Annotated[float | None, Figure("requests served per second")]
    capacity_per_s: Annotated[
        float | None, Figure("taken in while others waited; null where most did not", 1, label="capacity")
    ]
    stable: Annotated[bool, Figure("whether that is faster than they came")]
    busy_frac: Annotated[Share, Figure("share of the time in which any request was there")]
    requests_in_system: Annotated[float | None, Figure("there on average", label="requests there")]
    requests_waiting: Annotated[float | None, Figure("waiting on average", label="requests waiting")]


class Replica(msgspec.Struct, frozen=True):
    """One of several replicas ([replicas.md](replicas.md)). Throughput, busy_frac and requests in it are over the time
    of the whole run, so that they add up; arrivals, capacity and stable are of its own queue."""

    replica: Annotated[int, Figure("its number, from 0")]
    requests: Annotated[int, Figure("requests it was sent")]
    output_tokens: Annotated[int, Figure("tokens it put out")]
    throughput_tokens_per_s: Annotated[float | None, Figure("output tokens per second", 1)]
    hit_rate: Annotated[Share, Figure("as of the run", 1, unit="share")]
    busy_frac: Annotated[Share, Figure("as of `load`")]
    requests_in_system: Annotated[float | None, Figure("there on average")]
    requests_waiting: Annotated[float | None, Figure("waiting on average")]
    queue_mean_s: Annotated[float | None, Figure("mean wait before a prompt begins", -1)]
    arrivals_per_s: Annotated[float | None, Figure("how fast requests came")]
    capacity_per_s: Annotated[float | None, Figure("as of `load`", 1)]
    stable: Annotated[bool, Figure("as of `load`")]
    h2d_bytes: Annotated[int, Figure("copied to its GPUs", -1)]
    policy_stats: Annotated[dict[str, Any], Figure("figures of its policy's own")]
    scheduler_stats: Annotated[dict[str, Any], Figure("figures of its scheduler's own")]


class Attained(msgspec.Struct, frozen=True):
    """Requests of one task that had an SLO."""

    requests: Annotated[int, Figure("that had one")]
    met: Annotated[int, Figure("that kept it", 1)]
    attained_frac: Annotated[float, Figure("share that kept it", 1, unit="share", label="kept")]


class Violations(msgspec.Struct, frozen=True):
    """Requests that broke their SLO, by what took most of the time in question."""

    queue: Annotated[int, Figure("waiting in the queue", -1, label="queue")]
    prefill: Annotated[int, Figure("their own or others' prompts", -1, label="prefill")]
    copies: Annotated[int, Figure("copies to GPUs", -1, label="copies")]
    compute: Annotated[int, Figure("computing", -1, label="compute")]
    drive: Annotated[int, Figure("reads of a drive", -1, label="drive")]


class SloAttainment(msgspec.Struct, frozen=True, kw_only=True):
    """What became of `--slo` ([slo.md](slo.md)). Goodput counts the requests that kept all of theirs, and their
    tokens."""

    limits: Annotated[dict[str, dict[str, float]], Figure("what each task's requests were promised; `*`: all others")]
    requests: Annotated[int, Figure("that had an SLO")]
    met: Annotated[int, Figure("that kept it", 1)]
    attained_frac: Annotated[Share, Figure("share that kept it", 1, unit="share", label="kept", shown="first")]
    attained_ends: Annotated[Ends, Figure("where that share lies, [low, high] at 95 %", unit="share")]
    goodput_requests_per_s: Annotated[
        float | None, Figure("requests that kept it, per second", 1, label="goodput", shown="first")
    ]
    goodput_tokens_per_s: Annotated[float | None, Figure("their output tokens per second", 1, label="goodput, tokens")]
    violations: Annotated[Violations, Figure("requests that broke it, by what took most of the time", label="broken")]
    tasks: Annotated[dict[str, Attained], Figure("by task")]


class KvUse(msgspec.Struct, frozen=True):
    """A pool of pages for keys and values ([kv.md](kv.md)): what of it was held, and who had to make room."""

    page_tokens: Annotated[int, Figure("tokens of a page")]
    page_bytes: Annotated[int, Figure("of a page")]
    pages: Annotated[int, Figure("pages of the pool")]
    peak_pages: Annotated[int, Figure("held at most")]
    mean_pages: Annotated[float | None, Figure("held on average over time")]
    preempt: Annotated[str, Figure("what became of whoever made room: `recompute` or `swap`")]
    preemptions: Annotated[int, Figure("how often", label="pre-emptions")]
    preempted_requests: Annotated[int, Figure("requests that had to")]
    preempted_s: Annotated[float, Figure("waited after that, summed over requests")]
    recomputed_tokens: Annotated[int, Figure("tokens whose keys and values were computed again")]
    kv_swap_out_bytes: Annotated[int, Figure("moved to host memory")]
    kv_swap_in_bytes: Annotated[int, Figure("moved back")]
    peak_swapped_bytes: Annotated[int, Figure("in host memory at most")]


class Slowed(msgspec.Struct, frozen=True):
    """What shared memory added to the time of one activity."""

    added_s: Annotated[float, Figure("over the whole run and all its lanes, waited for or not")]
    of_busy_frac: Annotated[float, Figure("of what these lanes were busy, slowed as they were")]
    by: Annotated[str, Figure("`law`, or `measured`, `assumed`, `set` terms in its place")]


class Contention(msgspec.Struct, frozen=True):
    """What was slowed by what ran beside it ([contention.md](contention.md)); null: it was not."""

    cpu: Annotated[Slowed | None, Figure("experts on the CPU")]
    h2d: Annotated[Slowed | None, Figure("copies to GPUs")]
    d2h: Annotated[Slowed | None, Figure("copies back")]
    gpu: Annotated[Slowed | None, Figure("kernels")]
    nvme: Annotated[Slowed | None, Figure("reads of a drive; there only where they were slowed")] = None


class SizesByLayer(msgspec.Struct, frozen=True):
    """A file whose layers hold experts of unlike size ([formats.md](formats.md)): what it leaves out to take all for
    their mean, in decode."""

    least_bytes: Annotated[int, Figure("of an expert, at least")]
    most_bytes: Annotated[int, Figure("of an expert, at most")]
    h2d_frac: Annotated[float | None, Figure("how many more bytes would be copied; null where none are")]
    cpu_frac: Annotated[float | None, Figure("how many more would be read for experts on the CPU")]
    gpu_frac: Annotated[float | None, Figure("how many more would be read for experts on GPUs")]
    tpot_frac: Annotated[
        float | None, Figure("how much longer decode would take, to first order; null with several GPUs or a drive")
    ]


class Found(msgspec.Struct, frozen=True):
    """Experts that were asked of host memory."""

    asked: Annotated[int, Figure("asked for")]
    hit: Annotated[int, Figure("found there")]
    late: Annotated[int, Figure("found while they were being read")]
    miss: Annotated[int, Figure("read from the drive")]
    read_bytes: Annotated[int, Figure("of the last")]


class HostMemory(msgspec.Struct, frozen=True):
    """Host memory as a cache of experts above a drive ([nvme.md](nvme.md))."""

    drive: Annotated[str, Figure("the drive")]
    reads_are: Annotated[str, Figure("`direct` or `buffered`")]
    depth: Annotated[int, Figure("reads that are outstanding at most")]
    block_bytes: Annotated[int, Figure("of a read")]
    bytes_per_s: Annotated[float | None, Figure("what it gives to reads in a row")]
    start: Annotated[str, Figure("what host memory held at the start: `warm` or `cold`")]
    ram_policy: Annotated[str, Figure("who stays in it")]
    bytes: Annotated[int, Figure("room for experts")]
    peak_bytes: Annotated[int, Figure("held at most")]
    reads: Annotated[int, Figure("reads of the drive")]
    read_bytes: Annotated[int, Figure("read from the drive", -1, label="read from the drive")]
    hit_rate: Annotated[Share, Figure("share of what was asked that was there", 1, unit="share", label="hits in RAM")]
    copies: Annotated[Found, Figure("asked by copies on demand")]
    prefetches: Annotated[Found, Figure("asked by prefetches")]
    cpu: Annotated[Found, Figure("asked by experts on the CPU")]
    read_ahead: Annotated[Found, Figure("asked by reading ahead")]
    by_phase: Annotated[dict[str, Found], Figure("copies on demand and experts on the CPU, by phase")]
    evicted: Annotated[int, Figure("experts that left")]
    passed: Annotated[int, Figure("read past host memory, which had no room")]
    withdrawn: Annotated[int, Figure("reads that were taken back before they began")]


class Shape(msgspec.Struct, frozen=True):
    """Routing shape of model and trace."""

    layers: Annotated[int, Figure("MoE layers")]
    experts: Annotated[int, Figure("experts of a layer")]
    top_k: Annotated[int, Figure("chosen for a token")]


class Length(msgspec.Struct, frozen=True):
    """Tokens per request."""

    mean: Annotated[float | None, Figure("on average")]
    min: Annotated[int | None, Figure("at least")]
    max: Annotated[int | None, Figure("at most")]


class Lengths(msgspec.Struct, frozen=True):
    """Of the requests that were served."""

    prompt_tokens: Annotated[Length, Figure("of the prompt")]
    output_tokens: Annotated[Length, Figure("put out")]
    longest_context_tokens: Annotated[int | None, Figure("most of prompt and output together of one request")]


class Phase(msgspec.Struct, frozen=True):
    """Iterations of one phase."""

    iterations: Annotated[int, Figure("how many")]
    tokens: Annotated[int, Figure("tokens in them; with drafts rows, those of rejected ones too")]
    time_s: Annotated[float, Figure("how long they took", -1)]


class MixedPhase(msgspec.Struct, frozen=True):
    """Iterations in which prompts and decode tokens ran together."""

    iterations: Annotated[int, Figure("how many")]
    tokens: Annotated[int, Figure("tokens in them")]
    decode_tokens: Annotated[int, Figure("of these, those that were decoded")]
    time_s: Annotated[float, Figure("how long they took", -1)]


class Phases(msgspec.Struct, frozen=True):
    """Prompts, and tokens after them."""

    prefill: Annotated[Phase, Figure("prompts")]
    decode: Annotated[Phase, Figure("tokens after them")]
    mixed: Annotated[MixedPhase | None, Figure("both together; there only with `--prefill-chunk` or batching")] = None

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
    """How gates found experts; shares sum to 1, null where nothing was asked for."""

    hit: Annotated[Share, Figure("its weights are on the GPU", 1)]
    partial_hit: Annotated[Share, Figure("some of its parts are")]
    late_hit: Annotated[Share, Figure("its copy is queued or under way")]
    miss: Annotated[Share, Figure("nothing of it is there or coming", -1)]
    cpu: Annotated[Share, Figure("computed on the CPU")]
    substituted: Annotated[Share, Figure("its tokens went to another expert", -1)]
    dropped: Annotated[Share, Figure("nothing was computed in its place", -1)]


class ServedRates(msgspec.Struct, frozen=True):
    """How gates found the experts that served, however they were computed; shares sum to 1."""

    hit: Annotated[Share, Figure("on the GPU", 1)]
    partial_hit: Annotated[Share, Figure("in part")]
    late_hit: Annotated[Share, Figure("on its way")]
    miss: Annotated[Share, Figure("neither", -1)]


class DistinctExperts(msgspec.Struct, frozen=True):
    """Different experts that a layer of a decode iteration executes, all its tokens together, after any rerouting."""

    per_layer: Annotated[float | None, Figure("how many, on average")]
    slots: Annotated[float, Figure("whole experts that a layer's share of all caches holds")]
    per_slot: Annotated[float | None, Figure("their ratio, r_bar")]


class Copies(msgspec.Struct, frozen=True):
    """Copies to GPUs."""

    n: Annotated[int, Figure("how many")]
    bytes: Annotated[int, Figure("their sizes", label="bytes")]


class Prefetches(msgspec.Struct, frozen=True):
    """What became of prefetches: useful + late + wasted + cancelled = issued; harmful cuts across."""

    useful: Annotated[Copies, Figure("had arrived when a gate asked", label="useful")]
    late: Annotated[Copies, Figure("used, but queued or under way when the gate asked", label="late")]
    wasted: Annotated[Copies, Figure("evicted, or left at the end, without a use", -1, label="wasted")]
    harmful: Annotated[
        Copies, Figure("before its first use a gate missed an expert evicted for it", -1, label="harmful")
    ]
    issued: Annotated[Copies, Figure("handed to the copy engine", label="issued")]
    cancelled: Annotated[Copies, Figure("withdrawn before it moved a byte", label="cancelled")]
    refused: Annotated[Copies, Figure("not made: the policy named nothing to evict", label="refused")]


class Memory(msgspec.Struct, frozen=True):
    """Memory of GPU 0; where each GPU has whole layers, of the one that was fullest."""

    dense_bytes: Annotated[int, Figure("weights that are no routed experts")]
    kv_cache_bytes: Annotated[int, Figure("keys and values")]
    activation_bytes: Annotated[int, Figure("activations of an iteration")]
    reserve_bytes: Annotated[int, Figure("reserve; assumed")]
    predictor_bytes: Annotated[int, Figure("what the policy predicts with")]
    cache_capacity_bytes: Annotated[int, Figure("what its experts may take", label="cache", shown="first")]
    cache_peak_bytes: Annotated[int, Figure("the most they took")]
    vram_bytes: Annotated[int, Figure("the GPU's memory, or what `--vram` left of it", label="VRAM")]
    draft_bytes: Annotated[int | None, Figure("a draft model; there only with one")] = None

    @property
    def peak_bytes(self) -> int:
        """What was in use at most: all parts, and the most experts."""
        parts = self.dense_bytes + self.kv_cache_bytes + self.activation_bytes + self.reserve_bytes
        return parts + self.predictor_bytes + self.cache_peak_bytes + (self.draft_bytes or 0)

    @property
    def needed_bytes(self) -> int:
        """What a card has to have for that room for experts, of which a policy may leave some empty."""
        return self.peak_bytes - self.cache_peak_bytes + self.cache_capacity_bytes


class Drafting(msgspec.Struct, frozen=True):
    """A run with drafts ([draft.md](draft.md)): what its decode steps verified, and what they took."""

    asked: Annotated[str, Figure("as given")]
    k: Annotated[int, Figure("drafts of a step")]
    steps: Annotated[int, Figure("steps of requests that verified drafts")]
    drafted: Annotated[int, Figure("tokens drafted")]
    accepted: Annotated[int, Figure("of these, taken")]
    tokens_per_step: Annotated[float | None, Figure("put out by each step of a request, on average", 1)]
    acceptance: Annotated[Share, Figure("share of all drafts that were taken", unit="share")]
    acceptance_by_position: Annotated[list[Share], Figure("of drafts all before which were taken", unit="share")]
    draft_time_s: Annotated[float, Figure("that drafting took in all")]
    draft_bytes: Annotated[int, Figure("of GPU memory")]
    h2d_bytes_per_token: Annotated[
        float | None, Figure("copied for each token that decode put out, prompts' copies included", -1, unit="bytes")
    ]


class Bound(msgspec.Struct, frozen=True):
    """What no lossless policy can beat on these lanes ([bounds.md](bounds.md))."""

    tpot_s: Annotated[float | None, Figure("least mean TPOT", label="bound of TPOT", shown="first")]
    ttft_s: Annotated[float | None, Figure("least mean TTFT", label="bound of TTFT")]
    resource: Annotated[str, Figure("what it is worked out for: `copy`, or `copy + cpu`")]
    above_frac: Annotated[
        float | None, Figure("how far the mean TPOT lies above it", -1, label="above bound", shown="first")
    ]


TIED = 1e-9
"""Shares that differ by less are equal but for rounding."""


class Composition(msgspec.Struct, frozen=True):
    """Shares of a phase's time by what held it up."""

    gpu: Annotated[Share, Figure("the GPU's kernels")]
    copy: Annotated[Share, Figure("copies to it", label="copies")]
    host: Annotated[Share, Figure("the host's launches and reads")]
    cpu: Annotated[Share, Figure("experts on the CPU")]
    predictor: Annotated[Share, Figure("predictions")]
    drive: Annotated[Share | msgspec.UnsetType, Figure("reads of a drive; there only with one")] = UNSET
    back: Annotated[Share | msgspec.UnsetType, Figure("copies back; there only with any")] = UNSET
    peer: Annotated[Share | msgspec.UnsetType, Figure("transfers between GPUs; there only with any")] = UNSET

    def largest(self) -> str | None:
        """The resource behind the largest share, or those that share it; None where no time went by."""
        known = {part: share for part, share in values_of(self).items() if share is not None}
        most = max(known.values(), default=0.0)
        return " and ".join(CHARGED[part][1].resource for part, share in known.items() if share >= most - TIED) or None


class Bottleneck(msgspec.Struct, frozen=True):
    """What bounds the run; terms above."""

    resource: Annotated[
        str | None,
        Figure(
            "what takes the largest share of decode: `gpu`, `copy link`, `host`, `cpu`, `predictor`, `drive`, "
            "`link back`, `peer link`; several, joined by `and`, that are charged the same",
            label="bottleneck",
            shown="first",
        ),
    ]
    prefill: Annotated[Composition, Figure("shares of prompts")]
    decode: Annotated[Composition, Figure("shares of decode")]
    mixed: Annotated[Composition | None, Figure("shares of both together; there only where any ran so")] = None

    def of(self, phase: Phased) -> Composition:
        """What a phase's time is composed of."""
        return {"prefill": self.prefill, "decode": self.decode, "mixed": self.mixed or self.decode}[phase]

    def by_phase(self) -> dict[Phased, Composition]:
        """Of the phases that there are."""
        found: dict[Phased, Composition] = {"prefill": self.prefill, "decode": self.decode}
        return found if self.mixed is None else {**found, "mixed": self.mixed}


class Input(msgspec.Struct, frozen=True):
    """A figure of hardware or engine, and the share of simulated time that rests on it."""

    figure: Annotated[str, Figure("its name")]
    share: Annotated[float, Figure("of the time", unit="share")]
    source: Annotated[str, Figure("`measured`, `datasheet` or `assumed`")]
    value: Annotated[float | None, Figure("what it is")]
    ref: Annotated[str, Figure("where it is from")]


class Provenance(msgspec.Struct, frozen=True):
    """Shares of simulated time by the source of the figures behind it ([provenance.md](provenance.md))."""

    measured: Annotated[Share, Figure("by measured ones")]
    datasheet: Annotated[Share, Figure("by those of a datasheet")]
    assumed: Annotated[Share, Figure("by assumed ones")]
    figures: Annotated[list[Input], Figure("each of them, largest share first", shown="json")]

    def by_source(self) -> dict[str, Share]:
        """Source -> share."""
        return {"measured": self.measured, "datasheet": self.datasheet, "assumed": self.assumed}


class Sampling(msgspec.Struct, frozen=True):
    """Of the uncertainty, what is for the choice of requests, at 95 %; null of one request."""

    tpot_s: Annotated[Ends, Figure("of the mean TPOT, [low, high]")]
    ttft_s: Annotated[Ends, Figure("of the mean TTFT, [low, high]")]
    tpot_n: Annotated[int, Figure("requests (batches or blocks of them) behind it")]
    ttft_n: Annotated[int, Figure("requests (batches or blocks of them) behind it")]

    def of(self, time: Timed) -> tuple[Ends, int]:
        """The interval of a time, and how many (batches of) requests it is from."""
        return (self.tpot_s, self.tpot_n) if time == "tpot_s" else (self.ttft_s, self.ttft_n)


class Uncertainty(msgspec.Struct, frozen=True):
    """For figures and choice of requests together ([provenance.md](provenance.md))."""

    low_factor: Annotated[float | None, Figure("of the whole run's time, at least")]
    high_factor: Annotated[float | None, Figure("of the whole run's time, at most")]
    plus_minus_frac: Annotated[float | None, Figure("one standard deviation of calibration samples; null without")]
    sampling: Annotated[Sampling, Figure("that of the choice of requests alone")]
    ttft_s: Annotated[Ends, Figure("where the mean TTFT lies, [low, high]; null with arrivals in batches")]
    tpot_s: Annotated[Ends, Figure("where the mean TPOT lies, [low, high]")]


class Energy(msgspec.Struct, frozen=True):
    """Joules by the watts of the profile ([energy.md](energy.md)); where any are missing, nothing else is known."""

    counted: Annotated[str, Figure("what is counted: `gpu` or `machine`")]
    missing: Annotated[list[str], Figure("blocks of watts that the profile lacks")]
    energy_j: Annotated[float | None, Figure("of the whole run", -1, label="energy")]
    joules_per_token: Annotated[
        float | None, Figure("for each output token", -1, unit="j", label="energy per token", shown="first")
    ]
    range_joules_per_token: Annotated[
        Ends, Figure("[low, high], were watts and times all off at once to the ends of their ranges", unit="j")
    ]
    mean_w: Annotated[float | None, Figure("on average over time")]
    lanes_j: Annotated[dict[str, float], Figure("by part and state, which add up to `energy_j`")]
    provenance: Annotated[Provenance | None, Figure("by share of `energy_j`", unit="share")]


class PolicyFile(msgspec.Struct, frozen=True):
    """The file of a policy or scheduler that is not an installed one."""

    name: Annotated[str, Figure("its name")]
    sha256: Annotated[str, Figure("its digest, which `run_id` holds too")]


class Scheduling(msgspec.Struct, frozen=True):
    """A scheduler other than the default ([schedulers.md](schedulers.md))."""

    name: Annotated[str, Figure("its name")]
    file: Annotated[PolicyFile | None, Figure("the file it is from; null of an installed one")]
    stats: Annotated[dict[str, Any], Figure("figures of its own; of replicas, each tells its own")]


class Spent(msgspec.Struct, frozen=True):
    """How often a real machine did something."""

    n: Annotated[int, Figure("how often")]
    busy_s: Annotated[float, Figure("how long that took")]


class Measurement(msgspec.Struct, frozen=True):
    """What only a real run has ([validate.md](validate.md))."""

    output_digest: Annotated[str, Figure("of what was put out")]
    policy_code_s: Annotated[float, Figure("that the policy's code took")]
    policy_code_per_iteration_s: Annotated[float | None, Figure("of an iteration")]
    predictor_asked_s: Annotated[float, Figure("that asking predictors took")]
    distinct_host_experts: Annotated[int, Figure("buffers of experts in host memory")]
    spilt_arena_bytes: Annotated[int, Figure("of slots that had to be split")]
    operations: Annotated[dict[str, Spent], Figure("by lane and operation")]
    host: Annotated[dict[str, Spent], Figure("by what the host did")]
    fault: Annotated[str, Figure("why it stopped early; empty where it did not")]
    weights: Annotated[str | None, Figure("random, or of which checkpoint")] = None


class Prediction(msgspec.Struct, frozen=True):
    """Beside a real run: what the simulation of the very same run says."""

    hw: Annotated[str, Figure("by which machine")]
    label: Annotated[str | None, Figure("what a reader must know of it")]
    ttft_s: Annotated[Statistic, Figure("as of the run")]
    tpot_s: Annotated[Statistic, Figure("as of the run")]
    e2e_s: Annotated[Statistic, Figure("as of the run")]
    throughput_tokens_per_s: Annotated[float | None, Figure("as of the run")]
    hit_rate: Annotated[Share, Figure("as of the run", unit="share")]
    late_hit_rate: Annotated[Share, Figure("as of the run", unit="share")]
    miss_rate: Annotated[Share, Figure("as of the run", unit="share")]
    h2d_bytes: Annotated[int, Figure("as of the run")]
    d2h_bytes: Annotated[int, Figure("as of the run")]
    bottleneck: Annotated[Bottleneck, Figure("as of the run", unit="share")]
    uncertainty: Annotated[Uncertainty, Figure("as of the run")]
    lane_utilisation: Annotated[dict[str, Share], Figure("as of the run", unit="share")]


class Figures(msgspec.Struct, kw_only=True, eq=False):
    """A run: what was asked, how long it took, what was found where, what was copied, and what that rests on."""

    schema: Annotated[
        int, Figure("version of this list, 2; within a version keys are added, never changed", shown="json")
    ]
    run_id: Annotated[
        str, Figure("12 hex digits over everything that decides the numbers: equal inputs, equal id", shown="first")
    ]
    name: Annotated[str, Figure("the run in words; runs that differ in what was asked differ in it")]
    # What was asked for, under the names of the options.
    policy: Annotated[str, Figure("the policy", shown="first")]
    policy_file: Annotated[PolicyFile | None, Figure("of a policy named by its file; else null")]
    params: Annotated[dict[str, Value], Figure("all its parameters, defaults included")]
    hw: Annotated[str, Figure("the machine", shown="first")]
    model: Annotated[str, Figure("the model", shown="first")]
    precision: Annotated[str, Figure("type of the weights", shown="first")]
    engine: Annotated[str, Figure("the serving engine whose costs are reckoned")]
    overrides: Annotated[
        dict[str, Value],
        Figure("everything set on top of what these names stand for; empty when nothing was"),
    ]
    shape: Annotated[Shape, Figure("routing shape")]
    trace: Annotated[str, Figure("the trace", shown="first")]
    trace_sha256: Annotated[str, Figure("digest of its file")]
    split: Annotated[str, Figure("requests scored")]
    seed: Annotated[int, Figure("as given")]
    gpus: Annotated[int, Figure("as given")]
    batch: Annotated[int, Figure("as given", shown="first")]
    arrivals: Annotated[
        str,
        Figure("`trace`: by its arrival times; `back to back`: when a slot is free; else what `--arrivals` named"),
    ]
    n_requests: Annotated[int, Figure("requests done", shown="first")] = msgspec.field(name="requests")
    decode_tokens: Annotated[int, Figure("tokens that were decoded, also beside prompts; of drafts those put out")]
    # How long it took.
    ttft_s: Annotated[Statistic, Figure("time to first token", label="TTFT", first=("mean", "p95"))]
    tpot_s: Annotated[Statistic, Figure("time per output token", label="TPOT", first=("mean", "p95"))]
    e2e_s: Annotated[Statistic, Figure("from start to last token", label="end to end", first=("mean",))]
    queue_s: Annotated[Statistic, Figure("of the TTFT, before the prompt begins", label="queue")]
    service_s: Annotated[Statistic, Figure("of the TTFT, from there", label="service")]
    throughput_tokens_per_s: Annotated[
        float | None, Figure("output tokens / (last token - first start)", 1, label="throughput", shown="first")
    ]
    load: Annotated[Load | None, Figure("with arrivals; null back to back")]
    slo: Annotated[SloAttainment | None, Figure("with `--slo`; null without", label="SLO")]
    lengths: Annotated[Lengths, Figure("tokens of requests")]
    phases: Annotated[Phases, Figure("prompts and decode")]
    # How experts were found.
    hit_definition: Annotated[str, Figure("which definition the next seven follow")]
    lookup: Annotated[str, Figure("`layer`: the experts that a layer needs, of a prompt too, are looked up at once")]
    hit_rate: Annotated[Share, Figure("decode: hits", 1, unit="share", label="hit", shown="first")]
    partial_hit_rate: Annotated[Share, Figure("decode: hits in part", unit="share", label="partial hit")]
    late_hit_rate: Annotated[Share, Figure("decode: late hits", unit="share", label="late hit")]
    miss_rate: Annotated[Share, Figure("decode: misses", -1, unit="share", label="miss", shown="first")]
    cpu_rate: Annotated[Share, Figure("decode: computed on the CPU", unit="share", label="on the CPU")]
    substituted_rate: Annotated[Share, Figure("decode: another served", -1, unit="share", label="substituted")]
    dropped_rate: Annotated[Share, Figure("decode: dropped", -1, unit="share", label="dropped")]
    prefill_hit_rates: Annotated[HitRates, Figure("of prompts, by definition `gate`", unit="share")]
    token_hit_rates: Annotated[HitRates, Figure("decode, every (token, expert) pair counted", unit="share")]
    served_hit_rates: Annotated[
        ServedRates,
        Figure("decode: how the experts that served were found, after a lossy policy's changes", unit="share"),
    ]
    cache_ratio: Annotated[
        Share,
        Figure('decode: `hit` + `late_hit` of `served_hit_rates`; Importance\'s "GPU cache ratio"', 1, unit="share"),
    ]
    gate_mass_kept: Annotated[
        Share,
        Figure(
            "share of the chosen experts' gate mass that was computed; 1 of lossless policies, null where experts were "
            "changed and the trace has no scores or weights",
            1,
            unit="share",
            label="gate mass kept",
        ),
    ]
    activations_changed_frac: Annotated[
        float, Figure("share of (token, expert) pairs that a lossy policy changed or dropped", -1, label="changed")
    ]
    activations_lowered_frac: Annotated[
        float, Figure("share of executed pairs computed in less than the serving precision", -1)
    ]
    distinct_experts: Annotated[DistinctExperts, Figure("decode: different experts of a layer and iteration")]
    # What was copied, and what lay where.
    prefetch: Annotated[Prefetches, Figure("what became of prefetches", label="prefetches")]
    demand_copies: Annotated[Copies, Figure("copies asked for after a gate", -1, label="copies on demand")]
    h2d_bytes: Annotated[
        int, Figure("copied to GPUs; KV pages and activations included", -1, label="PCIe traffic", shown="first")
    ]
    d2h_bytes: Annotated[int, Figure("copied back", -1, label="copied back")]
    peak_vram_bytes: Annotated[
        int, Figure("of `memory`: what is fixed, and the most experts took", -1, label="peak VRAM", shown="first")
    ]
    ram_peak_bytes: Annotated[
        int, Figure("routed experts in host memory (above a drive, at most), and KV swapped there", -1, label="RAM")
    ]
    memory: Annotated[Memory, Figure("memory of a GPU, by part")]
    expert_bytes: Annotated[int, Figure("one whole routed expert; a mean where layers differ (`sizes_by_layer`)")]
    cache_capacity_bytes: Annotated[list[int], Figure("per GPU: what experts may take")]
    cache_peak_bytes: Annotated[list[int], Figure("per GPU: the most they took")]
    # What bounds it, and what it rests on.
    lower_bound: Annotated[
        Bound | None, Figure("what no policy can beat; null where arrivals and batches leave the future open")
    ]
    bottleneck: Annotated[Bottleneck, Figure("what holds it up", unit="share")]
    provenance: Annotated[Provenance, Figure("what the time rests on", unit="share")]
    uncertainty: Annotated[Uncertainty, Figure("how far it may be off")]
    caveats: Annotated[
        list[str],
        Figure(
            "what a reader must know: `lossy`, `oracle`, the trace's own (`synthetic` ...), `does not fit: needs ...`, "
            "`requests drawn with replacement from N recorded`, `unstable queue: ...`",
            shown="first",
        ),
    ]
    lane_utilisation: Annotated[
        dict[str, Share],
        Figure("busy share of each lane over `simulated_s`, or until its last work if that is later", unit="share"),
    ]
    policy_stats: Annotated[dict[str, Any], Figure("figures of the policy's own, named by it")]
    simulated_s: Annotated[float, Figure("simulated end of the last request", -1)]
    wall_s: Annotated[float, Figure("how long the simulation took, the only figure in which equal runs differ")]
    simulator: Annotated[
        str, Figure("what replayed it: `core`, [`simpy`](simpy.md), or `real` ([validate.md](validate.md))")
    ]
    version: Annotated[str, Figure("of this package")]
    by_layer: Annotated[list[dict[str, Any]], Figure("the rows of the table [`layers`](#layers)", shown="json")] = []
    # Of some runs only: others have no such key.
    batching: Annotated[str | None, Figure("with [`--set batch.static`](batching.md), as given")] = None
    prefill_chunk: Annotated[int | None, Figure("with [`--prefill-chunk`](batching.md), as given")] = None
    mixed_hit_rates: Annotated[
        HitRates | None, Figure("of iterations with prompts and decode tokens, both together", unit="share")
    ] = None
    draft: Annotated[Drafting | None, Figure("with `--draft`")] = None
    contention: Annotated[Contention | None, Figure("where shared memory slowed anything")] = None
    energy: Annotated[Energy | None, Figure("with `--set sim.energy`")] = None
    sizes_by_layer: Annotated[SizesByLayer | None, Figure("where layers hold experts of unlike size")] = None
    host_memory: Annotated[HostMemory | None, Figure("with a drive below host memory")] = None
    kv: Annotated[KvUse | None, Figure("with `--kv-memory`")] = None
    scheduling: Annotated[Scheduling | None, Figure("with a scheduler other than the default")] = None
    real: Annotated[bool | None, Figure("true of a real run")] = None
    device: Annotated[str | None, Figure("of a real run, where")] = None
    measured: Annotated[Measurement | None, Figure("of a real run, what only it has", shown="json")] = None
    prediction: Annotated[Prediction | None, Figure("of a real run, what its simulation says", shown="json")] = None
    router: Annotated[str | None, Figure("with [`--replicas`](replicas.md), as given")] = None
    replicas: Annotated[list[Replica] | None, Figure("with `--replicas`, each of them", shown="json")] = None


class Row(NamedTuple):
    """A row of the table with its whole key, and what it has from the records that it lies in.

    Attributes:
        key: as in JSON, dots between names; `*` stands for names that the run gives itself.
        path: the attributes that lead to it. kind: `open` of an object with names of its own, of which `key.*` is.
        part: whether it lies in a part, or is a key, that only some runs have.
        of: what a list is of, for tables; else nothing.
    """

    key: str
    path: tuple[str, ...]
    kind: Kind
    figure: Figure
    unit: Unit
    better: int
    label: str
    shown: Shown
    part: bool
    of: str = ""

    @property
    def number(self) -> bool:
        """Whether it is one, so that it can be held to something."""
        return self.kind in ("int", "float")

    def read(self, result: Any) -> Any:
        """Its value in a record; None where there is none."""
        for name in self.path:
            if result is None or result is UNSET:
                return None
            result = getattr(result, name)
        return None if result is UNSET else result


_SIMPLE: dict[object, Kind] = {int: "int", float: "float", str: "text", bool: "bool"}
_ENDINGS: tuple[tuple[str, Unit], ...] = (
    *(("_per_s", "per_s"), ("_s", "s"), ("_bytes", "bytes"), ("_frac", "frac"), ("_j", "j"), ("_w", "w")),
)
_LACKING = (type(None), msgspec.UnsetType)


_ABOVE = Row("", (), "open", Figure(""), "", 0, "", "tables", False)


@cache
def rows_of(kind: type[msgspec.Struct]) -> dict[str, Row]:
    """Every row of a record and of those within it, by key, in their order."""
    return {row.key: row for row in _walk(kind, _ABOVE)}


def with_lines() -> Iterator[Row]:
    """Rows of a result's own that have a line in the text of a run."""
    for base in RECORD.__mro__:
        for name, hint in get_annotations(base).items():
            if "line=True" in str(hint):  # as it is written: working all of them out takes as long as the text
                yield from _walk(RECORD, _ABOVE, [name])


@cache
def names_of(kind: type[msgspec.Struct]) -> list[tuple[str, str, Any]]:
    """Key, attribute and default (`...`: it has none) of each field of a record that it tells of."""
    names = kind.__struct_fields__
    defaults = (*[...] * (len(names) - len(kind.__struct_defaults__)), *kind.__struct_defaults__)
    every = zip(kind.__struct_encode_fields__, names, defaults, strict=True)
    return [one for one in every if not one[0].startswith("_")]


@cache
def field_of(kind: type[msgspec.Struct], name: str) -> tuple[Any, Figure]:
    """Type and figure of a field of a record."""
    base = next(base for base in kind.__mro__ if name in get_annotations(base))
    hint = get_annotations(base)[name]
    if isinstance(hint, str):
        hint = eval(hint, vars(sys.modules[base.__module__]))  # noqa: S307 - an annotation of ours
    of, figure = get_args(hint)
    return of, figure


def _walk(kind: type[msgspec.Struct], above: Row, wanted: Sequence[str] | None = None) -> Iterator[Row]:
    """Rows of a record's fields, and of what they hold; of one key alone, without a look at the others, where it is
    `wanted`, its names in a row."""
    for key, name, default in names_of(kind):
        if wanted is not None and wanted[:1] != [key]:
            continue
        hint, figure = field_of(kind, name)
        row = Row(
            f"{above.key}.{key}".lstrip("."),
            (*above.path, name),
            "open",
            figure,
            figure.unit or next((unit for end, unit in _ENDINGS if f"_{key}".endswith(end)), above.unit),
            figure.better or above.better,
            ", ".join(filter(None, (above.label, figure.label))),
            "json"
            if "json" in (figure.shown, above.shown)
            else "first"
            if figure.shown == "first" or key in above.figure.first
            else "tables",
            above.part or default is None or default is UNSET,
        )
        yield from _of_type(hint, row, False, None if wanted is None else wanted[1:])


def _of_type(hint: Any, row: Row, may_lack: bool, wanted: Sequence[str] | None = None) -> Iterator[Row]:
    """A row, or those of the record or object that it holds."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    of, *more = [one for one in options if one not in _LACKING]
    if isinstance(of, type) and issubclass(of, msgspec.Struct):
        part = row.part or may_lack or type(None) in options
        yield from _walk(of, row._replace(part=part), wanted)
    elif (origin := get_origin(of)) is dict:
        yield row
        inside = row._replace(key=f"{row.key}.*", path=(*row.path, "*"), shown="json")
        yield from _of_type(get_args(of)[1], inside, True)
    elif origin in (list, tuple):
        item = get_args(of)[0]
        items = get_args(item) if get_origin(item) in (Union, types.UnionType) else (item,)
        yield row._replace(kind="list", of=next((_SIMPLE[one] for one in items if one in _SIMPLE), ""))
    elif of is Any:
        yield row
    else:
        kinds = [_SIMPLE[one] for one in (of, *more) if one in _SIMPLE]
        unit: Unit = "" if row.unit == "none" else row.unit
        yield row._replace(kind="float" if "float" in kinds else kinds[0], unit=unit)


RECORD: type[msgspec.Struct] = Figures
"""What a result is a record of; a test puts one with a row more here."""


def figures() -> dict[str, Row]:
    """The rows of a result."""
    return rows_of(RECORD)


def row_of(key: str) -> Row | None:
    """The row of a figure, also of one whose names the run gives itself; None where no result has such a key."""
    return _row_of(RECORD, key)


@cache
def _row_of(kind: type[msgspec.Struct], key: str) -> Row | None:
    parts = key.split(".")
    for row in _walk(kind, _ABOVE, parts):
        if row.key == key:
            return row
    for row in rows_of(kind).values():
        own = row.key.split(".")
        if "*" in own and len(own) <= len(parts):
            at = own.index("*")
            tail = own[at + 1 :]
            if parts[:at] == own[:at] and (not tail or parts[-len(tail) :] == tail):
                return row
    return None


def label_of(key: str) -> str:
    """What text and pages call a figure; its key where the table has no label for it."""
    row = _row_of(RECORD, key)
    return (row.label if row is not None else "") or key


def numbers(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float | None]]:
    """Every number, and every null, of a result's JSON with its key; truth values and lists are no figures."""
    for key, child in value.items():
        name = f"{prefix}{key}"
        if isinstance(child, Mapping):
            yield from numbers(child, f"{name}.")
        elif isinstance(child, int | float) and not isinstance(child, bool):
            yield name, child
        elif child is None and (row := row_of(name)) is not None and row.number:
            yield name, None


def check_schema(data: Mapping[str, Any], where: object, way_out: str) -> None:
    """Raises BadInput where a file of results, or of their figures, is of another version of them."""
    if data.get("schema") != SCHEMA:
        raise BadInput(f"{where}: schema, got {data.get('schema')!r}: {SCHEMA} is read; {way_out}")
