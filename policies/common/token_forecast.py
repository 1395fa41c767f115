"""Experts foretold for all layers of a forward pass before it begins, and a cache that is filled by such a forecast.

SiDA-MoE and ExpertFlow train a network that reads the tokens of a batch and names the experts of every layer at once.
Their weights are not public, and routing traces hold token ids rather than the texts they were trained on. What stands
in is learnt from the store split of the trace: how often tokens of each id went to each expert. Like those networks it
knows the input alone, all layers at once; unlike them it knows nothing of the context.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from sim.policy import (
    FREE,
    LAST,
    SURROGATE,
    BadInput,
    Iteration,
    Piece,
    Policy,
    Prefetch,
    Rank,
    Steps,
    StoreSplit,
    Surrogate,
    TokenPaths,
    View,
    param,
)

Ids = NDArray[np.int64]
OR_SURROGATE = ", or a surrogate (--predictor surrogate:0.85)"


class Drawn:
    """The same from a labelled surrogate, all scores alike."""

    def __init__(self, text: str, store: StoreSplit, seed: int) -> None:
        trace = store.trace
        self._n_layers = trace.n_layers
        self._surrogate = Surrogate(text, trace.top_k, trace.n_experts, seed)

    def of(self, iteration: Iteration) -> tuple[Ids, Ids]:
        """Forecasts of an iteration's tokens, [n, L, K] each."""
        chosen = np.stack([iteration.ids(layer) for layer in range(self._n_layers)], axis=1).tolist()
        rows = [row for r in iteration.ranges for row in range(r.start_row, r.stop_row)]
        ids = np.array(
            [
                [self._surrogate.name(row, layer, own) for layer, own in enumerate(token)]
                for row, token in zip(rows, chosen, strict=True)
            ],
            dtype=np.int64,
        )
        return ids, np.ones_like(ids)


class Forecasting(Policy):
    """A policy with a forecast of the whole pass: its `expected` are loaded in order, and leave last.

    Who was loaded first leaves first. Whoever is needed by the layer that runs, or foretold for one to come, stays
    while others can go; when nobody else can go for a demand, the last of the forecast does.
    """

    needs = frozenset({"experts", "token_ids"})
    predictor: str = param(
        "tokens",
        "tokens: where tokens of the same id were routed on the store split; or surrogate:SHARE or surrogate:ALL/ANY, "
        "a labelled stand-in",
    )
    seed: int = param(0, "for a surrogate's draws", low=0, high=2**63 - 1)

    def __init__(self, **values: object) -> None:
        super().__init__(**values)
        if self.predictor.startswith(SURROGATE):
            self.needs, self.labels = frozenset({"experts"}), (SURROGATE,)
        elif self.predictor != "tokens":
            raise BadInput(f"{self.name}.predictor, got {self.predictor!r}: write tokens, or surrogate:0.85")

    def bind(self, view: View) -> None:
        n = view.n_layers * view.n_experts
        self.order = order = Rank(n)
        self._rank, self._bar = order.rank.data, order.bar.data
        self._turns = [0] * n  # by `Piece.index`, numbered as they were loaded
        self._n_loaded = 0
        self.expected: dict[Piece, None] = {}
        self.ids = np.zeros((0, 0, 0), dtype=np.int64)  # foretold [n, L, K] for the iteration that runs
        self.scores = self.ids
        self._n = self._right = 0

    def learn(self, store: StoreSplit) -> None:
        drawn = self.predictor.startswith(SURROGATE)
        self._source = Drawn(self.predictor, store, self.seed) if drawn else TokenPaths(store, self.name, OR_SURROGATE)

    def foretell(self, iteration: Iteration) -> None:
        """Take the forecast for an iteration."""
        self.ids, self.scores = self._source.of(iteration)

    def foretold(self, layer: int) -> list[int]:
        """Experts foretold for a layer by any token, those with the highest scores together first."""
        if len(self.ids) == 1:
            return [int(expert) for expert in self.ids[0, layer]]
        total: dict[int, int] = {}
        for expert, score in zip(
            self.ids[:, layer].ravel().tolist(), self.scores[:, layer].ravel().tolist(), strict=True
        ):
            total[expert] = total.get(expert, 0) + score
        return sorted(total, key=lambda e: (-total[e], e))

    def count(self, layer: int, chosen: Ids) -> None:
        """Compare with what the gates chose [n, K]."""
        found = (self.ids[:, layer, :, None] == chosen[:, None, :]).any(axis=1)
        self._n, self._right = self._n + found.size, self._right + int(found.sum())

    # -- the cache --------------------------------------------------------------------------------------------------

    def plan(self, pieces: Iterable[Piece]) -> None:
        """What the pass will need, in the order it is to be loaded."""
        for piece in self.expected:
            self._over(piece)
        self.expected = dict.fromkeys(pieces)
        for at, piece in enumerate(self.expected):
            self._rank[piece.index], self._bar[piece.index] = -at, LAST

    def passed(self, layer: int) -> None:
        """A layer's gate has spoken: its forecast has had its day."""
        for piece in [piece for piece in self.expected if piece.layer <= layer]:
            del self.expected[piece]
            self._over(piece)

    def _over(self, piece: Piece) -> None:
        """It is not foretold any more."""
        self._rank[piece.index], self._bar[piece.index] = self._turns[piece.index], FREE

    def loaded(self, piece: Piece) -> None:
        """To the end of the line of those who leave first."""
        self._n_loaded += 1
        self._turns[piece.index] = self._n_loaded
        if piece not in self.expected:
            self._rank[piece.index] = self._n_loaded

    def fill(self, view: View) -> Iterator[Piece]:
        """Pieces of the forecast that can be loaded now, in order; a GPU without room waits until some is free."""
        full: set[int] = set()
        for piece in list(self.expected):
            if piece.gpu in full or view.holds(piece):
                continue
            if view.free_bytes(piece.gpu) < piece.n_bytes and not self._somebody_leaves(piece.gpu, view):
                full.add(piece.gpu)
                if len(full) == view.n_gpus:
                    return
                continue
            yield piece

    def load(self, view: View) -> Steps:
        """Queue what can be loaded now."""
        for piece in self.fill(view):
            yield Prefetch(piece)

    def _somebody_leaves(self, gpu: int, view: View) -> bool:
        """Whether anybody makes room for a forecast."""
        return any(p.gpu == gpu and p not in self.expected and view.evictable(p) for p in view.residents())

    def placed(self, piece: Piece, view: View) -> None:
        self.loaded(piece)

    def accessed(self, piece: Piece, hit: bool, view: View) -> None:
        if not hit:
            self.loaded(piece)

    def stats(self) -> dict[str, float]:
        """Share of the experts chosen by the gates that were foretold."""
        return {"foretold_frac": self._right / self._n if self._n else 0.0}
