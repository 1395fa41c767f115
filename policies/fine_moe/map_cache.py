"""FineMoE's expert cache (arXiv 2502.05370, section 4.5): who leaves, by p x freq, and whom a prediction protects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.fine_moe.tracks import Foretold
from sim.policy import FREE, LAST, Policy, Rank, View, Wishes

Floats = NDArray[np.float64]


class Aims:
    """What has been foretold of some layers in a row, as the queue and the cache want it.

    Attributes:
        experts: to be prefetched, layer by layer, most probable first; those of layer `first + i` lie between
            `starts[i]` and `starts[i + 1]`. indices, likely: of each its `Piece.index` and probability.
        shares, worth, bars: of all experts of the layers, the probability p, p x freq, and who is protected.
    """

    __slots__ = ("bars", "experts", "first", "indices", "likely", "shares", "starts", "worth")

    def __init__(self, told: Foretold, visits: Floats, bar: int) -> None:
        n_layers, n_experts = told.shares.shape
        self.first = told.first
        at = told.experts + np.arange(n_layers).repeat(told.counts) * n_experts
        self.starts: list[int] = [0, *told.counts.cumsum().tolist()]
        here = slice(told.first * n_experts, (told.first + n_layers) * n_experts)
        shares = told.shares.ravel()
        self.experts: list[int] = told.experts.tolist()
        self.indices = at + here.start
        self.likely = shares[at]
        bars = np.zeros(n_layers * n_experts, dtype=np.uint8)
        bars[at] = bar
        self.bars = bars.data
        self.shares = shares.data
        self.worth = (shares * visits[here]).data


class Ready:
    """The queues of all layers whose `distance` successors were foretold together, worked out at once.

    Attributes:
        first: the layer whose predecessor's queue is the first. slices: by that layer, where its queue starts and stops
            in `wishes`, and where what its own search has found begins.
    """

    __slots__ = ("first", "slices", "wishes")

    def __init__(self, aims: Aims, distance: int) -> None:
        self.first = aims.first
        starts = np.array(aims.starts)
        n_layers = len(starts) - 1
        layers = np.arange(n_layers)
        begin, end = starts[:-1], starts[np.minimum(layers + distance, n_layers)]
        lengths = end - begin
        at = np.arange(lengths.sum()) - (lengths.cumsum() - lengths - begin).repeat(lengths)
        layer_of = layers.repeat(starts[1:] - begin)
        gaps = layer_of[at] + 1 - layers.repeat(lengths)
        self.wishes = Wishes(aims.indices[at], aims.likely[at] / gaps)
        stops = lengths.cumsum()
        fresh = stops - lengths + starts[np.minimum(layers + distance - 1, n_layers)] - begin
        self.slices: list[tuple[int, int, int]] = list(
            zip((stops - lengths).tolist(), stops.tolist(), fresh.tolist(), strict=True)
        )
        self.slices.append((0, 0, 0))  # nothing follows the last layer


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
        # The order of leaving: least rank, whoever holds the expert; who is aimed at leaves last, or what no gate has
        # asked for since it was prefetched leaves for no other prefetch.
        self.order = Rank(n, spares_unused=self.variant == "code")
        self._visits = np.zeros(n)
        # The same memory, for single numbers: a quarter of what numpy takes.
        self._ranks: Any = self.order.rank.data
        self._bars: Any = self.order.bar.data
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
