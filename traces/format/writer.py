"""Write a routing trace: rows arrive in chunks, memory stays constant, the file appears whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import numpy as np

from sim.base.errors import BadInput
from traces.format.header import Header, parse_header
from traces.format.layout import CODES, DTYPES, SPARSE, SPLITS, TENSORS, U16_LINEAR, Array, Code, expert_dtype
from traces.format.parts import Parts
from traces.format.requests import Request
from traces.format.rules import as_codes, chunk_faults
from traces.format.structure import version_for


@dataclass(frozen=True, slots=True)
class Layout:
    """How a writer stores what it is given.

    codes: score tensor -> code name; `u16_linear` where nothing is said.
    decode_only: tensors kept for decode rows only; chunks may still bring all rows.
    sparse: `next_scores_2`, `_3` or `shared_scores` -> how many of the highest scores of each row to keep.
    """

    codes: Mapping[str, str] = field(default_factory=dict)
    decode_only: frozenset[str] = frozenset()
    sparse: Mapping[str, int] = field(default_factory=dict)


class TraceWriter:
    """Append requests, then close; use as a context manager, so that an error leaves no file behind.

        with TraceWriter(path, header) as writer:
            writer.start_request(prompt_len=2, task="chat", split="store")
            writer.append(experts=..., scores=...)          # any number of times, all rows of the request together
            writer.add_request(prompt_len=5, experts=...)   # both at once

    The first chunk settles which tensors the trace has. Equal input gives equal bytes, however it was cut in chunks.
    Tensors wait in temporary files beside `path` (`Parts`), so closing needs the size of the trace once more.
    """

    def __init__(
        self,
        path: str | Path,
        header: Header,
        store: Layout | None = None,
        embedding_table: Array | None = None,
        parts: Parts | None = None,
    ) -> None:
        """Prepare a trace of `header`'s shape; `embedding_table` (V, h) goes with `token_ids`.

        Args:
            parts: where tensors wait; default: beside `path`.

        Raises:
            BadInput: a header or layout that FORMAT.md forbids.
        """
        self.path = Path(path)
        self.header = parse_header(header.to_metadata(), f"{self.path} header")
        self.store = store or Layout()
        for name in {*self.store.codes, *self.store.decode_only, *self.store.sparse}:
            if name not in TENSORS or (name in self.store.sparse and name not in SPARSE):
                raise BadInput(f"{self.path}: layout of tensor {name!r}: no such tensor, or it cannot be stored so")
        self._codes = {name: self._code(name) for name, spec in TENSORS.items() if spec.scored}
        self._table = None if embedding_table is None else _cast("embedding_table", embedding_table, self.header)
        self._parts = parts or Parts(self.path)
        self._given: frozenset[str] | None = None
        self._requests: list[tuple[int, int, float | None]] = []  # prompt rows, task, arrival
        self._splits: list[int] = []
        self._offsets = [0]
        self._n_rows = 0

    def _code(self, tensor: str) -> Code:
        name = self.store.codes.get(tensor, U16_LINEAR.name)
        if name not in CODES:
            raise BadInput(f"{self.path}: code of {tensor}, got {name!r}: one of {', '.join(CODES)}")
        return CODES[name]

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def start_request(
        self, prompt_len: int, task: str = "", split: str = "test", arrival_s: float | None = None
    ) -> None:
        """Begin the next request, of which the first `prompt_len` rows are prefill.

        Raises:
            BadInput: the request before is shorter than its prompt, or an unknown split or task.
        """
        self._finish_request()
        what = f"{self.path}: request {len(self._requests)}"
        if split not in SPLITS:
            raise BadInput(f"{what} split, got {split!r}: one of {', '.join(SPLITS)}; correct the recorder")
        tasks = self.header.tasks or ("",)
        if task not in tasks:
            raise BadInput(f"{what} task, got {task!r}: the header's tasks are {tasks}; add it there")
        if self._requests and (arrival_s is None) != (self._requests[0][2] is None):
            raise BadInput(f"{what} arrival_s, got {arrival_s}: all requests have one, or none; correct the recorder")
        self._requests.append((prompt_len, tasks.index(task), arrival_s))
        self._splits.append(SPLITS.index(split))

    def add_request(
        self, prompt_len: int, *, task: str = "", split: str = "test", arrival_s: float | None = None, **rows: Array
    ) -> None:
        """`start_request` and one `append` with all of its rows."""
        self.start_request(prompt_len, task, split, arrival_s)
        self.append(**rows)

    def append(self, **rows: Array) -> None:
        """Add rows of the current request: tensor name -> array whose first dimension is rows.

        Scores may be floats in [0, 1], which are quantised, or integer codes. A tensor that the layout keeps for decode
        rows only may bring all rows or just those.

        Raises:
            BadInput: an unknown tensor, a wrong shape, a value that breaks a rule, or other tensors than before.
        """
        if not self._requests:
            raise BadInput(f"{self.path}: rows before any request: call start_request first")
        if self._given is None:
            self._given = frozenset(rows)
        if frozenset(rows) != self._given or "experts" not in rows:
            raise BadInput(
                f"{self.path}: rows with {', '.join(sorted(rows))}, after {', '.join(sorted(self._given))}: "
                f"every chunk brings the same tensors, experts among them"
            )
        experts = np.asarray(rows["experts"])
        n_prefill = min(max(0, self._offsets[-1] + self._requests[-1][0] - self._n_rows), len(experts))
        for name, values in rows.items():
            decode_only = name in self.store.decode_only
            chunk = np.asarray(values)
            if decode_only and chunk.ndim and len(chunk) == len(experts):
                chunk = chunk[n_prefill:]
            same_rows = experts[n_prefill:] if decode_only else experts
            if chunk.ndim < 1 or len(chunk) != len(same_rows):
                raise BadInput(f"{self.path}: {name}, got shape {chunk.shape}: this chunk has {len(same_rows)} rows")
            self._append_one(name, chunk, same_rows)
        self._n_rows += len(experts)

    def _append_one(self, name: str, chunk: Array, experts: Array) -> None:
        if name not in TENSORS or not TENSORS[name].by_row:
            raise BadInput(f"{self.path}: rows of {name!r}: no such tensor of rows")
        stored: dict[str, Array] = {}
        if TENSORS[name].scored:
            try:
                stored[name] = as_codes(name, chunk, self._codes[name])
            except ValueError as error:
                raise BadInput(f"{self.path}: {error}; correct the recorder") from None
            if name in self.store.sparse:
                stored.update(_heaviest(name, stored[name], self.store.sparse[name], self.header.n_experts))
        else:
            stored[name] = _cast(name, chunk, self.header)
        for tensor, values in stored.items():
            code = self._codes[tensor] if TENSORS[tensor].scored else None
            if fault := next(chunk_faults(tensor, values, experts, self.header, code), None):
                raise BadInput(f"{self.path}: {fault.shifted(self._n_rows)}; correct the recorder")
            self._parts.add(tensor, values if code is None else code.store(values))

    def _finish_request(self) -> None:
        if not self._requests:
            return
        index, prompt_len = len(self._requests) - 1, self._requests[-1][0]
        if len(self._offsets) <= index + 1:
            if not 1 <= prompt_len <= self._n_rows - self._offsets[-1]:
                raise BadInput(
                    f"{self.path}: request {index} prompt_len, got {prompt_len}: at least 1 and at most its "
                    f"{self._n_rows - self._offsets[-1]} rows"
                )
            self._offsets.append(self._n_rows)

    def close(self) -> Path:
        """Assemble the file, check its structure and put it in place. Returns its path. Raises BadInput."""
        try:
            self._finish_request()
            if not self._requests:
                raise BadInput(f"{self.path}: no request: a trace has at least one")
            self._add_table()
            self._parts.assemble(self.metadata())
        finally:
            self.abort()
        return self.path

    def abort(self) -> None:
        """Throw away what was appended."""
        self._parts.drop()

    def _add_table(self) -> None:
        """The request table, and the embedding table when there is one, as tensors like the others."""
        prompts, tasks, arrivals = zip(*self._requests, strict=True)
        self._parts.add("req_offsets", np.array(self._offsets, "<i8"))
        self._parts.add("req_prompt_len", np.array(prompts, "<i8"))
        self._parts.add("req_split", np.array(self._splits, "u1"))
        if self.header.tasks:
            self._parts.add("req_task", np.array(tasks, "<u2"))
        if arrivals[0] is not None:
            self._parts.add("req_arrival_s", np.array(arrivals, "<f8"))
        if self._table is not None:
            self._parts.add("embedding_table", self._table)

    def metadata(self) -> dict[str, str]:
        """The header's strings, once the first rows are there."""
        pairs = self.header.to_metadata()
        if "weights" not in self._parts.shapes and self.header.weights_kind != "derived":
            pairs.pop("weights_kind", None)
        pairs.update({f"{name}.code": self._codes[name].name for name in self._parts.shapes if TENSORS[name].scored})
        pairs.update({f"{name}.rows": "decode" for name in self._parts.shapes if name in self.store.decode_only})
        return {**pairs, "version": version_for(pairs, self._parts.shapes)}


