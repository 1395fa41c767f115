"""Tensors of a trace that is being written: they wait in files beside it until all of them are there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from sim.base.errors import BadInput
from sim.base.files import SPOOL, hidden_folder, replacing, sweep
from traces.format.container import header_bytes, layout
from traces.format.layout import DTYPES, Array
from traces.format.reader import Trace

_COPY_BYTES = 1 << 20


class Parts:
    """A hidden folder beside `path` with a file for each tensor; `drop` it in any case.

    It outlives a killed process, until the next writer of the same `path` removes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep(path, SPOOL)
        self._folder = hidden_folder(path, SPOOL)
        self.shapes: dict[str, tuple[str, tuple[int, ...]]] = {}  # tensor -> its type's name and its shape so far

    def add(self, tensor: str, rows: Array) -> None:
        """Put rows behind those that a tensor has. Raises BadInput where they are of another width."""
        if tensor not in self.shapes:
            self.shapes[tensor] = (type_name(rows), (0, *rows.shape[1:]))
        dtype, (n_rows, *width) = self.shapes[tensor]
        if list(rows.shape[1:]) != width:
            raise BadInput(f"{self.path}: {tensor}, got shape {rows.shape}: earlier chunks had width {tuple(width)}")
        with (self._folder / tensor).open("ab") as file:  # not held open: a recorder has many writers at a time
            file.write(np.ascontiguousarray(rows).data)
        self.shapes[tensor] = (dtype, (n_rows + len(rows), *width))

    def forget(self, tensor: str) -> None:
        """Throw a tensor away, to add it otherwise."""
        (self._folder / tensor).unlink()
        del self.shapes[tensor]

    def assemble(self, metadata: Mapping[str, str]) -> None:
        """Write the file, check its structure and put it in place. Raises BadInput."""
        entries = layout(self.shapes)
        with replacing(self.path) as part:
            with part.open("wb") as out:
                out.write(header_bytes(metadata, entries))
                for name in entries:
                    with (self._folder / name).open("rb") as tensor:
                        shutil.copyfileobj(tensor, out, _COPY_BYTES)
                out.flush()
                os.fsync(out.fileno())
            Trace(part).close()  # the reader's structural rules are the writer's, too

    def drop(self) -> None:
        """Throw away what was added."""
        shutil.rmtree(self._folder, ignore_errors=True)


class Held(Parts):
    """The same in memory, for rows that go elsewhere than into a file of their own."""

    def __init__(self) -> None:
        self.shapes = {}
        self._rows: dict[str, list[Array]] = {}

    def add(self, tensor: str, rows: Array) -> None:
        self._rows.setdefault(tensor, []).append(rows)
        self.shapes[tensor] = (type_name(rows), rows.shape)

    def drop(self) -> None:
        """Nothing is left to throw away."""

    @property
    def rows(self) -> dict[str, Array]:
        """All rows of each tensor."""
        return {tensor: np.concatenate(rows) for tensor, rows in self._rows.items()}


def type_name(values: Array) -> str:
    """The safetensors name of an array's type."""
    return next(name for name, dtype in DTYPES.items() if dtype == values.dtype)
