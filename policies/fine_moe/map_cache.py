"""FineMoE's expert cache (arXiv 2502.05370, section 4.5): who leaves, by p x freq, and whom a prediction protects."""

from __future__ import annotations

import math
from typing import Any

from sim.policy import FREE, LAST, Outlook, Piece, Policy, Rank, View


class MapCache(Policy):
    """The part of FineMoE that answers the cache. State of all experts lies in rows by `piece.index`.

    Highest 1 / (p * freq) is evicted first, that is least p * freq; ties go to the lowest expert, then lowest layer.
    The paper leaves open what protects an expert that was prefetched and has freq = 0. Text (`paper`): its prediction
    does, until its layer has passed, as long as any other expert can go; after that it is ranked by p * freq like all
    others, one never visited first. Release 2 (`code`): nothing, but only a demand may take it.
    """

    evict: str
    variant: str
    freq: str

    def bind_cache(self, view: View, distance: int, to_last: bool) -> None:
        """Size the state. The rule `evict` is fine_moe (p x freq), lru or lfu (the ablation of Figure 14b)."""
        # The order of leaving: least rank, whoever holds the expert; who is aimed at leaves last, or what no gate has
        # asked for since it was prefetched leaves for no other prefetch.
        self.order = Rank(view.n_layers * view.n_experts, spares_unused=self.variant == "code")
        by_worth = self.evict == "fine_moe"
        bar = LAST if self.variant == "paper" else FREE
        self.outlook = Outlook(view.n_layers, view.n_experts, distance, self.order, bar, by_worth, to_last)
        # None where the outlook ranks; else the same memory, for single numbers: a quarter of what numpy takes.
        self.ranks: Any = None if by_worth else self.order.rank.data
        self._clock = 0

    def visit(self, layer: int, needs: dict[int, int], view: View) -> None:
        """A gate has asked for these."""
        outlook = self.outlook
        outlook.visit(layer, needs)
        if self.ranks is not None:
            self._rank_otherwise(layer, needs, view)
        elif self.freq == "hits":
            base = layer * view.n_experts
            for expert in needs:
                if not view.resident(layer, expert):
                    outlook.uncount(base + expert, 1.0)

    def evicted(self, piece: Piece, view: View) -> None:
        if self.freq == "since_loaded":
            if self.ranks is None:
                self.outlook.uncount(piece.index, math.inf)
            elif self.evict == "lfu":
                self.ranks[piece.index] = 0.0

    def _rank_otherwise(self, layer: int, needs: dict[int, int], view: View) -> None:
        """Their ranks by LRU or LFU.

        None of these can leave before it has run, so its rank may change before it is fetched.
        """
        base, ranks = layer * view.n_experts, self.ranks
        if self.evict == "lru":
            # Those that are there are used before those that are to come.
            for expert in sorted(needs, key=lambda expert: not view.resident(layer, expert)):
                self._clock += 1
                ranks[base + expert] = float(self._clock)
        else:
            for expert in needs:
                if self.freq != "hits" or view.resident(layer, expert):
                    ranks[base + expert] += 1.0