def write_trace(
    path: str | Path,
    header: Header,
    requests: Iterable[Request],
    store: Layout | None = None,
    embedding_table: Array | None = None,
    **rows: Array,
) -> Path:
    """Write a whole trace from arrays over all rows (they may be memory-mapped); `requests` say who owns which rows.

    Raises:
        BadInput: as `TraceWriter` does.
    """
    with TraceWriter(path, header, store, embedding_table) as writer:
        for request in requests:
            own = slice(request.first_row, request.end_row)
            writer.add_request(
                request.prompt_len,
                task=request.task,
                split=request.split,
                arrival_s=request.arrival_s,
                **{name: values[own] for name, values in rows.items()},
            )
    return Path(path)


def _cast(name: str, values: Array, header: Header) -> Array:
    """Bring an array to the tensor's stored type. Raises BadInput where that would change what it says."""
    target = DTYPES[expert_dtype(header.n_experts) if name == "experts" else TENSORS[name].dtypes[0]]
    values = np.asarray(values)
    if target.kind == "f":
        with np.errstate(over="ignore"):
            cast = values.astype(target)
        if np.isfinite(cast).all():
            return cast
    elif values.dtype.kind in "ui":
        info = np.iinfo(target)
        if not values.size or (int(values.min()) >= info.min and int(values.max()) <= info.max):
            return values.astype(target)
    raise BadInput(f"{name}, got a value that {target} cannot hold: finite and in range, please; correct the recorder")


def _heaviest(name: str, codes: Array, keep: int, n_experts: int) -> dict[str, Array]:
    """Keep the `keep` highest codes of each row with their ids, highest first, ties to the lowest id."""
    ids = np.argsort(-codes.astype(np.int64), axis=-1, kind="stable")[..., : max(1, keep)]
    return {name: np.take_along_axis(codes, ids, axis=-1), f"{name}.ids": ids.astype(DTYPES[expert_dtype(n_experts)])}
