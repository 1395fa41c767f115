# cython: boundscheck=True, wraparound=True
"""Which tokens run together: requests, token ranges with their phase, and what each layer's gate asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sim.base.flat import numbers

if TYPE_CHECKING:
    from traces.format.reader import Trace

PREFILL, DECODE, MIXED = "prefill", "decode", "mixed"
PHASES = (PREFILL, DECODE, MIXED)
"""Phases that times and hits are counted under, by their number."""
BLOCK_ROWS = 256


class RequestInfo(NamedTuple):
    """One request as a serving system knows it on arrival (`outputs` is used by the engine alone)."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody asks of a request
    first_row: int
    prompt_len: int
    outputs: int
    task: str
    arrival_s: float | None


class Range:
    """Rows `[start_row, stop_row)` of one request in one iteration; `context` tokens precede them in the KV cache.

    puts_out: a token of the answer comes out of its last row; not so of a part of a prompt that is not its end. With
    drafts one comes out of each row of a decode range, and those of its last `n_rejected` are not taken (used by the
    engine alone: no system knows before it has verified them).
    """

    __slots__ = ("context", "n_rejected", "phase", "puts_out", "request", "start_row", "stop_row")

    def __init__(
        self,
        request: RequestInfo,
        start_row: int,
        stop_row: int,
        phase: str,
        context: int,
        puts_out: bool = True,
        n_rejected: int = 0,
    ) -> None:
        self.request = request
        self.start_row = start_row
        self.stop_row = stop_row
        self.phase = phase
        self.context = context
        self.puts_out = puts_out
        self.n_rejected = n_rejected

    @property
    def taken_row(self) -> int:
        """Where its request goes on: rows whose tokens are rejected run again, as others are drafted or come out."""
        return self.stop_row - self.n_rejected

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Range):
            return NotImplemented
        return self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash(self._fields())

    def __repr__(self) -> str:
        return "Range({!r}, {!r}, {!r}, {!r}, {!r}, {!r}, {!r})".format(*self._fields())

    def _fields(self) -> tuple[RequestInfo, int, int, str, int, bool, int]:
        where = self.start_row, self.stop_row, self.phase, self.context
        return self.request, *where, self.puts_out, self.n_rejected


class Block:
    """Decode rows of one request: expert ids [n, L, K], one after the other; its last of all is `last_row`."""

    def __init__(self, first_row: int, last_row: int, ids: np.ndarray) -> None:
        self.first_row = first_row
        self.last_row = last_row
        self.n_rows = len(ids)
        self.width = ids[0].size
        self.ids: Any = numbers(ids)


class Row:
    """The expert ids of one decode token, [L, K], within a block: `block.ids[at + layer * top_k + i]`."""

    __slots__ = ("at", "block", "top_k")

    def __init__(self, block: Block, at: int, top_k: int) -> None:
        self.block = block
        self.at = at
        self.top_k = top_k

    def layer(self, layer: int) -> list[int]:
        """Ids of one layer, heaviest first."""
        at = self.at + layer * self.top_k
        return [self.block.ids[at + i] for i in range(self.top_k)]


