"""What FineMoE's searcher may track (EuroSys'26, arXiv 2502.05370, section 4.2), and what Figure 14a puts in its place.

A track answers twice: before an iteration, for the layers nothing has been seen of yet, and after each gate, for the
layer `distance` ahead. An answer is a row of scores per sequence and how alike the source of that row was.
"""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from policies.common.surrogate import Surrogate
from policies.fine_moe.expert_maps import inverse_norm, select_many
from sim.policy import DECODE, PREFILL, Gate, Iteration, RequestInfo, StoreSplit, View

Floats = NDArray[np.float64]


class Found(NamedTuple):
    """Scores of one layer's experts [E], and the similarity of where they come from."""

    row: Floats
    similarity: float


class Foretold(NamedTuple):
    """Of some layers in a row the experts to prefetch, most probable first: `counts` of each layer, [sum of counts].

    shares: the probabilities of all experts [layers, E].
    """

    first: int
    experts: NDArray[np.int64]
    counts: NDArray[np.int64]
    shares: Floats


def foretold(first: int, several: list[tuple[Floats, Floats]], top_k: int, threshold: bool) -> Foretold:
    """Equations 6 to 8 for every sequence; a batch takes the union of the sets and the larger probability.

    Args:
        first: the layer that the first row is of. several: scores of the layers' experts [m, E], and how alike their
            source is [m], by sequence.
    """
    told = [_settled(rows, similarities, top_k, threshold) for rows, similarities in several]
    if len(told) == 1:
        return Foretold(first, *told[0])
    sets = [[experts.tolist(), *np.cumsum(counts).tolist()] for experts, counts, _ in told]
    union: list[list[int]] = []
    for i in range(len(several[0][0])):
        named = (experts[ends[i - 1] if i else 0 : ends[i]] for experts, *ends in sets)
        union.append(list(dict.fromkeys(chain.from_iterable(named))))
    experts = np.array(list(chain.from_iterable(union)), dtype=np.int64)
    shares: Floats = np.maximum.reduce([shares for _, _, shares in told])
    return Foretold(first, experts, np.array([len(one) for one in union]), shares)


