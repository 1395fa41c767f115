"""A trace as the plain file that the writer here makes of it, squeezed or not; its bytes tell it from others."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import numpy as np

from traces.format.blocks import block_rows
from traces.format.container import header_bytes, layout
from traces.format.layout import CODES, DTYPES, Array
from traces.format.stored import StoredTrace
from traces.format.structure import version_for


def header_of(trace: StoredTrace) -> dict[str, str]:
    """The header's strings."""
    return trace.plain_pairs | {"version": version_for(trace.plain_pairs, trace.entries)}


def plain_sha256(trace: StoredTrace) -> str:
    """Digest of the plain file that the writer here makes of a trace; every block is unpacked for it."""
    entries = layout({name: (fact.dtype, trace.plain_shape(name)) for name, fact in trace.entries.items()})
    digest = hashlib.sha256(header_bytes(header_of(trace), entries))
    for name in entries:
        for rows in plain_rows(trace, name):
            digest.update(np.ascontiguousarray(rows).data)
    return digest.hexdigest()


def plain_rows(trace: StoredTrace, name: str) -> Iterator[Array]:
    """A tensor's rows as the plain file has them, some at a time."""
    stored = trace.stored(name)
    as_stored = trace.code(name) if name in trace.code_names else None
    packed = None if as_stored is None else CODES[as_stored.name]
    step = block_rows(math.prod(stored.shape[1:]) * DTYPES[trace.entries[name].dtype].itemsize)
    if not len(stored):
        yield np.asarray(stored)
    for at in range(0, len(stored), step):
        rows = stored[at : at + step]
        yield rows if packed is None or packed == as_stored else packed.store(rows)
