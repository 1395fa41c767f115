"""FineMoE's own track: past iterations as expert maps, found by meaning and by the way the gates have gone so far."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from policies._expert_maps import MapStore, Passage, Trajectory, as_embedding, as_map, select_many
from policies._fine_moe_tracks import Answer, Found, Settled
from sim.iterations import PREFILL, Gate, Iteration, Range, RequestInfo
from sim.store import StoreSplit
from sim.view import View

Floats = NDArray[np.float64]


class MapTrack:
    """Expert maps: semantic search for the first layers, then trajectory search (section 4.2).

    Args:
        semantic: search the first layers by embedding. threshold: choose by delta, see `select`.
    """

    def __init__(
        self, view: View, capacity: int, distance: int, variant: str, semantic: bool, threshold: bool = True
    ) -> None:
        self.store = MapStore(capacity, view.n_layers, view.n_experts, distance)
        self._last, self._semantic = variant == "code", semantic
        self._distance = distance
        self._top_k, self._threshold = view.top_k, threshold
        self._paths: list[Trajectory] = []  # where gates speak one by one
        self._passages: list[tuple[Floats, Passage | None]] = []  # where all layers are known: map and its trajectory
        self._ranges: list[Range] = []
        self._blind = True
        self._embeddings: list[Floats] = []
        self._alike: list[Floats] = []  # the answers of this iteration's semantic search

    @property
    def n_stored(self) -> int:
        return self.store.n_maps

    def learn(self, store: StoreSplit) -> None:
        maps, embeddings = [], []
        for r in store.iterations():
            rows = (r.start_row, r.stop_row)
            maps.append(as_map(store.trace.scores(*rows)))
            embeddings.append(as_embedding(store.trace.embeddings(*rows), self._last))
        if maps:
            self.store.fill(np.stack(maps), np.stack(embeddings))

    def start(self, iteration: Iteration, view: View) -> dict[int, list[Answer]]:
        self._ranges = iteration.ranges
        self._paths, self._passages = [], []
        self._embeddings = self._per_range(iteration, view.embeddings())
        self._alike = []
        self._blind = self.store.n_maps == 0 or (self._last and iteration.phase == PREFILL)
        if self._blind or not self._semantic:
            return {}
        self._alike = [self.store.semantic(embedding) for embedding in self._embeddings]
        best = [int(found.argmax()) for found in self._alike]
        return {
            layer: [self._row(layer, at, float(found[at])) for found, at in zip(self._alike, best, strict=True)]
            for layer in range(self._distance)
        }

    def step(self, gate: Gate, target: int) -> list[Answer]:
        found: list[Answer] | None = gate.at_once(self._along)
        return self._one_by_one(gate, target) if found is None else found

    def _along(self, scores: Floats) -> list[list[Answer]]:
        """By layer, what its gate lets `step` say, from the scores of all layers [n, L, E]."""
        self._passages, at = [], 0
        n_layers = self.store.n_layers
        told: list[list[Answer]] = [[] for _ in range(n_layers)]
        targets = np.arange(self._distance, n_layers)
        for r in self._ranges:
            n = r.stop_row - r.start_row
            own = as_map(scores[at : at + n])
            at += n
            passage = None if self._blind else self.store.along(own)
            self._passages.append((own, passage))
            if passage is not None and len(targets):
                m = len(targets)
                for found, one in zip(told, self._settle(targets, passage.slots[:m], passage.similarities[:m]),
                                      strict=False):  # fmt: skip
                    found.append(one)
        return told

    def _settle(self, layers: NDArray[np.int64], slots: NDArray[np.int64], similarities: Floats) -> list[Answer]:
        """What the maps in these slots say of these layers."""
        rows = self.store.maps[layers, :, slots].astype(np.float64)
        totals = rows.sum(axis=1)
        if not totals.all():  # `Found` knows what to do with a layer without scores
            return [Found(row, alike) for row, alike in zip(rows, similarities.tolist(), strict=True)]
        chosen = select_many(rows, similarities, self._top_k, self._threshold)
        rows /= totals[:, None]
        return list(map(Settled, chosen, rows))

    def _row(self, layer: int, slot: int, similarity: float) -> Found:
        return Found(self.store.maps[layer, :, slot].astype(np.float64), similarity)

    def _one_by_one(self, gate: Gate, target: int) -> list[Answer]:
        """`step` where later gates have not spoken."""
        if gate.layer == 0:
            self._paths = [Trajectory(self.store) for _ in self._ranges]
        scores, at = gate.scores, 0
        for path, r in zip(self._paths, self._ranges, strict=True):
            n = r.stop_row - r.start_row
            path.observe(np.array(scores[at]) if n == 1 else np.rint(scores[at : at + n].mean(axis=0)))
            at += n
        if self._blind or target >= self.store.n_layers:
            return []
        return [self._row(target, *path.nearest()) for path in self._paths]

    def end(self, iteration: Iteration) -> None:
        """Section 4.4: the new maps join the store."""
        passed: list[tuple[Floats, Floats | None, Floats | None]]
        if self._paths:
            passed = [(np.stack(path.rows), path.similarities(), None) for path in self._paths]
        else:
            passed = [(own, passage and passage.whole, passage and passage.inverse_norms)
                      for own, passage in self._passages]  # fmt: skip
        # In a batch the first newcomer may change the store the others were compared with: they compare again.
        alone = len(passed) == 1 and self.store.n_maps > 0
        semantic = self._alike[0] if alone and self._alike else None
        for embedding, (own, trajectory, norms) in zip(self._embeddings, passed, strict=True):
            self.store.add(own, embedding, trajectory if alone else None, semantic, norms)

    def request_end(self, request: RequestInfo) -> None:
        """Maps outlive their request."""

    def start_values(self) -> int:
        return len(self._embeddings) * len(self._embeddings[0])

    def step_values(self, gate: Gate) -> int:
        return len(self._ranges) * (gate.layer + 1) * self.store.n_experts

    def end_values(self) -> int:
        return len(self._ranges) * (self.store.n_layers * self.store.n_experts + len(self._embeddings[0]))

    def _per_range(self, iteration: Iteration, embeddings: NDArray[np.float32]) -> list[Floats]:
        found, at = [], 0
        for r in iteration.ranges:
            n = r.stop_row - r.start_row
            found.append(as_embedding(embeddings[at : at + n], self._last))
            at += n
        return found
