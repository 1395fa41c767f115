"""Which tokens run together: requests, token ranges with their phase, and what each layer's gate asks for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sim.base.errors import IllegalDecision

if TYPE_CHECKING:
    from traces.format.reader import Trace

PREFILL, DECODE = "prefill", "decode"
SCORES = ("scores",)
NO_PRECISIONS: dict[int, str] = {}  # no expert may run in less than the serving precision; never written to


class RequestInfo(NamedTuple):
    """One request as a serving system knows it on arrival (`outputs` is used by the engine alone)."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody asks of a request
    first_row: int
    prompt_len: int
    outputs: int
    task: str
    arrival_s: float | None


class Range(NamedTuple):
    """Rows `[start_row, stop_row)` of one request in one iteration; `context` tokens precede them in the KV cache."""

    request: RequestInfo
    start_row: int
    stop_row: int
    phase: str
    context: int
    puts_out: bool = True  # policies ask; a prompt was one range then

    @property
    def taken_row(self) -> int:
        return self.stop_row  # policies ask; nothing was drafted then


class Scheduler:
    """Continuous batching, first come first served: a free slot is filled by the next request's prefill, which runs
    as an iteration of its own (prefill first, as vLLM does without chunked prefill); else all active requests decode.

    Args:
        requests: in order of arrival. batch: slots. open_loop: honour arrival times instead of starting at once.
        split: shares a decode step out over passes that run one after the other (`Scheduler.passes`).
    """

    def __init__(
        self,
        requests: Sequence[RequestInfo],
        batch: int,
        open_loop: bool = False,
        split: Callable[[list[Range]], list[list[Range]]] | None = None,
    ) -> None:
        self._split = split
        self._later: deque[list[Range]] = deque()  # passes of the step that runs
        self._pending = deque(requests)
        self._batch = batch
        self._open_loop = open_loop
        self._active: list[tuple[RequestInfo, int]] = []  # (request, decode rows already run)

    def next(self, now_s: float) -> list[Range] | float | None:
        """The ranges of the next iteration, the time of the next arrival to wait for, or None at the end."""
        if self._later:
            return self._later.popleft()
        if self._pending and len(self._active) < self._batch:
            request = self._pending[0]
            if not self._open_loop or request.arrival_s is None or request.arrival_s <= now_s:
                self._pending.popleft()
                if request.outputs > 1:
                    self._active.append((request, 0))
                stop = request.first_row + request.prompt_len
                return [Range(request, request.first_row, stop, PREFILL, 0)]
            if not self._active:
                return request.arrival_s
        if not self._active:
            return None
        ranges, still = [], []
        for request, done in self._active:
            row = request.first_row + request.prompt_len + done
            ranges.append(Range(request, row, row + 1, DECODE, request.prompt_len + done))
            if done + 2 < request.outputs:
                still.append((request, done + 1))
        self._active = still
        if self._split is not None and len(ranges) > 1:
            passes = self._split(ranges)
            if len(passes) > 1 and (
                sorted(r for ranges in passes for r in ranges) != sorted(ranges) or not all(passes)
            ):
                raise IllegalDecision(f"split_step, got {passes!r}: every token of a decode step runs in one pass")
            self._later.extend(passes)
            return self._later.popleft()
        return ranges


