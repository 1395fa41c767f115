"""FineMoE's expert cache (arXiv 2502.05370, section 4.5): who leaves, by p x freq, and whom a prediction protects."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from sim.pieces import Piece
from sim.view import View

Floats = NDArray[np.float64]


class MapCache:
    """Eviction state of all experts as arrays over `expert * n_layers + layer`.

    argmin then breaks ties by lowest expert, then lowest layer. Highest 1 / (p * freq) is evicted first, that is least
    p * freq. The paper leaves open what protects an expert that was prefetched and has freq = 0. Text (`paper`): its
    prediction does, as long as any other expert can go. Release 2 (`code`): nothing, but only a demand may take it.

    Args:
        rule: fine_moe (p x freq), lru or lfu (the ablation of Figure 14b). variant: paper or code.
    """

    def __init__(self, view: View, rule: str, variant: str) -> None:
        n = view.n_experts * view.n_layers
        self._rule, self._variant, self._n_layers = rule, variant, view.n_layers
        self._probability = np.full(n, 1.0 / view.n_experts)  # of the map searched last for the layer
        self._visits = np.zeros(n)
        self._worth = np.zeros(n)  # what the rule ranks by, whoever holds the expert
        self._held = [bytearray(n) for _ in range(view.n_gpus)]
        self._unused = bytearray(n)  # prefetched, not used yet
        self._aimed = bytearray(n)  # predicted for a layer still to come
        self._rank = [np.full(n, math.inf) for _ in range(view.n_gpus)]  # worth where an expert may go, else infinity
        self._clock = 0

    def used(self, piece: Piece) -> None:
        """An access counts as a visit, hit or miss; visits are never reset (release 2)."""
        at = self._at(piece)
        self._clock += 1
        visits = self._visits[at] = self._visits[at] + 1.0
        if self._rule == "fine_moe":
            self._worth[at] = self._probability[at] * visits
        else:
            self._worth[at] = self._clock if self._rule == "lru" else visits
        self._unused[at] = False
        self._held[piece.gpu][at] = True
        self._bar(piece.gpu, at)

    def placed(self, piece: Piece) -> None:
        """A prefetch has taken its room."""
        at = self._at(piece)
        self._held[piece.gpu][at] = self._unused[at] = True
        self._rank[piece.gpu][at] = math.inf

    def evicted(self, piece: Piece) -> None:
        at = self._at(piece)
        self._held[piece.gpu][at] = self._unused[at] = False
        self._rank[piece.gpu][at] = math.inf

    def aim(self, pieces: Iterable[Piece], wanted: bool) -> None:
        """Predictions made, or layers passed."""
        for piece in pieces:
            at = self._at(piece)
            self._aimed[at] = wanted
            self._bar(piece.gpu, at)

    def believe(self, layer: int, probability: Floats) -> None:
        """A search has said how probable the layer's experts are [E]."""
        one_layer = slice(layer, None, self._n_layers)
        self._probability[one_layer] = probability
        if self._rule == "fine_moe":
            worth = self._worth[one_layer] = probability * self._visits[one_layer]
            for rank in self._rank:
                ranks = rank[one_layer]
                np.copyto(ranks, worth, where=ranks < math.inf)

    def _at(self, piece: Piece) -> int:
        return piece.expert * self._n_layers + piece.layer

    def _bar(self, gpu: int, at: int) -> None:
        safe = not self._held[gpu][at] or self._unused[at] or (self._variant == "paper" and self._aimed[at])
        self._rank[gpu][at] = math.inf if safe else self._worth[at]

    def victim(self, gpu: int, speculative: bool, view: View) -> Piece | None:
        """The piece to go; None when nothing may."""
        if self._variant == "paper" or speculative:
            found = self._least(self._rank[gpu], view)
            if found is not None or speculative:
                return found
        held = np.frombuffer(self._held[gpu], dtype=np.bool_)
        return self._least(np.where(held, self._worth, math.inf), view)

    def _least(self, rank: Floats, view: View) -> Piece | None:
        """The lowest rank among those that the running layer does not need."""
        at = int(rank.argmin())
        expert, layer = divmod(at, self._n_layers)
        if layer == view.layer and (owed := view.owed()):
            rank = rank.copy()
            for needed in owed:
                rank[needed * self._n_layers + layer] = math.inf
            at = int(rank.argmin())
            expert, layer = divmod(at, self._n_layers)
        return view.piece(layer, expert) if rank[at] < math.inf else None
