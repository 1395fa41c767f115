"""What FineMoE's searcher may track (EuroSys'26, arXiv 2502.05370, section 4.2), and what Figure 14a puts in its place.

A track answers twice: before an iteration, for the layers nothing has been seen of yet, and after each gate, for the
layer `distance` ahead. An answer is a row of scores per sequence and how alike the source of that row was.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from policies._expert_maps import inverse_norm, select
from policies._surrogate import Surrogate
from sim.policy import DECODE, PREFILL, Gate, Iteration, RequestInfo, StoreSplit, View

Floats = NDArray[np.float64]


class Settled(NamedTuple):
    """Experts to prefetch, most probable first, and the probabilities [E] of all."""

    chosen: list[int]
    shares: Floats

    def settled(self, top_k: int, threshold: bool) -> Settled | None:
        return self


class Found(NamedTuple):
    """Scores of one layer's experts [E], and the similarity of where they come from."""

    row: Floats
    similarity: float

    def settled(self, top_k: int, threshold: bool) -> Settled | None:
        """What `select` makes of it; None when no expert has a score."""
        scores = self.row.tolist()  # so few numbers are handled faster one by one
        total = sum(scores)
        return Settled(select(scores, self.similarity, top_k, threshold), self.row / total) if total > 0 else None


Answer = Found | Settled


class Track(Protocol):
    """What FineMoE needs of a way to track; costs are in numbers compared with all that is stored, and how many."""

    @property
    def n_stored(self) -> int: ...

    def learn(self, store: StoreSplit) -> None: ...

    def start(self, iteration: Iteration, view: View) -> dict[int, list[Answer]]:
        """Rows for the first layers, by layer; nothing where the track is blind."""

    def step(self, gate: Gate, target: int) -> list[Answer]:
        """Take in a gate; rows for layer `target`, nothing when it lies behind the last layer."""

    def end(self, iteration: Iteration) -> None: ...

    def request_end(self, request: RequestInfo) -> None: ...

    def start_values(self) -> int: ...

    def step_values(self, gate: Gate) -> int: ...

    def end_values(self) -> int: ...


class CountTrack:
    """Request-level hit counts, what MoE-Infinity tracks: the past request whose counts are most like those so far."""

    def __init__(self, view: View, distance: int) -> None:
        self._shape = (view.n_layers, view.n_experts)
        self._distance = distance
        self._stored = np.zeros((0, view.n_layers * view.n_experts))
        self._inverse = np.zeros(0)
        self._running: dict[int, Floats] = {}

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

    def start(self, iteration: Iteration, view: View) -> dict[int, list[Answer]]:
        for r in iteration.ranges:
            self._running.setdefault(r.request.index, np.zeros(self._shape))
        if not self.n_stored or iteration.phase == PREFILL:  # of a new request nothing has been counted
            return {}
        return {layer: self._search(iteration, layer) for layer in range(self._distance)}

    def step(self, gate: Gate, target: int) -> list[Answer]:
        ids, at = gate.ids, 0
        for r in gate.iteration.ranges:
            n = r.stop_row - r.start_row
            np.add.at(self._running[r.request.index][gate.layer], ids[at : at + n], 1.0)
            at += n
        return self._search(gate.iteration, target) if self.n_stored and target < self._shape[0] else []

    def _search(self, iteration: Iteration, layer: int) -> list[Answer]:
        found: list[Answer] = []
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

    def step_values(self, gate: Gate) -> int:
        return len(gate.iteration.ranges) * self._stored.shape[1]

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

    def start(self, iteration: Iteration, view: View) -> dict[int, list[Answer]]:
        return {}  # no gate input yet

    def step(self, gate: Gate, target: int) -> list[Answer]:
        if gate.phase != DECODE or target >= self._n_layers:
            return []
        if self._surrogate is None:
            return [Found(row, 1.0) for row in gate.next_scores(self._distance)]
        found: list[Answer] = []
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

    def step_values(self, gate: Gate) -> int:
        return 0

    def end_values(self) -> int:
        return 0
