"""What requests that are served alone ask for, one after the other: the part of a lower bound that no machine decides.

Remembered, since one workload is often held against many machines.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from sim.workload.fewest_copies import copies
from sim.workload.iterations import PREFILL, Range

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from sim.workload.iterations import RequestInfo
    from traces.format.reader import Trace

MOST_KNOWN = 512  # requests; others are looked at anew


class Uses:
    """Experts that steps use in turn: their ids, and where each step ends."""

    def __init__(self, ids: NDArray[np.int64], stops: list[int]) -> None:
        self.ids, self.stops = ids, stops
        self._copies: dict[tuple[int, int], int] = {}

    def copies(self, room: int, working: int) -> int:
        """Copies no policy can avoid in them (`sim.workload.fewest_copies`)."""
        found = self._copies.get((room, working))
        if found is None:
            found = copies(self.ids, self.stops, room, working) if len(self.ids) else 0
            self._copies[room, working] = found
        return found


def in_turn(every: Sequence[Uses]) -> Uses:
    """All of them, one after the other."""
    stops: list[int] = []
    at = 0
    for uses in every:
        stops += [at + stop for stop in uses.stops]
        at += len(uses.ids)
    return Uses(np.concatenate([uses.ids for uses in every]), stops)


class Alone:
    """One request, its prefill and then its decode.

    Attributes:
        prefill: the first iteration. counts: there, per layer, the tokens of each expert, most first; `tokens`: which
            numbers of tokens there are. at_first, later: the experts that prefill uses, and decode.
    """

    def __init__(self, trace: Trace, request: RequestInfo) -> None:
        self.request = request
        stop = request.first_row + request.prompt_len
        self.prefill = [Range(request, request.first_row, stop, PREFILL, 0)]
        needs = np.zeros((trace.n_layers, trace.n_experts), dtype=np.int64)
        chosen = trace.experts[request.first_row : stop]
        np.add.at(needs, (np.arange(trace.n_layers)[None, :, None], chosen), 1)
        self.counts = [sorted((n for n in row if n), reverse=True) for row in needs.tolist()]
        self.tokens = frozenset(n for row in self.counts for n in row)
        ends = np.cumsum([len(row) for row in self.counts])
        self.at_first = Uses(np.flatnonzero(needs), ends.tolist())
        n, top_k = request.outputs - 1, trace.top_k
        layers = np.arange(trace.n_layers, dtype=np.int64)[None, :, None] * trace.n_experts
        ids = (trace.experts[stop : stop + n].astype(np.int64) + layers).ravel()
        self.later = Uses(ids, list(range(top_k, len(ids) + 1, top_k)))


def alone(trace: Trace, requests: Sequence[RequestInfo]) -> Iterator[Alone]:
    """Each of them."""
    known = _first(_Known(trace), tuple(requests[:MOST_KNOWN]))
    yield from known
    for request in islice(requests, len(known), None):
        yield Alone(trace, request)


class _Known:
    """A trace by what it holds."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Known) and other.trace.sha256 == self.trace.sha256

    def __hash__(self) -> int:
        return hash(self.trace.sha256)


@lru_cache(maxsize=2)
def _first(known: _Known, requests: tuple[RequestInfo, ...]) -> list[Alone]:
    return [Alone(known.trace, request) for request in requests]
