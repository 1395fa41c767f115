"""Hits of a least-recently-used cache of every size, from one pass over the trace; `ranked_curve.py` has others.

Mattson's stack distances (Mattson, Gecsei, Slutz and Traiger, "Evaluation techniques for storage hierarchies", IBM
Systems Journal 9(2), 1970), for caches that are asked for several experts at once. The engine runs those that are there
first, so the order in which the experts of one layer come to lie depends on the size of the cache: they are one
*group* of the stack, and only a size that holds part of a group has to know its order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sim.base.errors import BadInput
from sim.policy.api import overrides
from sim.policy.order import Rank, Recency
from sim.studies.ranked_curve import ranked_hits
from sim.workload.iterations import DECODE, PHASES, Feed, Iteration

if TYPE_CHECKING:
    from sim.engine.engine import Engine
    from sim.setup.setup import Setup

DECIDING = (
    *("request_start", "iteration_start", "layer_enter", "gate_input", "assign", "gate_done", "layer_done"),
    *("iteration_end", "request_end", "idle", "initial", "victim", "predictor_bytes", "drafting"),
)


class Hit:
    """In which sizes of the cache an expert was there: all from `least` on, and those of `others` below."""

    __slots__ = ("least", "others")

    def __init__(self, least: float, others: frozenset[int] = frozenset()) -> None:
        self.least = least
        self.others = others

    def at(self, size: int) -> bool:
        """Whether it was in a cache of that size."""
        return size >= self.least or size in self.others


class Group:
    """Experts that one layer asked for together and nobody has asked for since, in the order of the gate.

    Where a cache is smaller than that, the last ones to run push out the first ones: the same order decides.
    """

    __slots__ = ("at", "members")

    def __init__(self, at: int, members: dict[int, Hit]) -> None:
        self.at = at
        self.members = members

    def survivors(self, size: int, room: int) -> list[int]:
        """Which of them a cache of that size still holds, where it has room for so many: those that ran last. Experts
        that were there when the layer asked ran before those that had to be copied."""
        order = sorted(self.members, key=lambda piece: not self.members[piece].at(size))  # stable
        return order[len(order) - room :]


class Stack:
    """One cache in every size at once.

    Args:
        n_visits: how often it will be asked.
    """

    def __init__(self, n_visits: int) -> None:
        self._tree = [0] * (n_visits + 1)  # Fenwick's: how many pieces were used last in each visit
        self._group_of: dict[int, Group] = {}
        self._n_visits = 0
        self._n_pieces = 0

    def visit(self, pieces: Sequence[int]) -> list[Hit]:
        """Ask for pieces together; in which sizes each is there."""
        found = [self._look_up(piece) for piece in pieces]
        for piece in pieces:
            group = self._group_of.get(piece)
            if group is None:
                self._n_pieces += 1
            else:
                del group.members[piece]
                self._add(group.at, -1)
        self._n_visits += 1
        newest = Group(self._n_visits, dict(zip(pieces, found, strict=True)))
        self._add(newest.at, len(pieces))
        for piece in pieces:
            self._group_of[piece] = newest
        return found

    def _look_up(self, piece: int) -> Hit:
        group = self._group_of.get(piece)
        if group is None:
            return Hit(math.inf)
        after, n = self._n_pieces - self._up_to(group.at), len(group.members)
        sizes = range(after + 1, after + n)  # they hold some of the group
        return Hit(after + n, frozenset(s for s in sizes if piece in group.survivors(s, s - after)))

    def _add(self, at: int, n: int) -> None:
        while at < len(self._tree):
            self._tree[at] += n
            at += at & -at

    def _up_to(self, at: int) -> int:
        total = 0
        while at:
            total += self._tree[at]
            at -= at & -at
        return total


@dataclass
class Counted:
    """Experts asked for in one phase, and of these, by size of the cache, how many were there."""

    n: int = 0
    hits: list[int] = field(default_factory=list)

    def add(self, hit: Hit) -> None:
        """One more was asked for."""
        self.n += 1
        if hit.least < len(self.hits):
            self.hits[int(hit.least)] += 1  # a difference, until `summed`
        for size in hit.others:
            self._one(size)

    def _one(self, size: int) -> None:
        self.hits[size] += 1
        if size + 1 < len(self.hits):
            self.hits[size + 1] -= 1

    def summed(self) -> list[int]:
        """Hits by size."""
        found, total = [], 0
        for difference in self.hits:
            total += difference
            found.append(total)
        return found


@dataclass
class HitCurve:
    """Hits of one policy on one trace by experts of room.

    Attributes:
        least: experts of room that the policy needs.
        asked: phase -> experts asked for. hits: phase -> by experts of room, how many of them were there.
    """

    least: int
    n_experts: int
    expert_bytes: int
    asked: dict[str, int]
    hits: dict[str, list[int]]

    def rate(self, n_experts: int, phase: str = DECODE) -> float | None:
        """Share of the experts asked for that were there."""
        return self.hits[phase][n_experts] / self.asked[phase] if self.asked[phase] else None

    def copies(self, n_experts: int) -> int:
        """Copies on demand in both phases: one for each expert that was not there."""
        return sum(self.asked[phase] - self.hits[phase][n_experts] for phase in PHASES)


def hit_curve(setup: Setup) -> HitCurve:
    """The curve of a run's policy, trace and batch; its hardware and its budget do not matter.

    Raises:
        BadInput: the policy is no cache of this kind, or time decides what runs together.
    """
    from sim.run import assemble

    if not setup.timeless or setup.spec.gpus > 1:
        raise BadInput(
            "--hits-only, got arrivals with batches, or several GPUs: it knows one cache, filled in one order"
        )
    engine, _ = assemble(setup)
    order = _checked(setup, engine)
    model = setup.model
    n_all = model.n_moe_layers * model.n_experts
    n_caches = model.n_moe_layers if order.per_layer else 1
    if isinstance(order, Rank):
        asked, by_cache = ranked_hits(setup, n_caches)
        hits = {phase: _by_room(some, n_all) for phase, some in by_cache.items()}
        return HitCurve(n_caches, n_all, engine.view.expert_bytes, asked, hits)
    n_visits = sum(request.outputs for request in setup.requests) * model.n_moe_layers // n_caches
    stacks = [Stack(n_visits) for _ in range(n_caches)]
    size = model.n_experts if order.per_layer else n_all
    counted = {phase: [Counted(0, [0] * (size + 1)) for _ in stacks] for phase in PHASES}
    for iteration in _iterations(setup):
        for layer in range(model.n_moe_layers):
            row = iteration.token
            experts = row.layer(layer) if row is not None else list(iteration.chosen(layer))
            at = layer % n_caches
            counts = counted[iteration.counted][at]
            for hit in stacks[at].visit([layer * model.n_experts + expert for expert in experts]):
                counts.add(hit)
    asked = {phase: sum(one.n for one in counts) for phase, counts in counted.items()}
    hits = {phase: _by_room([one.summed() for one in counts], n_all) for phase, counts in counted.items()}
    return HitCurve(n_caches, n_all, engine.view.expert_bytes, asked, hits)


def _by_room(by_cache: list[list[int]], n_all: int) -> list[int]:
    """Hits by experts of room in all caches, which share it evenly, the first ones taking what is left over."""
    n = len(by_cache)
    found = []
    for room in range(n_all + 1):
        each, more = divmod(room, n)
        found.append(sum(hits[each + (at < more)] for at, hits in enumerate(by_cache)))
    return found


def _iterations(setup: Setup) -> Iterable[Iteration]:
    batching, feed, index = setup.batching(open_loop=False), Feed(setup.trace), 0
    while isinstance(ranges := batching.next(math.inf), list):
        yield Iteration(index, ranges, setup.trace, feed.row(ranges))
        index += 1


def _checked(setup: Setup, engine: Engine) -> Recency | Rank:
    """The policy's order. Raises BadInput where it is another, or where the policy decides more than that."""
    policy = setup.policy
    order, more = policy.order, [hook for hook in DECIDING if overrides(policy, hook)]
    ranked = policy.ranks_by_trace and isinstance(order, Rank)
    if ranked:
        more = [hook for hook in more if hook != "gate_done"]  # which says the ranks
    if more or not (ranked or isinstance(order, Recency)):
        answers = (
            f"it answers {more[0]}, so hits of one size do not tell another's" if more else "its order is no stack"
        )
        raise BadInput(
            f"--hits-only, got policy {policy.name}: {policy.one_size or answers}; sweep it without --hits-only"
        )
    assert isinstance(order, Recency | Rank)
    divided = policy.layer_budgets(engine.view)
    n_layers, size = setup.model.n_moe_layers, engine.view.expert_bytes
    each, more_ = divmod(engine.view.capacity_of(0), n_layers)
    evenly = [(each + (layer < more_)) * size for layer in range(n_layers)]
    if (divided is not None) != order.per_layer or (divided is not None and list(divided[0]) != evenly):
        raise BadInput(f"--hits-only, got policy {policy.name}: its layers do not share the room evenly; leave it out")
    return order
