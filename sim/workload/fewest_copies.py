"""The fewest copies that let a sequence of steps find the experts it uses, in a given room.

Between two uses of an expert it is either kept, which takes its room all the while, or copied again. So the question is
which of these intervals to keep: as many as fit. Where too many cross a point, the one that ends last goes; intervals
of equal weight leave no better choice (Belady 1966). `docs/bounds.md` has the argument and what the numbers mean.
"""

from __future__ import annotations

from hashlib import blake2b
from heapq import heappop, heappush, heappushpop

import numpy as np
from numpy.typing import NDArray

MOST_KNOWN = 20_000
_KNOWN: dict[bytes, int] = {}


def copies(ids: NDArray[np.int64], stops: list[int], room: int, working: int) -> int:
    """Uses that need a copy (see `kept`), remembered: no figure of a machine has a say in them, and one trace is often
    held against many machines."""
    asked = blake2b(ids.tobytes(), digest_size=16)
    asked.update(np.array([*stops, room, working], dtype=np.int64).tobytes())
    key = asked.digest()
    found = _KNOWN.get(key)
    if found is None:
        if len(_KNOWN) >= MOST_KNOWN:
            _KNOWN.clear()
        found = _KNOWN[key] = len(ids) - sum(kept(ids, stops, room, working))
    return found


def next_uses(ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For uses of experts `ids` in order: where each one is used next (len(ids): nowhere), and every first use."""
    n = len(ids)
    order = np.argsort(ids, kind="stable")
    again = ids[order[1:]] == ids[order[:-1]]
    found = np.full(n, n, dtype=np.int64)
    found[order[:-1][again]] = order[1:][again]
    first = np.ones(n, dtype=bool)
    first[found[found < n]] = False
    return found, np.flatnonzero(first)


def kept(ids: NDArray[np.int64], stops: list[int], room: int, working: int) -> bytearray:
    """Which uses find their expert kept since the use before, or since the start.

    Args:
        ids: expert of every use, step after step, each once per step. stops: where each step ends in `ids`; no step is
            empty. room: experts that fit. working: of these, taken by the expert that runs (1, or 0 where it may run
            elsewhere): what is neither used in a step nor kept across it must fit in the rest.

    Returns:
        1 for a use that needs no copy; the sum is the most there can be.
    """
    following, first = next_uses(ids)
    n, ends = len(ids), following.tolist()
    free = bytearray(n + 1)
    nearest = first[: max(0, room)].tolist()
    for use in nearest:
        free[use] = 1
    heap = [-use for use in reversed(nearest)]  # who ends last is on top; what has ended sinks and is never popped
    size, across, start = len(heap), max(0, room - working), 0
    for stop in stops:
        size -= sum(free[start:stop])
        while size > across:
            free[-heappop(heap)] = 0
            size -= 1
        for end in ends[start:stop]:
            if end < n:
                free[end] = 1
                if size < room:
                    heappush(heap, -end)
                    size += 1
                else:
                    free[-heappushpop(heap, -end)] = 0
        start = stop
    return free[:n]