class Iteration:
    """One forward pass: its ranges, and per MoE layer the experts its gates chose.

    `phase` is `prefill` where any token of a prompt runs: decode tokens may run beside it, and each range has a phase
    of its own. Times and hits are counted under `counted`: `prefill`, `decode`, or `mixed` then, which
    `number` has as 0, 1 or 2. `n_out` tokens come out of it, drafts to be rejected included.

    Shapes: n tokens, L MoE layers, K experts per token. Scores are exact integers held in float64 (see FORMAT.md).
    """

    recorded = True  # all its layers are known beforehand; not so where a model routes itself as it runs

    def __init__(
        self, index: int, ranges: list[Range], trace: Trace, row: Row | None = None
    ) -> None:  # `row`: the single decode row, when there is just one token
        self.index = index
        self.ranges = ranges
        self._count()
        self._trace = trace
        self.token = row
        self._rows: list[list[int]] | None = None
        self._counts: list[list[int]] | None = None
        self._ids: np.ndarray | None = None

    def _count(self) -> None:
        n_tokens = n_prompts = n_out = 0
        for r in self.ranges:
            n_rows = r.stop_row - r.start_row
            n_tokens += n_rows
            if r.phase != PREFILL:
                n_out += n_rows
                continue
            n_prompts += 1
            if r.puts_out:
                n_out += 1
        self.n_tokens = n_tokens
        self.n_out = n_out
        self.phase = PREFILL if n_prompts else DECODE
        self.number = 0 if n_prompts == len(self.ranges) else 2 if n_prompts else 1
        self.counted = PHASES[self.number]

    @property
    def n_requests(self) -> int:
        """Requests in it; one whose rejected drafts stand elsewhere has two ranges."""
        return len({r.request.index for r in self.ranges})

    @property
    def row(self) -> list[list[int]] | None:
        """The ids of a single decode token by layer; None where several tokens run together."""
        if self._rows is None and self.token is not None:  # asked layer by layer, made once
            self._rows = [self.token.layer(layer) for layer in range(self._trace.n_layers)]
        return self._rows

    def chosen(self, layer: int) -> dict[int, int]:
        """Expert -> tokens routed to it: router order for a single token, ascending ids otherwise."""
        row = self.token
        if row is not None:
            at = row.at + layer * row.top_k
            needs: dict[int, int] = {}
            for i in range(row.top_k):
                needs[row.block.ids[at + i]] = 1
            return needs
        if self._counts is None:
            shape = (self._trace.n_layers, self._trace.n_experts)
            counts = np.zeros(shape, dtype=np.int64)
            ids = self._ids = self.all_ids()
            np.add.at(counts, (np.arange(shape[0])[None, :, None], ids), 1)
            self._counts = counts.tolist()
        if self.n_tokens == 1:  # a prompt of one token
            return dict.fromkeys(self.ids(layer)[0].tolist(), 1)
        return {expert: n for expert, n in enumerate(self._counts[layer]) if n}

    def ids(self, layer: int) -> np.ndarray:
        """Chosen experts per token, router order, [n, K]."""
        if self.token is not None:  # a single token, the common case, without touching the trace again
            return np.array([self.token.layer(layer)], dtype=np.int64)
        if self._ids is None:
            self._ids = self.all_ids()
        return self._ids[:, layer].copy()

    def all_ids(self) -> np.ndarray:
        """Chosen experts of every layer, router order, [n, L, K]."""
        return np.asarray(self.gather(lambda a, b: self._trace.experts[a:b]), dtype=np.int64)

    def gather(self, read: Callable[[int, int], np.ndarray]) -> np.ndarray:
        """Concatenate `read(start_row, stop_row)` over the ranges: the rows of this iteration, in order."""
        parts = [read(r.start_row, r.stop_row) for r in self.ranges]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class Feed:
    """Decode rows of the trace, read a block at a time (a slice of a memory map costs microseconds)."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._top_k = trace.top_k
        self._blocks: dict[int, Block] = {}  # by request

    def row(self, ranges: list[Range]) -> Row | None:
        """The expert ids of an iteration that is a single decode token, else None."""
        if len(ranges) > 1:
            return None
        only: Range = ranges[0]
        if only.phase != DECODE or only.stop_row - only.start_row > 1:
            return None
        row = only.start_row
        block: Block | None = self._blocks.get(only.request.index)
        if block is None or not block.first_row <= row < block.first_row + block.n_rows:
            block = self._read(only)
        if row == block.last_row:
            del self._blocks[only.request.index]
        return Row(block, (row - block.first_row) * block.width, self._top_k)

    def rest(self, request: RequestInfo, row: int) -> Block:
        """Decode rows of a request from one on, as many as are read at a time; whoever asks keeps them."""
        block = self._read(Range(request, row, row + 1, DECODE, row - request.first_row))
        del self._blocks[request.index]
        return block

    def _read(self, only: Range) -> Block:
        request, row = only.request, only.start_row
        end = request.first_row + request.prompt_len + request.outputs - 1
        ids = self._trace.experts[row : min(row + BLOCK_ROWS, end)]
        block = self._blocks[request.index] = Block(row, end - 1, ids)
        return block
