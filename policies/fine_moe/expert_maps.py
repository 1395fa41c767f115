"""FineMoE's Expert Map Store (EuroSys'26, arXiv 2502.05370, sections 4.1, 4.2 and 4.4).

A map is one iteration's gate scores, L x E. Scores are exact integers (traces/FORMAT.md) and embeddings are scaled to
integers here, so every dot product is exact and a search finds the same map on every machine.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

EMBEDDING_RANGE = 2047  # largest magnitude of a scaled embedding: 12 bits keep dot products exact up to h = 2**31
BLOCK = 512  # maps added at once by `fill`
# Whole numbers up to here are exact in single precision, and so is every sum of such that does not exceed it.
EXACT_IN_SINGLE = 2.0**24


def as_map(scores: Floats) -> Floats:
    """One map [L, E] from the scores of an iteration's tokens [n, L, E]: their mean, rounded to whole numbers."""
    return np.asarray(scores[0] if len(scores) == 1 else np.rint(scores.mean(axis=0)))


def as_embedding(embeddings: NDArray[np.float32], last: bool) -> Floats:
    """One semantic embedding [h] from those of an iteration's tokens [n, h]: the mean (paper) or the last (code)."""
    rows = embeddings.astype(np.float64)
    # The mean of float16 values is exact for any prompt below 2**13 tokens, hence the same on every machine.
    vector: Floats = rows[-1] if last or len(rows) == 1 else rows.mean(axis=0)
    largest = float(np.abs(vector).max())
    return np.rint(vector * (EMBEDDING_RANGE / largest)) if largest > 0 else vector


def inverse_norm(squares: Floats) -> Floats:
    """1 / sqrt, and 0 for a vector of zeros, so that its similarity is 0."""
    return np.where(squares > 0, 1.0 / np.sqrt(np.maximum(squares, 1.0)), 0.0)


class Trajectory:
    """The similarity of one running iteration with every stored map, extended layer by layer (equation 5)."""

    def __init__(self, store: MapStore) -> None:
        self._store = store
        self._dots = np.zeros(store.n_maps)
        self._own_square = 0.0
        self.rows: list[Floats] = []

    def observe(self, scores: Floats) -> None:
        """Take in the next layer's gate scores [E]."""
        self._dots += self._store.products(len(self.rows), scores)
        self._own_square += float(scores.dot(scores))
        self.rows.append(scores)

    def similarities(self) -> Floats:
        """Cosine with the same prefix of every stored map [n_maps]."""
        own = 1.0 / math.sqrt(self._own_square) if self._own_square > 0 else 0.0
        similarities: Floats = self._dots * self._store.inverse_norms[len(self.rows) - 1, : len(self._dots)]
        similarities *= own
        return similarities

    def nearest(self) -> tuple[int, float]:
        """The slot of the map most alike (ties go to the lowest), and how alike it is."""
        inverse = self._store.inverse_norms[len(self.rows) - 1, : len(self._dots)]
        alike = self._dots * inverse
        slot = int(alike.argmax())  # one's own norm scales all of them alike
        own = 1.0 / math.sqrt(self._own_square) if self._own_square > 0 else 0.0
        return slot, float(alike[slot]) * own


class Passage(NamedTuple):
    """A whole iteration's trajectory: for each prefix the map most alike and how alike; all similarities at its end."""

    slots: NDArray[np.int64]  # [L]
    similarities: Floats  # [L]
    whole: Floats  # [n_maps]
    inverse_norms: Floats  # of its own prefixes [L]


