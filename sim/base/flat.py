"""Flat arrays of numbers: machine numbers where this module is compiled, plain lists where it is not, used alike."""

from __future__ import annotations

from array import array
from collections.abc import MutableSequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Numbers = TypeVar("Numbers", bound=MutableSequence[Any])

COMPILED = not __file__.endswith(".py")
"""Whether this process runs the compiled modules; all of them are, or none (`sim.base.compiled`)."""
LINE_BYTES = 64


def floats(n: int, value: float = 0.0) -> MutableSequence[float]:
    """`n` double-precision numbers."""
    return array("d", [value]) * n if COMPILED else [value] * n


def ints(n: int, value: int = 0) -> MutableSequence[int]:
    """`n` whole numbers of 64 bits."""
    return array("q", [value]) * n if COMPILED else [value] * n


def places(n: int) -> MutableSequence[int]:
    """`n` whole numbers of 32 bits, for what is walked through: half as large is sooner at hand."""
    return array("i", [0]) * n if COMPILED else [0] * n


def numbers(of: NDArray[np.int64]) -> Any:
    """Whole numbers of an array, in a row."""
    return np.ascontiguousarray(of, dtype=np.int64).reshape(-1) if COMPILED else of.ravel().tolist()


def records(n: int, kind: type, fields: list[tuple[str, str]]) -> Any:
    """`n` records that begin with zeros: structs of `fields` (names and numpy's types), or objects of `kind`.

    Structs begin at a line of the cache, so that one of 64 bytes lies in one.
    """
    if not COMPILED:
        return [kind() for _ in range(n)]
    layout = np.dtype(fields, align=True)
    room = np.zeros(n * layout.itemsize + LINE_BYTES, dtype=np.uint8)
    first = -room.__array_interface__["data"][0] % LINE_BYTES
    return room[first : first + n * layout.itemsize].view(layout)


def longer_floats(old: MutableSequence[float], n: int, value: float = 0.0) -> MutableSequence[float]:
    """A copy of `n` numbers that begins with those of `old`."""
    return _longer(floats(0), old, floats(n - len(old), value))


def longer_ints(old: MutableSequence[int], n: int, value: int = 0) -> MutableSequence[int]:
    """A copy of `n` numbers that begins with those of `old`."""
    return _longer(ints(0), old, ints(n - len(old), value))


def longer_places(old: MutableSequence[int], n: int) -> MutableSequence[int]:
    """A copy of `n` numbers that begins with those of `old`."""
    return _longer(places(0), old, places(n - len(old)))


def _longer(new: Numbers, old: Numbers, more: Numbers) -> Numbers:
    """`new`, which is empty, with those of `old` and `more`: machine numbers are copied as they lie."""
    if COMPILED:
        machine_numbers: Any = new
        machine_numbers.frombytes(memoryview(old).tobytes())  # type: ignore[arg-type]
    else:
        new.extend(old)
    new.extend(more)
    return new
