"""Which rows of an iteration go to which expert: forced from a trace, or the model's own choice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from sim.real.machine.decoder import Decoder
    from sim.workload.iterations import Iteration
    from traces.format.reader import Trace


class Routing:
    """Forces the trace's routing. Expert weights are the trace's where it has them, else equal shares."""

    def __init__(self, trace: Trace, torch: Any, dtype: Any, vocab: int, precision: str) -> None:
        self.trace, self.torch, self.dtype = trace, torch, dtype
        self.vocab, self.precision = vocab, precision
        self._weighted = "weights" in trace.levels_prefill
        self._tokens = "token_ids" in trace.levels_prefill
        self._iteration: Iteration | None = None
        self._layer = -1
        self._ids: np.ndarray = np.zeros((0, 0), dtype=np.int64)
        self._weights: np.ndarray = np.zeros((0, 0))
        self._all_weights: np.ndarray | None = None

    def begin(self, iteration: Iteration) -> None:
        """Forget the iteration before."""
        self._iteration, self._layer, self._all_weights = iteration, -1, None
        if self._weighted:
            self._all_weights = np.asarray(iteration.gather(self.trace.weights))

    def token_ids(self, iteration: Iteration) -> np.ndarray:
        """Ids [n] int64 to embed: the trace's where it has them, else the row's number."""
        if self._tokens:
            ids = iteration.gather(lambda a, b: np.asarray(self.trace.token_ids[a:b]))
        else:
            ids = iteration.gather(np.arange)
        return ids.astype(np.int64) % self.vocab

    def chose(self, layer: int, chosen: list[list[int]], decoder: Decoder) -> None:
        """The gate has spoken; a forced routing does not listen."""

    def put_out(self, iteration: Iteration, next_ids: list[int]) -> None:
        """The head has spoken; the trace knows better."""

    def changed(self, layer: int, ids: np.ndarray, weights: np.ndarray) -> None:
        """A lossy policy's answer for this layer."""
        self._layer, self._ids, self._weights = layer, ids, np.asarray(weights, dtype=np.float64)

    def _turn_to(self, layer: int) -> None:
        assert self._iteration is not None
        self._layer, self._ids = layer, self._iteration.ids(layer)
        if self._all_weights is not None:
            self._weights = self._all_weights[:, layer]
        else:
            self._weights = np.full(self._ids.shape, 1.0 / self._ids.shape[1])

    def rows(self, layer: int, expert: int) -> tuple[Any, Any]:
        """Row numbers (None: the only one) and weights, a float or [rows, 1], on the host."""
        if layer != self._layer:
            self._turn_to(layer)
        if len(self._ids) == 1:
            places = np.flatnonzero(self._ids[0] == expert)
            return None, float(self._weights[0, places[0]]) if len(places) else 0.0
        rows, columns = np.nonzero(self._ids == expert)
        share = self.torch.from_numpy(self._weights[rows, columns][:, None].copy()).to(self.dtype)
        return self.torch.from_numpy(rows), share

    def first(self, n_rows: int) -> tuple[Any, Any]:
        """Rows and equal weights of an expert computed before its gate has spoken."""
        assert self._iteration is not None
        k = self.trace.top_k
        if self._iteration.n_tokens == 1:
            return None, 1.0 / k
        return self.torch.arange(n_rows), self.torch.full((n_rows, 1), 1.0 / k, dtype=self.dtype)
