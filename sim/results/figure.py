"""Figures of a result by their keys: their unit, how people write and read them, and which way is better."""

from __future__ import annotations

import math

from sim.base.errors import BadInput
from sim.base.units import parse_bytes, parse_seconds, show_value
from sim.figures import label_of as label_of
from sim.figures import row_of

ALIASES = {"slo_attainment": "slo.attained_frac", "goodput": "slo.goodput_requests_per_s"}
"""What figures are called in papers -> their keys in a result."""


def unit_of(key: str) -> str:
    """`s`, `bytes`, `j`, `frac`, `share` (a ratio that is 1 at most), or nothing for a count or another ratio."""
    row = row_of(key)
    return "" if row is None else row.unit


def plot_unit(key: str) -> str:
    """The same for an axis or a column of a page: `x` for what has none, and a share is a fraction."""
    return {"s": "s", "bytes": "bytes", "j": "j", "frac": "frac", "share": "frac"}.get(unit_of(key), "x")


def better(key: str) -> int:
    """1 where more is better, -1 where less is, 0 where a change is neither."""
    row = row_of(key)
    return 0 if row is None else row.better


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
    if number > 1 and unit == "share":
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
        if unit in ("frac", "share") and text.endswith("%"):
            return float(text[:-1]) / 100.0
    except ValueError:
        pass
    share = unit in ("frac", "share")
    takes = "a number or a percentage, 0.3 or 30%" if share else "a number, if it is called so (docs/output.md)"
    raise BadInput(f"{what}, got {text!r}: {key} takes {takes}")


def show_figure(key: str, value: float | None) -> str:
    """For people: `650 ms`, `40.1 TB`, `33.1 %`."""
    if value is None:
        return "null"
    unit = unit_of(key)
    if unit in ("s", "bytes", "j"):
        return show_value(value, unit)
    if unit in ("frac", "share"):
        return f"{100.0 * value:.4g} %"
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