class Iteration:
    """One forward pass: its ranges, and per MoE layer the experts its gates chose.

    Shapes: n tokens, L MoE layers, K experts per token. Scores are exact integers held in float64 (see FORMAT.md).
    """

    __slots__ = ("_counts", "_trace", "index", "n_tokens", "phase", "ranges", "row")
    recorded = True  # all its layers are known beforehand; not so where a model routes itself as it runs

    def __init__(
        self, index: int, ranges: list[Range], trace: Trace, row: list[list[int]] | None
    ) -> None:  # `row`: the single decode row's ids per layer, when there is just one token
        self.index = index
        self.ranges = ranges
        self.phase = ranges[0].phase
        self.n_tokens = sum(r.stop_row - r.start_row for r in ranges)
        self._trace = trace
        self.row = row
        self._counts: list[list[int]] | None = None

    def chosen(self, layer: int) -> dict[int, int]:
        """Expert -> tokens routed to it: router order for a single token, ascending ids otherwise."""
        if self.row is not None:
            return dict.fromkeys(self.row[layer], 1)
        if self._counts is None:
            shape = (self._trace.n_layers, self._trace.n_experts)
            counts = np.zeros(shape, dtype=np.int64)
            layers = np.arange(shape[0])[None, :, None]
            for r in self.ranges:
                np.add.at(counts, (layers, self._trace.experts[r.start_row : r.stop_row]), 1)
            self._counts = counts.tolist()
        if self.n_tokens == 1:  # corrected since 0.1: router order for a prompt of one token, too
            return dict.fromkeys(self.ids(layer)[0].tolist(), 1)
        return {expert: n for expert, n in enumerate(self._counts[layer]) if n}

    def ids(self, layer: int) -> np.ndarray:
        """Chosen experts per token, router order, [n, K]."""
        if self.row is not None:  # a single token, the common case, without touching the trace again
            return np.array([self.row[layer]], dtype=np.int64)
        parts = [self._trace.experts[r.start_row : r.stop_row, layer] for r in self.ranges]
        return np.concatenate(parts).astype(np.int64)

    def all_ids(self) -> np.ndarray:
        """Chosen experts of every layer, router order, [n, L, K]."""
        return np.stack([self.ids(layer) for layer in range(self._trace.n_layers)], axis=1)

    def gather(self, read: Callable[[int, int], np.ndarray]) -> np.ndarray:
        """Concatenate `read(start_row, stop_row)` over the ranges: the rows of this iteration, in order."""
        parts = [read(r.start_row, r.stop_row) for r in self.ranges]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class Gate:
    """What one layer's gate has just said: `needs` maps expert -> tokens; arrays are read only when asked for.

    `asked` is the part of the gate's own choice that is still to be executed; it differs from `needs` only after a
    lossy policy has changed the routing, and hits are counted over it. `precision` names the experts that a lossy
    policy allows to run in less than the serving precision.
    """

    __slots__ = ("_arrays", "asked", "iteration", "layer", "needs", "precision")

    def __init__(self, layer: int, iteration: Iteration, needs: dict[int, int], arrays: Arrays) -> None:
        self.layer = layer
        self.iteration = iteration
        self.needs = needs
        self.asked = needs
        self.precision = NO_PRECISIONS
        self._arrays = arrays

    @property
    def phase(self) -> str:
        """`prefill` or `decode`."""
        return self.iteration.phase

    @property
    def ids(self) -> np.ndarray:
        """Chosen experts [n, K], heaviest first."""
        return self.iteration.ids(self.layer)

    @property
    def scores(self) -> np.ndarray:
        """Full gate scores [n, E], exact integers; divide by `score_scale` for probabilities."""
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
        """The same where a layer's answer rests on its own rows alone: without all layers it is asked for this one."""
        found = self._arrays.at_once(work, self.layer, reads)
        if found is not None:
            return found
        return work(*(self._arrays.named(name)[:, self.layer, None] for name in reads or SCORES))[0]

    @property
    def score_scale(self) -> int:
        """What `scores` are multiples of: a probability is scores / score_scale."""
        return self._arrays.trace.score_scale

    @property
    def weights(self) -> np.ndarray:
        """Weights of the chosen experts [n, K] as the model applies them."""
        return self._arrays.weights()[:, self.layer]

    def weights_of(self, ids: np.ndarray) -> np.ndarray:
        """Weights [n, K] the model would apply to other experts `ids` [n, K] (-1: none): their scores, renormalised
        over them where its gate renormalises, times its scaling.

        A sparse mixer's weights cannot be had from scores: there each place keeps its own weight (assumed).
        """
        gate, there = self._arrays.trace.header.gate, ids >= 0
        if gate.score == "sparsemixer":
            return np.where(there, self.weights, 0.0)
        mass = np.where(there, np.take_along_axis(self.scores, np.maximum(ids, 0), 1), 0.0)
        if not gate.renormalised:
            return np.asarray(mass / self.score_scale * gate.scaling)
        total = mass.sum(axis=1, keepdims=True)
        return np.asarray(np.divide(mass, total, out=np.zeros_like(mass), where=total > 0) * gate.scaling)

    def next_scores(self, distance: int = 1) -> np.ndarray:
        """Scores of layer `layer + distance` predicted from this layer's gate input [n, E] (`needs` declares it)."""
        return self._arrays.next_scores(distance)[:, self.layer]

    @property
    def shared_scores(self) -> np.ndarray:
        """L4s: the next gate applied to MoE input + shared expert + residual [n, E]."""
        return self._arrays.shared_scores()[:, self.layer]


class Arrays:
    """Score arrays of the current iteration, each read from the trace at most once."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._iteration: Iteration | None = None
        self._cache: dict[str, np.ndarray] = {}
        self._answers: dict[Callable[..., Sequence[Any]], Sequence[Any]] = {}
        self.hides_later = False  # a check: whoever is asked for all layers at once sees noise where later ones are
        self.n_at_once = 0

    def begin(self, iteration: Iteration) -> None:
        """Forget the previous iteration."""
        self._iteration = iteration
        self._cache.clear()
        self._answers.clear()

    def _get(self, key: str, read: Callable[[int, int], np.ndarray]) -> np.ndarray:
        found = self._cache.get(key)
        if found is None:
            assert self._iteration is not None
            found = self._cache[key] = np.asarray(self._iteration.gather(read))  # plain: slices of maps are slow
        return found

    def scores(self) -> np.ndarray:
        return self._get("scores", self.trace.scores)

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

    def named(self, name: str) -> np.ndarray:
        """An array of the iteration by the name that `Gate.at_once` gives it."""
        if name == "ids":
            return self._get("ids", lambda a, b: self.trace.experts[a:b].astype(np.int64, copy=False))
        if name.startswith("next_scores_"):
            return self.next_scores(int(name.removeprefix("next_scores_")))
        found: np.ndarray = getattr(self, name)()
        return found

    def weights(self) -> np.ndarray:
        return self._get("weights", self.trace.weights)

    def embeddings(self) -> np.ndarray:
        return self._get("embeddings", self.trace.embeddings)

    def next_scores(self, distance: int) -> np.ndarray:
        return self._get(f"next{distance}", lambda a, b: self.trace.next_scores(distance, a, b))

    def shared_scores(self) -> np.ndarray:
        return self._get("shared", self.trace.shared_scores)


class Feed:
    """Decode rows of the trace as plain lists, read a block at a time (a slice of a memory map costs microseconds)."""

    BLOCK_ROWS = 256

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._blocks: dict[int, tuple[int, list[Any]]] = {}  # request -> (first row, rows)

    def row(self, request: int, row: int, last_row: int) -> list[Any]:
        """Expert ids of one decode row: a list of K ids per layer."""
        first, rows = self._blocks.get(request, (0, []))
        if not first <= row < first + len(rows):
            first, rows = row, self.read(row, min(row + self.BLOCK_ROWS, last_row))
            self._blocks[request] = (first, rows)
        if row == last_row - 1:
            self._blocks.pop(request, None)
        found: list[Any] = rows[row - first]
        return found

    def read(self, start_row: int, stop_row: int) -> list[Any]:
        """Rows as `row` returns them."""
        return self._trace.experts[start_row:stop_row].tolist()  # type: ignore[no-any-return]
