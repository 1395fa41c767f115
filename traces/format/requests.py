"""The request table: which rows belong to which request, and what is known about each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from traces.format.layout import SPLITS, Array, Floats, Ints


@dataclass(frozen=True, slots=True)
class Request:
    """One request: `prompt_len` prefill rows from `first_row` on, then `n_decode` decode rows.

    The first output token comes out of the prefill and the last one is never processed, so outputs = n_decode + 1.
    """

    index: int
    first_row: int
    prompt_len: int
    n_rows: int
    task: str = ""
    arrival_s: float | None = None
    split: str = "test"

    @property
    def n_decode(self) -> int:
        """Rows processed one at a time after the prefill."""
        return self.n_rows - self.prompt_len

    @property
    def outputs(self) -> int:
        """Tokens the request produced."""
        return self.n_decode + 1

    @property
    def first_decode_row(self) -> int:
        """First row of the decode phase; `end_row` when there is none."""
        return self.first_row + self.prompt_len

    @property
    def end_row(self) -> int:
        """One past the last row."""
        return self.first_row + self.n_rows


class RequestTable:
    """All requests as columns of length N; indexing and iterating yield `Request`."""

    def __init__(
        self,
        offsets: Ints,
        prompt_len: Ints,
        split: Array,
        task: Array | None,
        tasks: tuple[str, ...],
        arrival_s: Floats | None,
    ) -> None:
        self.offsets = offsets  # (N + 1,), request i owns rows offsets[i] to offsets[i + 1]
        self.first_row = offsets[:-1]
        self.n_rows = np.diff(offsets)
        self.prompt_len = prompt_len
        self.n_decode = self.n_rows - prompt_len
        self.split = split  # position in SPLITS
        self.task = task  # position in `tasks`, or None
        self.tasks = tasks
        self.arrival_s = arrival_s
        self._prompts_before = np.concatenate(([0], np.cumsum(prompt_len)))

    def __len__(self) -> int:
        return len(self.first_row)

    def __getitem__(self, index: int) -> Request:
        i = range(len(self))[index]  # negative indices and IndexError as for a list
        arrival = math.nan if self.arrival_s is None else float(self.arrival_s[i])
        return Request(
            index=i,
            first_row=int(self.first_row[i]),
            prompt_len=int(self.prompt_len[i]),
            n_rows=int(self.n_rows[i]),
            task="" if self.task is None else self.tasks[int(self.task[i])],
            arrival_s=None if math.isnan(arrival) else arrival,
            split=SPLITS[int(self.split[i])],
        )

    def __iter__(self) -> Iterator[Request]:
        return (self[i] for i in range(len(self)))

    def in_split(self, split: str) -> list[Request]:
        """The requests of `store` or `test`, in order."""
        return [self[int(i)] for i in np.flatnonzero(self.split == SPLITS.index(split))]

    @property
    def n_decode_rows(self) -> int:
        """Decode rows of the whole trace."""
        return int(self.offsets[-1] - self._prompts_before[-1])

    def request_of(self, row: int) -> int:
        """Index of the request that owns a row."""
        return int(np.searchsorted(self.offsets, row, side="right")) - 1

    def decode_position(self, start: int, stop: int) -> int | None:
        """Position among all decode rows of row `start`, or None unless all of [start, stop) are decode rows.

        Every request begins with a prefill row, so a range of decode rows lies within one request.
        """
        i = self.request_of(start)
        if i >= len(self) or start < self.offsets[i] + self.prompt_len[i] or stop > self.offsets[i + 1]:
            return None
        return start - int(self._prompts_before[i + 1])

    def decode_rows(self, start: int, stop: int) -> Ints:
        """Row numbers of the decode rows at positions [start, stop) among all decode rows."""
        positions = np.arange(start, stop)
        ends = np.cumsum(self.n_decode)
        owner = np.searchsorted(ends, positions, side="right")
        return positions + self._prompts_before[owner + 1]
