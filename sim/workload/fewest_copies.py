"""The fewest copies that let a sequence of steps find the experts it uses, in a given room.

Between two uses of an expert it is either kept, which takes its room all the while, or copied again. So the question is
which of these intervals to keep: as many as fit. Taken in the order in which they end, each one is kept that still
fits; intervals of equal weight leave no better choice (Belady 1966). `docs/bounds.md` has the argument and what the
numbers mean.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence

import numpy as np
from numpy.typing import NDArray

from sim.base.flat import ints, numbers, places


def copies(ids: NDArray[np.int64], stops: NDArray[np.int64], room: int, working: int) -> int:
    """Uses that need a copy; arguments as in `kept`."""
    return len(ids) - kept(ids, stops, room, working).count(1)


def kept(ids: NDArray[np.int64], stops: NDArray[np.int64], room: int, working: int) -> bytearray:
    """Which uses find their expert kept since the use before, or since the start.

    Args:
        ids: expert of every use, step after step, each once per step. stops: where each step ends in `ids`; no step is
            empty. room: experts that fit. working: of these, taken by the expert that runs (1, or 0 where it may run
            elsewhere): what is neither used in a step nor kept across it must fit in the rest.

    Returns:
        1 for a use that needs no copy; the sum is the most there can be.
    """
    found = bytearray(len(ids))
    if room > 0 and len(ids):
        since = ints(int(ids.max()) + 1, room)
        keep(numbers(ids), numbers(stops), since, places(room + len(ids) + len(stops) + 1), room, working > 0, found)
    return found


def keep(
    ids: Sequence[int],
    stops: Sequence[int],
    since: MutableSequence[int],
    before: MutableSequence[int],
    room: int,
    working: bool,
    found: MutableSequence[int],
) -> None:
    """Mark in `found` the uses that `kept` names, each looked at once.

    What is left of the room over a stretch of time that reaches up to now grows with its start. So instants fall into
    blocks, by how many more experts fit from there to now: none in the first block, `room` in the last. An expert is
    kept from an instant of any block but the first, and then its block and all that follow have one less left: the
    block joins the one before, and a new last one begins. Blocks are joined as disjoint sets (Tarjan 1975).

    Args:
        since: instant from which each expert may be kept; `room` at first. before: room for an instant per use, per
            step, and `room` + 1: an earlier one of the same block, itself for a block's first.
    """
    last = room
    for instant in range(room + 1):
        before[instant] = instant
    start = 0
    for step in range(len(stops)):
        stop = stops[step]
        for use in range(start, stop):
            instant = since[ids[use]]
            while before[instant] != instant:
                before[instant] = before[before[instant]]
                instant = before[instant]
            if instant > 0:
                found[use] = 1
                before[instant] = instant - 1
                last += 1
                before[last] = last
        if working:  # one less is left while the step runs
            before[last] = last - 1
            last += 1
            before[last] = last
        for use in range(start, stop):
            since[ids[use]] = last
        start = stop
