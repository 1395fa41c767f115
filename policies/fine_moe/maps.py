"""FineMoE's own track: past iterations as expert maps, found by meaning and by the way the gates have gone so far."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from policies.fine_moe.expert_maps import MapStore, Passage, Trajectory, as_embedding, as_map
from policies.fine_moe.tracks import Foretold, Found, foretold
from sim.policy import DECODE, PREFILL, Gate, Iteration, RequestInfo, StoreSplit, View

Floats = NDArray[np.float64]


class MapTrack:
    """Expert maps: semantic search for the first layers, then trajectory search (section 4.2).

    A decode token is a map. Of a prompt, `prefill` says: one map, the mean of its tokens' (`mean`), or one of each
    token, searched and stored on its own (`union`); or the mean is stored and nothing predicted (`none`).

    Args:
        last: a map's embedding is that of its last token, not their mean. semantic: search the first layers by
            embedding. threshold: choose by delta, see `select`.
    """

    def __init__(
        self, view: View, capacity: int, distance: int, prefill: str, last: bool, semantic: bool, threshold: bool = True
    ) -> None:
        self.store = MapStore(capacity, view.n_layers, view.n_experts, distance)
        self._prefill, self._last, self._semantic = prefill, last, semantic
        self._distance = distance
        self._top_k, self._threshold = view.top_k, threshold
        self._paths: list[Trajectory] = []  # where gates speak one by one
        self._passages: list[tuple[Floats, Passage | None]] = []  # where all layers are known: map and its trajectory
        self._spans: list[tuple[int, int]] = []  # rows of the iteration that make up one map each
        self._blind = True
        self._embeddings: list[Floats] = []
        self._alike: list[Floats] = []  # the answers of this iteration's semantic search
        self._sums, self._counts = [0.0, 0.0], [0, 0]  # similarities of maps found by meaning, by trajectory

    @property
    def n_stored(self) -> int:
        return self.store.n_maps

    @property
    def n_spans(self) -> int:
        """Maps that the iteration makes."""
        return len(self._spans)

    def learn(self, store: StoreSplit) -> None:
        maps, embeddings = [], []
        for request in store.requests:
            rows = (request.first_row, request.first_row + request.prompt_len + request.outputs - 1)
            scores, meanings = store.trace.scores(*rows), store.trace.embeddings(*rows)
            n = request.prompt_len
            for start, stop in [*self._within(0, n, PREFILL), *self._within(n, rows[1] - rows[0], DECODE)]:
                maps.append(as_map(scores[start:stop]))
                embeddings.append(as_embedding(meanings[start:stop], self._last))
        if maps:
            self.store.fill(np.stack(maps), np.stack(embeddings))

    def _within(self, start: int, stop: int, phase: str) -> list[tuple[int, int]]:
        """Rows that make up one map each: single tokens, or a whole prompt."""
        if phase == PREFILL and self._prefill != "union":
            return [(start, stop)]
        return [(row, row + 1) for row in range(start, stop)]

    def start(self, iteration: Iteration, view: View) -> dict[int, list[Found]]:
        self._spans, at = [], 0
        for r in iteration.ranges:
            self._spans += self._within(at, at + r.stop_row - r.start_row, iteration.phase)
            at += r.stop_row - r.start_row
        self._paths, self._passages = [], []
        meanings = view.embeddings()
        self._embeddings = [as_embedding(meanings[start:stop], self._last) for start, stop in self._spans]
        self._alike = []
        self._blind = self.store.n_maps == 0 or (self._prefill == "none" and iteration.phase == PREFILL)
        if self._blind or not self._semantic:
            return {}
        self._alike = [self.store.semantic(embedding) for embedding in self._embeddings]
        best = [int(found.argmax()) for found in self._alike]
        for found, at in zip(self._alike, best, strict=True):
            self._sums[0] += float(found[at])
        self._counts[0] += len(best)
        return {
            layer: [self._row(layer, at, float(found[at])) for found, at in zip(self._alike, best, strict=True)]
            for layer in range(self._distance)
        }

    def along(self, scores: Floats) -> Foretold | None:
        """What `step` finds for each layer from `distance` on, from the scores of all gates [n, L, E] at once."""
        self._passages = []
        targets = np.arange(self._distance, self.store.n_layers)
        m = len(targets)
        several: list[tuple[Floats, Floats]] = []
        for start, stop in self._spans:
            own = as_map(scores[start:stop])
            passage = None if self._blind else self.store.along(own)
            self._passages.append((own, passage))
            if passage is not None and m:
                similarities = passage.similarities[:m]
                self._sums[1] += sum(similarities.tolist())
                self._counts[1] += m
                rows = self.store.maps[targets, :, passage.slots[:m]].astype(np.float64)
                several.append((rows, similarities))
        return foretold(self._distance, several, self._top_k, self._threshold) if several else None

    def _row(self, layer: int, slot: int, similarity: float) -> Found:
        return Found(self.store.maps[layer, :, slot].astype(np.float64), similarity)

    def step(self, gate: Gate, target: int) -> list[Found]:
        """Take in a gate where later ones have not spoken; what to expect of layer `target`, where there is one."""
        if gate.layer == 0:
            self._paths = [Trajectory(self.store) for _ in self._spans]
        scores = gate.scores
        for path, (start, stop) in zip(self._paths, self._spans, strict=True):
            path.observe(np.array(as_map(scores[start:stop])))
        if self._blind or target >= self.store.n_layers:
            return []
        nearest = [path.nearest() for path in self._paths]
        self._sums[1] += sum([alike for _, alike in nearest])
        self._counts[1] += len(nearest)
        return [self._row(target, *one) for one in nearest]

    def similarities(self) -> tuple[float, float]:
        """Mean similarity of the maps found by meaning, and by trajectory; 9 digits, whatever the order of adding."""
        meaning, way = (round(total / n, 9) if n else 0.0 for total, n in zip(self._sums, self._counts, strict=True))
        return meaning, way

    def end(self, iteration: Iteration) -> None:
        """Section 4.4: the new maps join the store."""
        passed: list[tuple[Floats, Floats | None, Floats | None]]
        if self._paths:
            passed = [(np.stack(path.rows), path.similarities(), None) for path in self._paths]
        else:
            passed = [(own, passage and passage.whole, passage and passage.inverse_norms)
                      for own, passage in self._passages]  # fmt: skip
        if len(passed) > 1:  # the first newcomer may change the store the others were compared with: compare again
            self.store.fill(np.stack([own for own, _, _ in passed]), np.stack(self._embeddings))
            return
        ((own, trajectory, norms),), (embedding,) = passed, self._embeddings
        known = self.store.n_maps > 0
        semantic = self._alike[0] if known and self._alike else None
        self.store.add(own, embedding, trajectory if known else None, semantic, norms)

    def request_end(self, request: RequestInfo) -> None:
        """Maps outlive their request."""

    def start_values(self) -> int:
        return len(self._embeddings) * len(self._embeddings[0])

    def step_values(self, layer: int) -> int:
        return len(self._spans) * (layer + 1) * self.store.n_experts

    def end_values(self) -> int:
        return len(self._spans) * (self.store.n_layers * self.store.n_experts + len(self._embeddings[0]))
