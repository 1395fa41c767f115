# cython: boundscheck=True, wraparound=True
"""What a layer's gate says, and the arrays of scores behind it, read from the trace when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sim.workload.levels import require_declared

if TYPE_CHECKING:
    from sim.workload.iterations import Iteration
    from traces.format.reader import Trace

NO_PRECISIONS: dict[int, str] = {}  # no expert may run in less than the serving precision; never written to
SCORES = ("scores",)
MOST_ROWS, BLOCK_BYTES, MOST_BLOCKS = 256, 2**20, 8
"""Decode rows of a request read at once, and their bytes as float64: a slice of a memory map costs microseconds."""


class Gate:
    """What one layer's gate has just said.

    `layer`, `phase` and `iteration` are where. `needs` maps expert -> tokens, in router order for a single token, by
    ascending id for several. Arrays are read when asked for, of levels that the
    policy's own `needs` declare; others raise IllegalDecision.

    `asked` is the part of the gate's own choice that is still to be executed; it differs from `needs` only after a
    lossy policy has changed the routing, and hits are counted over it. `precision` names the experts that a lossy
    policy allows to run in less than the serving precision.
    """

    __slots__ = ("_arrays", "asked", "iteration", "layer", "needs", "phase", "precision")

    def __init__(self, layer: int, iteration: Iteration, needs: dict[int, int], arrays: Arrays) -> None:
        self.layer = layer
        self.iteration = iteration
        self.phase = iteration.phase  # `prefill` where any token of a prompt runs, else `decode`
        self.needs = needs
        self.asked = needs
        self.precision = NO_PRECISIONS
        self._arrays = arrays

    @property
    def ids(self) -> np.ndarray:
        """Chosen experts [n, K], heaviest first."""
        return self.iteration.ids(self.layer)

    @property
    def scores(self) -> np.ndarray:
        """Full gate scores [n, E], exact integers; divide by `score_scale` for probabilities."""
        self._arrays.declared("scores")
        return self._arrays.scores()[:, self.layer]

    def at_once(self, work: Callable[..., Sequence[Any]], *reads: str) -> Any:
        """What `work` says of this layer, asked for all layers of the iteration in one go; None where that cannot be.

        A product per layer costs a fraction when all layers' are formed together. `work` takes the arrays that `reads`
        names (the scores unless told: `scores`, `shared_scores`, `next_scores_1` ..., each [n, L, E], or `ids`
        [n, L, K]) and answers for every layer, for layer l from rows up to l alone: later gates have not spoken yet.
        `moesim conformance` hides them and insists on the same decisions; real runs that route themselves have none.
        """
        return self._arrays.at_once(work, self.layer, reads)

    def by_layer(self, work: Callable[..., Sequence[Any]], *reads: str) -> Any:
        """The same where `work` answers from a layer's own rows and from nothing else, whenever it is asked: tokens to
        come may be worked out with the present one, and where nothing is known beforehand this layer alone.

        For `work`, the tokens that are decoded one by one from here on are more layers of one token, [1, layers, E].
        """
        found = self._arrays.by_layer(work, self.layer, reads)
        if found is not None:
            return found
        return work(*[self._arrays.named(name)[:, self.layer, None] for name in reads or SCORES])[0]

    @property
    def score_scale(self) -> int:
        """What `scores` are multiples of: a probability is scores / score_scale."""
        return self._arrays.trace.score_scale

    @property
    def weights(self) -> np.ndarray:
        """Weights of the chosen experts [n, K] as the model applies them."""
        self._arrays.declared("weights")
        return self._arrays.weights()[:, self.layer]

    def weights_of(self, ids: np.ndarray) -> np.ndarray:
        """Weights [n, K] the model would apply to other experts `ids` [n, K] (-1: none): their scores, renormalised
        over them where its gate renormalises, times its scaling.

        A sparse mixer's weights cannot be had from scores: there each place keeps its own weight (assumed).
        """
        self._arrays.declared("weights" if self._arrays.trace.header.gate.score == "sparsemixer" else "scores")
        return self._arrays.weights_of(self.layer, ids)

    def next_scores(self, distance: int = 1) -> np.ndarray:
        """Scores of layer `layer + distance` predicted from this layer's gate input [n, E] (`needs` declares it)."""
        self._arrays.declared(f"next_scores_{distance}")
        return self._arrays.next_scores(distance)[:, self.layer]

    @property
    def shared_scores(self) -> np.ndarray:
        """L4s: the next gate applied to MoE input + shared expert + residual [n, E]."""
        self._arrays.declared("shared_scores")
        return self._arrays.shared_scores()[:, self.layer]


