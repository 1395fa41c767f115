"""FineMoE's expert cache (arXiv 2502.05370, section 4.5): who leaves, by p x freq, and whom a prediction protects."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.fine_moe.tracks import Foretold
from sim.policy import Piece, Policy, View

Floats = NDArray[np.float64]

# Who may go to make room: anybody, nobody for a prefetch, nobody for a prefetch and for a demand only when nobody else.
FREE, NOT_FOR_PREFETCH, LAST = 0, 1, 2


class Aims:
    """What has been foretold of some layers in a row, as the queue and the cache want it.

    Attributes:
        pieces, experts: to be prefetched, layer by layer, most probable first; those of layer `first + i` lie between
            `starts[i]` and `starts[i + 1]`. by_gap: their priorities p / gap (section 4.5), gap = 1, 2 ... layers.
        shares, worth, bars: of all experts of the layers, the probability p, p x freq, and who is protected.
    """

    __slots__ = ("bars", "by_gap", "experts", "first", "pieces", "shares", "starts", "worth")

    def __init__(self, told: Foretold, pieces: NDArray[np.object_], visits: Floats, distance: int, bar: int) -> None:
        n_layers, n_experts = told.shares.shape
        self.first = told.first
        at = told.experts + np.arange(n_layers).repeat(told.counts) * n_experts
        self.starts = [0, *told.counts.cumsum().tolist()]
        here = slice(told.first * n_experts, (told.first + n_layers) * n_experts)
        shares = told.shares.ravel()
        self.pieces: list[Piece] = pieces[here][at].tolist()
        self.experts: list[int] = told.experts.tolist()
        likely = shares[at]
        self.by_gap: list[list[float]] = [[], *[(likely / gap).tolist() for gap in range(1, distance + 1)]]
        named = np.zeros(n_layers * n_experts, dtype=np.uint8)
        named[at] = bar
        self.bars = named.data
        self.shares = shares.data
        self.worth = (shares * visits[here]).data


class MapCache(Policy):
    """The part of FineMoE that answers the cache. State of all experts lies in rows by `piece.index`.

    Highest 1 / (p * freq) is evicted first, that is least p * freq; ties go to the lowest expert, then lowest layer.
    The paper leaves open what protects an expert that was prefetched and has freq = 0. Text (`paper`): its prediction
    does, until its layer has passed, as long as any other expert can go; after that it is ranked by p * freq like all
    others, one never visited first. Release 2 (`code`): nothing, but only a demand may take it.
    """

    evict: str
    variant: str

    def bind_cache(self, view: View) -> None:
        """Size the state. The rule `evict` is fine_moe (p x freq), lru or lfu (the ablation of Figure 14b)."""
        self._n_layers, n_experts = view.n_layers, view.n_experts
        self._n_experts, n = n_experts, view.n_layers * n_experts
        self._ranks_by_worth = self.evict == "fine_moe"
        self._aim_bar = LAST if self.variant == "paper" else FREE
        self._unused_bar = NOT_FOR_PREFETCH if self.variant == "code" else FREE
        self._all = np.empty(n, dtype=object)
        self._all[:] = [view.piece(layer, expert) for layer in range(view.n_layers) for expert in range(n_experts)]
        self._gpu = np.array([piece.gpu for piece in self._all])
        self._held, self._unused = np.zeros(n, dtype=bool), np.zeros(n, dtype=bool)
        self._bar = np.zeros(n, dtype=np.uint8)
        self._rank = np.zeros(n)  # what the rule ranks by, whoever holds the expert
        self._visits = np.zeros(n)
        # The same memory, for single numbers: a quarter of what numpy takes.
        self._ranks: Any = self._rank.data
        self._bars: Any = self._bar.data
        self._counts: Any = self._visits.data
        # By layer the probabilities that the map searched last for it gives its experts, and where they begin.
        self._believed: list[tuple[Any, int]] = [(np.full(n_experts, 1.0 / n_experts).data, 0)] * view.n_layers
        self._unaimed = bytes(n_experts)
        self._clock = 0

    def visit(self, layer: int, needs: Iterable[int], view: View) -> None:
        """A gate has asked: a visit, hit or miss; visits are never reset (release 2).

        None of these can leave before it has run, so its rank may change before it is fetched.
        """
        base, counts, ranks = layer * self._n_experts, self._counts, self._ranks
        if self._ranks_by_worth:
            shares, start = self._believed[layer]
            for expert in needs:
                at = base + expert
                count = counts[at] = counts[at] + 1.0
                ranks[at] = shares[start + expert] * count
        elif self.evict == "lru":
            # Those that are there are used before those that are to come.
            for expert in sorted(needs, key=lambda expert: not view.resident(layer, expert)):
                self._clock += 1
                ranks[base + expert] = float(self._clock)
        else:
            for expert in needs:
                ranks[base + expert] += 1.0

    def believe(self, aims: Aims, layer: int) -> None:
        """A search has said how probable the layer's experts are, and which are to be prefetched."""
        n_experts = self._n_experts
        start = (layer - aims.first) * n_experts
        here, there = slice(layer * n_experts, (layer + 1) * n_experts), slice(start, start + n_experts)
        self._believed[layer] = (aims.shares, start)
        if self._aim_bar:
            self._bars[here] = aims.bars[there]
        if self._ranks_by_worth:
            self._ranks[here] = aims.worth[there]

    def forget(self, layer: int) -> None:
        """The layer has passed: what was predicted for it is so no more."""
        if self._aim_bar:
            self._bars[layer * self._n_experts : (layer + 1) * self._n_experts] = self._unaimed

    def accessed(self, piece: Piece, hit: bool, view: View) -> None:
        self._held[piece.index] = True
        self._unused[piece.index] = False
        if self._unused_bar:
            self._bar[piece.index] = FREE

    def placed(self, piece: Piece, view: View) -> None:
        """A prefetch has taken its room."""
        self._held[piece.index] = self._unused[piece.index] = True
        if self._unused_bar:
            self._bar[piece.index] = self._unused_bar

    def evicted(self, piece: Piece, view: View) -> None:
        self._held[piece.index] = self._unused[piece.index] = False
        if self._unused_bar:
            self._bar[piece.index] = FREE

    def unasked(self) -> int:
        """Experts prefetched for layers that have passed, which no gate has asked for since."""
        return int(self._unused.sum())

    def victim(self, piece: Piece, speculative: bool, view: View) -> Piece | None:
        """The piece to go; None when nothing may."""
        may = self._held & (self._gpu == piece.gpu)
        owed = view.owed()
        if owed:
            may[[view.layer * self._n_experts + expert for expert in owed]] = False
        free = may & (self._bar <= (FREE if speculative else NOT_FOR_PREFETCH))
        if free.any():
            may = free
        elif speculative or not may.any():
            return None
        rank = np.where(may, self._rank, math.inf).reshape(self._n_layers, -1).T
        expert, layer = divmod(int(rank.argmin()), self._n_layers)
        found: Piece = self._all[layer * self._n_experts + expert]
        return found
