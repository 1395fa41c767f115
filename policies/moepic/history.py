"""What MoEpic remembers of the tokens it has served: cache priorities, and the counts its configurator needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.lcp import CHUNK_ROWS, Priorities
from policies.moepic.config import Statistics
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
        self._learns = False  # serves the store split: priorities follow when tokens are counted
        self._last = len(priorities.keys) - 1
        self._predicted: list[FloatArray] = []
        self._tokens: list[tuple[Any, ...]] = []  # not counted yet, by iteration: chosen, and what was foretold
        self._n_kept = 0
        self._wraps: dict[int, FloatArray] = {}  # request -> what its last token predicts for layer 0 of the next

    @property
    def mean_context(self) -> int:
        """Tokens before a token, on average."""
        return self._contexts // max(1, self.statistics.n_tokens)

    # -- the store split, a request at a time -----------------------------------------------------------------------

    def learn(self, store: StoreSplit, served: Callable[[], object]) -> None:
        """Serve the store split; `served` is told of each request's end."""
        self._learns = True
        for request in store.requests:
            prompt_end = request.first_row + request.prompt_len
            end = prompt_end + request.outputs - 1
            self._rows(store, request.first_row, prompt_end, False)
            self._rows(store, prompt_end, end, True)
            n_tokens = end - request.first_row
            self._contexts += n_tokens * (n_tokens - 1) // 2
            served()
        self.count()
        self._learns = False

    def _rows(self, store: StoreSplit, start: int, stop: int, generated: bool) -> None:
        """Tokens that follow one another, each predicting layer 0 of the next."""
        wrap: FloatArray | None = None
        for a in range(start, stop, CHUNK_ROWS):
            b = min(a + CHUNK_ROWS, stop)
            ids = np.asarray(store.trace.experts[a:b], dtype=np.int64)
            foretold: tuple[FloatArray, ...] = ()
            if self._predicts and generated:
                scores = np.asarray(store.trace.next_scores(1, a, b))
                first = np.zeros((1, scores.shape[2])) if wrap is None else wrap[None]
                foretold = (scores, np.concatenate([first, scores[:-1, -1]]))
                wrap = scores[-1, -1]
            self._tokens.append((ids, *foretold))
            self._n_kept += len(ids)
            self.since += len(ids) if self._counts else 0
            if self._n_kept >= CHUNK_ROWS:
                self.count()

    # -- the run, an iteration at a time ----------------------------------------------------------------------------

    def begin(self) -> None:
        """An iteration starts: what its tokens find is counted by the priorities before it."""
        self._predicted = []
        if self._counts and not self._tokens:
            self._before = self.priorities.copy()

    def observe(self, gate: Gate) -> None:
        """A gate has chosen."""
        row, layer = gate.iteration.row, gate.layer
        self.priorities.observe(layer, [row[layer]] if row is not None else gate.ids.tolist())
        if self._predicts and gate.phase == DECODE:
            if not gate.iteration.recorded:
                self._predicted.append(gate.next_scores(1))
            elif layer == self._last:  # all have spoken by now
                self._predicted = [gate.at_once(self._whole, "next_scores_1")]

    def _whole(self, scores: FloatArray) -> list[FloatArray | None]:
        return [None] * self._last + [scores]

    def end(self, iteration: Iteration) -> None:
        """An iteration is over."""
        if not self._counts:
            return
        for r in iteration.ranges:
            n = r.stop_row - r.start_row
            self._contexts += n * r.context + n * (n - 1) // 2
        row = iteration.row
        ids = row if row is not None else np.stack([iteration.ids(layer) for layer in range(self._last + 1)], axis=1)
        self._tokens.append(([ids] if row is not None else ids, *self._foretold(iteration)))
        self.since += iteration.n_tokens
        self._n_kept += iteration.n_tokens
        if self._n_kept >= CHUNK_ROWS:
            self.count()

    def _foretold(self, iteration: Iteration) -> tuple[FloatArray, ...]:
        """What was predicted of the iteration's tokens: by each for the next layer [n, L, E], and for layer 0 by the
        token before each [n, E]; nothing of prompts."""
        if not self._predicted:
            for r in iteration.ranges:  # a token decoded beside a prompt says nothing of the one after it
                self._wraps.pop(r.request.index, None)
            return ()
        scores = self._predicted[0] if len(self._predicted) == 1 else np.stack(self._predicted, axis=1)
        wraps, at = np.zeros((len(scores), scores.shape[2])), 0
        for r in iteration.ranges:
            wrap = self._wraps.get(r.request.index)
            if wrap is not None:
                wraps[at] = wrap  # drafts after it run beside it: nobody has predicted their first layer
            n_taken = r.taken_row - r.start_row
            if n_taken:
                self._wraps[r.request.index] = scores[at + n_taken - 1, -1]
            at += r.stop_row - r.start_row
        return scores, wraps

    def count(self) -> None:
        """Count the tokens kept since the last time: together, since one after the other costs far more."""
        if not self._tokens:
            return
        ids = np.concatenate([np.asarray(tokens, dtype=np.int64) for tokens, *_ in self._tokens])
        if any(foretold for _, *foretold in self._tokens):
            n_experts = self.priorities.n_experts
            scores, wraps, known = [], [], []
            for tokens, *foretold in self._tokens:
                n = len(tokens)
                known.append(np.full(n, bool(foretold)))
                scores.append(foretold[0] if foretold else np.zeros((n, self._last + 1, n_experts)))
                wraps.append(foretold[1] if foretold else np.zeros((n, n_experts)))
            self._record(self._before, ids, np.concatenate(scores), np.concatenate(wraps), np.concatenate(known))
        else:
            self._record(self._before, ids)
        if self._learns:
            self.priorities.observe_all(ids)
        self._tokens.clear()
        self._n_kept = 0

    def forget(self, request: int) -> None:
        """A request is over: nothing follows its last token."""
        self._wraps.pop(request, None)

    def _record(
        self,
        before: Priorities,
        ids: IntArray,
        scores: FloatArray | None = None,
        wraps: FloatArray | None = None,
        predicted: NDArray[np.bool_] | None = None,
    ) -> None:
        """Count tokens [n, L, K].

        Args:
            scores: what each predicts for the layer after each, [n, L, E]. wraps: what the token before each predicts
                for layer 0, [n, E], zeros where there is none. predicted: the tokens that have scores [n]; None: all.
        """
        if not self._counts:
            return
        if scores is None or wraps is None:
            self.statistics.record(before, ids, None, np.zeros(ids.shape[:2], dtype=bool))
            return
        known = np.ones(ids.shape[:2], dtype=bool)
        known[:, 0] = wraps.any(axis=1)
        if predicted is not None:
            known &= predicted[:, None]
        self.statistics.record(before, ids, np.concatenate([wraps[:, None], scores[:, :-1]], axis=1), known)
