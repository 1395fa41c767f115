"""What `moesim validate` makes, keeps in files and reads back: a prediction and a measurement side by side, as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NotRequired, TypedDict, final

import msgspec

from sim.base.errors import BadInput
from sim.base.files import read_object
from sim.figures import check_schema

MAX_BYTES = 64 * 1024 * 1024
WAY_OUT = "let `moesim validate --out` write it again"


class Pair(TypedDict):
    """One figure in both worlds; the error is a share of what was measured."""

    predicted: float | None
    measured: float | None
    error_frac: float | None


class Off(TypedDict):
    """Busy seconds of a lane or an operation per iteration, and their difference."""

    predicted_s: float
    measured_s: float
    off_s: float


class Moved(TypedDict):
    """Bytes; `asked_bytes` are those of every copy asked for."""

    h2d_bytes: Pair
    d2h_bytes: Pair
    asked_bytes: Pair


class Repeats(TypedDict):
    """Mean times of every real run."""

    tpot_s: list[float]
    ttft_s: list[float]


class Decisions(TypedDict):
    """Whether both worlds decided alike, and where they part."""

    n: int
    identical: bool
    part_at: int | None
    predicted: list[tuple[str, int, int]] | None
    measured: list[tuple[str, int, int]] | None


class Comparison(TypedDict):
    """One policy with one capacity in both worlds."""

    policy: str
    params: dict[str, bool | int | float | str | None]
    traits: list[str]
    hw: str
    model: str
    trace: NotRequired[str]  # since a model's bundled one was replaced by another
    precision: str
    device: str | None
    cache_capacity_bytes: int
    experts: int | None
    cache_frac: float | None
    requests: int
    outputs: int | None
    decode_tokens: int
    ttft_s: Pair
    tpot_s: Pair
    repeats: Repeats
    plus_minus_frac: float | None
    decode_iqr_frac: float | None
    classes: dict[str, Pair]  # by the keys of a result: hit_rate, miss_rate, ...
    bytes: Moved
    utilisation: dict[str, Pair]  # by lane
    operations: dict[str, Off]  # by "lane: operation"
    lanes: dict[str, Off]
    worst_lane: str
    worst_operation: str
    policy_code_s: Pair
    decisions: Decisions
    caveats: list[str]
    case: NotRequired[dict[str, Any]]  # the configuration that was asked for, as it is saved


class Order(TypedDict):
    """How well policies with one capacity come in the order that was predicted (`sim.real.order.order`)."""

    policies: int
    noise_s: float | None
    tau_b: float | None
    pairs: int
    pairs_apart: int
    pairs_agree: int


class Errors(TypedDict):
    """Absolute errors over all comparisons."""

    tpot_s_median_error_frac: float | None
    tpot_s_worst_error_frac: float | None
    ttft_s_median_error_frac: float | None
    ttft_s_worst_error_frac: float | None


@final
class Report(Errors):
    """All comparisons of a command, and of what."""

    schema: int
    device: str
    cores: int
    machine: dict[str, Any]  # as `sim.real.devices.environment` finds it
    distinct_host_experts: int
    profile: str
    load: list[float]
    date: str
    tolerance_frac: float
    comparisons: list[Comparison]
    order: dict[str, Order]
    repeats: int
    interrupted: bool
    wrong: list[str]


class Talked(TypedDict):
    """What a real model generated under a policy, beside the same model resident."""

    policy: str
    lossy: bool
    tokens: int
    tokens_same_frac: float
    tokens_identical: bool
    perplexity: float | None
    perplexity_resident: float | None
    scored_tokens: int
    perplexity_change_frac: float
    closed_loop_activations_changed_frac: float
    open_loop_activations_changed_frac: float
    open_loop_gate_mass_kept: float | None
    hit_rate: float | None
    experts: int | None


@final
class Talk(TypedDict):
    """All policies under which a checkpoint generated."""

    schema: int
    checkpoint: str
    policies: list[Talked]
    wrong: list[str]


def read(path: Path) -> Report | Talk:
    """Kept comparisons. Raises BadInput."""
    data = read_object(path, MAX_BYTES, WAY_OUT)
    check_schema(data, path, WAY_OUT)
    if not {"comparisons", "policies"} & set(data):
        raise BadInput(f"{path}: not comparisons of `moesim validate --out`; {WAY_OUT}")
    try:
        found: Report | Talk = msgspec.convert(data, Talk) if "policies" in data else msgspec.convert(data, Report)
    except (msgspec.ValidationError, RecursionError) as error:
        raise BadInput(f"{path}: not comparisons of `moesim validate --out` ({error}); {WAY_OUT}") from None
    return found


def read_report(path: Path) -> Report:
    """Kept comparisons of simulation and measurement. Raises BadInput."""
    found = read(path)
    if "policies" in found:
        raise BadInput(f"{path}: what a checkpoint generated, not comparisons with a simulation; name another file")
    return found
