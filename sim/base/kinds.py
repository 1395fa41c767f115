"""How the value of an option is written: text on a command line, data in YAML and Python, and text again."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

from sim.base.errors import BadInput
from sim.base.units import GIB, parse_bytes, show_bytes

LEAST_MEANT = 1000  # bytes without a unit: fewer hold no expert of any model
LARGEST = Decimal("1e300")
LONGEST = 40  # characters of a whole number: Python itself refuses some thousands
MOST_COUNTED = 1_000_000  # experts of any model: a larger number without a unit is bytes


def written(what: str, value: str) -> str:
    """An example of what to write: `--batch 4`, `--set run.pause=0.5`."""
    return f"{what}{'=' if ' ' in what.rpartition(': ')[2] else ' '}{value}"


class Kind:
    """Text as it is. `column`: of a table that shows it. `ranged`: FROM:TO:STEP makes sense. `unit`: ends a column's
    name. `stepped`: a range has to say its step."""

    column: type = str
    ranged = False
    stepped = False
    unit = ""
    example = "NAME"

    def read(self, text: str, what: str) -> Any:
        """The value that a text stands for. Raises BadInput naming `what`."""
        return text

    def take(self, data: Any, what: str) -> Any:
        """The value that data of a file, or of Python, stands for. Raises BadInput."""
        if isinstance(data, os.PathLike):
            return os.fspath(data)
        if not isinstance(data, str):
            raise BadInput(f"{what}, got {data!r}: a name; quote it")
        return self.read(data, what)

    def show(self, value: Any) -> str:
        """As it can be typed again, never rounded."""
        return str(value)

    def several(self, text: str) -> list[str]:
        """The values that one text of an axis lists."""
        return text.split(",")

    def decimal(self, text: str, what: str) -> Decimal:
        """An end of a range. Raises BadInput."""
        try:
            value = Decimal(text.strip())
        except InvalidOperation:
            raise BadInput(
                f"{what}, got {text.strip()!r}: not a number; write e.g. {written(what, '0.1:0.9:0.1')}"
            ) from None
        if not value.is_finite() or abs(value) > LARGEST or (value and abs(value) < 1 / LARGEST):
            raise BadInput(f"{what}, got {text.strip()!r}: beyond any figure of a machine; correct it")
        return value

    def between(self, value: Decimal, ends: Sequence[str], what: str) -> Any:
        """A value of a range whose ends (and step) are these texts. Raises BadInput."""
        said = ":".join(ends)
        whole = value == value.to_integral_value()
        return int(value) if whole and "." not in said and "e" not in said.lower() else float(value)


class Whole(Kind):
    """A whole number."""

    column, ranged, example = int, True, "4"

    def read(self, text: str, what: str) -> int:
        if not re.fullmatch(r"\s*[-+]?[0-9]+\s*", text):
            raise BadInput(f"{what}, got {text!r}: not a whole number; write e.g. {written(what, self.example)}")
        if len(text.strip()) > LONGEST:
            raise BadInput(f"{what}, got {text!r}: beyond any figure of a run; correct it")
        return int(text)

    def take(self, data: Any, what: str) -> int:
        if isinstance(data, str):
            return self.read(data, what)
        if isinstance(data, bool) or not isinstance(data, int):
            raise BadInput(f"{what}, got {data!r}: not a whole number; correct it")
        return data

    def between(self, value: Decimal, ends: Sequence[str], what: str) -> int:
        if value != value.to_integral_value():
            raise BadInput(f"{what}, got {':'.join(ends)!r}: {value} is not a whole number; take a whole step")
        return int(value)


class Number(Kind):
    """A number."""

    column, ranged, stepped, example = float, True, True, "0.5"

    def read(self, text: str, what: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise BadInput(f"{what}, got {text!r}: not a number; write e.g. {written(what, self.example)}")
        return value

    def take(self, data: Any, what: str) -> float:
        if isinstance(data, bool) or not isinstance(data, str | int | float):
            raise BadInput(f"{what}, got {data!r}: not a number; correct it")
        return self.read(str(data), what)

    def show(self, value: Any) -> str:
        short = f"{value:g}"
        return short if float(short) == value else repr(value)

    def between(self, value: Decimal, ends: Sequence[str], what: str) -> float:
        return float(value)


class Switch(Kind):
    """On or off."""

    column, example = bool, "on"
    WORDS: ClassVar = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}

    def read(self, text: str, what: str) -> bool:
        if (value := self.WORDS.get(text.strip().lower())) is None:
            raise BadInput(f"{what}, got {text!r}: on or off; write {written(what, 'on')}")
        return value

    def take(self, data: Any, what: str) -> bool:
        return data if isinstance(data, bool) else self.read(str(data), what)

    def show(self, value: Any) -> str:
        return "on" if value else "off"


class Size(Kind):
    """Bytes, written with a unit; of RAM (`binary`) GB is GiB, as it is sold."""

    column, ranged, stepped, unit, example = int, True, True, "bytes", "8GB"

    def __init__(self, binary: bool = False) -> None:
        self.binary = binary

    def read(self, text: str, what: str) -> int:
        n_bytes = parse_bytes(text, what, self.binary)
        if 0 < n_bytes < LEAST_MEANT and text.strip().isdigit():
            raise BadInput(f"{what}, got {text!r}: that is {n_bytes} bytes; did you mean {text.strip()}GB?")
        return n_bytes

    def take(self, data: Any, what: str) -> int:
        if isinstance(data, str):
            return self.read(data, what)
        if isinstance(data, bool) or not isinstance(data, int | float) or not float(data).is_integer():
            raise BadInput(f"{what}, got {data!r}: bytes, or a size such as 8GB; correct it")
        return int(data)

    def show(self, value: Any) -> str:
        unit, scale = ("GiB", GIB) if self.binary else ("GB", 1e9)
        short = f"{value / scale:g}"
        return f"{short}{unit}" if float(short) * scale == value else str(value)

    def decimal(self, text: str, what: str) -> Decimal:
        return Decimal(parse_bytes(text, what, self.binary))

    def between(self, value: Decimal, ends: Sequence[str], what: str) -> int:
        return int(value)


SHARE, EXPERTS, BYTES = "share", "experts", "bytes"


class Capacity(NamedTuple):
    """Room for experts on all GPUs together: a share of all experts, so many of them, or bytes."""

    unit: str
    amount: float

    def __str__(self) -> str:
        """As it is typed, in one form."""
        if self.unit == SHARE:
            return f"{(Decimal(repr(self.amount)) * 100).normalize():f}%"
        if self.unit == EXPERTS:
            return f"{self.amount:.0f}experts"
        return Size().show(int(self.amount)) if self.amount % 1e6 == 0 else f"{self.amount:.0f}B"

    @property
    def words(self) -> str:
        """For a message: bytes with three digits."""
        return show_bytes(self.amount) if self.unit == BYTES else str(self)

    def experts(self, n_all: int, size_bytes: int) -> int:
        """How many whole ones it holds, of so many and of that size; a share holds one at least."""
        if self.unit == SHARE:
            return max(1, int(self.amount * n_all))
        return int(self.amount) if self.unit == EXPERTS else int(self.amount) // size_bytes


def amount_in(unit: str, room: Capacity | None) -> Any:
    """Of a room that was asked for in this unit; None where it was not."""
    return room.amount if room is not None and room.unit == unit else None


_AMOUNT = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*(%|experts?|)\s*")
_HOW = "write 40% of all experts, 60experts, or bytes such as 12GB"


@lru_cache(maxsize=4096)
def capacity_of(text: str, what: str = "--cache") -> Capacity:
    """`40%`, `0.4`, `60experts` or `12GB`. Raises BadInput for any other, and for a share that is none."""
    found = _AMOUNT.fullmatch(text)
    if found is None:
        n_bytes = parse_bytes(text, what) if text.strip()[:1].isdigit() or text.strip()[:1] == "." else -1
        if n_bytes < 0:
            raise BadInput(f"{what}, got {text!r}: no room for experts; {_HOW}")
        return Capacity(BYTES, n_bytes)
    amount, unit = Decimal(found[1]), found[2]
    if amount > LARGEST:
        raise BadInput(f"{what}, got {text!r}: beyond any memory; {_HOW}")
    if unit.startswith("expert"):
        if amount < 1 or amount != amount.to_integral_value():
            raise BadInput(f"{what}, got {text!r}: whole experts, at least 1; write e.g. 60experts")
        return Capacity(EXPERTS, int(amount))
    if not unit and amount > MOST_COUNTED:
        return Capacity(BYTES, int(amount))
    if not unit and not ("." in found[1] and amount <= 1):
        raise BadInput(f"{what}, got {text!r}: of what? {_HOW}")
    share = amount / 100 if unit else amount
    if not 0 < share <= 1:
        raise BadInput(f"{what}, got {text!r}: a share of all experts, above 0 and at most 100%; {_HOW}")
    return Capacity(SHARE, float(share))


class Cache(Kind):
    """Room for experts, as text in one form: `40%`, `60experts`, `12GB`."""

    ranged, stepped, example = True, True, "40%"

    def read(self, text: str, what: str) -> str:
        return str(capacity_of(text, what))

    def take(self, data: Any, what: str) -> str:
        if isinstance(data, int | float) and not isinstance(data, bool):
            data = repr(data)
        if not isinstance(data, str):
            raise BadInput(f"{what}, got {data!r}: of what? {_HOW}")
        return self.read(data, what)

    def decimal(self, text: str, what: str) -> Decimal:
        end = capacity_of(text, what)
        return Decimal(repr(end.amount) if end.unit == SHARE else int(end.amount))

    def between(self, value: Decimal, ends: Sequence[str], what: str) -> str:
        units = {capacity_of(end, what).unit for end in ends}
        if len(units) != 1:
            raise BadInput(f"{what}, got {':'.join(ends)!r}: ends and step in different units; take one of them")
        return str(Capacity(units.pop(), float(value)))


TEXT, WHOLE, NUMBER, SWITCH, SIZE, RAM_SIZE, CACHE = (
    Kind(),
    Whole(),
    Number(),
    Switch(),
    Size(),
    Size(binary=True),
    Cache(),
)
