"""The first decision in which two runs differ, and what led there: both tables go by side by side, row by row."""

from __future__ import annotations

import math
from collections import deque
from itertools import chain, islice, starmap, zip_longest
from typing import TYPE_CHECKING

from msgspec import Struct

from sim.studies.diff.tables import rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sim.studies.diff.side import Side

BEFORE, AFTER = 5, 3
RUNS = ("gpu", "cpu", "cpu_ahead")
SAME_REQUESTS = (("trace", "trace_sha256"), ("split of it", "split"))
COMPOSITION = ["phase", "n_requests", "n_tokens"]


class Decision(Struct, frozen=True):
    """One row of `decisions`."""

    iteration: int
    layer: int
    expert: int
    kind: str


class Made(Decision, frozen=True):
    """A decision where two runs part, and the uses of its expert around it: iterations of this run, None for none."""

    used_before: int | None
    used_next: int | None


class FirstDifference(Struct, frozen=True):
    """Where two runs part.

    Attributes:
        at: the number of the decision, from 0. phase, request: of the iteration, where they are known.
        a, b: what either decides there; None: it decides nothing any more.
        before: decisions that both made last. then_a, then_b: what follows on either side.
    """

    at: int
    phase: str | None
    request: int | None
    a: Made | None
    b: Made | None
    before: list[Decision]
    then_a: list[Decision]
    then_b: list[Decision]


def first_difference(a: Side, b: Side) -> tuple[FirstDifference | None, str]:
    """Where they part, None where they do not; and why that cannot be said, empty where it can.

    Raises:
        BadInput: a table that cannot be read.
    """
    for what, name in SAME_REQUESTS:
        if getattr(a.result, name) != getattr(b.result, name):
            return None, f"the {what} differs, so that iterations are not the same ones"
    first, second = (_decisions(side) for side in (a, b))
    if first is None or second is None:
        return None, f"{'A' if first is None else 'B'} has no table of decisions"
    before: deque[Decision] = deque(maxlen=BEFORE)
    used: dict[tuple[int, int], int] = {}
    for at, (own, other) in enumerate(zip_longest(first, second)):  # noqa: B007
        if own != other:
            break
        before.append(own)
        if own.kind in RUNS:
            used[own.layer, own.expert] = own.iteration
    else:
        return None, ""
    composed = _composed_alike(a, b)
    if min(one.iteration for one in (own, other) if one is not None) >= composed:
        return None, (
            f"from iteration {composed:,} on, other requests or tokens run together in A than in B; before it, every "
            "decision is the same"
        )
    phase, request = _when(a, (own or other).iteration)
    then_a, then_b = list(islice(first, AFTER)), list(islice(second, AFTER))
    made = [
        None if one is None else _made(one, used.get((one.layer, one.expert)), later)
        for one, later in ((own, chain(then_a, first)), (other, chain(then_b, second)))
    ]
    return FirstDifference(at, phase, request, made[0], made[1], list(before), then_a, then_b), ""


def _decisions(side: Side) -> Iterator[Decision] | None:
    """In order; None where no table holds them. Raises BadInput."""
    found = rows(side.tables, "decisions", side.result.run_id, Decision.__struct_fields__)
    return None if found is None else starmap(Decision, found)


def _composed_alike(a: Side, b: Side) -> float:
    """How many iterations from the first on are composed alike; infinity where all are, or nobody knows."""
    own, other = (rows(side.tables, "iterations", side.result.run_id, COMPOSITION) for side in (a, b))
    if own is None or other is None:
        return math.inf
    return next((at for at, (here, there) in enumerate(zip_longest(own, other)) if here != there), math.inf)


def _made(one: Decision, used_before: int | None, later: Iterable[Decision]) -> Made:
    """With the next iteration of this run in which its expert is computed."""
    alike = (found for found in later if found.kind in RUNS and (found.layer, found.expert) == (one.layer, one.expert))
    used_next = next((found.iteration for found in alike), None)
    return Made(one.iteration, one.layer, one.expert, one.kind, used_before, used_next)


def _when(side: Side, iteration: int) -> tuple[str | None, int | None]:
    """The phase of an iteration, and whose it is where it is one request's."""
    found = rows(side.tables, "iterations", side.result.run_id, ["iteration", "phase", "n_requests", "start_s"])
    for index, phase, n_requests, start_s in found or ():
        if index == iteration:
            running = [
                one.request
                for one in (side.requests or {}).values()
                if None not in (one.start_s, one.last_token_s) and one.start_s <= start_s < one.last_token_s
            ]
            return phase, running[0] if n_requests == len(running) == 1 else None
    return None, None
