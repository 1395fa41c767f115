"""The first decision in which two runs differ, and what led there: both tables go by side by side, row by row."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.studies.diff.tables import Decision, decisions_of, file_of, rows

if TYPE_CHECKING:
    from sim.studies.diff.side import Side

BEFORE, AFTER = 5, 3
RUNS = ("gpu", "cpu", "cpu_ahead")
SAME_REQUESTS = (("trace", "trace_sha256"), ("split of it", "split"))
COMPOSITION = ["phase", "n_requests", "n_tokens"]


class Made(NamedTuple):
    """A decision where two runs part, and the uses of its expert around it: iterations of this run, None for none."""

    decision: Decision
    used_before: int | None
    used_next: int | None


class FirstDifference(NamedTuple):
    """Where two runs part.

    Attributes:
        at: the number of the decision, from 0. a, b: what either decides there; None: it decides nothing any more.
        phase, request: of the iteration, where they are known.
        before: decisions that both made last. then_a, then_b: what follows on either side.
    """

    at: int
    a: Made | None
    b: Made | None
    phase: str | None
    request: int | None
    before: list[Decision]
    then_a: list[Decision]
    then_b: list[Decision]


def first_difference(a: Side, b: Side) -> tuple[FirstDifference | None, str]:
    """Where they part, None where they do not; and why that cannot be said, empty where it can.

    Raises:
        BadInput: a table that cannot be read.
    """
    for what, name in SAME_REQUESTS:
        if getattr(a.told, name) != getattr(b.told, name):
            return None, f"the {what} differs, so that iterations are not the same ones"
    for which, side in (("A", a), ("B", b)):
        if side.tables is None or decisions_of(side.tables, side.told.run_id) is None:
            return None, f"{which} has no table of decisions"
    parted = _parted(_stream(a), _stream(b))
    if parted is None:
        return None, ""
    at, own, other, before, used, (then_a, then_b) = parted
    composed = _composed_alike(a, b)
    if min(one.iteration for one in (own, other) if one is not None) >= composed:
        return None, (
            f"from iteration {composed:,} on, other requests or tokens run together in A than in B; before it, every "
            "decision is the same"
        )
    phase, request = _when(a, own or other)
    made = [
        None if one is None else Made(one, used.get((one.layer, one.expert)), _used_next(side, one, at))
        for side, one in ((a, own), (b, other))
    ]
    return FirstDifference(at, made[0], made[1], phase, request, before, then_a, then_b), ""


def _stream(side: Side) -> Iterator[Decision]:
    assert side.tables is not None
    found = decisions_of(side.tables, side.told.run_id)
    assert found is not None
    return found


def _composed_alike(a: Side, b: Side) -> float:
    """How many iterations from the first on are composed alike; infinity where all are, or nobody knows."""
    found = []
    for side in (a, b):
        assert side.tables is not None
        file = file_of(side.tables, "iterations", side.told.run_id)
        if file is None:
            return math.inf
        found.append(rows(file, COMPOSITION, str(side.tables / "iterations.parquet")))
    return next((at for at, (own, other) in enumerate(zip_longest(*found)) if own != other), math.inf)


def _parted(first: Iterator[Decision], second: Iterator[Decision]) -> Any:
    before: deque[Decision] = deque(maxlen=BEFORE)
    used: dict[tuple[int, int], int] = {}
    for at, (own, other) in enumerate(zip_longest(first, second)):
        if own != other:
            return at, own, other, list(before), used, (list(islice(first, AFTER)), list(islice(second, AFTER)))
        before.append(own)
        if own.kind in RUNS:
            used[own.layer, own.expert] = own.iteration
    return None


def _used_next(side: Side, one: Decision, at: int) -> int | None:
    """The next iteration of this run in which an expert is computed."""
    for found in islice(_stream(side), at + 1, None):
        if found.kind in RUNS and (found.layer, found.expert) == (one.layer, one.expert):
            return found.iteration
    return None


def _when(side: Side, one: Decision) -> tuple[str | None, int | None]:
    """The phase of a decision's iteration, and whose it is where it is one request's."""
    assert side.tables is not None
    file = file_of(side.tables, "iterations", side.told.run_id)
    if file is None:
        return None, None
    where = str(side.tables / "iterations.parquet")
    for index, phase, n_requests, start_s in rows(file, ["iteration", "phase", "n_requests", "start_s"], where):
        if index == one.iteration:
            return phase, _of_request(side, start_s) if n_requests == 1 else None
    return None, None


def _of_request(side: Side, start_s: float) -> int | None:
    running = [
        one.request
        for one in (side.requests or {}).values()
        if one.start_s is not None and one.last_token_s is not None and one.start_s <= start_s < one.last_token_s
    ]
    return running[0] if len(running) == 1 else None
