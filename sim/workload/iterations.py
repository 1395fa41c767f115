# cython: boundscheck=True, wraparound=True
"""Which tokens run together: requests, token ranges with their phase, and what each layer's gate asks for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sim.base.errors import IllegalDecision
from sim.base.flat import COMPILED

if TYPE_CHECKING:
    from traces.format.reader import Trace

PREFILL, DECODE = "prefill", "decode"


class RequestInfo(NamedTuple):
    """One request as a serving system knows it on arrival (`outputs` is used by the engine alone)."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody asks of a request
    first_row: int
    prompt_len: int
    outputs: int
    task: str
    arrival_s: float | None


class Range(NamedTuple):
    """Rows `[start_row, stop_row)` of one request in one iteration; `context` tokens precede them in the KV cache."""

    request: RequestInfo
    start_row: int
    stop_row: int
    phase: str
    context: int


class Scheduler:
    """Continuous batching, first come first served: a free slot is filled by the next request's prefill, which runs
    as an iteration of its own (prefill first, as vLLM does without chunked prefill); else all active requests decode.

    Args:
        requests: in order of arrival. batch: slots. open_loop: honour arrival times instead of starting at once.
        split: shares a decode step out over passes that run one after the other (`Policy.split_step`).
    """

    def __init__(
        self, requests: Sequence[RequestInfo], batch: int, open_loop: bool = False,
        split: Callable[[list[Range]], list[list[Range]]] | None = None,
    ) -> None:  # fmt: skip
        self._split = split
        self._later: deque[list[Range]] = deque()  # passes of the step that runs
        self._pending = deque(requests)
        self._batch = batch
        self._open_loop = open_loop
        self._active: list[tuple[RequestInfo, int]] = []  # (request, decode rows already run)

    def next(self, now_s: float) -> list[Range] | float | None:
        """The ranges of the next iteration, the time of the next arrival to wait for, or None at the end."""
        if self._later:
            return self._later.popleft()
        if self._pending and len(self._active) < self._batch:
            request = self._pending[0]
            if not self._open_loop or request.arrival_s is None or request.arrival_s <= now_s:
                self._pending.popleft()
                if request.outputs > 1:
                    self._active.append((request, 0))
                stop = request.first_row + request.prompt_len
                return [Range(request, request.first_row, stop, PREFILL, 0)]
            if not self._active:
                return request.arrival_s
        if not self._active:
            return None
        ranges, still = [], []
        for request, done in self._active:
            row = request.first_row + request.prompt_len + done
            ranges.append(Range(request, row, row + 1, DECODE, request.prompt_len + done))
            if done + 2 < request.outputs:
                still.append((request, done + 1))
        self._active = still
        if self._split is not None and len(ranges) > 1:
            passes = self._split(ranges)
            if not _shares_out(passes, ranges):
                raise IllegalDecision(f"split_step, got {passes!r}: every token of a decode step runs in one pass")
            self._later.extend([list(one) for one in passes])
            return self._later.popleft()
        return ranges


def _shares_out(passes: list[list[Range]], ranges: list[Range]) -> bool:
    """Whether passes hold every range of a step once."""
    try:
        return all(passes) and sorted([r for one in passes for r in one]) == sorted(ranges)
    except (TypeError, ValueError):
        return False


class Block:
    """Decode rows of one request: expert ids [n, L, K], one after the other."""

    def __init__(self, first_row: int, ids: np.ndarray) -> None:
        self.first_row = first_row
        self.n_rows = len(ids)
        self.width = ids[0].size
        flat = np.ascontiguousarray(ids, dtype=np.int64).reshape(-1)
        self.ids: Any = flat if COMPILED else flat.tolist()


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

    Shapes: n tokens, L MoE layers, K experts per token. Scores are exact integers held in float64 (see FORMAT.md).
    """

    recorded = True  # all its layers are known beforehand; not so where a model routes itself as it runs

    def __init__(
        self, index: int, ranges: list[Range], trace: Trace, row: Row | None = None
    ) -> None:  # `row`: the single decode row, when there is just one token
        self.index = index
        self.ranges = ranges
        first = ranges[0]
        self.phase = first.phase
        if len(ranges) == 1:
            self.n_tokens = first.stop_row - first.start_row
        else:
            self.n_tokens = sum([r.stop_row - r.start_row for r in ranges])
        self._trace = trace
        self.token = row
        self._rows: list[list[int]] | None = None
        self._counts: list[list[int]] | None = None

    @property
    def row(self) -> list[list[int]] | None:
        """The ids of a single decode token by layer; None where several tokens run together."""
        if self._rows is None and self.token is not None:  # asked layer by layer, made once
            self._rows = [self.token.layer(layer) for layer in range(self._trace.n_layers)]
        return self._rows

    def chosen(self, layer: int) -> dict[int, int]:
        """Expert -> tokens routed to it: router order for a single token, ascending ids otherwise."""
        if self.token is not None:
            return dict.fromkeys(self.token.layer(layer), 1)
        if self._counts is None:
            shape = (self._trace.n_layers, self._trace.n_experts)
            counts = np.zeros(shape, dtype=np.int64)
            layers = np.arange(shape[0])[None, :, None]
            for r in self.ranges:
                np.add.at(counts, (layers, self._trace.experts[r.start_row : r.stop_row]), 1)
            self._counts = counts.tolist()
        return {expert: n for expert, n in enumerate(self._counts[layer]) if n}

    def ids(self, layer: int) -> np.ndarray:
        """Chosen experts per token, router order, [n, K]."""
        if self.token is not None:  # a single token, the common case, without touching the trace again
            return np.array([self.token.layer(layer)], dtype=np.int64)
        parts = [self._trace.experts[r.start_row : r.stop_row, layer] for r in self.ranges]
        return np.concatenate(parts).astype(np.int64)

    def all_ids(self) -> np.ndarray:
        """Chosen experts of every layer, router order, [n, L, K]."""
        return self.gather(lambda a, b: self._trace.experts[a:b]).astype(np.int64)

    def gather(self, read: Callable[[int, int], np.ndarray]) -> np.ndarray:
        """Concatenate `read(start_row, stop_row)` over the ranges: the rows of this iteration, in order."""
        parts = [read(r.start_row, r.stop_row) for r in self.ranges]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class Feed:
    """Decode rows of the trace, read a block at a time (a slice of a memory map costs microseconds)."""

    BLOCK_ROWS = 256

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._top_k = trace.top_k
        self._blocks: dict[int, Block] = {}  # by request

    def row(self, request: int, row: int, last_row: int) -> Row:
        """Expert ids of one decode row."""
        block = self._blocks.get(request)
        if block is None or not block.first_row <= row < block.first_row + block.n_rows:
            stop = min(row + self.BLOCK_ROWS, last_row)
            block = self._blocks[request] = Block(row, self._trace.experts[row:stop])
        if row == last_row - 1:
            self._blocks.pop(request, None)
        return Row(block, (row - block.first_row) * block.width, self._top_k)


def decode_row(feed: Feed, ranges: list[Range]) -> Row | None:
    """The feed's row when the iteration is a single decode token, else None."""
    if len(ranges) == 1:
        only = ranges[0]
        if only.phase == DECODE:
            request = only.request
            return feed.row(request.index, only.start_row, request.first_row + request.prompt_len + request.outputs - 1)
    return None