class MapStore:
    """At most `capacity` maps with their embeddings; when full, the most redundant one is replaced (section 4.4).

    Args:
        distance: prefetch distance d, which weighs semantic against trajectory similarity in the redundancy score.
    """

    def __init__(self, capacity: int, n_layers: int, n_experts: int, distance: int) -> None:
        self.capacity, self.distance = capacity, distance
        self.n_layers, self.n_experts = n_layers, n_experts
        # Layer first: a search reads one layer of all maps. Single precision as long as that is exact.
        self.maps: NDArray[Any] = np.zeros((n_layers, n_experts, capacity), dtype=np.float32)
        self.inverse_norms = np.zeros((n_layers, capacity))  # of the prefix that ends with each layer
        self.embeddings = np.zeros((capacity, 0))
        self.inverse_embeddings = np.zeros(capacity)
        self.n_maps = 0
        self._scratch: Scratch | None = None
        self._layers = np.arange(n_layers)

    def products(self, layer: int, scores: Floats) -> Floats:
        """Dot products of one layer's scores [E] with that layer of every stored map, [n_maps]; exact."""
        self._admit(float(scores.dot(scores)))
        dots: Floats = scores.astype(self.maps.dtype) @ self.maps[layer, :, : self.n_maps]
        return dots.astype(np.float64)

    def along(self, rows: Floats) -> Passage:
        """What `Trajectory` says after each layer of a map [L, E], for all layers at once."""
        squares = (rows * rows).sum(axis=1)
        self._admit(float(squares.max()))
        scratch = self._scratch
        if scratch is None or not scratch.suits(self):
            scratch = self._scratch = Scratch(self)
        np.matmul(rows.astype(self.maps.dtype)[:, None, :], self.maps[:, :, : self.n_maps], out=scratch.products)
        np.copyto(scratch.dots, scratch.products[:, 0])
        for before, here in scratch.steps:  # several times as fast as numpy's cumsum along this axis
            np.add(before, here, out=here)
        alike = np.multiply(scratch.dots, self.inverse_norms[:, : self.n_maps], out=scratch.alike)
        slots = alike.argmax(axis=1)
        own = inverse_norm(np.cumsum(squares))
        best = alike[self._layers, slots]
        return Passage(slots, best * own, alike[-1] * own[-1], own)

    def _admit(self, square: float) -> None:
        """Make sure that products of rows with this sum of squares are exact: they do not exceed the larger square."""
        if square > EXACT_IN_SINGLE and self.maps.dtype == np.float32:
            self.maps = self.maps.astype(np.float64)

    def semantic(self, embedding: Floats) -> Floats:
        """Cosine of an embedding [h] with every stored one (equation 4), [n_maps]."""
        n = self.n_maps
        own = float(inverse_norm(np.asarray(embedding @ embedding)))
        return (self.embeddings[:n] @ embedding) * self.inverse_embeddings[:n] * own

    def redundancy(self, semantic: Floats, trajectory: Floats) -> Floats:
        """RDY = d/L * semantic + (L - d)/L * trajectory similarity."""
        share = self.distance / self.n_layers
        return share * semantic + (1.0 - share) * trajectory

    def add(
        self, new_map: Floats, embedding: Floats, trajectory: Floats | None = None, semantic: Floats | None = None,
        inverse_norms: Floats | None = None,
    ) -> int:  # fmt: skip
        """Store a map [L, E] with its embedding [h]; returns the slot it took.

        Args:
            trajectory, semantic: cosines of the whole map and of the embedding with every stored one, where they are
                known already.
            inverse_norms: of the map's prefixes [L], where `along` has worked them out.
        """
        slot = self.n_maps
        if slot == self.capacity:
            if trajectory is None:
                path = Trajectory(self)
                for row in new_map:
                    path.observe(row)
                trajectory = path.similarities()
            if semantic is None:
                semantic = self.semantic(embedding)
            slot = int(np.argmax(self.redundancy(semantic, trajectory)))
        self._put(slot, new_map, embedding, inverse_norms)
        return slot

    def fill(self, new_maps: Floats, embeddings: Floats) -> None:
        """Add maps [n, L, E] with embeddings [n, h] in turn, as `add` would, with the products of a block at once."""
        start = 0
        while start < len(new_maps) and self.n_maps < self.capacity:
            self._put(self.n_maps, new_maps[start], embeddings[start])
            start += 1
        for at in range(start, len(new_maps), BLOCK):
            self._replace_block(new_maps[at : at + BLOCK], embeddings[at : at + BLOCK])

    def _replace_block(self, new_maps: Floats, embeddings: Floats) -> None:
        """A slot taken by one newcomer is, for those after it, as similar as that newcomer."""
        flat = new_maps.reshape(len(new_maps), -1)
        stored = self.maps.reshape(-1, self.capacity).astype(np.float64)  # sums over all layers
        own, own_sem = (inverse_norm((rows * rows).sum(axis=1)) for rows in (flat, embeddings))
        theirs, theirs_sem = self.inverse_norms[-1], self.inverse_embeddings
        trajectory = flat @ stored * theirs[None] * own[:, None]
        semantic = embeddings @ self.embeddings.T * theirs_sem[None] * own_sem[:, None]
        among = flat @ flat.T * own[None] * own[:, None]
        among_sem = embeddings @ embeddings.T * own_sem[None] * own_sem[:, None]
        scores = self.redundancy(semantic, trajectory)
        among_scores = self.redundancy(among_sem, among)
        for i in range(len(new_maps)):
            slot = int(np.argmax(scores[i]))
            self._put(slot, new_maps[i], embeddings[i])
            scores[i + 1 :, slot] = among_scores[i + 1 :, i]

    def _put(self, slot: int, new_map: Floats, embedding: Floats, inverse_norms: Floats | None = None) -> None:
        if self.embeddings.shape[1] != len(embedding):
            self.embeddings = np.zeros((self.capacity, len(embedding)))
        if inverse_norms is None:
            squares = (new_map * new_map).sum(axis=1)
            self._admit(float(squares.max()))
            inverse_norms = inverse_norm(np.cumsum(squares))
        self.maps[:, :, slot] = new_map
        self.inverse_norms[:, slot] = inverse_norms
        self.embeddings[slot] = embedding
        self.inverse_embeddings[slot] = inverse_norm(np.asarray(embedding @ embedding))
        if slot == self.n_maps:
            self.n_maps = slot + 1

    @property
    def n_bytes(self) -> int:
        """Host memory of the maps as the paper stores them: fp32 (Figure 18)."""
        return self.n_maps * self.n_layers * self.n_experts * 4


