"""What MoEpic remembers of the tokens it has served: cache priorities, and the counts its configurator needs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from policies._moepic_config import Statistics
from policies._priority import CHUNK_ROWS, Priorities
from sim.policy import DECODE, Gate, Iteration, StoreSplit

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class History:
    """Tokens served so far, of the store split and of the run.

    Args:
        counts: keep the configurator's counts. predicts: the trace records predictions, of generated tokens.

    Attributes:
        since: tokens since the configurator ran.
    """

    def __init__(self, priorities: Priorities, statistics: Statistics, counts: bool, predicts: bool) -> None:
        self.priorities = priorities
        self.statistics = statistics
        self.since = 0
        self._counts = counts
        self._predicts = counts and predicts
        self._contexts = 0  # tokens before each token, summed
        self._before = priorities
        self._predicted: list[FloatArray] = []
        self._wraps: dict[int, FloatArray] = {}  # request -> what its last token predicts for layer 0 of the next

    @property
    def mean_context(self) -> int:
        """Tokens before a token, on average."""
        return self._contexts // max(1, self.statistics.n_tokens)

    # -- the store split, a request at a time -----------------------------------------------------------------------

    def learn(self, store: StoreSplit, served: Callable[[], object]) -> None:
        """Serve the store split; `served` is told of each request's end."""
        for request in store.requests:
            prompt_end = request.first_row + request.prompt_len
            end = prompt_end + request.outputs - 1
            self._rows(store, request.first_row, prompt_end, False)
            self._rows(store, prompt_end, end, True)
            n_tokens = end - request.first_row
            self._contexts += n_tokens * (n_tokens - 1) // 2
            served()

    def _rows(self, store: StoreSplit, start: int, stop: int, generated: bool) -> None:
        """Tokens that follow one another, each predicting layer 0 of the next."""
        wrap: FloatArray | None = None
        for a in range(start, stop, CHUNK_ROWS):
            b = min(a + CHUNK_ROWS, stop)
            ids = store.trace.experts[a:b].astype(np.int64)
            if self._predicts and generated:
                scores = store.trace.next_scores(1, a, b)
                first = np.zeros((1, scores.shape[2])) if wrap is None else wrap[None]
                self._record(self.priorities, ids, scores, np.concatenate([first, scores[:-1, -1]]))
                wrap = scores[-1, -1]
            else:
                self._record(self.priorities, ids)
            for layer in range(ids.shape[1]):
                self.priorities.observe(layer, ids[:, layer].tolist())

    # -- the run, an iteration at a time ----------------------------------------------------------------------------

    def begin(self) -> None:
        """An iteration starts: what its tokens find is counted by the priorities before it."""
        self._predicted = []
        if self._counts:
            self._before = self.priorities.copy()

    def observe(self, gate: Gate) -> None:
        """A gate has chosen."""
        row = gate.iteration.row
        self.priorities.observe(gate.layer, [row[gate.layer]] if row is not None else gate.ids.tolist())
        if self._predicts and gate.phase == DECODE:
            self._predicted.append(gate.next_scores(1))

    def end(self, iteration: Iteration) -> None:
        """An iteration is over."""
        if not self._counts:
            return
        for r in iteration.ranges:
            n = r.stop_row - r.start_row
            self._contexts += n * r.context + n * (n - 1) // 2
        ids = np.stack([iteration.ids(layer) for layer in range(len(self.priorities.keys))], axis=1)
        if not self._predicted:
            self._record(self._before, ids)
            return
        scores = np.stack(self._predicted, axis=1)
        none = np.zeros(scores.shape[2])
        wraps = [self._wraps.get(r.request.index, none) for r in iteration.ranges]
        self._wraps.update((r.request.index, scores[at, -1]) for at, r in enumerate(iteration.ranges))
        self._record(self._before, ids, scores, np.stack(wraps))

    def forget(self, request: int) -> None:
        """A request is over: nothing follows its last token."""
        self._wraps.pop(request, None)

    def _record(
        self, before: Priorities, ids: IntArray, scores: FloatArray | None = None, wraps: FloatArray | None = None
    ) -> None:
        """Count tokens [n, L, K].

        Args:
            scores: what each predicts for the layer after each, [n, L, E]. wraps: what the token before each predicts
                for layer 0, [n, E], zeros where there is none.
        """
        if not self._counts:
            return
        self.since += len(ids)
        if scores is None or wraps is None:
            self.statistics.record(before, ids, None, np.zeros(ids.shape[:2], dtype=bool))
            return
        known = np.ones(ids.shape[:2], dtype=bool)
        known[:, 0] = wraps.any(axis=1)
        self.statistics.record(before, ids, np.concatenate([wraps[:, None], scores[:, :-1]], axis=1), known)
