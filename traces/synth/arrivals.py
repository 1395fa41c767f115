"""When requests arrive: production logs of others, or a Poisson or Gamma process.

- Azure LLM inference traces (https://github.com/Azure/AzurePublicDataset, 2023 and 2024): CSV with the columns
  TIMESTAMP, ContextTokens, GeneratedTokens; 2024 writes a time zone, and leaves the fraction out where it is zero.
- Mooncake traces (https://github.com/kvcache-ai/Mooncake): JSONL with `timestamp` in milliseconds, `input_length`,
  `output_length` and `hash_ids` (prefix blocks, which nothing here uses).
- BurstGPT traces (https://github.com/HPMLL/BurstGPT): CSV with, among others, the columns Timestamp (seconds), Request
  tokens, Response tokens.
- `poisson:RATE`: independent exponential gaps. `gamma:RATE,CV`: Gamma gaps of that coefficient of variation (1 is
  Poisson, above 1 is bursty). Rates are requests per second.

Times begin with 0 and are rounded to microseconds, so that they are the same on every machine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from sim.base.errors import BadInput
from sim.base.paths import mode_of
from traces.convert.csv_long import columns, rows
from traces.convert.text import bad, field, has_keys, head_of, records, shown, starts_object, whole

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length")
BURST_GPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
MAX_TOKENS = 1 << 20  # of one request's prompt or output; beyond any context a log of today can mean
_STAMP = re.compile(
    r"^(\d{4})-(\d{2})-(\d{2})[ T](\d{2}):(\d{2}):(\d{2})(?:\.(\d{1,9}))?(Z|[+-]\d{2}:?\d{2})?$", re.ASCII
)
_PROCESS = re.compile(r"^(poisson|gamma):([^,]*)(?:,(.+))?$")
_LIKE_A_PROCESS = re.compile(r"^\w\w+(:[^/\\]*)?$")  # a drive of Windows has one letter


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: seconds after the first one, and its lengths where the source tells them."""

    at_s: float
    prompt_len: int | None = None
    outputs: int | None = None


def arrivals(source: str, n: int, seed: int = 0, rate_scale: float = 1.0) -> list[Arrival]:
    """The first `n` arrivals (fewer when a log ends before), in order of time.

    Args:
        source: `poisson:RATE`, `gamma:RATE,CV`, or the path of an Azure, Mooncake or BurstGPT log, plain or gzipped.
        rate_scale: how many times as many requests per second as the source has.

    Raises:
        BadInput: naming option, or file, line and field.
    """
    if not 0 < rate_scale < math.inf:
        raise BadInput(f"--set arrivals.scale, got {rate_scale}: a positive number, 2 for twice the load; correct it")
    if match := _PROCESS.match(source):
        return _process(match[1], match[2], match[3], n, seed, rate_scale)
    if _LIKE_A_PROCESS.match(source) and not mode_of(Path(source)):
        raise BadInput(
            f"--arrivals, got {shown(source)}: neither poisson:RATE, gamma:RATE,CV, closed:CLIENTS, none, nor a file "
            "that is there; correct it"
        )
    found = list(islice(_log(Path(source)), n))
    if not found:
        raise BadInput(f"{source}: no requests: the log has none; take another")
    found.sort(key=lambda one: one[0])  # logs are in order but for a few rows
    first_ns = found[0][0]
    return [
        Arrival(round((time_ns - first_ns) / 1e9 / rate_scale, 6), prompt_len, outputs)
        for time_ns, prompt_len, outputs in found
    ]


