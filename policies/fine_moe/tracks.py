"""What FineMoE's searcher may track (EuroSys'26, arXiv 2502.05370, section 4.2), and what Figure 14a puts in its place.

A track answers twice: before an iteration, for the layers nothing has been seen of yet, and after each gate, for the
layer `distance` ahead. An answer is a row of scores per sequence and how alike the source of that row was; of several
sequences the outlook takes the union of the sets and the larger probability.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sim.policy import DECODE, Gate, Iteration, Outlook, RequestInfo, StoreSplit, Surrogate, View, inverse_norm

Floats = NDArray[np.float64]
ALIKE = np.ones(1)  # the gate itself is asked


class Track(Protocol):
    """What FineMoE needs of a way to track; costs are in numbers compared with all that is stored, and how many."""

    @property
    def n_stored(self) -> int: ...

    def learn(self, store: StoreSplit) -> None: ...

    def start(self, iteration: Iteration, view: View) -> int:
        """Choose for the first layers, and say for how many: for none where the track is blind."""

    def step(self, gate: Gate, target: int) -> bool:
        """Take in a gate and choose for layer `target`, and all after it where the outlook is `to_last`.

        False where nothing can be said of them.
        """

    def end(self, iteration: Iteration) -> None: ...

    def request_end(self, request: RequestInfo) -> None: ...

    def start_values(self) -> int: ...

    def step_values(self, layer: int) -> int: ...

    def end_values(self) -> int: ...


class CountTrack:
    """Request-level hit counts, what MoE-Infinity tracks: the past request whose counts are most like those so far."""

    def __init__(self, view: View, distance: int, outlook: Outlook) -> None:
        self._outlook, self._top_k = outlook, view.top_k
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

    def start(self, iteration: Iteration, view: View) -> int:
        self._n_ranges = len(iteration.ranges)
        for r in iteration.ranges:
            self._running.setdefault(r.request.index, np.zeros(self._shape))
        if not self.n_stored or not any(r.context for r in iteration.ranges):
            return 0
        self._search(iteration, 0, self._distance)
        return self._distance

    def step(self, gate: Gate, target: int) -> bool:
        ids, at = gate.ids, 0
        for r in gate.iteration.ranges:
            n = r.stop_row - r.start_row
            np.add.at(self._running[r.request.index][gate.layer], ids[at : at + n], 1.0)
            at += n
        if not self.n_stored or target >= self._shape[0]:
            return False
        self._search(gate.iteration, target, self._shape[0] if self._outlook.to_last else target + 1)
        return True

    def _search(self, iteration: Iteration, first: int, stop: int) -> None:
        """Choose for layers `first` to `stop` by the counts that are most like each request's so far."""
        # Of a new request nothing has been counted yet.
        known = [r for r in iteration.ranges if first or r.context]
        for i, r in enumerate(known):
            counts = self._running[r.request.index].reshape(-1)
            alike = (self._stored @ counts) * self._inverse * float(inverse_norm(counts.dot(counts)))
            best = int(alike.argmax())
            rows = self._stored[best].reshape(self._shape)[first:stop]
            similarities = np.full(stop - first, alike[best])
            self._outlook.choose(first, rows, similarities, self._top_k, False, i > 0)

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

    In prompts only where the trace records such scores of theirs. A `surrogate` stands in for the gate, in prompts as
    well: what it names is equally probable.
    """

    def __init__(self, view: View, distance: int, outlook: Outlook, surrogate: Surrogate | None = None) -> None:
        self._outlook, self._top_k = outlook, view.top_k
        self._distance, self._n_layers, self._n_experts = distance, view.n_layers, view.n_experts
        self._surrogate = surrogate
        self._in_prompts = surrogate is not None
        self.n_stored = 0  # nothing is searched

    def learn(self, store: StoreSplit) -> None:
        """Whether gates ahead are recorded of prompts, too."""
        self._in_prompts = self._in_prompts or f"next_scores_{self._distance}" in store.trace.levels_prefill

    def start(self, iteration: Iteration, view: View) -> int:
        return 0  # no gate input yet

    def step(self, gate: Gate, target: int) -> bool:
        if (gate.phase != DECODE and not self._in_prompts) or target >= self._n_layers:
            return False
        rows = self._named(gate, target) if self._surrogate else np.ascontiguousarray(gate.next_scores(self._distance))
        for i in range(len(rows)):
            self._outlook.choose(target, rows[i : i + 1], ALIKE, self._top_k, False, i > 0)
        return True

    def _named(self, gate: Gate, target: int) -> Floats:
        """The stand-in's answer as scores, by sequence [n, E]."""
        assert self._surrogate is not None
        truth = gate.iteration.ids(target).tolist()
        rows = np.zeros((len(truth), self._n_experts))
        every = [at for r in gate.iteration.ranges for at in range(r.start_row, r.stop_row)]
        for row, at, ids in zip(rows, every, truth, strict=True):
            row[self._surrogate.name(at, target, ids)] = 1.0
        return rows

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
