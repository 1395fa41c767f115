"""What a policy learned from a trace, kept as a file: it is read where all that it was learned from is the same, and
where not one bit of it has changed; else the policy learns again.

A file is the SHA-256 of what follows, then on a line of its own what was learned from what (a digest) and the arrays,
then their numbers, packed.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.base.digests import of_data
from sim.workload.learn_split import StoreSplit, TrainingTrace

Arrays = Mapping[str, NDArray[Any]]
FORMAT = 1
SMALL = ("uint8", "int8", "uint16", "int16", "uint32", "int32")
HEAD = 65  # bytes of the first line


def origin(store: StoreSplit, facts: Mapping[str, Any]) -> str:
    """The digest of what is learned from: the requests and levels that a policy is given of a trace, and `facts`: its
    parameters, and the version of its own code for this. '' where the trace is another than a run hands over."""
    trace = store.trace
    if not isinstance(trace, TrainingTrace):
        return ""
    requests = [[r.first_row, r.prompt_len, r.outputs] for r in store.requests]
    told = {"trace": trace.sha256, "drawn": trace.drawn_by, "requests": requests, "levels": sorted(trace.levels)}
    return of_data({"format": FORMAT, **told, "facts": dict(facts)})


def recalled(file: Path, origin: str) -> dict[str, NDArray[Any]] | None:
    """The arrays that were kept in a file; None where it is not there, damaged, or of another origin."""
    try:
        data = file.read_bytes()
        sha256, rest = data[:HEAD], data[HEAD:]
        if sha256 != _line(rest):
            return None
        head, _, packed = rest.partition(b"\n")
        said = json.loads(head)
        if said["origin"] != origin:
            return None
        numbers, at = lzma.decompress(packed), 0
    except (OSError, ValueError, KeyError, lzma.LZMAError):
        return None
    found = {}
    for name, dtype, shape in said["arrays"]:
        found[name] = np.frombuffer(numbers, np.dtype(dtype), math.prod(shape), at).reshape(shape)
        at += found[name].nbytes
    return found


def keep(file: Path, origin: str, arrays: Arrays) -> None:
    """Write arrays of whole numbers, each in the smallest type that holds all of them.

    Raises:
        ValueError: numbers that are not whole, or beyond 32 bits.
    """
    small = {name: _small(array) for name, array in arrays.items()}
    said = [[name, array.dtype.str, list(array.shape)] for name, array in small.items()]
    packed = lzma.compress(b"".join(array.tobytes() for array in small.values()))
    rest = json.dumps({"origin": origin, "arrays": said}).encode() + b"\n" + packed
    file.write_bytes(_line(rest) + rest)


def _line(rest: bytes) -> bytes:
    """The first line of a file that goes on so."""
    return hashlib.sha256(rest).hexdigest().encode() + b"\n"


def _small(array: NDArray[Any]) -> NDArray[Any]:
    for name in SMALL:
        small = array.astype(np.dtype(name).newbyteorder("<"))
        if (small == array).all():
            return np.ascontiguousarray(small)
    raise ValueError(f"got {array.dtype} with {array.min()} to {array.max()}: whole numbers of 32 bits are kept")
