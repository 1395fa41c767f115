"""Write a trace again with its columns squeezed, or as the plain file it was before: nothing else changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np

from sim.base.errors import BadInput
from traces.format import blocks
from traces.format.parts import Parts
from traces.format.plain import header_of, plain_rows, plain_sha256
from traces.format.stored import StoredTrace
from traces.format.structure import version_for

WORTH = 7 / 8
"""Of a tensor's plain bytes: one that its blocks leave above that stays plain, as it would cost more than it saves; so
does one that unpacks to more than `blocks.MOST_TIMES` its blocks, which no reader takes."""
Progress = Callable[[int, int], None]


def squeeze(trace: StoredTrace, out: Path, progress: Progress | None = None, plain: Collection[str] = ()) -> Path:
    """Write tensors of rows in blocks where it is worth it (FORMAT.md, version 4), with the digest of the plain file.

    Args:
        plain: tensors that stay as they are, for runs that read all of them.

    Raises:
        BadInput: a packed code with bits behind the last one, which a squeezed file has no room for.
    """
    told = {"plain_sha256": plain_sha256(trace)}
    parts = Parts(out)
    try:
        for done, name in enumerate(trace.entries):
            if progress:
                progress(done, len(trace.entries))
            fact, shape = trace.entries[name], trace.plain_shape(name, packed=False)
            able = name not in plain and blocks.can_be_squeezed(name, shape, fact.dtype)
            if able and _add_blocks(parts, trace, name, shape):
                told[f"{name}.squeezed"] = " ".join([fact.dtype, *map(str, shape)])
                continue
            for rows in plain_rows(trace, name):
                parts.add(name, rows)
        if len(told) == 1:
            told.clear()
        pairs = header_of(trace) | told
        parts.assemble(pairs | {"version": version_for(pairs, trace.entries)})
    finally:
        parts.drop()
    return out


def _add_blocks(parts: Parts, trace: StoredTrace, name: str, shape: tuple[int, ...]) -> bool:
    """Add a tensor in blocks, unless they save too little."""
    stored, lines, end = trace.stored(name), [], 0
    step = blocks.block_rows(math.prod(shape[1:]) * stored.dtype.itemsize)
    for at in range(0, shape[0], step):
        rows = stored[at : at + step]
        if name in trace.code_names:
            whole, rows = rows, trace.codes(name, rows)
            if (trace.code(name).store(rows) != whole).any():
                raise BadInput(
                    f"{trace.path}: {name}, got a bit behind a row's last code: unused bits are 0; `moesim traces "
                    f"check` shows where, record the trace again"
                )
        packed, check = blocks.pack(rows)
        end += len(packed)
        lines.append((end, check))
        parts.add(name, np.frombuffer(packed, np.uint8))
    plain, unpacked = (math.prod(some) * stored.dtype.itemsize for some in (trace.plain_shape(name), shape))
    if end > WORTH * plain or unpacked > blocks.MOST_TIMES * end:
        parts.forget(name)
        return False
    parts.add(f"{name}.blocks", np.array(lines, "<i8"))
    return True


def unsqueeze(trace: StoredTrace, out: Path, progress: Progress | None = None) -> Path:
    """Write the plain file of a trace, squeezed or not. Raises BadInput where a block is damaged, or it is another."""
    digest = trace.sha256
    parts = Parts(out)
    try:
        for done, name in enumerate(trace.entries):
            if progress:
                progress(done, len(trace.entries))
            for rows in plain_rows(trace, name):
                parts.add(name, rows)
        if trace.squeezed and (got := plain_sha256(trace)) != digest:
            raise other_than_stated(trace, got)
        parts.assemble(header_of(trace))
    finally:
        parts.drop()
    return out


def other_than_stated(trace: StoredTrace, got: str) -> BadInput:
    """The error that a squeezed file does not hold the trace it says it does."""
    return BadInput(
        f"{trace.path}: metadata plain_sha256, got {trace.sha256[:16]}... for a trace of {got[:16]}...: the digest of "
        f"the plain file; copy or record it again"
    )
