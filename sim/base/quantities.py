"""One figure with its origin: every number of a hardware profile or a serving stack is a `Quantity`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from sim.base.errors import BadInput
from sim.base.units import parse_bytes, parse_size, show_bytes, show_flops, show_rate, show_seconds

USER_REF = "set by the user"

# A field named as figures are (`latency_s`, `vram_bytes`, `flops_per_s[...]`) that holds a number and no origin.
_BARE_NUMBER = r"(?:_s|_bytes|_frac|_w|slowdown_by_\w+|\[\.\.\.\]): Expected `object`, got `(?:int|float|str)`"

Source = Literal["measured", "datasheet", "assumed"]
# Of seconds that a policy asks for; the last two are the stack's, for a layer that the CPU shares.
Basis = Source | Literal["stack", "overlap"]


class Unit(NamedTuple):
    """How figures are shown and written whose names end alike, and what is plausible.

    Attributes:
        written: what a refusal adds to "give one". rule: in words, from `least` to `most`.
    """

    show: Callable[[float], str]
    written: str
    least: float
    most: float
    rule: str


def _plain(value: float) -> str:
    return f"{value:g}"


_SHARE = "above 0 and at most 1; it is a share, not a percentage"
_SLOWER = "from 0 to 10; it is the share of extra time, 0.05 for 5 % slower"
_FLOPS = "from 1e6 to 1e18; did you write TFLOPS? the unit is floating-point operations per second"
_UNITS = {
    "_flops_per_s": Unit(show_flops, "", 1e6, 1e18, _FLOPS),
    "_bytes_per_s": Unit(
        *(show_rate, " in bytes per second, or e.g. 25GB/s", 1e6, 1e14),
        rule="from 1e6 to 1e14; did you write GB/s? the unit is bytes per second",
    ),
    "_bytes": Unit(
        show_bytes, " in bytes, or e.g. 8GB", 1e6, 1e15, "from 1e6 to 1e15; did you write GB? the unit is bytes"
    ),
    "_w": Unit(lambda value: f"{value:g} W", " in watts", 0, 1e4, "from 0 to 10,000; the unit is watts"),
    "_s": Unit(
        show_seconds, " in seconds, e.g. 1e-5", 0, 1, "from 0 to 1; did you write ms or us? the unit is seconds"
    ),
    "_frac": Unit(_plain, " from 0 to 1", 5e-324, 1, _SHARE),
    "slowdown": Unit(_plain, "", 0, 10, _SLOWER),
}
"""Ending of a field's name -> its unit; a slowdown has it anywhere."""


