"""FineMoE's own track: past iterations as expert maps, found by meaning and by the way the gates have gone so far."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from policies.fine_moe.map_store import MapStore, Passage, Trajectory, as_embedding, as_embeddings, as_map
from sim.policy import PREFILL, Gate, Iteration, Outlook, RequestInfo, StoreSplit, View

Floats = NDArray[np.float64]


class MapTrack:
    """Expert maps: semantic search for the first layers, then trajectory search (section 4.2).

    A decode token is a map. Of a prompt, `prefill` says: one map, the mean of its tokens' (`mean`), or one of each
    token, searched and stored on its own (`union`); or the mean is stored and nothing predicted (`none`).

    Args:
        outlook: takes the choices. last: a map's embedding is that of its last token, not their mean. semantic: search
            the first layers by embedding. threshold: choose by delta, see `Outlook.choose`.
    """

    def __init__(
        self,
        view: View,
        capacity: int,
        distance: int,
        outlook: Outlook,
        prefill: str,
        last: bool,
        semantic: bool,
        threshold: bool = True,
    ) -> None:
        self._outlook = outlook
        self.store = MapStore(capacity, view.n_layers, view.n_experts, distance)
        self._prefill, self._last, self._semantic = prefill, last, semantic
        self._distance = distance
        self._top_k, self._threshold = view.top_k, threshold
        self._paths: list[Trajectory] = []  # where gates speak one by one
        self._passages: list[tuple[Floats, Passage | None]] = []  # where all layers are known: map and its trajectory
        self._spans: list[tuple[int, int]] = []  # rows of the iteration that make up one map each
        self._blind = True
        self._embeddings: list[Floats] = []
        self._first = np.zeros(distance, dtype=np.int64), np.zeros(distance)  # slots and similarities of first layers
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
            if self._prefill != "union":  # a prompt is one map
                maps.append(as_map(scores[:n])[None])
                embeddings.append(as_embedding(meanings[:n], self._last)[None])
                scores, meanings = scores[n:], meanings[n:]
            maps.append(scores)
            embeddings.append(as_embeddings(meanings))
        if maps:
            self.store.fill(np.concatenate(maps), np.concatenate(embeddings))

    def _within(self, start: int, stop: int, phase: str) -> list[tuple[int, int]]:
        """Rows that make up one map each: single tokens, or a whole prompt."""
        if phase == PREFILL and self._prefill != "union":
            return [(start, stop)]
        return [(row, row + 1) for row in range(start, stop)]

    def start(self, iteration: Iteration, view: View) -> int:
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
            return 0
        self._alike = [self.store.semantic(embedding) for embedding in self._embeddings]
        slots, similarities = self._first
        for i, found in enumerate(self._alike):
            best = found.argmax()
            similarity = found[best]
            self._sums[0] += float(similarity)
            slots.fill(best)
            similarities.fill(similarity)
            self._choose(0, slots, similarities, i > 0)
        self._counts[0] += len(self._alike)
        return self._distance

    def along(self, scores: Floats) -> bool:
        """What `step` finds for each layer from `distance` on, from the scores of all gates [n, L, E] at once."""
        self._passages = []
        m = self.store.n_layers - self._distance
        for start, stop in self._spans:
            own = as_map(scores[start:stop])
            passage = None if self._blind else self.store.along(own)
            self._passages.append((own, passage))
            if passage is not None and m:
                self._sums[1] += sum(passage.similarities[:m].tolist())
                self._counts[1] += m
                self._choose(self._distance, passage.slots[:m], passage.similarities, len(self._passages) > 1)
        return not self._blind and m > 0 and bool(self._spans)

    def _choose(self, first: int, slots: NDArray[np.int64], similarities: Floats, joins: bool) -> None:
        """Choose for the layers from `first` on by the maps in these slots."""
        rows = self.store.rows(first, slots)
        self._outlook.choose(first, rows, similarities, self._top_k, self._threshold, joins)

    def step(self, gate: Gate, target: int) -> bool:
        """Take in a gate where later ones have not spoken, and choose for layer `target`, where there is one."""
        if gate.layer == 0:
            self._paths = [Trajectory(self.store) for _ in self._spans]
        scores = gate.scores
        for path, (start, stop) in zip(self._paths, self._spans, strict=True):
            path.observe(np.array(as_map(scores[start:stop])))
        if self._blind or target >= self.store.n_layers:
            return False
        for i, path in enumerate(self._paths):
            slot, similarity = path.nearest()
            self._sums[1] += similarity
            self._choose(target, np.array([slot]), np.array([similarity]), i > 0)
        self._counts[1] += len(self._paths)
        return True

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
            passed = [
                (own, passage and passage.whole, passage and passage.inverse_norms) for own, passage in self._passages
            ]
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
