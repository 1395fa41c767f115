"""The values of one axis of a sweep: single ones, lists, and ranges whose steps are decimal, so that none is off."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from sim.base.errors import BadInput
from sim.base.files import parse_yaml
from sim.base.kinds import TEXT, Kind
from sim.options import OPTIONS

Scalar = bool | int | float | str | None
MOST_VALUES = 100_000
"""Of one range. A grid has its own limit, in points."""

_NUMBER = r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?\s*(?:%|[a-zA-Z]*)"
_RANGE = re.compile(rf"\s*({_NUMBER})\s*:\s*({_NUMBER})\s*(?::\s*({_NUMBER})\s*)?")


class Range(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"first": "from", "last": "to"}):
    """`{from: 0.1, to: 0.9, step: 0.1}` of a grid file."""

    first: int | float | str
    last: int | float | str
    step: int | float | str | None = None


class Free(Kind):
    """A figure of a profile or a parameter of a policy: whatever YAML reads."""

    ranged = True

    def read(self, text: str, what: str) -> Scalar:
        return self.take(parse_yaml(text, what), what)

    def take(self, data: Any, what: str) -> Scalar:
        if data is not None and not isinstance(data, bool | int | float | str):
            raise BadInput(f"{what}, got {data!r}: a value is a number or a word; write e.g. {what}=1,2")
        return data


FREE = Free()


def kind_of(key: str) -> Kind:
    """How values of a key of `set` are written. Raises BadInput for an option that is misspelt."""
    return OPTIONS.by_name[key].kind if OPTIONS.names(key) else FREE


def of_text(text: str, kind: Kind, what: str) -> list[Scalar]:
    """`0.1:0.3:0.1,0.9` as values of a kind.

    Raises:
        BadInput: naming `what`, an empty value, or a range without an end.
    """
    found: list[Scalar] = []
    for part in kind.several(text):
        if not part.strip():
            raise BadInput(f"{what}, got {text!r}: an empty value in the list; write e.g. {what} A,B")
        ends = _RANGE.fullmatch(part) if kind.ranged else None
        if ends is not None:
            found += spread([end for end in ends.groups() if end is not None], kind, what)
        else:
            found.append(None if part.strip() == "null" else kind.read(part.strip(), what))
    return found


def spread(ends: Sequence[str], kind: Kind, what: str) -> list[Scalar]:
    """first, first + step ... up to `last` itself, in decimals: 0.1:0.9:0.1 holds 0.3, not 0.30000000000000004.

    Args:
        ends: FROM, TO and, where there is one, STEP.

    Raises:
        BadInput: no step for what is not counted in ones, a step that leads away from the end, or too many values.
    """
    ends = [end.strip() for end in ends]
    first, last, *step = (kind.decimal(end, what) for end in ends)
    written = ":".join(ends)
    if not step and (kind.stepped or any(end != end.to_integral_value() for end in (first, last))):
        raise BadInput(f"{what}, got {written!r}: a range needs a step; write FROM:TO:STEP, e.g. 0.1:0.9:0.1")
    by = step[0] if step else type(first)(1)
    if by == 0 or (last - first) * by < 0:
        raise BadInput(f"{what}, got {written!r}: the step does not lead from {ends[0]} to {ends[1]}; mend it")
    if (last - first) / by >= MOST_VALUES:
        raise BadInput(f"{what}, got {written!r}: more than {MOST_VALUES:,} values; take a wider step")
    return [kind.between(first + index * by, ends, what) for index in range(int((last - first) / by) + 1)]


def of_data(data: Any, kind: Kind, what: str) -> list[Scalar]:
    """An axis of a file or of Python: a value, a `Range`, a text as on the command line, or a list. Raises BadInput."""
    if isinstance(data, list):
        if not data:
            raise BadInput(f"{what}, got an empty list: an axis has at least one value; name it, or leave the axis out")
        return [value for part in data for value in of_data(part, kind, what)]
    if isinstance(data, Range):
        ends = (data.first, data.last, data.step)
        return spread([str(end) for end in ends if end is not None], kind, what)
    if isinstance(data, str):
        # A name in a list of its own holds whatever it holds: only options of other kinds, and drafts, list in a text.
        return [data] if kind is TEXT else of_text(data, kind, what)
    return [None if data is None else kind.take(data, what)]
