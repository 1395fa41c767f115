"""A trace file with room for all of its requests, each of which is drawn when it is first read.

How many rows a drawn trace has, and whose they are, is known before any is drawn. So the file has its whole size at
once, most of it holes, and a request's rows are put in their place when somebody slices them. Beside the file lies a
folder with the digest of every request that is there: one that is damaged, or whose writer was killed, is not believed
and drawn anew. Two processes may draw the same request at a time, since both write the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.base.errors import BadInput
from traces.format.blocks import Column, Judge
from traces.format.layout import TENSORS, Array

if TYPE_CHECKING:
    from traces.format.stored import StoredTrace

DRAWN_SHA256 = "drawn_sha256"
"""The header's key for the digest of what a trace is drawn from."""
Rows = Mapping[str, Array]
"""Tensor -> rows of one request, as they are stored."""
draw: Callable[[Path, int], Rows] | None = None
"""Draws a request of a file; `traces.format.catalogue` knows how."""
_FOUND: dict[tuple[str, int, int, int], set[int]] = {}  # file -> requests that this process has found sound


class Rooms(Column):
    """A tensor of rows as an array, whose requests are drawn as they are sliced."""

    def __init__(self, stored: Array, ends: Array, need: Callable[[int], None]) -> None:
        """`ends`: (N,) where each request's rows end. `need(request)` sees to it that they are there."""
        self._stored, self._ends, self._need = stored, ends, need
        self.shape, self.dtype, self.ndim = stored.shape, stored.dtype, stored.ndim
        self.size, self.nbytes = stored.size, stored.nbytes

    def judged_by(self, judge: Judge) -> Column:
        return self  # what is drawn was judged when it was written

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self[:], dtype=dtype, copy=copy)

    def __getitem__(self, key: Any) -> Array:
        rows = key[0] if isinstance(key, tuple) else key
        if isinstance(rows, slice):
            taken = range(*rows.indices(len(self)))
            ends = np.array([taken[0], taken[-1]]) if taken else np.empty(0, np.int64)
            owners = self._owners(ends)
            wanted = set(range(min(owners), max(owners) + 1)) if owners else owners
        else:
            at = np.asarray(rows)
            wanted = self._owners(np.flatnonzero(at) if at.dtype == bool else at)
        for request in sorted(wanted):
            self._need(request)
        found: Array = self._stored[key]
        return found

    def _owners(self, rows: Array) -> set[int]:
        inside = np.where(rows < 0, rows + len(self), rows).ravel()
        return set(np.searchsorted(self._ends, inside[inside < len(self)], side="right").tolist())


class Growing:
    """What is there of a trace file, and how more comes.

    Raises:
        BadInput: from `need`, where a request cannot be drawn: it is no file of this version's folder of drawn traces.
    """

    def __init__(self, trace: StoredTrace, mapped: Array) -> None:
        self._path, self._entries, self._requests = trace.path, trace.entries, trace.requests
        self._decode_only = {name for name in trace.entries if trace.decode_only(name)}
        self._mapped = np.asarray(mapped)
        facts = self._path.stat()
        self._found = _FOUND.setdefault((str(self._path), facts.st_dev, facts.st_ino, facts.st_size), set())

    def column(self, tensor: str, stored: Array) -> Rooms:
        """A tensor of rows, to be read as if all of it were there."""
        table = self._requests
        counts = table.n_decode if tensor in self._decode_only else table.n_rows
        return Rooms(np.asarray(stored), np.cumsum(counts), self.need)

    def need(self, request: int) -> None:
        """See to it that the rows of a request are there."""
        if request in self._found:
            return
        mark = marks(self._path) / f"{request}.sha256"
        if not self._is_there(mark, request):
            from sim.base.files import replacing

            assert draw is not None
            self._put(request, draw(self._path, request))
            found = self._digest(request)
            with replacing(mark) as part:
                part.write_text(f"{found}\n", encoding="ascii")
        self._found.add(request)

    def _is_there(self, mark: Path, request: int) -> bool:
        try:
            return mark.read_text(encoding="ascii").strip() == self._digest(request)
        except (OSError, ValueError):
            return False

    def _slices(self, request: int) -> dict[str, slice]:
        """By tensor the bytes of a request's rows."""
        found, one = {}, self._requests[request]
        for name, entry in sorted(self._entries.items()):
            if not TENSORS[name].by_row:
                continue
            row_bytes = (entry.stop - entry.start) // max(1, entry.shape[0])
            first, n_rows = one.first_row, one.n_rows
            if name in self._decode_only:
                first, n_rows = int(self._requests.n_decode[:request].sum()), one.n_decode
            start = entry.start + first * row_bytes
            found[name] = slice(start, start + n_rows * row_bytes)
        return found

    def _digest(self, request: int) -> str:
        digest = hashlib.sha256()
        for where in self._slices(request).values():
            digest.update(self._mapped[where].data)
        return digest.hexdigest()

    def _put(self, request: int, rows: Rows) -> None:
        slices = self._slices(request)
        with self._path.open("r+b") as file:
            written = np.memmap(file, np.uint8, "r+")  # a map, of which every reader's map sees the same bytes
        for name, where in slices.items():
            written[where] = np.ascontiguousarray(rows[name]).reshape(-1).view(np.uint8)
        written.flush()
        for where in slices.values():
            if not np.array_equal(self._mapped[where], written[where]):
                raise BadInput(f"{self._path}: request {request}: the file was replaced meanwhile; run it again")


def marks(path: Path) -> Path:
    """The folder with the digests of the requests that are there."""
    return path.with_name(f"{path.name}.requests")
