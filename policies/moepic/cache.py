"""What MoEpic holds: of one layer on one GPU the tops that are cached and how experts are split, and how much where."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from policies.common.placement import homes
from policies.lcp import Priorities
from policies.moepic.config import LayerPlan
from sim.policy import Buffer, Piece, Segment, SplitExpert, View, lowest


class Replacement:
    """Puts missed experts' tops in the place of others.

    Args:
        at_random: instead of by priority (Table 3, w/o LCP). admission, replace: the policy's parameters. draw: from
            [0, 1).

    Attributes:
        n_admitted: missed experts whose tops have been cached.
    """

    def __init__(
        self, priorities: Priorities, at_random: bool, admission: str, replace: str, draw: Callable[[], float]
    ) -> None:
        self._priorities = priorities
        self._at_random = at_random
        self._admission = admission
        self._by_all = replace == "lowest"
        self._draw = draw
        self.n_admitted = 0

    def admit(self, tops: Tops, expert: int, needs: Mapping[int, int], pending: dict[int, int], buffer: Buffer) -> None:
        """A missed expert's top takes the place of the one of lowest priority that the layer does not need; where it
        needs all that are cached (prompts, batches), of the lowest, or passes through the buffer while that one is
        still to run."""
        if not tops.n_cached:
            return
        if len(tops.cached) >= tops.n_cached:
            keys = self._priorities.keys[tops.layer]
            victim = self._any(tops, pending) if self._at_random else self._lowest(keys, tops, needs, pending)
            if victim < 0 or (self._admission == "priority" and keys[expert] < keys[victim]):
                return
            leaving = tops.splits[victim].top
            if leaving is not None:
                buffer.leave(leaving)
            del tops.cached[victim]
        tops.cached[expert] = None
        self.n_admitted += 1

    def _lowest(self, keys: list[int], tops: Tops, needs: Mapping[int, int], pending: dict[int, int]) -> int:
        """The cached expert that leaves, -1 where it cannot yet."""
        if not self._by_all:
            return lowest(keys, tops.cached, pending)
        victim = lowest(keys, tops.cached, needs)
        if victim < 0:
            victim = lowest(keys, tops.cached, {})
        return -1 if victim in pending else victim

    def _any(self, tops: Tops, pending: dict[int, int]) -> int:
        """One of those cached that are not still to run, -1 where there is none."""
        candidates = [e for e in tops.cached if e not in pending]
        return candidates[int(self._draw() * len(candidates))] if candidates else -1


def shuffled(experts: list[int], draw: Callable[[], float]) -> Iterator[int]:
    """The experts in random order, which becomes the order of the list."""
    for left in range(len(experts), 0, -1):
        at = int(draw() * left)
        experts[at], experts[left - 1] = experts[left - 1], experts[at]
        yield experts[left - 1]


class Tops:
    """The cached tops of one layer's experts on one GPU.

    Attributes:
        experts: those of the layer that live on this GPU. cached: those whose top is resident.
        n_cached: C. split_frac: theta, the share of an expert that its top takes. splits: its experts in two segments;
            without a top where nothing is cached (theta 0), without a bottom where the top is everything (theta 1).
            They are cut when it is said what is held: the configurator runs more often.
    """

    def __init__(self, layer: int, gpu: int, copies: int, view: View) -> None:
        self.layer = layer
        self.gpu = gpu
        self.copies = copies
        self.experts = [e for e in range(view.n_experts) if view.piece(layer, e).gpu == gpu]
        self.cached: dict[int, None] = {}
        self.n_cached = 0
        self.split_frac = 0.0
        self.top_bytes = 0
        self._cut = (0, 0.0)  # for which C and theta the segments are
        self.splits: dict[int, SplitExpert] = {}

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
                self.splits[e] = SplitExpert(whole, None) if self.n_cached else SplitExpert(None, whole)
            else:
                top, bottom = self._segment(e, 0.0, self.split_frac, view), self._segment(e, self.split_frac, 1.0, view)
                self.splits[e] = SplitExpert(top, bottom)

    def _segment(self, expert: int, start_frac: float, stop_frac: float, view: View) -> Segment:
        """A segment in as many slices as it is copied in, none of them empty."""
        piece = view.part(self.layer, expert, start_frac, stop_frac)
        n = min(self.copies, max(1, piece.n_bytes))
        cuts = [start_frac + (stop_frac - start_frac) * i / n for i in range(n)] + [stop_frac]
        slices = tuple([view.part(self.layer, expert, *ends) for ends in pairwise(cuts)])
        return Segment(piece, slices, [view.prices.copy_s(one.n_bytes) for one in slices])

    def top_slices(self, expert: int) -> tuple[Piece, ...]:
        """What caching the expert holds."""
        top = self.splits[expert].top
        return () if top is None else top.slices

    def holds_tops(self, view: View) -> None:
        """The tops of those cached have their room, and nothing else has."""
        if not self.splits or self._cut != (self.n_cached, self.split_frac):
            self._cut_experts(view)
        for expert, split in self.splits.items():
            for segment in split.segments:
                segment.hold(segment is split.top and expert in self.cached)

    def best(self, key: Callable[[int], int]) -> list[int]:
        """The C experts of largest key, ties to the lowest id."""
        return sorted(self.experts, key=lambda e: (-key(e), e))[: self.n_cached]


class Division:
    """How the memory for experts is divided among layers, and each layer's share among GPUs.

    Args:
        buffer: whole experts left to prefetched and missing segments. split: theta before the configurator has run.
        copies: slices that a segment is copied in.

    Attributes:
        tops: by layer and GPU. budgets: V of each layer, whole experts. fits: all experts do, nothing is to be decided
            and no buffer needed. kept_bytes: by GPU what the caches have no use for, which is no part of the buffer.
    """

    def __init__(self, buffer: int, split: float, copies: int, view: View) -> None:
        gpus = range(view.n_gpus)
        self.tops = [[Tops(layer, gpu, copies, view) for gpu in gpus] for layer in range(view.n_layers)]
        held = [sum(len(tops[gpu].experts) for tops in self.tops) for gpu in gpus]
        self.fits = all(view.capacity_of(gpu) >= held[gpu] for gpu in gpus)
        mine = [held[gpu] if self.fits else view.capacity_of(gpu) - buffer for gpu in gpus]  # V_e
        self.budgets = [sum(mine) / view.n_layers] * view.n_layers
        self._buffer = buffer
        self._mine = mine
        # A layer's share on each GPU that has experts of it.
        held_by = [[n * (gpu in here) for gpu, n in enumerate(mine)] for here in map(set, homes(view).tolist())]
        self._shares = [[n / max(1, sum(row)) for n in row] for row in held_by]
        self._apart = any(0.0 in shares for shares in self._shares)  # some layers are not on every GPU
        self.kept_bytes = [0] * view.n_gpus  # of V_e, left by its division
        self.lay_out([self._even(budget, split, view.n_experts) for budget in self.budgets], view)

    def _even(self, budget: float, split: float, n_experts: int) -> LayerPlan:
        """Algorithm 1, line 4: C = V / theta, rounded down, no more experts than there are."""
        if split == 0.0 or budget <= 0.0:
            return LayerPlan(0, 0.0, 0.0)
        n_cached = n_experts if self.fits else min(n_experts, max(1, int(budget / split)))
        return LayerPlan(n_cached, min(1.0, budget / n_cached), 0.0)

    def lay_out(self, plans: Sequence[LayerPlan], view: View) -> None:
        """Give every layer and GPU its share."""
        budgets = [
            [budget * share for share in shares] for budget, shares in zip(self.budgets, self._shares, strict=True)
        ]
        if self._apart:  # the configurator divides what all GPUs have together, and each has its own alone
            asked = [sum(of_gpu) for of_gpu in zip(*budgets, strict=True)]
            held = [min(1.0, has / n) if n else 0.0 for has, n in zip(self._mine, asked, strict=True)]
            budgets = [[n * frac for n, frac in zip(row, held, strict=True)] for row in budgets]
        for groups, plan, row, shares in zip(self.tops, plans, budgets, self._shares, strict=True):
            for tops, budget, share in zip(groups, row, shares, strict=True):
                tops.lay_out(budget, plan.n_cached * share, view)
        for gpu in range(view.n_gpus):
            taken_bytes = sum(groups[gpu].n_cached * groups[gpu].top_bytes for groups in self.tops)
            if not self.fits:
                self.kept_bytes[gpu] = (view.capacity_of(gpu) - self._buffer) * view.expert_bytes - taken_bytes
