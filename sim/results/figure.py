"""Figures of a result by their dotted names: which unit they are in, how people write them, and which way is better."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from sim.base.errors import BadInput
from sim.base.units import parse_bytes, parse_seconds, show_bytes, show_joules, show_seconds

_FRACS = re.compile(r"(?:^|_)(?:rates?|frac|ratio|kept)$")
_JOULES = ("energy_j", "joules_per_token")
_AT_MOST_ONE = re.compile(r"(?:^|_)(?:rates?|kept)$|^(?:attained_frac|cache_ratio)$")
_SHARES = {"provenance", "lane_utilisation", "bound_by"}
_MORE_IS_BETTER = re.compile(
    r"hit_rate|\w*_hit_rates\.hit|cache_ratio|throughput_tokens_per_s|gate_mass_kept"
    r"|slo\.(?:met|attained_frac|goodput_\w+_per_s|tasks\..+\.(?:met|attained_frac))|load\.capacity_per_s"
)
_LESS_IS_BETTER = re.compile(
    r"(?:ttft_s|tpot_s|e2e_s|queue_s|service_s)\.(?:mean|p50|p90|p95|p99)|slo\.violations\.\w+|phases\.\w+\.time_s|simulated_s|bound\.above_frac"
    r"|miss_rate|\w*_hit_rates\.(?:miss|dropped|substituted)|dropped_rate|substituted_rate"
    r"|energy\.(?:energy_j|joules_per_token)|activations_(?:changed|lowered)_frac|h2d_bytes|d2h_bytes|peak_(?:vram|host)_bytes"
    r"|demand_copies\.(?:n|bytes)|prefetch\.(?:wasted|harmful)\.(?:n|bytes)"
)


ALIASES = {"slo_attainment": "slo.attained_frac", "goodput": "slo.goodput_requests_per_s"}
"""What figures are called in papers -> their names in a result."""


def unit_of(key: str) -> str:
    """`s`, `bytes`, `j`, `frac`, or nothing for a count or another ratio."""
    parts = key.split(".")
    if parts[0] == "energy" and (parts[-1] in _JOULES or parts[1] == "lanes_j"):
        return "j"
    if parts[-1].endswith("bytes"):
        return "bytes"
    if any(part.endswith("_s") and not part.endswith("per_s") for part in parts) and parts[-1] != "n":
        return "s"
    if parts[0] in _SHARES or any(_FRACS.search(part) for part in parts):
        return "frac"
    return ""


def better(key: str) -> int:
    """1 where more is better, -1 where less is, 0 where a change is neither."""
    if _MORE_IS_BETTER.fullmatch(key):
        return 1
    return -1 if _LESS_IS_BETTER.fullmatch(key) else 0


def parse_figure(key: str, text: str, what: str) -> float:
    """A number for a figure as people write it: `0.3`, `30%` of a share, `650ms`, `40TB`.

    Raises:
        BadInput: naming `what`; also for a unit that the figure is not in, and for what is not finite.
    """
    unit = unit_of(key)
    try:
        number = float(text)
    except ValueError:
        number = _with_unit(key, unit, text.strip(), what)
    if not math.isfinite(number):
        raise BadInput(f"{what}, got {text!r}: no figure is {text.strip()}; write a finite number")
    if number > 1 and unit == "frac" and any(_AT_MOST_ONE.search(part) for part in key.split(".")):
        raise BadInput(
            f"{what}, got {text!r}: {key} is a share, 1 at most; write e.g. {number / 100:.4g} or {number:g}%"
        )
    return number


def _with_unit(key: str, unit: str, text: str, what: str) -> float:
    if unit == "s":
        return parse_seconds(text, what)
    if unit == "bytes":
        return float(parse_bytes(text, what))
    try:
        if unit == "frac" and text.endswith("%"):
            return float(text[:-1]) / 100.0
    except ValueError:
        pass
    takes = (
        "a number or a percentage, 0.3 or 30%" if unit == "frac" else "a number, if it is called so (docs/output.md)"
    )
    raise BadInput(f"{what}, got {text!r}: {key} takes {takes}")


def show_figure(key: str, value: float | None) -> str:
    """For people: `650 ms`, `40.1 TB`, `33.1 %`."""
    if value is None:
        return "null"
    unit = unit_of(key)
    if unit == "s":
        return show_seconds(value)
    if unit == "bytes":
        return show_bytes(value)
    if unit == "j":
        return show_joules(value)
    if unit == "frac":
        return f"{100.0 * value:.4g} %"
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def figures(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float | None]]:
    """Every number, and every null, with its dotted name; truth values and lists are no figures."""
    for key, child in value.items():
        name = f"{prefix}{key}"
        if isinstance(child, Mapping):
            yield from figures(child, f"{name}.")
        elif child is None or (isinstance(child, int | float) and not isinstance(child, bool)):
            yield name, child
