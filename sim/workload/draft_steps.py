"""Decode steps with drafts: their rows, how many of their tokens are taken, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from sim.workload.draft_options import ELSEWHERE, Draft
from sim.workload.iterations import DECODE, PREFILL, Range

if TYPE_CHECKING:
    from sim.base.quantities import Source
    from sim.workload.iterations import Iteration, RequestInfo

_STREAM = 0xD4AF7  # draws of drafts, apart from those of arrivals and policies
_PLACES = 1  # of it, where rejected drafts stand: a draw that has rejected one is known to be high


class Drafts:
    """The decode steps of one run.

    Whether a draft is taken is drawn by the seed, the request and the token's place: the same for every policy, every
    machine and every k, so that a longer draft takes whatever a shorter one takes.

    Args:
        recorded: counts that `read_accepted` has read. seconds: what each of the drafted tokens of an iteration takes.
    """

    def __init__(
        self,
        draft: Draft,
        seed: int,
        recorded: Sequence[Sequence[int]] = (),
        seconds: Callable[[Iteration, int], list[float]] | None = None,
        basis: Source = "assumed",
    ) -> None:
        self.draft = draft
        self.k = draft.k
        self.basis: Source = basis
        self._seed = seed
        self._recorded = recorded
        self._seconds = seconds
        self.took_s = 0.0  # drafting, so far
        self._draws: dict[tuple[int, ...], list[float]] = {}
        self._steps: dict[int, int] = {}

    def step(self, request: RequestInfo, row: int, stop_row: int) -> list[Range]:
        """The rows of a request's next step: the last range is what is taken of it, and goes on at `taken_row`.

        A draft is no longer than what is left of the answer.
        """
        context, n_drafted = row - request.first_row, min(self.k, stop_row - row - 1)
        n_rejected = n_drafted - self._taken(request, row, n_drafted)
        stop = row + 1 + n_drafted
        found: list[Range] = []
        if n_rejected and self.draft.rejected == ELSEWHERE:
            stop -= n_rejected
            first = request.first_row + request.prompt_len
            at = first + int(self._of(request, _PLACES)[row - first] * (stop_row - first - n_rejected + 1))
            found.append(Range(request, at, at + n_rejected, DECODE, context + stop - row, True, n_rejected))
            n_rejected = 0
        found.append(Range(request, row, stop, DECODE, context, True, n_rejected))
        return found

    def each_s(self, iteration: Iteration) -> list[float]:
        """What each of the tokens that are drafted for an iteration takes, one after the other."""
        if self._seconds is None:
            return []
        rows: dict[int, int] = {}
        for r in iteration.ranges:
            if r.phase != PREFILL:
                rows[r.request.index] = rows.get(r.request.index, -1) + r.stop_row - r.start_row
        found = self._seconds(iteration, max(rows.values(), default=0))
        self.took_s += math.fsum(found)
        return found

    def _taken(self, request: RequestInfo, row: int, n_drafted: int) -> int:
        if self._recorded:
            at = self._steps.get(request.index)
            if at is None:
                at = 0 if len(self._recorded) > 1 else int(self._of(request)[0] * len(self._recorded[0]))
            counts = self._recorded[request.index % len(self._recorded)]
            self._steps[request.index] = at + 1
            return min(counts[at % len(counts)], n_drafted)
        draws, first = self._of(request), row + 1 - request.first_row - request.prompt_len
        for position in range(n_drafted):
            if draws[first + position] >= self.draft.chance(position):
                return position
        return n_drafted

    def _of(self, request: RequestInfo, *stream: int) -> list[float]:
        """A draw for each token that is decoded, as an input."""
        found = self._draws.get((request.index, *stream))
        if found is None:
            source = np.random.default_rng((self._seed, _STREAM, request.index, *stream))
            found = self._draws[request.index, *stream] = source.random(max(1, request.outputs)).tolist()
        return found


class Drafted:
    """What came of drafts: counted as steps end."""

    def __init__(self, of: Sequence[Drafts] = ()) -> None:
        self._of = of
        self.n_steps = 0
        self.n_drafted = 0
        self.n_accepted = 0
        self.tried: list[int] = []  # by position, drafts all before which were taken
        self.taken: list[int] = []
        self.n_beside = 0  # tokens put out beside prompts
        self._elsewhere = 0  # rows of the step that runs which stand elsewhere

    def verified(self, r: Range, by_itself: bool) -> None:
        """A range of a decode step is over, without prompts beside it or with some; one whose rows stand elsewhere
        belongs to the next."""
        n_rows = r.stop_row - r.start_row
        if r.n_rejected == n_rows:
            self._elsewhere = n_rows
            return
        n_drafted, n_accepted = n_rows - 1 + self._elsewhere, n_rows - 1 - r.n_rejected
        self._elsewhere = 0
        self.n_steps += 1
        self.n_drafted += n_drafted
        self.n_accepted += n_accepted
        self.n_beside += 0 if by_itself else n_accepted + 1
        while len(self.tried) < n_drafted:
            self.tried.append(0)
            self.taken.append(0)
        for position in range(min(n_accepted + 1, n_drafted)):
            self.tried[position] += 1
            self.taken[position] += position < n_accepted

    @property
    def took_s(self) -> float:
        """Drafting, in all."""
        return math.fsum(drafts.took_s for drafts in self._of)

    @classmethod
    def summed(cls, several: Sequence[Drafted]) -> Drafted:
        """Of several replicas."""
        found = cls([drafts for one in several for drafts in one._of])
        for one in several:
            found.n_steps += one.n_steps
            found.n_drafted += one.n_drafted
            found.n_accepted += one.n_accepted
            found.n_beside += one.n_beside
            while len(found.tried) < len(one.tried):
                found.tried.append(0)
                found.taken.append(0)
            for position, (tried, taken) in enumerate(zip(one.tried, one.taken, strict=True)):
                found.tried[position] += tried
                found.taken[position] += taken
        return found
