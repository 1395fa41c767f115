"""The values of one axis of a sweep: single ones, lists, and ranges whose steps are decimal, so that none is off."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec

from sim.base.errors import BadInput
from sim.base.files import parse_yaml
from sim.base.units import parse_size
from sim.workload.draft_options import each_of

Scalar = bool | int | float | str | None

TEXTS = (
    *("hw", "model", "trace", "precision", "stack", "arrivals", "router", "scheduler", "batching", "split", "link"),
    *("draft", "preempt", "peer", "dense", "placement", "host_links", "nvme", "ram_policy"),
    *("hit_definition", "predictor", "engine", "contention", "energy"),
)
INTS = ("gpus", "replicas", "batch", "prefill_chunk", "kv_page", "requests", "seed", "experts")
FRACS = ("cache_frac", "rate_scale")
SIZES = ("vram_bytes", "expert_cache_bytes", "kv_memory_bytes", "host_memory_bytes")
AXES = (*TEXTS, *INTS, *FRACS, *SIZES)
"""Fields of a run that may be varied, besides its policy and `set`."""

OPTIONS = {
    "vram_bytes": "--vram",
    "expert_cache_bytes": "--expert-cache",
    "kv_memory_bytes": "--kv-memory",
    "host_memory_bytes": "--host-memory",
}
MOST_VALUES = 100_000
"""Of one range. A grid has its own limit, in points."""

_NUMBER = r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
_RANGE = re.compile(rf"\s*({_NUMBER}\s*[a-zA-Z]*)\s*:\s*({_NUMBER}\s*[a-zA-Z]*)\s*(?::\s*({_NUMBER}\s*[a-zA-Z]*)\s*)?")


class Range(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"first": "from", "last": "to"}):
    """`{from: 0.1, to: 0.9, step: 0.1}` of a grid file."""

    first: int | float | str
    last: int | float | str
    step: int | float | str | None = None


def option_of(name: str) -> str:
    """How a field is written on the command line."""
    return OPTIONS.get(name, f"--{name.replace('_', '-')}")


def of_text(text: str, name: str, what: str) -> list[Scalar]:
    """`0.1:0.3:0.1,0.9` as values of the field `name`; any other name is a key of `set` or a parameter of a policy.

    Raises:
        BadInput: naming `what`, an empty value, or a range without an end.
    """
    if name == "draft":
        return list(each_of(text))
    found: list[Scalar] = []
    for part in text.split(","):
        if not part.strip():
            raise BadInput(f"{what}, got {text!r}: an empty value in the list; write e.g. {what} A,B")
        ends = None if name in TEXTS else _RANGE.fullmatch(part)
        if ends is not None:
            found += spread(ends[1], ends[2], ends[3], name, what)
        else:
            found.append(one(part.strip(), name, what))
    return found


def one(text: str, name: str, what: str) -> Scalar:
    """One value as the field has it. Raises BadInput."""
    if name in TEXTS:
        return text
    if name in SIZES:
        return parse_size(text, name, what)
    value: Any = parse_yaml(text, what)
    if name in INTS and (isinstance(value, bool) or not isinstance(value, int)):
        raise BadInput(f"{what}, got {text!r}: not a whole number; write e.g. {what} 1,2 or {what} 1:8")
    if name in FRACS and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise BadInput(f"{what}, got {text!r}: not a number; write e.g. {what} 0.1,0.25 or {what} 0.1:0.9:0.1")
    if isinstance(value, dict | list) or (value is not None and not isinstance(value, bool | int | float | str)):
        raise BadInput(f"{what}, got {text!r}: a value is a number or a word; write e.g. {what}=1,2")
    return value


def spread(first: str, last: str, step: str | None, name: str, what: str) -> list[Scalar]:
    """first, first + step ... up to `last` itself, in decimals: 0.1:0.9:0.1 holds 0.3, not 0.30000000000000004.

    Raises:
        BadInput: no step for what is not counted in ones, a step that leads away from the end, or too many values.
    """
    ends = [_decimal(text, name, what) for text in (first, last)]
    written = f"{first.strip()}:{last.strip()}" + (f":{step.strip()}" if step is not None else "")
    whole = all(end == end.to_integral_value() for end in ends)
    if step is None and (not whole or name in SIZES or name in FRACS):
        raise BadInput(f"{what}, got {written!r}: a range needs a step; write FROM:TO:STEP, e.g. 0.1:0.9:0.1")
    by = Decimal(1) if step is None else _decimal(step, name, what)
    if by == 0 or (ends[1] - ends[0]) * by < 0:
        raise BadInput(
            f"{what}, got {written!r}: the step does not lead from {first.strip()} to {last.strip()}; mend it"
        )
    if (ends[1] - ends[0]) / by >= MOST_VALUES:
        raise BadInput(f"{what}, got {written!r}: more than {MOST_VALUES:,} values; take a wider step")
    n = int((ends[1] - ends[0]) / by) + 1
    exact = [ends[0] + index * by for index in range(n)]
    return [_plain(value, name, written, what) for value in exact]


def _plain(value: Decimal, name: str, written: str, what: str) -> Scalar:
    whole = value == value.to_integral_value()
    if name in INTS or name in SIZES:
        if not whole:
            raise BadInput(f"{what}, got {written!r}: {value} is not a whole number; take a whole step")
        return int(value)
    if name not in FRACS and whole and "." not in written and "e" not in written.lower():
        return int(value)
    return float(value)


def _decimal(text: str, name: str, what: str) -> Decimal:
    if name in SIZES:
        return Decimal(parse_size(text, name, what))
    try:
        value = Decimal(text.strip())
    except InvalidOperation:
        raise BadInput(f"{what}, got {text.strip()!r}: not a number; write e.g. {what} 0.1:0.9:0.1") from None
    if not value.is_finite():
        raise BadInput(f"{what}, got {text.strip()!r}: not a finite number; write e.g. {what} 0.1:0.9:0.1")
    if abs(value) > Decimal("1e300") or (value and abs(value) < Decimal("1e-300")):
        raise BadInput(f"{what}, got {text.strip()!r}: beyond any figure of a machine; correct it")
    return value


def of_data(data: Any, name: str, what: str) -> list[Scalar]:
    """An axis of a file or of Python: a value, a `Range`, a text as on the command line, or a list. Raises BadInput."""
    if isinstance(data, list):
        if not data:
            raise BadInput(f"{what}, got an empty list: an axis has at least one value; name it, or leave the axis out")
        return [value for part in data for value in of_data(part, name, what)]
    if isinstance(data, Range):
        step = None if data.step is None else str(data.step)
        return spread(str(data.first), str(data.last), step, name, what)
    if isinstance(data, str) and name not in TEXTS:
        return of_text(data, name, what)
    if isinstance(data, str) and name in TEXTS:
        return list(each_of(data)) if name == "draft" else [data]
    if name in TEXTS and data is not None:
        raise BadInput(f"{what}, got {data!r}: a name; quote it")
    if name in INTS and data is not None and (isinstance(data, bool) or not isinstance(data, int)):
        raise BadInput(f"{what}, got {data!r}: not a whole number; correct it")
    if name in SIZES and data is not None:
        if isinstance(data, bool) or not float(data).is_integer():
            raise BadInput(f"{what}, got {data!r}: bytes, or a size such as 8GB; correct it")
        return [int(data)]
    return [data]
