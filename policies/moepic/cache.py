"""What MoEpic holds: of one layer on one GPU the tops that are cached and how experts are split, and how much where."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

from policies.moepic.config import LayerPlan
from sim.policy import Evict, Fetch, Piece, Prefetch, RunPart, View


class Segment:
    """A top or a bottom: the piece that is computed, the slices of it that are copied in their order, and what is said
    of all of them at once.

    Attributes:
        held: its slices have their room. settled: and all of them have been seen there. n_bytes: of all slices.
        copies_s: link time of each slice.
    """

    __slots__ = (
        "copies_s",
        "evict",
        "expert",
        "fetch",
        "gpu",
        "held",
        "n_bytes",
        "prefetch",
        "run",
        "settled",
        "slices",
    )

    def __init__(self, piece: Piece, slices: tuple[Piece, ...], view: View) -> None:
        self.expert = piece.expert
        self.gpu = piece.gpu
        self.slices = slices
        self.n_bytes = sum(one.n_bytes for one in slices)
        self.copies_s = [view.prices.copy_s(one.n_bytes) for one in slices]
        self.fetch = [Fetch(one) for one in slices]
        self.prefetch = [Prefetch(one) for one in slices]
        self.evict = [Evict(one) for one in slices]
        self.run = RunPart(piece) if len(slices) == 1 else RunPart(piece, (), slices)
        self.held = self.settled = False

    def absent(self, view: View) -> list[Fetch]:
        """Of a held segment, the slices that have not arrived yet."""
        if self.settled:
            return []
        arrived = view.arrived
        found = [fetch for fetch in self.fetch if not arrived(fetch.piece)]
        self.settled = not found
        return found


class Tops:
    """The cached tops of one layer's experts on one GPU.

    Attributes:
        experts: those of the layer that live on this GPU. cached: those whose top is resident.
        n_cached: C. split_frac: theta, the share of an expert that its top takes. n_slices: that an expert comes in,
            over both segments, or over one where theta is 0 or 1. segments: of an expert, top and bottom, or the one
            there is. Experts are cut when it is said what is held: the configurator runs more often.
    """

    def __init__(self, layer: int, gpu: int, copies: int, view: View) -> None:
        self.layer = layer
        self.gpu = gpu
        self.copies = copies
        self.experts = [e for e in range(view.n_experts) if view.piece(layer, e).gpu == gpu]
        self.cached: dict[int, None] = {}
        self.n_cached = 0
        self.split_frac = 0.0
        self.n_slices = copies
        self.top_bytes = 0
        self._cut = (0, 0.0)  # for which C and theta the segments are
        self._pairs: dict[int, tuple[Segment | None, Segment | None]] = {}
        self.segments: dict[int, list[Segment]] = {}

    def lay_out(self, budget: float, n_cached: float, view: View) -> None:
        """Divide `budget` (V, whole experts) among C tops; fractions of a byte are left."""
        size = view.expert_bytes
        room = int(min(budget, float(len(self.experts))) * size)
        count = min(len(self.experts), max(1, int(n_cached))) if n_cached > 0 else 0
        top_bytes = min(size, room // count) if count else 0
        count = count if top_bytes else 0
        self.split_frac = top_bytes / size if count else 0.0
        self.n_cached, self.top_bytes = count, top_bytes

    def _cut_experts(self, view: View) -> None:
        """Make the segments of C and theta."""
        self._cut = self.n_cached, self.split_frac
        for e in self.experts:
            if self.split_frac in (0.0, 1.0):
                whole = self._segment(e, 0.0, 1.0, view)
                self._pairs[e] = (whole, None) if self.n_cached else (None, whole)
            else:
                top, bottom = self._segment(e, 0.0, self.split_frac, view), self._segment(e, self.split_frac, 1.0, view)
                self._pairs[e] = top, bottom
            self.segments[e] = [segment for segment in self._pairs[e] if segment is not None]
        self.n_slices = sum(len(segment.slices) for segment in self.segments[self.experts[0]]) if self.experts else 0

    def _segment(self, expert: int, start_frac: float, stop_frac: float, view: View) -> Segment:
        """A segment in as many slices as it is copied in, none of them empty."""
        piece = view.part(self.layer, expert, start_frac, stop_frac)
        n = min(self.copies, max(1, piece.n_bytes))
        cuts = [start_frac + (stop_frac - start_frac) * i / n for i in range(n)] + [stop_frac]
        return Segment(piece, tuple(view.part(self.layer, expert, *ends) for ends in pairwise(cuts)), view)

    def top(self, expert: int) -> Segment | None:
        """The top segment; None where nothing is cached (theta 0)."""
        return self._pairs[expert][0]

    def bottom(self, expert: int) -> Segment | None:
        """The bottom segment; None where the top is everything (theta 1)."""
        return self._pairs[expert][1]

    def top_slices(self, expert: int) -> tuple[Piece, ...]:
        """What caching the expert holds."""
        top = self._pairs[expert][0]
        return () if top is None else top.slices

    def holds_tops(self, view: View) -> None:
        """The tops of those cached have their room, and nothing else has."""
        if not self._pairs or self._cut != (self.n_cached, self.split_frac):
            self._cut_experts(view)
        for expert, pair in self._pairs.items():
            for segment in pair:
                if segment is not None:
                    segment.held, segment.settled = segment is pair[0] and expert in self.cached, False

    def best(self, key: Callable[[int], int]) -> list[int]:
        """The C experts of largest key, ties to the lowest id."""
        return sorted(self.experts, key=lambda e: (-key(e), e))[: self.n_cached]

    def replaceable(self, pending: Collection[int]) -> list[int]:
        """Cached experts that may leave."""
        return [e for e in self.cached if e not in pending]


class Division:
    """How the memory for experts is divided among layers, and each layer's share among GPUs.

    Args:
        buffer: whole experts left to prefetched and missing segments. split: theta before the configurator has run.
        copies: slices that a segment is copied in.

    Attributes:
        tops: by layer and GPU. budgets: V of each layer, whole experts. fits: all experts do, nothing is to be decided
            and no buffer needed.
    """

    def __init__(self, buffer: int, split: float, copies: int, view: View) -> None:
        gpus = range(view.n_gpus)
        self.tops = [[Tops(layer, gpu, copies, view) for gpu in gpus] for layer in range(view.n_layers)]
        held = [sum(len(tops[gpu].experts) for tops in self.tops) for gpu in gpus]
        self.fits = all(view.capacity_of(gpu) >= held[gpu] for gpu in gpus)
        mine = [held[gpu] if self.fits else view.capacity_of(gpu) - buffer for gpu in gpus]  # V_e
        self.budgets = [sum(mine) / view.n_layers] * view.n_layers
        self._buffer = buffer
        self._shares = [n / max(1, sum(mine)) for n in mine]
        self._spare_bytes = [0] * view.n_gpus  # of V_e, left by its division
        self.lay_out([self._even(budget, split, view.n_experts) for budget in self.budgets], view)

    def _even(self, budget: float, split: float, n_experts: int) -> LayerPlan:
        """Algorithm 1, line 4: C = V / theta, rounded down, no more experts than there are."""
        if split == 0.0 or budget <= 0.0:
            return LayerPlan(0, 0.0, 0.0)
        n_cached = n_experts if self.fits else min(n_experts, max(1, int(budget / split)))
        return LayerPlan(n_cached, min(1.0, budget / n_cached), 0.0)

    def lay_out(self, plans: Sequence[LayerPlan], view: View) -> None:
        """Give every layer and GPU its share."""
        for groups, plan, budget in zip(self.tops, plans, self.budgets, strict=True):
            for tops, share in zip(groups, self._shares, strict=True):
                tops.lay_out(budget * share, plan.n_cached * share, view)
        for gpu in range(view.n_gpus):
            taken_bytes = sum(groups[gpu].n_cached * groups[gpu].top_bytes for groups in self.tops)
            self._spare_bytes[gpu] = (view.capacity_of(gpu) - self._buffer) * view.expert_bytes - taken_bytes

    def room(self, gpu: int, view: View) -> int:
        """Bytes left in the buffer: what the caches have no use for is no part of it."""
        return view.free_bytes(gpu) - (0 if self.fits else self._spare_bytes[gpu])
