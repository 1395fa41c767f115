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
    from collections.abc import Iterable, Iterator, Sequence

    from sim.workload.iterations import RequestInfo
    from traces.format.blocks import Column
    from traces.format.layout import Array, Ints
    from traces.format.reader import Trace

MOST_KNOWN = 512  # requests; others are looked at anew


class Uses:
    """Experts that steps use in turn: their ids, and where each step ends; no step is empty."""

    def __init__(self, ids: Ints, stops: Ints) -> None:
        self.ids, self.stops = ids, stops
        self._copies: dict[tuple[int, int], int] = {}

    def copies(self, room: int, working: int) -> int:
        """Copies no policy can avoid in them (`sim.workload.fewest_copies`)."""
        found = self._copies.get((room, working))
        if found is None:
            found = self._copies[room, working] = copies(self.ids, self.stops, room, working)
        return found


def in_turn(every: Sequence[Uses]) -> Uses:
    """All of them, one after the other."""
    begin = np.cumsum([0, *(len(uses.ids) for uses in every[:-1])])
    stops = [uses.stops + at for uses, at in zip(every, begin, strict=True)]
    return Uses(np.concatenate([uses.ids for uses in every]), np.concatenate(stops))


def used(rows: Array, n_layers: int, n_experts: int) -> tuple[Uses, Ints]:
    """The experts that tokens choose [n, L, K], layer by layer, and how many tokens choose each."""
    ids = rows + np.arange(n_layers, dtype=np.int64)[None, :, None] * n_experts
    needs = np.bincount(ids.ravel(), minlength=n_layers * n_experts)
    per_layer = np.count_nonzero(needs.reshape(n_layers, n_experts), axis=1)
    found = np.flatnonzero(needs)
    return Uses(found, np.cumsum(per_layer)), needs[found]


def most_first(counts: Ints, stops: Ints) -> Ints:
    """Numbers of tokens, those of each layer from the most to the fewest."""
    base = int(counts.max(initial=0)) + 1
    layer = np.repeat(np.arange(len(stops)), np.diff(stops, prepend=0))
    found: Ints = base - 1 - np.sort(layer * base + (base - 1 - counts)) % base
    return found


class Alone:
    """One request, its prefill and then its decode.

    Attributes:
        prefill: the first iteration. counts: there, the tokens of each expert, most first in every layer; `tokens`:
            which numbers of tokens there are. at_first, later: the experts that prefill uses, and decode.
    """

    def __init__(self, trace: Trace, experts: Array | Column, request: RequestInfo) -> None:
        self.request = request
        stop = request.first_row + request.prompt_len
        self.prefill = [Range(request, request.first_row, stop, PREFILL, 0)]
        self.at_first, counts = used(experts[request.first_row : stop], trace.n_layers, trace.n_experts)
        self.counts = most_first(counts, self.at_first.stops)
        self.tokens = frozenset(counts.tolist())
        n, top_k = request.outputs - 1, trace.top_k
        layers = np.arange(trace.n_layers, dtype=np.int64)[None, :, None] * trace.n_experts
        ids = (experts[stop : stop + n] + layers).ravel()
        self.later = Uses(ids, np.arange(top_k, len(ids) + 1, top_k))


def alone(trace: Trace, requests: Sequence[RequestInfo]) -> Iterator[Alone]:
    """Each of them."""
    known = _first(_Known(trace), tuple(requests[:MOST_KNOWN]))
    yield from known
    yield from _each(trace, islice(requests, len(known), None))


def _each(trace: Trace, requests: Iterable[RequestInfo]) -> Iterator[Alone]:
    experts = chosen(trace)
    return (Alone(trace, experts, request) for request in requests)


def chosen(trace: Trace) -> Array | Column:
    """A trace's experts [T, L, K], without the checks that a memory map makes of every slice."""
    return np.asarray(trace.experts) if isinstance(trace.experts, np.memmap) else trace.experts


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
    return list(_each(known.trace, requests))
