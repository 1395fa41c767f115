"""The nouns of a result, typed: what the nested objects of the JSON hold, with their units in the names."""

from __future__ import annotations

import msgspec

Share = float | None
Ends = tuple[float, float] | None


class Statistic(msgspec.Struct, frozen=True):
    """Of one figure over requests; a percentile without enough requests behind it is None."""

    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None
    n: int


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


class Phases(msgspec.Struct, frozen=True):
    """Prompts, and tokens after them."""

    prefill: Phase
    decode: Phase


class HitRates(msgspec.Struct, frozen=True):
    """How the gate found experts; shares sum to 1, None where nothing was asked for."""

    hit: Share
    partial_hit: Share
    late_hit: Share
    miss: Share
    cpu: Share = None  # None as well where only what served is counted
    substituted: Share = None
    dropped: Share = None


class Union(msgspec.Struct, frozen=True):
    """Different experts that a layer of a decode iteration asks for, beside a layer's share of the room."""

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


class Memory(msgspec.Struct, frozen=True):
    """GPU 0."""

    dense_bytes: int
    kv_cache_bytes: int
    activation_bytes: int
    reserve_bytes: int
    predictor_bytes: int
    expert_budget_bytes: int
    peak_expert_bytes: int
    vram_bytes: int


class Bound(msgspec.Struct, frozen=True):
    """What no lossless policy can beat on these lanes."""

    tpot_s: float | None
    ttft_s: float | None
    lanes: str
    above_frac: float | None


class Composition(msgspec.Struct, frozen=True):
    """Shares of GPU 0's time: busy, or waiting for copies, host, CPU, predictor."""

    gpu: Share
    copy: Share
    host: Share
    cpu: Share
    predictor: Share


class BoundBy(msgspec.Struct, frozen=True):
    """`resource`: gpu, copy link, host, cpu or predictor; what takes the largest share of decode."""

    resource: str | None
    prefill: Composition
    decode: Composition


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


class Sampling(msgspec.Struct, frozen=True):
    """Of the uncertainty, what is for the choice of requests: 95 % over so many of them (batches of them)."""

    tpot_s: Ends
    ttft_s: Ends
    tpot_n: int
    ttft_n: int


class Uncertainty(msgspec.Struct, frozen=True):
    """Bands [low, high] for figures and choice of requests together."""

    tpot_s: Ends
    ttft_s: Ends
    low_factor: float | None
    high_factor: float | None
    plus_minus_frac: float | None
    sampling: Sampling


class PolicyFile(msgspec.Struct, frozen=True):
    """The file of a policy that is not an installed one, and the digest that `run_id` holds."""

    name: str
    sha256: str
