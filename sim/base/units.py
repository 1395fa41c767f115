"""Seconds and bytes inside; every other unit exists only here, at the edge where people read and type."""

from __future__ import annotations

import math
import re

from sim.base.errors import BadInput

KIB, MIB, GIB = 1024, 1024**2, 1024**3

_SIZE = r"^\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([a-zA-Z]*)\s*$"
_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "k": 1000,
    "kb": 1000,
    "m": 1000**2,
    "mb": 1000**2,
    "g": 1000**3,
    "gb": 1000**3,
    "t": 1000**4,
    "tb": 1000**4,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1024**4,
}


ROUNDING = 1e-12  # of a number: smaller differences come of the order of sums
LEAST_S = 0.5e-9  # what is shown apart: a nanosecond

RAM = ("memory_bytes",)
"""Fields that hold an amount of RAM. It is sold, and shown by operating systems, in binary units under decimal names: a
machine with `128GB` has 128 GiB. So that is what it means here, in the option and in the profile alike. Files, VRAM and
caches stay decimal, as model cards and data sheets have them."""


def parse_size(text: str, field: str, what: str) -> int:
    """Bytes of a field as people write them: an amount of `RAM` in powers of 1024, any other as `parse_bytes` does.

    Raises:
        BadInput: not a size, or negative.
    """
    return parse_bytes(text, what, binary=field in RAM)


def parse_bytes(text: str, what: str = "size", binary: bool = False) -> int:
    """Read `24GiB`, `6e9`, `512 MB` or a plain count of bytes; decimal prefixes are powers of 1000.

    Args:
        binary: `kB` to `TB` are powers of 1024, too.

    Raises:
        BadInput: not a size, or negative.
    """
    match = re.match(_SIZE, text)
    unit = match.group(2).lower() if match else ""
    if binary and unit[:1] in ("k", "m", "g", "t") and unit in _SIZE_UNITS:
        unit = f"{unit[0]}ib"
    if match is None or unit not in _SIZE_UNITS:
        known = "B, kB, MB, GB, KiB, MiB or GiB"
        raise BadInput(f"{what}, got {text!r}: not a size; write a number with {known}, e.g. 6GB")
    n_bytes = float(match.group(1)) * _SIZE_UNITS[unit]
    if n_bytes >= 2**63:
        raise BadInput(f"{what}, got {text!r}: beyond any memory; correct the number or its unit")
    return int(n_bytes)


_TIME = r"^\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*(|s|ms|us|ns|min|h)\s*$"
_TIME_UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}


def parse_seconds(text: str, what: str = "time") -> float:
    """Read `650ms`, `1.5 s`, `40us`, or a plain number of seconds.

    Raises:
        BadInput: not a time, or negative.
    """
    match = re.match(_TIME, text)
    if match is None:
        raise BadInput(f"{what}, got {text!r}: not a time; write seconds, or a number with ms, us, ns, min or h")
    duration_s = float(match[1]) * _TIME_UNITS[match[2]]
    if not math.isfinite(duration_s):
        raise BadInput(f"{what}, got {text!r}: beyond any run; correct the number or its unit")
    return duration_s


def show_bytes(n_bytes: float) -> str:
    """Decimal prefixes, three significant digits: `352 MB`, `22.5 GB`."""
    return _scaled(n_bytes, (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))) or f"{n_bytes or 0.0:.0f} B"


def show_ram(n_bytes: float) -> str:
    """An amount of RAM, three significant digits: `58.0 GiB`, `128 GiB`."""
    return f"{three_digits(n_bytes / GIB)} GiB"


def show_seconds(duration_s: float) -> str:
    """`98.2 ms`, `14.4 us`, `3.21 s`."""
    return _scaled(duration_s, (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))) or f"{(duration_s or 0.0) * 1e9:.0f} ns"


def show_joules(energy_j: float) -> str:
    """`104 J`, `2.59 J`, `1.20 kJ`, `85.0 mJ`."""
    return _scaled(energy_j, (("MJ", 1e6), ("kJ", 1e3), ("J", 1.0))) or f"{three_digits(energy_j * 1e3)} mJ"


def show_count(n: int, what: str) -> str:
    """`1 request`, `2,219 decode tokens`."""
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def show_number(value: float) -> str:
    """Three digits, and no exponent below a million millions: `0.0471`, `81.9`, `1,380`."""
    return f"{float(f'{value:.3g}'):,.12g}"


def show_rate(bytes_per_s: float) -> str:
    """Link rates in GB/s, as data sheets print them."""
    return f"{bytes_per_s / 1e9:.1f} GB/s"


def show_flops(flops_per_s: float) -> str:
    """TFLOPS as data sheets print them; below one, where a decimal would leave nothing of the figure, GFLOPS."""
    return f"{flops_per_s / 1e12:.1f} TFLOPS" if flops_per_s >= 1e12 else f"{flops_per_s / 1e9:.3g} GFLOPS"


def show_frac(frac: float | None) -> str:
    """A share as a percentage with one decimal; `-` when there is none."""
    return "-" if frac is None else f"{100 * frac:.1f} %"


def show_fracs(ends: tuple[float, float]) -> str:
    """`48.1 to 85.5 %`."""
    return f"{100 * ends[0]:.1f} to {show_frac(ends[1])}"


def show_value(value: float | None, unit: str = "") -> str:
    """A number in its unit, as `sim.figures` calls units, of a count or a rate as it is; `-` where there is none."""
    return "-" if value is None else _IN.get(unit, _bare)(value)


def show_change(before: float | None, after: float | None, unit: str = "") -> str:
    """What a number became more by, with its sign: `+1.20 ms`, `-3.1 points`, `0`; empty where one is not there."""
    if before is None or after is None:
        return ""
    change = after - before
    if abs(change) <= ROUNDING * max(abs(before), abs(after)) or (unit == "s" and abs(change) < LEAST_S):
        return "0"
    if unit in ("frac", "share"):
        return f"{100 * change:+.1f} points" if abs(change) >= 0.0005 else f"{100 * change:+.1g} points"
    return f"{'+' if change > 0 else ''}{show_value(change, unit)}"


def _bare(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else show_number(value)


_IN = {"s": show_seconds, "bytes": show_bytes, "frac": show_frac, "share": show_frac, "j": show_joules}


def _scaled(value: float, units: tuple[tuple[str, float], ...]) -> str:
    """In the largest unit that leaves a whole number before the point; empty below all of them."""
    for unit, scale in units:
        if abs(value) >= scale * 0.9995:
            return f"{'-' if value < 0 else ''}{three_digits(abs(value) / scale)} {unit}"
    return ""


def three_digits(value: float) -> str:
    """`123`, `12.3`, `1.23`."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