def _settled(
    rows: Floats, similarities: Floats, top_k: int, threshold: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
    """The same for one sequence; nothing is chosen of a layer without scores."""
    order, counts = select_many(rows, similarities, top_k, threshold)
    totals = rows.sum(axis=1)
    if not totals.all():
        counts = np.where(totals > 0, counts, 0)
        totals = np.where(totals > 0, totals, 1.0)
    return order[np.arange(rows.shape[1]) < counts[:, None]], counts, rows / totals[:, None]


class Track(Protocol):
    """What FineMoE needs of a way to track; costs are in numbers compared with all that is stored, and how many."""

    @property
    def n_stored(self) -> int: ...

    def learn(self, store: StoreSplit) -> None: ...

    def start(self, iteration: Iteration, view: View) -> dict[int, list[Found]]:
        """Rows for the first layers, by layer; nothing where the track is blind."""

    def step(self, gate: Gate, target: int) -> list[Found]:
        """Take in a gate; rows for layer `target`, nothing when it lies behind the last layer."""

    def end(self, iteration: Iteration) -> None: ...

    def request_end(self, request: RequestInfo) -> None: ...

    def start_values(self) -> int: ...

    def step_values(self, layer: int) -> int: ...

    def end_values(self) -> int: ...


class CountTrack:
    """Request-level hit counts, what MoE-Infinity tracks: the past request whose counts are most like those so far."""

    def __init__(self, view: View, distance: int) -> None:
        self._shape = (view.n_layers, view.n_experts)
        self._distance = distance
        self._stored = np.zeros((0, view.n_layers * view.n_experts))
        self._inverse = np.zeros(0)
        self._running: dict[int, Floats] = {}
        self._n_ranges = 0

    @property
    def n_stored(self) -> int:
        return len(self._stored)

    def learn(self, store: StoreSplit) -> None:
        for request in store.requests:
            last_row = request.first_row + request.prompt_len + request.outputs - 1
            ids = store.trace.experts[request.first_row : last_row].astype(np.int64)
            counts = np.zeros(self._shape)
            np.add.at(counts, (np.arange(self._shape[0])[None, :, None], ids), 1.0)
            self._keep(counts)

    def _keep(self, counts: Floats) -> None:
        self._stored = np.concatenate([self._stored, counts.reshape(1, -1)])
        self._inverse = inverse_norm((self._stored * self._stored).sum(axis=1))

    def start(self, iteration: Iteration, view: View) -> dict[int, list[Found]]:
        self._n_ranges = len(iteration.ranges)
        for r in iteration.ranges:
            self._running.setdefault(r.request.index, np.zeros(self._shape))
        if not self.n_stored or iteration.phase == PREFILL:  # of a new request nothing has been counted
            return {}
        return {layer: self._search(iteration, layer) for layer in range(self._distance)}

    def step(self, gate: Gate, target: int) -> list[Found]:
        ids, at = gate.ids, 0
        for r in gate.iteration.ranges:
            n = r.stop_row - r.start_row
            np.add.at(self._running[r.request.index][gate.layer], ids[at : at + n], 1.0)
            at += n
        return self._search(gate.iteration, target) if self.n_stored and target < self._shape[0] else []

    def _search(self, iteration: Iteration, layer: int) -> list[Found]:
        found: list[Found] = []
        for r in iteration.ranges:
            counts = self._running[r.request.index].reshape(-1)
            alike = (self._stored @ counts) * self._inverse * float(inverse_norm(np.asarray(counts @ counts)))
            best = int(alike.argmax())
            found.append(Found(self._stored[best].reshape(self._shape)[layer], float(alike[best])))
        return found

    def end(self, iteration: Iteration) -> None:
        """Counts are kept when the request ends."""

    def request_end(self, request: RequestInfo) -> None:
        self._keep(self._running.pop(request.index))

    def start_values(self) -> int:
        return len(self._running) * self._stored.shape[1]

    def step_values(self, layer: int) -> int:
        return self._n_ranges * self._stored.shape[1]

    def end_values(self) -> int:
        return 0


class GateTrack:
    """Speculation: the gate of the layer ahead on this layer's gate input, as Mixtral-Offloading and ProMoE predict.

    While generating only: traces record such scores for decode tokens. A `surrogate` stands in for the gate: what it
    names is equally probable.
    """

    def __init__(self, view: View, distance: int, surrogate: Surrogate | None = None) -> None:
        self._distance, self._n_layers, self._n_experts = distance, view.n_layers, view.n_experts
        self._surrogate = surrogate
        self.n_stored = 0  # nothing is searched

    def learn(self, store: StoreSplit) -> None:
        """Nothing to learn."""

    def start(self, iteration: Iteration, view: View) -> dict[int, list[Found]]:
        return {}  # no gate input yet

    def step(self, gate: Gate, target: int) -> list[Found]:
        if gate.phase != DECODE or target >= self._n_layers:
            return []
        if self._surrogate is None:
            return [Found(row, 1.0) for row in gate.next_scores(self._distance)]
        found: list[Found] = []
        truth = gate.iteration.ids(target).tolist()
        for r, ids in zip(gate.iteration.ranges, truth, strict=True):
            row = np.zeros(self._n_experts)
            row[self._surrogate.name(r.start_row, target, ids)] = 1.0
            found.append(Found(row, 1.0))
        return found

    def end(self, iteration: Iteration) -> None:
        """Nothing is kept."""

    def request_end(self, request: RequestInfo) -> None:
        """Nothing is kept."""

    def start_values(self) -> int:
        return 0

    def step_values(self, layer: int) -> int:
        return 0

    def end_values(self) -> int:
        return 0