def gate_of(layer: int, iteration: Iteration, needs: dict[int, int], arrays: Arrays) -> Gate:
    """A gate as `Gate` makes it; compiled, in a fraction of the time."""
    gate = Gate.__new__(Gate)
    gate.layer = layer
    gate.iteration = iteration
    gate.phase = iteration.phase
    gate.needs = gate.asked = needs
    gate.precision = NO_PRECISIONS
    gate._arrays = arrays
    return gate


class Arrays:
    """Score arrays of the current iteration, each read from the trace at most once.

    needs: levels that a policy may read of them by its gates; None: all.
    """

    def __init__(self, trace: Trace, needs: Collection[str] | None = None) -> None:
        self.trace = trace
        self.needs = needs
        self._iteration: Iteration | None = None
        self._cache: dict[str, np.ndarray] = {}
        self._answers: dict[Callable[..., Sequence[Any]], Sequence[Any]] = {}
        self._blocks: dict[tuple[str, int], tuple[int, np.ndarray]] = {}  # decode rows by what they are and whose
        self._ahead: dict[tuple[Callable[..., Sequence[Any]], int], tuple[int, Sequence[Any]]] = {}  # first row
        self._lists: list[list[float]] | None = None  # scores of a single token by layer
        self.hides_later = False  # a check: whoever is asked for all layers at once sees noise where later ones are
        self.n_at_once = 0
        self._block_rows = max(1, min(MOST_ROWS, BLOCK_BYTES // (8 * trace.n_layers * trace.n_experts)))

    def begin(self, iteration: Iteration) -> None:
        """Forget the previous iteration."""
        self._iteration = iteration
        self._cache.clear()
        self._answers.clear()
        self._lists = None

    def declared(self, level: str) -> None:
        """Raises IllegalDecision for a level that the policy's `needs` do not have."""
        if self.needs is not None and level not in self.needs:
            require_declared(level, self.needs)

    def _get(self, name: str) -> np.ndarray:
        found = self._cache.get(name)
        if found is None:
            assert self._iteration is not None
            if self._iteration.token is not None:
                row = self._iteration.ranges[0].start_row
                first, block = self._block(name)
                found = block[row - first : row - first + 1]
            else:
                found = np.asarray(self._iteration.gather(self._reader(name)))  # plain: slices of maps are slow
            self._cache[name] = found
        return found

    def _reader(self, name: str) -> Callable[[int, int], np.ndarray]:
        """What reads rows of an array by the name that `Gate.at_once` gives it."""
        trace = self.trace
        if name == "ids":
            return lambda a, b: trace.experts[a:b].astype(np.int64, copy=False)
        if name.startswith("next_scores_"):
            distance = int(name.removeprefix("next_scores_"))
            return lambda a, b: trace.next_scores(distance, a, b)
        found: Callable[[int, int], np.ndarray] = getattr(trace, name)
        return found

    def _block(self, name: str) -> tuple[int, np.ndarray]:
        """The first row of a block that has the single decode token's, and those of its request that follow."""
        assert self._iteration is not None
        only = self._iteration.ranges[0]
        row, request = only.start_row, only.request
        block = self._blocks.get((name, request.index))
        if block is None or not block[0] <= row < block[0] + len(block[1]):
            stop = min(row + self._block_rows, request.first_row + request.prompt_len + request.outputs - 1)
            if len(self._blocks) >= MOST_BLOCKS:
                self._blocks.clear()
            block = self._blocks[name, request.index] = (row, np.asarray(self._reader(name)(row, stop)))
        return block

    def scores(self) -> np.ndarray:
        return self._get("scores")

    def scores_of_token(self) -> list[list[float]]:
        """Scores of the iteration's first token by layer."""
        if self._lists is None:
            self._lists = self.scores()[0].tolist()
        return self._lists

    def at_once(self, work: Callable[..., Sequence[Any]], layer: int, reads: Sequence[str] = ()) -> Any:
        """What `work` says of a layer; see `Gate.at_once`."""
        answers = self._answers.get(work)
        if answers is None:
            assert self._iteration is not None
            if not self._iteration.recorded:
                return None
            arrays = [self.named(name) for name in reads or SCORES]
            if self.hides_later:
                arrays = [array.copy() for array in arrays]
                for array in arrays:
                    array[:, layer + 1 :] = array.max() - array[:, layer + 1 :]
                return work(*arrays)[layer]
            answers = self._answers[work] = work(*arrays)
            self.n_at_once += 1
        return answers[layer]

    def by_layer(self, work: Callable[..., Sequence[Any]], layer: int, reads: Sequence[str] = ()) -> Any:
        """What `work` says of a layer; see `Gate.by_layer`."""
        answers = self._answers.get(work)
        if answers is not None:
            return answers[layer]
        iteration = self._iteration
        if iteration is None or iteration.token is None or not iteration.recorded or self.hides_later:
            return self.at_once(work, layer, reads)
        only = iteration.ranges[0]
        key = (work, only.request.index)
        first, ahead = self._ahead.get(key, (0, ()))
        n_layers = self.trace.n_layers
        at = (only.start_row - first) * n_layers
        if not 0 <= at < len(ahead):
            ahead = self._work_ahead(work, only.start_row, reads or SCORES)
            if len(self._ahead) >= MOST_BLOCKS:
                self._ahead.clear()
            self._ahead[key] = (only.start_row, ahead)
            at = 0
        answers = self._answers[work] = ahead[at : at + n_layers]
        return answers[layer]

    def _work_ahead(self, work: Callable[..., Sequence[Any]], row: int, reads: Sequence[str]) -> Sequence[Any]:
        """Answers of all layers of the decode rows of a request from one row on, as many as were read."""
        for name in reads:
            if name != "ids":
                self.declared(name)
        blocks = [self._block(name) for name in reads]
        n_rows = min([first + len(block) for first, block in blocks]) - row
        rows = [block[row - first : row - first + n_rows] for first, block in blocks]
        self.n_at_once += 1
        return work(*[array.reshape(1, n_rows * array.shape[1], array.shape[2]) for array in rows])

    def named(self, name: str) -> np.ndarray:
        """An array of the iteration by the name that `Gate.at_once` gives it."""
        if name != "ids":
            self.declared(name)
        return self._get(name)

    def weights_of(self, layer: int, ids: np.ndarray) -> np.ndarray:
        """What `Gate.weights_of` says."""
        gate, there = self.trace.header.gate, ids >= 0
        if gate.score == "sparsemixer":
            return np.where(there, self.weights()[:, layer], 0.0)
        mass = np.where(there, np.take_along_axis(self.scores()[:, layer], np.maximum(ids, 0), 1), 0.0)
        if not gate.renormalised:
            return np.asarray(mass / self.trace.score_scale * gate.scaling)
        total = mass.sum(axis=1, keepdims=True)
        return np.asarray(np.divide(mass, total, out=np.zeros_like(mass), where=total > 0) * gate.scaling)

    def weights(self) -> np.ndarray:
        return self._get("weights")

    def embeddings(self) -> np.ndarray:
        return self._get("embeddings")

    def next_scores(self, distance: int) -> np.ndarray:
        return self._get(f"next_scores_{distance}")

    def shared_scores(self) -> np.ndarray:
        return self._get("shared_scores")
