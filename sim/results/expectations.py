"""`--expect 'hit_rate >= 0.3'`: hold a run to figures of its result, so that a CI job fails when one gets worse."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from sim.base.errors import BadInput, did_you_mean
from sim.base.units import parse_bytes

_FORM = re.compile(r"\s*(?P<key>[A-Za-z0-9_.]+)\s*(?P<sign>>=|<=|==|>|<)\s*(?P<bound>[^\s<>=][^<>=]*)")
_HOLDS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
_WAY_OUT = "write e.g. 'hit_rate >= 0.3', 'tpot_s.mean < 0.7' or 'h2d_bytes <= 40TB'"


class Expectation(NamedTuple):
    """One comparison of a figure of the result, named by its keys with dots between them, with a number."""

    key: str
    sign: str
    bound: float
    text: str  # the number as it was written


def parsed(texts: tuple[str, ...]) -> list[Expectation]:
    """What `--expect` was given. Raises BadInput for what is no comparison with a finite number."""
    return [_parsed(text) for text in texts]


def _parsed(text: str) -> Expectation:
    match = _FORM.fullmatch(text)
    if match is None:
        raise BadInput(f"--expect, got {text!r}: not KEY >= NUMBER; {_WAY_OUT}")
    key, sign, bound = match["key"], match["sign"], match["bound"].strip()
    try:
        number = float(bound)
    except ValueError:
        if not key.endswith("bytes"):
            raise BadInput(f"--expect, got {text!r}: {bound!r} is not a number; {_WAY_OUT}") from None
        number = float(parse_bytes(bound, "--expect"))
    if not math.isfinite(number):
        raise BadInput(f"--expect, got {text!r}: no figure is {bound}; {_WAY_OUT}")
    return Expectation(key, sign, number, bound)


def judged(expectations: list[Expectation], result: Mapping[str, Any]) -> Iterator[tuple[bool, str]]:
    """(whether it holds, the line that says so) of each. A figure that is null here holds to nothing.

    Raises:
        BadInput: a key that the result does not have, or one that is no number.
    """
    flat = dict(figures(result))
    for expected in expectations:
        if expected.key not in flat:
            inside = [name for name in flat if name.startswith(f"{expected.key}.")]
            way_out = f"one of {', '.join(inside)}" if inside else did_you_mean(expected.key, flat)
            raise BadInput(f"--expect, got {expected.key!r}: no figure of a result, see docs/output.md; {way_out}")
        value = flat[expected.key]
        held = value is not None and _HOLDS[expected.sign](value, expected.bound)
        found = "null here" if value is None else repr(value)
        yield held, f"{'met' if held else 'not met'}: {expected.key} {expected.sign} {expected.text}: it is {found}"


def figures(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float | None]]:
    """Every number, and every null, with its dotted name; truth values and lists are no figures."""
    for key, child in value.items():
        name = f"{prefix}{key}"
        if isinstance(child, Mapping):
            yield from figures(child, f"{name}.")
        elif child is None or (isinstance(child, int | float) and not isinstance(child, bool)):
            yield name, child
