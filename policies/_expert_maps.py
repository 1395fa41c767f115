"""FineMoE's Expert Map Store (EuroSys'26, arXiv 2502.05370, sections 4.1, 4.2 and 4.4).

A map is one iteration's gate scores, L x E. Scores are exact integers (traces/FORMAT.md) and embeddings are scaled to
integers here, so every dot product is exact and a search finds the same map on every machine.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

EMBEDDING_RANGE = 2047  # largest magnitude of a scaled embedding: 12 bits keep dot products exact up to h = 2**31


def as_map(scores: Floats) -> Floats:
    """One map [L, E] from the scores of an iteration's tokens [n, L, E]: their mean, rounded to whole numbers."""
    return np.asarray(scores[0] if len(scores) == 1 else np.rint(scores.mean(axis=0)))


def as_embedding(embeddings: NDArray[np.float32], last: bool) -> Floats:
    """One semantic embedding [h] from those of an iteration's tokens [n, h]: the mean (paper) or the last (code)."""
    rows = embeddings.astype(np.float64)
    vector: Floats = rows[-1] if last else rows.mean(axis=0)
    # The mean of float16 values is exact for any prompt below 2**13 tokens, hence the same on every machine.
    largest = float(np.abs(vector).max())
    return np.rint(vector * (EMBEDDING_RANGE / largest)) if largest > 0 else vector


class Trajectory:
    """The similarity of one running iteration with every stored map, extended layer by layer (equation 5)."""

    def __init__(self, store: MapStore) -> None:
        self._store = store
        self.dots = np.zeros(store.n_maps)
        self.own_square = 0.0
        self.rows: list[Floats] = []

    def observe(self, scores: Floats) -> None:
        """Take in the next layer's gate scores [E]."""
        layer = len(self.rows)
        self.rows.append(scores)
        self.dots += self._store.maps[: self._store.n_maps, layer] @ scores
        self.own_square += float(scores @ scores)

    def similarities(self) -> Floats:
        """Cosine with the same prefix of every stored map [n_maps]."""
        squares = self._store.prefix_squares[: self._store.n_maps, len(self.rows) - 1]
        return self.dots / np.sqrt(np.maximum(squares * self.own_square, 1.0))


class MapStore:
    """At most `capacity` maps with their embeddings; when full, the most redundant one is replaced (section 4.4).

    Args:
        distance: prefetch distance d, which weighs semantic against trajectory similarity in the redundancy score.
    """

    def __init__(self, capacity: int, n_layers: int, n_experts: int, distance: int) -> None:
        self.capacity, self.distance = capacity, distance
        self.n_layers, self.n_experts = n_layers, n_experts
        self.maps = np.zeros((capacity, n_layers, n_experts))
        self.prefix_squares = np.zeros((capacity, n_layers))
        self.embeddings = np.zeros((0, 0))
        self.embedding_squares = np.zeros(capacity)
        self.n_maps = 0

    def semantic(self, embedding: Floats) -> Floats:
        """Cosine of an embedding [h] with every stored one (equation 4), [n_maps]."""
        n = self.n_maps
        dots = self.embeddings[:n] @ embedding
        own_square = float(embedding @ embedding)
        return np.asarray(dots / np.sqrt(np.maximum(self.embedding_squares[:n] * own_square, 1.0)))

    def redundancy(self, embedding: Floats, trajectory: Floats) -> Floats:
        """RDY = d/L * semantic + (L - d)/L * trajectory similarity, [n_maps]."""
        share = self.distance / self.n_layers
        return share * self.semantic(embedding) + (1.0 - share) * trajectory

    def add(self, new_map: Floats, embedding: Floats, trajectory: Floats | None = None) -> int:
        """Store a map; returns the slot it took.

        Args:
            new_map: [L, E]. embedding: [h]. trajectory: cosine of the whole map with every stored one, if known.
        """
        if self.embeddings.shape[1] != len(embedding):
            self.embeddings = np.zeros((self.capacity, len(embedding)))
        squares = np.cumsum((new_map * new_map).sum(axis=1))
        if self.n_maps < self.capacity:
            slot = self.n_maps
            self.n_maps += 1
        else:
            if trajectory is None or len(trajectory) != self.n_maps:
                dots = np.tensordot(self.maps, new_map, axes=2)
                trajectory = dots / np.sqrt(np.maximum(self.prefix_squares[:, -1] * squares[-1], 1.0))
            slot = int(np.argmax(self.redundancy(embedding, trajectory)))
        self.maps[slot] = new_map
        self.prefix_squares[slot] = squares
        self.embeddings[slot] = embedding
        self.embedding_squares[slot] = float(embedding @ embedding)
        return slot

    @property
    def n_bytes(self) -> int:
        """Host memory of the maps as the paper stores them: fp32 (Figure 18)."""
        return self.n_maps * self.n_layers * self.n_experts * 4


def select(scores: Floats, similarity: float, top_k: int, threshold: bool) -> NDArray[np.int64]:
    """Experts to prefetch for a layer, most probable first (equations 6 to 8).

    The smallest set whose probability reaches delta = clip(1 - similarity, 0, 1), at least K experts; without the
    `threshold` just the K most probable (the ablation "Map (T+S)"). Ties go to the lowest id.
    """
    order = np.argsort(-scores, kind="stable")
    count = top_k
    if threshold:
        delta = max(0.0, min(1.0 - similarity, 1.0))
        reached = np.cumsum(scores[order]) >= delta * scores.sum()
        count = max(top_k, int(np.argmax(reached)) + 1 if reached.any() else len(order))
    return order[: min(count, len(order))]
