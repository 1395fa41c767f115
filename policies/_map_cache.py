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
    """Eviction state of all experts as arrays [E, L]: argmin then breaks ties by lowest expert, then lowest layer.

    Highest 1 / (p * freq) is evicted first, that is least p * freq. The paper leaves open what protects an expert
    that was prefetched and has freq = 0. Text (`paper`): its prediction does, as long as any other expert can go.
    Release 2 (`code`): nothing, but only a demand may take it.

    Args:
        rule: fine_moe (p x freq), lru or lfu (the ablation of Figure 14b). variant: paper or code.
    """

    def __init__(self, view: View, rule: str, variant: str) -> None:
        shape = (view.n_experts, view.n_layers)
        self._rule, self._variant = rule, variant
        self.probability = np.full(shape, 1.0 / view.n_experts)  # of the map searched last for the layer
        self._visits = np.zeros(shape)
        self._used_at = np.zeros(shape)
        self._held = np.zeros((view.n_gpus, *shape), dtype=bool)
        self._unused = np.zeros(shape, dtype=bool)  # prefetched, not used yet
        self._aimed = np.zeros(shape, dtype=bool)  # predicted for a layer still to come
        self._barred = np.full((view.n_gpus, *shape), math.inf)  # 0 where an expert may go, infinity elsewhere
        self._rank = np.zeros(shape)
        self._clock = 0

    def used(self, piece: Piece) -> None:
        """An access counts as a visit, hit or miss; visits are never reset (release 2)."""
        self._clock += 1
        at = (piece.expert, piece.layer)
        self._visits[at] += 1
        self._used_at[at] = self._clock
        self._unused[at] = False
        self._held[piece.gpu][at] = True
        self._bar(piece)

    def placed(self, piece: Piece) -> None:
        """A prefetch has taken its room."""
        self._held[piece.gpu, piece.expert, piece.layer] = True
        self._unused[piece.expert, piece.layer] = True
        self._bar(piece)

    def evicted(self, piece: Piece) -> None:
        self._held[piece.gpu, piece.expert, piece.layer] = False
        self._unused[piece.expert, piece.layer] = False
        self._bar(piece)

    def aim(self, pieces: Iterable[Piece], wanted: bool) -> None:
        """Predictions made, or layers passed."""
        for piece in pieces:
            self._aimed[piece.expert, piece.layer] = wanted
            self._bar(piece)

    def _bar(self, piece: Piece) -> None:
        at = (piece.expert, piece.layer)
        safe = self._unused[at] or (self._variant == "paper" and self._aimed[at])
        self._barred[piece.gpu][at] = 0.0 if self._held[piece.gpu][at] and not safe else math.inf

    def victim(self, gpu: int, speculative: bool, view: View) -> Piece | None:
        """The piece to go; None when nothing may."""
        if self._variant == "paper" or speculative:
            found = self._least(self._barred[gpu], view)
            if found is not None or speculative:
                return found
        return self._least(np.where(self._held[gpu], 0.0, math.inf), view)

    def _least(self, barred: Floats, view: View) -> Piece | None:
        rank = self._rank
        if self._rule == "fine_moe":
            np.multiply(self.probability, self._visits, out=rank)
            rank += barred
        else:
            np.add(self._used_at if self._rule == "lru" else self._visits, barred, out=rank)
        for expert in view.owed():
            rank[expert, view.layer] = math.inf
        expert, layer = divmod(int(rank.argmin()), view.n_layers)
        return view.piece(layer, expert) if rank[expert, layer] < math.inf else None
