"""FineMoE's expert cache (arXiv 2502.05370, section 4.5): who leaves, by p x freq, and whom a prediction protects."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from sim.policy import Piece, Policy, View

Floats = NDArray[np.float64]

HELD, UNUSED, AIMED = 1, 2, 4  # here or on its way; prefetched, not used yet; predicted for a layer still to come


class Numbers:
    """A row of floats that Python reads one by one (`at`) and numpy all at once (`all`); the memory is shared."""

    __slots__ = ("all", "at", "of_layer")

    def __init__(self, value: float, n_experts: int, n_layers: int) -> None:
        self.at = array("d", [value]) * (n_experts * n_layers)
        self.all: Floats = np.frombuffer(self.at, dtype=np.float64)
        self.of_layer: list[Floats] = [self.all[layer::n_layers] for layer in range(n_layers)]


class MapCache(Policy):
    """The part of FineMoE that answers the cache: eviction state of all experts, rows over `expert * n_layers + layer`.

    argmin then breaks ties by lowest expert, then lowest layer. Highest 1 / (p * freq) is evicted first, that is least
    p * freq. The paper leaves open what protects an expert that was prefetched and has freq = 0. Text (`paper`): its
    prediction does, until its layer has passed, as long as any other expert can go; after that it is ranked by p *
    freq like all others, one never visited first. Release 2 (`code`): nothing, but only a demand may take it.
    """

    evict: str
    variant: str

    def bind_cache(self, view: View) -> None:
        """Size the state. The rule `evict` is fine_moe (p x freq), lru or lfu (the ablation of Figure 14b)."""
        n_experts, self._n_layers = view.n_experts, view.n_layers
        self._ranks_by_worth = self.evict == "fine_moe"
        # States in which an expert may go.
        free = {HELD, HELD | UNUSED} if self.variant == "paper" else {HELD, HELD | AIMED}
        self._bar_of = [0.0 if state in free else math.inf for state in range(HELD + UNUSED + AIMED + 1)]
        self._pieces = [view.piece(layer, expert) for expert in range(n_experts) for layer in range(self._n_layers)]
        self._gpu = np.array([piece.gpu for piece in self._pieces])
        self._state = bytearray(len(self._pieces))
        # Of the map searched last for the layer, by layer and expert.
        self._probability = [[1.0 / n_experts] * n_experts for _ in range(self._n_layers)]

        def row(value: float) -> Numbers:
            return Numbers(value, n_experts, self._n_layers)

        self._visits = row(0.0)
        self._worth = row(0.0)  # what the rule ranks by, whoever holds the expert
        self._bar = [row(math.inf) for _ in range(view.n_gpus)]  # 0 where an expert may go, else infinity
        self._rank = [row(math.inf) for _ in range(view.n_gpus)]  # their sum
        self._clock = 0

    def accessed(self, piece: Piece, hit: bool, view: View) -> None:
        """An access counts as a visit, hit or miss; visits are never reset (release 2)."""
        at = piece.expert * self._n_layers + piece.layer
        counts = self._visits.at
        visits = counts[at] = counts[at] + 1.0
        if self._ranks_by_worth:
            worth = self._probability[piece.layer][piece.expert] * visits
        elif self.evict == "lru":
            self._clock += 1
            worth = float(self._clock)
        else:
            worth = visits
        self._worth.at[at] = worth
        state = self._state[at] = (self._state[at] | HELD) & ~UNUSED
        bar = self._bar[piece.gpu].at[at] = self._bar_of[state]
        self._rank[piece.gpu].at[at] = worth + bar

    def placed(self, piece: Piece, view: View) -> None:
        """A prefetch has taken its room."""
        at = piece.expert * self._n_layers + piece.layer
        state = self._state[at] = self._state[at] | HELD | UNUSED
        self._judge(piece.gpu, at, state)

    def evicted(self, piece: Piece, view: View) -> None:
        at = piece.expert * self._n_layers + piece.layer
        self._state[at] &= AIMED
        self._bar[piece.gpu].at[at] = self._rank[piece.gpu].at[at] = math.inf

    def aim(self, pieces: Iterable[Piece]) -> None:
        """Predictions made."""
        states, n_layers = self._state, self._n_layers
        for piece in pieces:
            at = piece.expert * n_layers + piece.layer
            state = states[at] = states[at] | AIMED
            if state & HELD:
                self._judge(piece.gpu, at, state)

    def passed(self, pieces: Iterable[Piece]) -> None:
        """Layers passed: what was predicted for them is so no more."""
        states, n_layers = self._state, self._n_layers
        for piece in pieces:
            at = piece.expert * n_layers + piece.layer
            state = states[at] = states[at] & ~AIMED
            if state & HELD:
                self._judge(piece.gpu, at, state)

    def unasked(self) -> int:
        """Experts prefetched for layers that have passed, which no gate has asked for since."""
        return self._state.count(HELD | UNUSED)

    def _judge(self, gpu: int, at: int, state: int) -> None:
        """Whether a held expert may go."""
        bar = self._bar[gpu].at[at] = self._bar_of[state]
        self._rank[gpu].at[at] = self._worth.at[at] + bar

    def believe(self, layer: int, probability: Floats) -> list[float]:
        """A search has said how probable the layer's experts are [E]; returns the same as a list."""
        likely: list[float] = probability.tolist()
        self._probability[layer] = likely
        if self._ranks_by_worth:
            worth = self._worth.of_layer[layer]
            np.multiply(probability, self._visits.of_layer[layer], out=worth)
            for bar, rank in zip(self._bar, self._rank, strict=True):
                np.add(worth, bar.of_layer[layer], out=rank.of_layer[layer])
        return likely

    def victim(self, piece: Piece, speculative: bool, view: View) -> Piece | None:
        """The piece to go; None when nothing may."""
        if self.variant == "paper" or speculative:
            found = self._least(self._rank[piece.gpu].all, view)
            if found is not None or speculative:
                return found
        held = (np.frombuffer(self._state, dtype=np.uint8) & HELD != 0) & (self._gpu == piece.gpu)
        return self._least(np.where(held, self._worth.all, math.inf), view)

    def _least(self, rank: Floats, view: View) -> Piece | None:
        """The lowest rank among those that the running layer does not need."""
        at = int(rank.argmin())
        piece = self._pieces[at]
        if piece.layer == view.layer and not view.evictable(piece):
            rank = rank.copy()
            for needed in view.owed():
                rank[needed * self._n_layers + view.layer] = math.inf
            at = int(rank.argmin())
            piece = self._pieces[at]
        return piece if rank[at] < math.inf else None
