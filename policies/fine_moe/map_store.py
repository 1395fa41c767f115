"""FineMoE's Expert Map Store (EuroSys'26, arXiv 2502.05370, sections 4.1, 4.2 and 4.4).

A map is one iteration's gate scores, L x E. Scores are exact integers (traces/FORMAT.md) and embeddings are scaled to
integers here, so every dot product is exact and a search finds the same map on every machine.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.policy import (
    EXACT_IN_SINGLE,
    Likeness,
    PathSearch,
    VectorSearch,
    inverse_norm,
    most_alike,
    replaced_in_turn,
    scaled,
)

Floats = NDArray[np.float64]

BLOCK = 512  # maps added at once by `fill`


def as_map(scores: Floats) -> Floats:
    """One map [L, E] from the scores of an iteration's tokens [n, L, E]: their mean, rounded to whole numbers."""
    return np.asarray(scores[0] if len(scores) == 1 else np.rint(scores.mean(axis=0)))


def as_embeddings(rows: NDArray[np.float32]) -> Floats:
    """`as_embedding` of single tokens, [n, h]."""
    return np.array([scaled(row) for row in rows.astype(np.float64)]).reshape(rows.shape)


def as_embedding(embeddings: NDArray[np.float32], last: bool) -> Floats:
    """One semantic embedding [h] from those of an iteration's tokens [n, h]: the mean (paper) or the last (code)."""
    rows = embeddings.astype(np.float64)
    # The mean of float16 values is exact for any prompt below 2**13 tokens, hence the same on every machine.
    return scaled(rows[-1] if last or len(rows) == 1 else rows.mean(axis=0))


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
        self.meanings = VectorSearch(capacity, 0)
        self.n_maps = 0
        self._search: PathSearch | None = None

    def products(self, layer: int, scores: Floats) -> Floats:
        """Dot products of one layer's scores [E] with that layer of every stored map, [n_maps]; exact."""
        self._admit(float(scores.dot(scores)))
        dots: Floats = scores.astype(self.maps.dtype) @ self.maps[layer, :, : self.n_maps]
        return dots.astype(np.float64)

    def along(self, rows: Floats) -> PathSearch:
        """What `Trajectory` says after each layer of a map [L, E], at once: the search has it till its next."""
        rows = np.ascontiguousarray(rows, dtype=np.float64)
        search = self._search or self.search()
        if not search.find(rows, self.n_maps):
            self._widen()
            search = self.search()
            search.find(rows, self.n_maps)
        return search

    def search(self) -> PathSearch:
        """The search among what is stored."""
        if self._search is None:
            self._search = PathSearch(self.maps, self.inverse_norms)
        return self._search

    def rows(self, first: int, slots: NDArray[np.int64]) -> Floats:
        """Scores of stored maps: of layer `first + i` those of the map in `slots[i]`, [m, E]."""
        out = np.empty((len(slots), self.n_experts))
        self.search().rows(first, slots, out)
        return out

    def _admit(self, square: float) -> None:
        """Make sure that products of rows with this sum of squares are exact: they do not exceed the larger square."""
        if square > EXACT_IN_SINGLE and self.maps.dtype == np.float32:
            self._widen()

    def _widen(self) -> None:
        self.maps = self.maps.astype(np.float64)
        self._search = None

    def semantic(self, embedding: Floats) -> Floats:
        """Cosine of an embedding [h] with every stored one (equation 4), [n_maps]."""
        return self.meanings.cosines(embedding, self.n_maps)

    def add(
        self,
        new_map: Floats,
        embedding: Floats,
        trajectory: Floats | None = None,
        semantic: Floats | None = None,
        inverse_norms: Floats | None = None,
    ) -> int:
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
            # Redundancy RDY = d/L * semantic + (L - d)/L * trajectory similarity.
            slot = most_alike(semantic, trajectory, self.distance / self.n_layers)
        self._put(slot, new_map, embedding, inverse_norms)
        return slot

    def fill(self, new_maps: Floats, embeddings: Floats) -> None:
        """Add maps [n, L, E] with embeddings [n, h] in turn, as `add` would, with the products of a block at once."""
        room = self.capacity - self.n_maps
        first = new_maps[:room]
        if len(first):
            self._put_all(np.arange(self.n_maps, self.n_maps + len(first)), first, embeddings[:room])
        for at in range(len(first), len(new_maps), BLOCK):
            self._replace_block(new_maps[at : at + BLOCK], embeddings[at : at + BLOCK])

    def _replace_block(self, new_maps: Floats, embeddings: Floats) -> None:
        """A slot taken by one newcomer is, for those after it, as similar as that newcomer."""
        flat = new_maps.reshape(len(new_maps), -1)
        stored = self.maps.reshape(-1, self.capacity).astype(np.float64)  # sums over all layers
        whole, meaning = (
            Likeness(products, norms.copy(), rows @ rows.T, inverse_norm((rows * rows).sum(axis=1)))
            for rows, products, norms in (
                (flat, flat @ stored, self.inverse_norms[-1]),
                (embeddings, embeddings @ self.meanings.vectors.T, self.meanings.inverse_norms),
            )
        )
        slots = replaced_in_turn(meaning, whole, self.distance / self.n_layers)
        last = {slot: i for i, slot in enumerate(slots.tolist())}  # of those who took the same slot, who stays
        stays = list(last.values())
        self._put_all(np.array(list(last)), new_maps[stays], embeddings[stays])

    def _put_all(self, slots: NDArray[np.int64], new_maps: Floats, embeddings: Floats) -> None:
        """Write maps [m, L, E] with their embeddings [m, h] into these slots, each named once."""
        squares = (new_maps * new_maps).sum(axis=2)
        self._admit(float(squares.max()))
        self._size(embeddings.shape[1])
        self.search().put_all(slots, new_maps.transpose(1, 2, 0), inverse_norm(squares.cumsum(axis=1)).T)
        self.meanings.put_all(slots, embeddings)
        self.n_maps = max(self.n_maps, int(slots.max()) + 1)

    def _put(self, slot: int, new_map: Floats, embedding: Floats, inverse_norms: Floats | None) -> None:
        if inverse_norms is None:
            self._put_all(np.array([slot]), new_map[None], embedding[None])
            return
        self._size(len(embedding))
        self.search().put(slot, new_map, inverse_norms)
        self.meanings.put(slot, embedding)
        if slot == self.n_maps:
            self.n_maps = slot + 1

    def _size(self, hidden: int) -> None:
        if self.meanings.n_values != hidden:
            self.meanings = VectorSearch(self.capacity, hidden)

    def kept(self) -> dict[str, NDArray[Any]]:
        """All maps [n, L, E] with their embeddings [n, h]; `fill` of an empty store takes them in again."""
        return {
            "maps": self.maps[:, :, : self.n_maps].transpose(2, 0, 1),
            "embeddings": self.meanings.vectors[: self.n_maps],
        }

    @property
    def n_bytes(self) -> int:
        """Host memory of the maps as the paper stores them: fp32 (Figure 18)."""
        return self.n_maps * self.n_layers * self.n_experts * 4
