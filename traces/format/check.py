"""The rules held against the values of a trace: rows as a run reads them, or all of them in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from sim.base.errors import BadInput
from traces.format.blocks import Column
from traces.format.layout import TENSORS, Array, Ints
from traces.format.rules import Fault, chunk_faults, weight_faults

if TYPE_CHECKING:
    from traces.format.stored import StoredTrace

_CHUNK_VALUES = 1 << 20
Progress = Callable[[int, int], None]


def check_trace(trace: StoredTrace, limit: int = 1, on_progress: Progress | None = None) -> list[Fault]:
    """Up to `limit` faults, by tensor in the order of FORMAT.md, then by index; an empty list means sound.

    Opening the trace has already judged its structure. `on_progress(done, total)` is called with counts of values.

    Raises:
        BadInput: a squeezed block that cannot be unpacked.
    """
    faults: list[Fault] = []
    for _, found in _found(trace, on_progress):
        if isinstance(found, BadInput):
            raise found
        faults.append(found)
        if len(faults) == limit:
            break
    return faults


def findings(trace: StoredTrace, on_progress: Progress | None = None) -> Iterator[tuple[str, BadInput]]:
    """What is wrong with the values of a trace: the tensor, and what a run says that reads it.

    A run judges rows when it reads them first, by the same `row_faults`: reading all of a long trace would cost a run
    more than its replay. So it refuses what it uses and no more; only `experts` is used by every run. `plain_sha256` is
    the exception: a run states it as the header has it, because all of the file has to be unpacked to compute it.
    """
    for tensor, found in _found(trace, on_progress):
        yield tensor, found if isinstance(found, BadInput) else unsound(trace, found)


def unsound(trace: StoredTrace, fault: Fault) -> BadInput:
    """The error that names a fault of a trace."""
    return BadInput(f"{trace.path}: {fault}; correct the recorder and write the trace again")


def _found(trace: StoredTrace, progress: Progress | None) -> Iterator[tuple[str, Fault | BadInput]]:
    """Tensor that was read, and a fault of its values, or why the rest of it cannot be read."""
    names = [name for name in TENSORS if name in trace.entries and not name.startswith("req_")]
    total = sum(trace.stored(name).size for name in names)
    done, readable = 0, True
    for name in names:
        try:
            for start, chunk in _chunks(trace.stored(name)):
                for fault in row_faults(trace, name, start, chunk):
                    yield name, fault.shifted(start)
                done += chunk.size
                if progress:
                    progress(done, total)
        except BadInput as error:
            readable = False
            yield name, error
    from traces.format.plain import plain_sha256  # a run, which holds rows against the rules, does not ask

    if trace.squeezed and readable and (got := plain_sha256(trace)) != trace.sha256:
        yield (
            "plain_sha256",
            Fault("plain_sha256", (), trace.sha256[:16], f"the digest of the plain file, which begins with {got[:16]}"),
        )


def _chunks(tensor: Array | Column) -> Iterator[tuple[int, Array]]:
    step = max(1, _CHUNK_VALUES // max(1, int(np.prod(tensor.shape[1:]))))
    for start in range(0, len(tensor), step):
        yield start, tensor[start : start + step]


def row_faults(trace: StoredTrace, name: str, start: int, chunk: Array) -> Iterator[Fault]:
    """Faults of some rows of a tensor as stored, the first of which is row `start`; counted from there."""
    rows = _rows_behind(trace, name, start, len(chunk))
    if name == "embedding_table":
        experts = np.empty((0, trace.n_layers, trace.top_k), np.int64)
    else:
        experts = trace.stored("experts")[rows]
    vocabulary = len(trace.stored("embedding_table")) if "embedding_table" in trace.entries else None
    code = trace.code(name) if TENSORS[name].scored else None
    if code is not None:
        codes = trace.codes(name, chunk)
        loose = code.store(codes) != chunk  # only bits that belong to no code can differ
        for i, layer in np.argwhere(loose.any(axis=-1)) if loose.any() else ():
            yield Fault(name, (int(i), int(layer)), "a bit behind the last code", "unused bits are 0")
        chunk = codes
    yield from chunk_faults(name, chunk, experts, trace.header, code, vocabulary)
    if name == "iterations":
        yield from _iteration_order(trace, chunk, start, rows)
    if name == "scores" and "weights" in trace.entries:
        weights = trace.stored("weights")
        if len(weights) == len(trace.stored("scores")):  # both for all rows, or both for decode rows
            same = weights[start : start + len(chunk)]
            yield from weight_faults(same, chunk, experts, trace.header, trace.code("scores"))


def _rows_behind(trace: StoredTrace, name: str, start: int, count: int) -> Ints:
    """Rows of the trace that a chunk of a stored tensor belongs to."""
    if trace.decode_only(name):
        return trace.requests.decode_rows(start, start + count)
    return np.arange(start, start + count)


def _iteration_order(trace: StoredTrace, chunk: Array, start: int, rows: Ints) -> Iterator[Fault]:
    """A request's rows never go back to an earlier iteration, and each decode row has one of its own."""
    table, tensor = trace.requests, trace.stored("iterations")
    owner = np.searchsorted(table.offsets, rows, side="right") - 1
    first = rows == table.offsets[owner]
    decode = rows >= table.offsets[owner] + table.prompt_len[owner]
    before = np.concatenate([tensor[max(0, start - 1) : start] if start else chunk[:1], chunk[:-1]])
    bad = ~first & ((chunk < before) | (decode & (chunk == before)))
    for i in np.flatnonzero(bad):
        yield Fault(
            "iterations",
            (int(i),),
            str(chunk[i]),
            "iterations of a request never go back, and every decode row has a later one",
        )