class Scratch:
    """Arrays that `along` writes over; asking the system for new ones costs more than the sums."""

    def __init__(self, store: MapStore) -> None:
        self.products = np.empty((store.n_layers, 1, store.n_maps), dtype=store.maps.dtype)
        self.dots, self.alike = np.empty((2, store.n_layers, store.n_maps))
        rows = list(self.dots)
        self.steps = list(pairwise(rows))

    def suits(self, store: MapStore) -> bool:
        """True while the store has neither grown nor changed its precision."""
        return bool(self.products.shape[2] == store.n_maps and self.products.dtype == store.maps.dtype)


def select_many(
    rows: Floats, similarities: Floats, top_k: int, threshold: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Experts to prefetch for layers with these scores [m, E] (equations 6 to 8).

    The smallest set whose probability reaches delta = clip(1 - similarity, 0, 1), at least K experts; without the
    `threshold` just the K most probable (the ablation "Map (T+S)"). Ties go to the lowest id.

    Returns:
        All experts, most probable first [m, E], and how many of them are taken [m].
    """
    falling = -rows
    order = falling.argsort(axis=1, kind="stable")
    least = min(top_k, rows.shape[1])
    if not threshold:
        return order, np.full(len(rows), least)
    falling.sort(axis=1)
    reached = falling.cumsum(axis=1)  # less than nothing, as everything here
    targets = np.maximum(np.minimum(similarities - 1.0, 0.0), -1.0) * -reached[:, -1]
    enough = (targets < 0.0) + (reached[:, :-1] > targets[:, None]).sum(axis=1)  # the fewest that reach it
    return order, np.maximum(enough, least)