def _process(kind: str, rate: str, cv: str | None, n: int, seed: int, rate_scale: float) -> list[Arrival]:
    """Arrivals of a renewal process: the first at 0, then independent gaps."""
    example = "poisson:0.5" if kind == "poisson" else "gamma:0.5,2"
    if (cv is None) != (kind == "poisson"):
        raise BadInput(
            f"--arrivals, got {shown(f'{kind}:{rate}' + (f',{cv}' if cv else ''))}: such as {example}; correct it"
        )
    rate_per_s = _positive("rate", rate, example) * rate_scale
    rng = np.random.default_rng(seed)
    if kind == "poisson":
        gaps = rng.exponential(1.0 / rate_per_s, max(0, n - 1))
    else:
        shape = 1.0 / _positive("coefficient of variation", cv or "", example) ** 2
        gaps = rng.gamma(shape, 1.0 / (shape * rate_per_s), max(0, n - 1))
    times = np.concatenate(([0.0], np.cumsum(gaps)))
    if not np.isfinite(times).all():
        raise BadInput(f"--arrivals, got {shown(rate)}: times beyond what a float holds; raise the rate")
    return [Arrival(round(float(time), 6)) for time in times[:n]]


def _positive(what: str, text: str, example: str) -> float:
    value = _float(text)
    if not 1e-9 <= value <= 1e9:
        raise BadInput(f"--arrivals, got {what} {shown(text)}: a number from 1e-9 to 1e9, as in {example}; correct it")
    return value


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _log(path: Path) -> Iterator[tuple[int, int, int]]:
    """(nanoseconds, prompt, outputs) of every row of a log. Raises BadInput with file, line and field."""
    head = head_of(path)
    names = columns(head)
    found: Iterator[tuple[int, dict[str, Any]]]
    time_ns: Callable[[str, Any], int]
    if starts_object(head) and has_keys(head, "timestamp"):
        fields, time_ns, found = MOONCAKE_FIELDS, _milliseconds_ns, records(path)
    elif set(BURST_GPT_COLUMNS) <= names:
        fields, time_ns, found = BURST_GPT_COLUMNS, _seconds_ns, rows(path, BURST_GPT_COLUMNS)
    elif set(AZURE_COLUMNS) <= names:
        fields, time_ns, found = AZURE_COLUMNS, _stamp_ns, rows(path, AZURE_COLUMNS)
    else:
        raise BadInput(
            f"{path}: neither an Azure trace (CSV with {', '.join(AZURE_COLUMNS)}) nor a BurstGPT one (CSV with "
            f"{', '.join(BURST_GPT_COLUMNS)}) nor a Mooncake one (JSONL with {', '.join(MOONCAKE_FIELDS)}); "
            f"name one, or poisson:RATE"
        )
    for number, row in found:
        where = f"{path}:{number}"
        at_ns = time_ns(where, field(where, row, fields[0]))
        prompt_len, outputs = (whole(where, name, field(where, row, name), 0, MAX_TOKENS) for name in fields[1:])
        yield at_ns, prompt_len, outputs


def _milliseconds_ns(where: str, value: Any) -> int:
    """A number of milliseconds in nanoseconds. Raises BadInput."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1e15:
        raise bad(where, "timestamp", shown(value), "milliseconds from 0 on")
    return round(value * 1_000_000)


def _seconds_ns(where: str, text: str) -> int:
    """A number of seconds in nanoseconds. Raises BadInput."""
    value = _float(text)
    if not 0 <= value <= 1e12:
        raise bad(where, "Timestamp", shown(text), "seconds from 0 on", "mend the row")
    return round(value * 1e9)


def _stamp_ns(where: str, text: str) -> int:
    """An Azure time stamp in nanoseconds since 1970; without a zone it is UTC. Raises BadInput."""
    match = _STAMP.match(text.strip())
    try:
        if match is None:
            raise ValueError
        year, month, day, hour, minute, second = (int(match[i]) for i in range(1, 7))
        zone = UTC
        if match[8] and match[8] != "Z":
            digits = match[8].replace(":", "")
            offset = timedelta(hours=int(digits[1:3]), minutes=int(digits[3:]))
            zone = timezone(-offset if digits[0] == "-" else offset)
        moment = datetime(year, month, day, hour, minute, second, tzinfo=zone)
    except ValueError:
        rule = "a time such as 2023-11-16 18:15:46.6805900"
        raise bad(where, "TIMESTAMP", shown(text), rule, "mend the row") from None
    whole_s = (moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(seconds=1)
    return whole_s * 1_000_000_000 + int((match[7] or "0").ljust(9, "0"))
