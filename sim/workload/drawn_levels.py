"""Levels that a trace lacks, drawn around its routing: a log of expert ids then serves policies that read scores.

How they are drawn (docs/predictor.md has it in words, with what must not be concluded):

- Predictions (`next_scores_1` to `_3`, `shared_scores`): `Surrogate` names k experts of a token and layer, each of
  those that its gate will choose with the probability that was given. The k named take the first k ranks in an order
  of their own, all others the ranks behind them, at random. A score falls with the rank r as 1/r. One draw is made
  per token and target layer: it is heard alike from every distance, and from `shared_scores`.
- A gate's own `scores`: what it chose has the first k ranks, in the router's order where the trace has that, else at
  random; others follow at random. Where weights are recorded, the chosen ones' scores are in their ratio.
- `weights`: those scores as the model's gate would turn them into weights.
- `embeddings`: a 1 for each expert that is named of the token's first layer, [E].

Predictions are drawn whether or not the trace has some: who names an accuracy means it. The rest is taken from the
trace wherever it has it, so that gates of prompts alone are drawn where only those of decode tokens were recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.workload.surrogate import Surrogate
from traces.format.layout import DISTANCES, Floats, Ints
from traces.format.reader import Trace

PREDICTED = frozenset({*(f"next_scores_{distance}" for distance in DISTANCES), "shared_scores"})
GATES = frozenset({"scores", "weights"})
DRAWABLE = PREDICTED | GATES | {"embeddings"}
_OWN, _AHEAD = 1, 2  # streams of chance: of a gate's own scores, of predictions
_ROWS_AT_ONCE, _ROWS_KEPT = 64, 1024
_LAST = np.iinfo(np.uint64).max


class DrawnTrace(Trace):
    """A trace with some of its levels drawn; all others are as in the file.

    Args:
        levels: which (`to_draw`). text: `surrogate:SHARE`, as `Surrogate` takes it. seed: equal seeds draw equally, in
            whatever order rows are read.

    Raises:
        BadInput: as `Trace`; and for a text that is no surrogate's, where a prediction is drawn.
    """

    def __init__(self, path: str | Path, levels: Collection[str], text: str, seed: int) -> None:
        super().__init__(path)
        self.drawn, self.drawn_by = frozenset(levels), (text, seed)  # equal ones draw equally
        self._text, self._seed = text, seed
        self._recorded, self._recorded_prefill = self.levels, self.levels_prefill
        self.levels = self.levels | self.drawn
        self.levels_prefill = self.levels_prefill | self.drawn
        predicts = self.drawn - GATES
        self._surrogate = Surrogate(text, self.top_k, self.n_experts, seed) if predicts else None
        self._named: dict[int, Ints] = {}  # row -> experts named of each of its layers [L, K]
        ranks = 1.0 / np.arange(1, self.n_experts + 1)
        self._shape: Floats = ranks / ranks.sum()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.drawn, self._text, self._seed)

    def scores(self, a: int, b: int) -> Floats:
        found: Floats = self._taken("scores", a, b, super().scores, self._own_scores)
        return found

    def weights(self, a: int, b: int) -> Floats:
        found: Floats = self._taken("weights", a, b, super().weights, self._own_weights)
        return found

    def embeddings(self, a: int, b: int) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self._taken("embeddings", a, b, super().embeddings, self._meanings)
        return found.astype(np.float32, copy=False)

    def next_scores(self, distance: int, a: int, b: int) -> Floats:
        if f"next_scores_{distance}" not in self.drawn:
            return super().next_scores(distance, a, b)
        return self._in_blocks(a, b, lambda first, stop: self._ahead_by(distance, first, stop))

    def shared_scores(self, a: int, b: int) -> Floats:
        if "shared_scores" not in self.drawn:
            return super().shared_scores(a, b)
        return self._in_blocks(a, b, lambda first, stop: self._moved(self._predicted(first, stop), 1))

    def _taken(
        self,
        level: str,
        a: int,
        b: int,
        recorded: Callable[[int, int], Any],
        draw: Callable[[int, int], Floats],
    ) -> Any:
        """Rows of a level: recorded ones where the trace has them, drawn ones where it does not."""
        if level not in self.drawn:
            return recorded(a, b)
        found = self._in_blocks(a, b, draw)
        if level in self._recorded:  # of decode rows alone
            at = a
            while at < b:
                request = self.requests[self.requests.request_of(at)]
                first, stop = max(at, request.first_decode_row), min(b, request.end_row)
                if first < stop:
                    found[first - a : stop - a] = recorded(first, stop)
                at = request.end_row
        return found

    def _in_blocks(self, a: int, b: int, draw: Callable[[int, int], Floats]) -> Floats:
        """Rows [a, b), drawn some at a time: chance takes several times the room of what comes of it."""
        ends = [(first, min(b, first + _ROWS_AT_ONCE)) for first in range(a, b, _ROWS_AT_ONCE)] or [(a, b)]
        blocks = [draw(first, stop) for first, stop in ends]
        return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)

    # -- a gate's own -----------------------------------------------------------------------------------------------

    def _own_scores(self, a: int, b: int) -> Floats:
        """Scores [n, L, E] of which the k highest are what the gate chose."""
        chosen, chance = self._ids(a, b), self._chance(_OWN, a, b)
        if self.header.expert_order == "unranked":
            chosen = _shuffled(chosen, chance)
        k = self.top_k
        share = np.broadcast_to(self._shape[:k], chosen.shape)
        if "weights" in self._recorded_prefill:
            chosen, share = self._ids(a, b), self._shares_of(super().weights(a, b), a, b)
        behind = share.min(axis=-1, keepdims=True) * (self._shape[k:] / self._shape[k - 1])
        return self._placed(chosen, share, behind, chance)

    def _shares_of(self, weights: Floats, a: int, b: int) -> Floats:
        """Scores of the chosen experts as shares [n, L, K]: known where the gate does not renormalise, else assumed to
        come to what the first k ranks do, in the ratio of the weights."""
        gate = self.header.gate
        if self.header.weights_kind == "raw" or not (gate.renormalised or gate.score == "sparsemixer"):
            return self.raw_weights(a, b)
        scores: Floats = self._shares(weights) * self._shape[: self.top_k].sum()
        return scores

    def _own_weights(self, a: int, b: int) -> Floats:
        """Weights [n, L, K] as the model's gate makes them of the scores."""
        scores = self.scores(a, b) if "scores" in self.levels else self._own_scores(a, b)
        return self._as_weights(np.take_along_axis(scores, self._ids(a, b), -1), self.score_scale)

    # -- predictions ------------------------------------------------------------------------------------------------

    def _ahead_by(self, distance: int, a: int, b: int) -> Floats:
        """Row by row what layer l hears of layer l + distance; at distance 1 the last one hears of the next token's
        first layer, within its request."""
        predicted = self._predicted(a, b)
        found = self._moved(predicted, distance)
        if distance == 1:
            found[:-1, -1] = predicted[1:, 0]
            if b < self.n_tokens:
                found[-1, -1] = self._predicted(b, b + 1)[0, 0]
            ends = self.requests.offsets[1:] - 1  # a request's last token has none after it
            found[ends[(ends >= a) & (ends < b)] - a, -1] = 0.0
        return found

    def _moved(self, predicted: Floats, distance: int) -> Floats:
        found = np.zeros_like(predicted)
        found[:, : self.n_layers - distance] = predicted[:, distance:]
        return found

    def _predicted(self, a: int, b: int) -> Floats:
        """Scores [n, L, E] of every layer of some rows, of which the k highest are the experts that are named."""
        chance = self._chance(_AHEAD, a, b)
        named = _shuffled(self._names(a, b), chance)
        share = np.broadcast_to(self._shape[: self.top_k], named.shape)
        behind = np.broadcast_to(self._shape[self.top_k :], (*named.shape[:2], self.n_experts - self.top_k))
        return self._placed(named, share, behind, chance)

    def _meanings(self, a: int, b: int) -> Floats:
        """Embeddings [n, E]: what is named of the first layer."""
        found = np.zeros((b - a, self.n_experts))
        np.put_along_axis(found, self._names(a, b)[:, 0], 1.0, axis=-1)
        return found

    def _names(self, a: int, b: int) -> Ints:
        """The experts named [n, L, K] of every layer of some rows."""
        assert self._surrogate is not None
        if len(self._named) > _ROWS_KEPT:
            self._named.clear()
        name = self._surrogate.name
        for row, token in enumerate(self._ids(a, b).tolist(), a):
            if row not in self._named:
                self._named[row] = np.array([name(row, layer, ids) for layer, ids in enumerate(token)])
        return np.stack([self._named[row] for row in range(a, b)])

    # -- both -------------------------------------------------------------------------------------------------------

    def _ids(self, a: int, b: int) -> Ints:
        return self.experts[a:b].astype(np.int64)

    def _chance(self, stream: int, a: int, b: int) -> NDArray[np.uint64]:
        """A number for every row, layer and expert [n, L, E], the same however rows are read: a counter per row."""
        size = self.n_layers * self.n_experts
        steps = -(-size // 4)  # Philox gives four numbers a count
        drawn = np.random.Philox(key=[self._seed, stream], counter=a * steps).random_raw((b - a) * steps * 4)
        return drawn.reshape(b - a, steps * 4)[:, :size].reshape(b - a, self.n_layers, self.n_experts)

    def _placed(self, first: Ints, share: Floats, behind: Floats, chance: NDArray[np.uint64]) -> Floats:
        """Scores as whole numbers [n, L, E]: `share` for the experts `first`, `behind` for all others at random, none
        of which reaches the least of the first."""
        keys = chance.copy()
        np.put_along_axis(keys, first, _LAST, axis=-1)
        others = np.argsort(keys, axis=-1, kind="stable")[..., : self.n_experts - self.top_k]
        ahead = np.maximum(1.0, np.rint(share * self.score_scale))
        rest = np.minimum(np.rint(behind * self.score_scale), ahead.min(axis=-1, keepdims=True) - 1.0)
        found = np.empty(chance.shape)
        np.put_along_axis(found, first, ahead, axis=-1)
        np.put_along_axis(found, others, rest, axis=-1)
        return found


def _shuffled(ids: Ints, chance: NDArray[np.uint64]) -> Ints:
    """Each token's experts [n, L, K] in an order of their own."""
    order = np.argsort(np.take_along_axis(chance, ids, -1), axis=-1, kind="stable")
    return np.take_along_axis(ids, order, -1)


def to_draw(trace: Trace, needs: Collection[str], lossy: bool) -> frozenset[str]:
    """The levels that are drawn for a policy with these needs: all predictions, and what else the trace lacks.

    A lossy policy's gates are never drawn: they would decide what it changes, and how much is said to be lost.
    """
    wanted = DRAWABLE & frozenset(needs)
    if lossy:
        wanted -= GATES
    return (wanted & PREDICTED) | (wanted - trace.levels_prefill)