class Quantity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value in the unit its field name ends with.

    `ref` names one or more keys (`"nvbw15, oxide"`) of the file's `sources`; `low` and `high` bound the published
    range; `iqr` and `n` come from a calibration on the machine itself.
    """

    value: float
    source: Source
    ref: str = ""
    note: str = ""
    low: float | None = None
    high: float | None = None
    iqr: float | None = None
    n: int | None = None

    @property
    def refs(self) -> tuple[str, ...]:
        """The source keys in `ref`."""
        if not self.ref or self.ref == USER_REF:
            return ()
        return tuple(key.strip() for key in self.ref.split(",") if key.strip())


def quantities(node: object, path: str = "") -> Iterator[tuple[str, Quantity]]:
    """Yield (dotted path, quantity) for every figure inside a Struct, in field order."""
    if isinstance(node, Quantity):
        yield path, node
    elif isinstance(node, msgspec.Struct):
        for name in node.__struct_fields__:
            child = getattr(node, name)
            if child is not None and not isinstance(child, (str, int, float)):  # as most are
                yield from quantities(child, f"{path}.{name}".lstrip("."))
    elif isinstance(node, Mapping):
        for name, child in node.items():
            yield from quantities(child, f"{path}.{name}")


def check_quantities(node: msgspec.Struct, sources: Mapping[str, str], where: str) -> None:
    """Refuse figures that are not finite, not plausible in their unit, or whose reference nobody explains.

    Raises:
        BadInput: naming file, field, value and remedy.
    """
    for path, figure in quantities(node):
        for part in ("value", "low", "high", "iqr"):
            number = getattr(figure, part)
            if number is None:
                continue
            if not math.isfinite(number):
                raise BadInput(f"{where}: {path}.{part}, got {number}: a figure is finite; correct the number")
            beyond_all = part == "high" and path.endswith("_frac")  # of another rate: measured, that may be more
            if part != "iqr" and not beyond_all and (rule := _implausible(path, number)):
                at = path if part == "value" else f"{path}.{part}"
                raise BadInput(f"{where}: {at}, got {number:g}: {rule}")
        if (figure.low is not None and figure.low > figure.value) or (
            figure.high is not None and figure.high < figure.value
        ):
            raise BadInput(
                f"{where}: {path}, got {figure.value:g}: outside its own range "
                f"{_bound(figure.low)} to {_bound(figure.high)}; correct value, low or high"
            )
        for key in figure.refs:
            if key not in sources:
                raise BadInput(f"{where}: {path}.ref, got {key!r}: not a key of `sources`; add the citation there")


def explain(error: BadInput) -> BadInput:
    """Add the remedy when a bare number stands where a figure with its origin is required."""
    text = str(error)
    if re.search(_BARE_NUMBER, text):
        form = "write {value: NUMBER, source: measured|datasheet|assumed}"
        return BadInput(text.replace("correct the field", form))
    return error


def user_figure(value: Any, name: str = "", what: str = "figure") -> Any:
    """Plain data of a figure typed on the command line: assumed, and without the old range.

    Args:
        name: the field it belongs to, whose ending says the unit. what: how messages name it.

    Raises:
        BadInput: neither a finite number nor, where the unit is bytes, a size (`8GB`, `25GB/s`).
    """
    if isinstance(value, dict):
        value = {**value, "value": _number(value["value"], name, what)} if "value" in value else value
        return {"source": "assumed", "ref": USER_REF, **value}
    return {"value": _number(value, name, what), "source": "assumed", "ref": USER_REF}


def _number(value: Any, name: str, what: str) -> float | int:
    """A number as typed, or the bytes a size stands for."""
    if isinstance(value, str) and value.lower().lstrip("+-.") in ("nan", "inf", "infinity"):
        raise BadInput(f"{what}, got {value}: a figure is finite; give a number")
    if isinstance(value, str) and name.endswith("_bytes"):
        return parse_size(value, name, what)
    if isinstance(value, str) and name.endswith("_bytes_per_s") and value.rstrip().endswith("/s"):
        return parse_bytes(value.rstrip().removesuffix("/s"), what)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadInput(f"{what}, got {value!r}: not a number; give one{_in_unit(name)}")
    if not math.isfinite(value):
        raise BadInput(f"{what}, got {value}: a figure is finite; give a number")
    return value


def _in_unit(name: str) -> str:
    """How a figure of this name is written, by its ending."""
    return next((row.written for end, row in _UNITS.items() if name.endswith(end)), "")


def _bound(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"


def _implausible(path: str, value: float) -> str:
    """The rule a value breaks, judged by the unit at the end of its field name; empty when it is plausible."""
    row = _unit_of(path)
    if row is None or row.least <= value <= row.most:
        return ""
    return row.rule


def show_figure(path: str, value: float) -> str:
    """A figure in the unit people use, chosen by the end of its name."""
    row = _unit_of(path)
    return f"{value:g}" if row is None else row.show(value)


def _unit_of(path: str) -> Unit | None:
    name = "_flops_per_s" if "flops_per_s" in path else path.rsplit(".", 1)[-1]
    return next((row for part, row in _UNITS.items() if name.endswith(part) or part == "slowdown" in name), None)
