"""`--expect 'hit_rate >= 0.3'`: hold a run to figures of its result, so that a CI job fails when one gets worse."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from sim.base.errors import BadInput, did_you_mean
from sim.base.renamed import key_now
from sim.figures import figures, numbers, row_of
from sim.results.figure import ALIASES, parse_figure, show_figure

_FORM = re.compile(r"\s*(?P<key>[A-Za-z0-9_.]+)\s*(?P<sign>>=|<=|==|>|<)\s*(?P<bound>[^\s<>=][^<>=]*)")
_HOLDS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
_WAY_OUT = "write e.g. 'hit_rate >= 30%', 'tpot_s.mean < 650ms' or 'h2d_bytes <= 40TB'"

_NONE = "no figure of a result, see docs/output.md; "
ASKED_FOR = {
    "energy": "--set sim.energy=gpu",
    "slo": "--slo 'ttft_s <= 10s'",
    "host_memory": "--drive gen4x4",
    "draft": "--draft k=4,acceptance=0.7",
}
"""Parts of a result that only some runs have, and what asks for them."""


class Expectation(NamedTuple):
    """One comparison of a figure of the result, named by its keys with dots between them, with a number."""

    key: str
    sign: str
    bound: float
    text: str  # the number as it was written


def parsed(texts: tuple[str, ...], what: str = "--expect") -> list[Expectation]:
    """What an option was given. Raises BadInput for a key that no result has, or no comparison with a finite number."""
    return [_parsed(text, what) for text in texts]


def _parsed(text: str, what: str) -> Expectation:
    match = _FORM.fullmatch(text)
    if match is None:
        raise BadInput(f"{what}, got {text!r}: not KEY >= NUMBER; {_WAY_OUT}")
    key, sign, bound = ALIASES.get(match["key"], match["key"]), match["sign"], match["bound"].strip()
    if why := misspelt(key):
        raise BadInput(f"{what}, got {key!r}: {why}")
    return Expectation(key, sign, parse_figure(key, bound, what), bound)


class Judged(NamedTuple):
    """An expectation beside the figure that came out; one that is null here holds to nothing."""

    expected: Expectation
    value: float | None
    held: bool

    @property
    def line(self) -> str:
        """What is said of it."""
        expected = self.expected
        found = "null here" if self.value is None else repr(self.value)
        if self.value is not None and not expected.text[-1].isdigit():  # written with a unit
            found = f"{show_figure(expected.key, self.value)} ({found})"
        met = "met" if self.held else "not met"
        return f"{met}: {expected.key} {expected.sign} {expected.text}: it is {found}"

    def to_dict(self) -> dict[str, Any]:
        """Its entry in `--json`."""
        key, sign, bound, text = self.expected
        return {"key": key, "sign": sign, "bound": bound, "written": text, "value": self.value, "met": self.held}


def holds(expected: Expectation, value: float) -> bool:
    """Whether a figure is as expected."""
    return _HOLDS[expected.sign](value, expected.bound)


def judged(expectations: list[Expectation], result: Mapping[str, Any]) -> list[Judged]:
    """What became of each.

    Raises:
        BadInput: a key that the result does not have, or one that is no number.
    """
    found = dict(numbers(result))
    return [_judged(expected, found) for expected in expectations]


def _judged(expected: Expectation, found: Mapping[str, float | None]) -> Judged:
    known(expected.key, found, "--expect")
    value = found[expected.key]
    return Judged(expected, value, value is not None and holds(expected, value))


def misspelt(key: str) -> str:
    """Why no result has a figure of that name, in a line; empty where some results have it, or may."""
    row = row_of(key)
    there = row is not None and (row.number or (row.kind == "open" and "*" in row.key))
    return "" if there else _inside(key, names())


def names() -> list[str]:
    """Figures that results may have, by their keys; `*` stands for names that the run gives itself."""
    return [row.key for row in figures().values() if row.number]


def _inside(key: str, known: Iterable[str]) -> str:
    if (now := key_now(key)) != key:
        all_of = names()
        within = [name for name in all_of if name.endswith(f".{now}") and not name.startswith("prediction.")]
        return f"no such key any more; write {now if now in all_of or not within else within[0]}"
    inside = sorted(name for name in known if name.startswith(f"{key}."))
    return _NONE + (f"one of {', '.join(inside)}" if inside else did_you_mean(key, known))


def known(key: str, found: Mapping[str, float | None], what: str) -> None:
    """Raises BadInput where a result has no such figure."""
    if why := unknown(key, found):
        raise BadInput(f"{what}, got {key!r}: {why}")


def unknown(key: str, found: Mapping[str, float | None]) -> str:
    """Why a result has no figure of that name, in a line; empty where it has."""
    if key in found:
        return ""
    kind, _, rest = key.partition(".")
    if kind in ASKED_FOR and rest and not any(name.startswith(f"{kind}.") for name in found):
        return f"the run was not asked for it; add {ASKED_FOR[kind]}"
    return _inside(key, found)
