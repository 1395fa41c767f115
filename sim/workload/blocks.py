"""Rows of decode tokens, read from the trace many at a time: reading one costs hardly less than reading sixty-four."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sim.workload.iterations import Range

BLOCK_VALUES = 1 << 16
"""Values of an array that are read at once, at least one row: half a megabyte in double precision."""


class Blocks:
    """Of each request that generates, and each array asked for, the rows read last."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, int], tuple[int, np.ndarray]] = {}  # first row, rows

    def gather(self, key: str, ranges: list[Range], read: Callable[[int, int], np.ndarray]) -> np.ndarray:
        """The rows of an iteration, in order, of an array that `read(start_row, stop_row)` reads."""
        parts = [self._rows(key, r, read) for r in ranges]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _rows(self, key: str, r: Range, read: Callable[[int, int], np.ndarray]) -> np.ndarray:
        if r.context == 0:  # a prompt
            return np.asarray(read(r.start_row, r.stop_row))  # plain: slices of maps are slow
        request = r.request
        last_row = request.first_row + request.prompt_len + request.outputs - 1
        first, rows = self._blocks.get((key, request.index), (0, _NOTHING))
        if not first <= r.start_row < first + len(rows):
            row = np.asarray(read(r.start_row, r.stop_row))
            n = max(1, BLOCK_VALUES // max(1, row.size))
            first, rows = r.start_row, np.asarray(read(r.start_row, min(r.start_row + n, last_row)))
            self._blocks[key, request.index] = (first, rows)
        if r.stop_row == last_row:
            self._blocks.pop((key, request.index), None)
        return rows[r.start_row - first : r.stop_row - first]


_NOTHING = np.zeros(0)
