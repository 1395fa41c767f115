"""Where tokens of each id were routed before: a forecast of a token's experts in all layers from its id alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sim.workload.learn_split import no_store

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sim.workload.iterations import Iteration
    from sim.workload.learn_split import StoreSplit

PRIOR = 2  # tokens of average routing added to each id's own: few enough that one sighting outweighs popularity


class TokenPaths:
    """Where tokens of each id were routed on the store split; a forecast mixes in the average of all tokens.

    Args:
        who: who learns it, and `rest`: another way out, for the refusal.

    Raises:
        BadInput: the trace has no store split.
    """

    def __init__(self, store: StoreSplit, who: str, rest: str = "") -> None:
        trace = store.trace
        if not store:
            raise no_store(trace, f"{who} learns there where tokens of each id are routed", rest)
        self.n_experts = trace.n_experts
        self._tokens, self._top_k = trace.token_ids, trace.top_k
        self._known: dict[int, NDArray[np.int64]] = {}
        self._named: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        self._popular: NDArray[np.int64] = np.zeros((trace.n_layers, trace.n_experts), dtype=np.int64)
        layers = np.arange(trace.n_layers)[:, None]
        for request in store.requests:
            stop = request.first_row + request.prompt_len + request.outputs - 1
            ids = trace.experts[request.first_row : stop].astype(np.int64)
            for token, row in zip(self._tokens[request.first_row : stop].tolist(), ids, strict=True):
                counts = self._known.setdefault(token, np.zeros_like(self._popular))
                counts[layers, row] += 1
        for counts in self._known.values():
            self._popular += counts

    def forecast(self, token: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(ids, scores), both [L, K], best first, ties to the lowest id; scores are integers of one scale per layer."""
        found = self._named.get(token)
        if found is None:
            scores = PRIOR * self._popular
            if token in self._known:
                scores = scores + self._known[token] * self._popular.sum(axis=1, keepdims=True)
            ids = np.argsort(-scores, axis=1, kind="stable")[:, : self._top_k]
            found = self._named[token] = (ids, np.take_along_axis(scores, ids, 1))
        return found

    def paths(self, rows: list[int]) -> NDArray[np.int64]:
        """Experts foretold for the tokens of some rows, [n, L, K]."""
        return np.stack([self.forecast(int(self._tokens[row]))[0] for row in rows])

    def of(self, iteration: Iteration) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Forecasts of an iteration's tokens, [n, L, K] each."""
        rows = [self.forecast(int(t)) for r in iteration.ranges for t in self._tokens[r.start_row : r.stop_row]]
        return np.stack([ids for ids, _ in rows]), np.stack([scores for _, scores in rows])
