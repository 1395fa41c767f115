"""What a policy expects of each layer of an iteration: which experts, how probable each is, and what that ranks.

A policy that predicts by scores chooses experts from rows of them (`choose`), believes a layer's choice once its
prediction is due (`believe`), and asks for the prefetches of the layers ahead (`ahead`). Compiled these are plain loops
over numbers; without a compiler numpy and Python give the same bits.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.base.flat import COMPILED, floats, ints
from sim.policy.decisions import RequeueFrom
from sim.policy.order import Rank
from sim.policy.path_search import PathSearch
from sim.policy.tickets import Ticket
from sim.policy.wishes import Wishes

Floats = NDArray[np.float64]
FEW = 16


class Outlook:
    """Chosen experts and probabilities by layer. State of all experts lies in rows by `Piece.index`.

    Rows of scores are whole numbers not below zero, so that their sums are exact.

    Args:
        distance: layers between a prediction and the nearest layer it is about. order: the order of leaving, whose bars
            and ranks are kept.
        bar: of an expert that is chosen for a layer to come; `FREE` leaves the bars alone.
        ranks: whether an expert ranks by probability x visits.
        to_last: a prediction is about every layer from `distance` ahead to the last; else about that one alone.

    Attributes:
        needed, named, right: of the layers that something was expected of the experts asked for, chosen, and both.
    """

    def __init__(
        self,
        n_layers: int,
        n_experts: int,
        distance: int,
        order: Rank,
        bar: int = 0,
        ranks: bool = True,
        to_last: bool = False,
    ) -> None:
        n = n_layers * n_experts
        self.to_last = to_last
        self.reach = n_layers if to_last else distance  # layers ahead that `ahead` looks
        self.n_layers = n_layers
        self.n_experts = n_experts
        self.distance = distance
        self.rank: Any = order.rank.data  # single numbers are written in a quarter of an array's time
        self.bar_of: Any = order.bar.data
        if len(self.rank) != n or len(self.bar_of) != n:
            raise ValueError(f"Outlook of {n} experts, got an order of {len(self.rank)}: make Rank({n})")
        self.bar = bar
        self.ranks = ranks
        self.n_chosen = ints(n_layers)
        self.chosen = ints(n)  # of each layer the experts, in order of asking
        self.shares = floats(n)  # probabilities of the last choice
        self.is_chosen = bytearray(n)
        self.believed = bytearray(n_layers)
        self.expected = bytearray(n_layers)  # believed, and not asked for since
        self.believed_shares = floats(n, 1.0 / n_experts)
        self.visits = floats(n)
        self.heap = ints(n_experts)
        self.row: Any = np.zeros(n_experts)
        room = self.reach * n_experts
        self.wishes = wishes = Wishes(np.zeros(room, dtype=np.int64), np.zeros(room))
        self.indices: Any = wishes.indices
        self.priorities: Any = wishes.priorities
        self.n_fresh = 0  # of what was asked for last, where what waits for the newest prediction begins
        self.needed = 0
        self.named = 0
        self.right = 0

    # -- choosing ---------------------------------------------------------------------------------------------------

    def choose(
        self, first: int, rows: Floats, similarities: Floats, least: int, threshold: bool, joins: bool = False
    ) -> None:
        """Choose experts of the layers from `first` on by rows of scores [m, E], most probable first.

        The smallest set whose share of the row reaches clip(1 - similarity, 0, 1), at least so many experts; without
        the `threshold` just the `least` number. Ties go to the lowest id; of a row without scores nothing is chosen.

        Args:
            similarities: how alike the source of each row is, [m].
            joins: what was chosen last stays in front: the union of the sets, of probabilities the larger.
        """
        m = len(rows)
        if not 0 <= first <= self.n_layers - m or rows.shape[1] != self.n_experts or len(similarities) < m:
            raise ValueError(f"choose, got {m} rows from layer {first} on: there are {self.n_layers} layers")
        least = min(least, self.n_experts)
        if not COMPILED:
            self._choose_plain(first, rows, similarities[:m], least, threshold, joins)
            return
        for i in range(m):
            self._choose_row(first + i, rows[i], similarities[i], least, threshold, joins)

    def choose_found(
        self, search: PathSearch, first: int, m: int, least: int, threshold: bool, joins: bool = False
    ) -> None:
        """The same for `m` layers from what `search` has found last: of layer `first` + i the path behind layer i."""
        if not 0 <= m <= search.n_layers:
            raise ValueError(f"choose_found, got {m} layers: {search.n_layers} were searched along")
        self._choose_stored(search, first, m, least, threshold, joins, -1, 0.0)

    def choose_path(
        self,
        search: PathSearch,
        slot: int,
        similarity: float,
        first: int,
        m: int,
        least: int,
        threshold: bool,
        joins: bool = False,
    ) -> None:
        """The same for `m` layers from `first` on by one stored path."""
        if not 0 <= slot < search.n_stored:
            raise ValueError(f"choose_path, got slot {slot}: there are {search.n_stored}")
        self._choose_stored(search, first, m, least, threshold, joins, slot, similarity)

    def _choose_stored(
        self,
        search: PathSearch,
        first: int,
        m: int,
        least: int,
        threshold: bool,
        joins: bool,
        slot: int,
        similarity: float,
    ) -> None:
        """Choose by the path in a slot; -1: by those that `search` has found."""
        n_layers = min(self.n_layers, search.n_layers)
        if not 0 <= first <= n_layers - m or m < 0 or search.n_width != self.n_experts:
            raise ValueError(f"choose, got {m} rows from layer {first} on: there are {n_layers} layers")
        if not COMPILED:
            slots = np.full(m, slot) if slot >= 0 else search.slot_array[:m]
            similarities = np.full(m, similarity) if slot >= 0 else search.similarity_array[:m]
            rows = np.empty((m, self.n_experts))
            search.rows(first, slots, rows)
            self.choose(first, rows, similarities, least, threshold, joins)
            return
        least = min(least, self.n_experts)
        for i in range(m):
            if slot >= 0:
                search.read(first + i, slot, self.row)
            else:
                search.read(first + i, search.slots[i], self.row)
                similarity = search.similarities[i]
            self._choose_row(first + i, self.row, similarity, least, threshold, joins)

    def _choose_row(self, layer: int, row: Floats, similarity: float, least: int, threshold: bool, joins: bool) -> None:
        n_experts, base, heap, shares = self.n_experts, layer * self.n_experts, self.heap, self.shares
        total = 0.0
        for expert in range(n_experts):
            total += row[expert]
            heap[expert] = expert
        self._begin(layer, joins)
        if not total > 0.0:
            if not joins:
                for expert in range(n_experts):
                    shares[base + expert] = 0.0
            return
        for expert in range(n_experts):
            share = row[expert] / total
            if not joins or share > shares[base + expert]:
                shares[base + expert] = share
        goal = similarity - 1.0
        goal = 0.0 if goal > 0.0 else goal
        goal = (1.0 if goal < -1.0 else -goal) * total if threshold else 0.0
        few = n_experts <= FEW  # a look at all that are left is less than a heap of them
        if not few:
            for at in range(n_experts // 2 - 1, -1, -1):
                self._sink(row, at, n_experts)
        reached = 0.0
        left = n_experts
        while left > 0 and (n_experts - left < least or reached < goal):
            best = 0
            if few:
                for at in range(1, left):  # in rising order, so that of equals the lowest is met first
                    if row[heap[at]] > row[heap[best]]:
                        best = at
            expert = heap[best]
            reached += row[expert]
            left -= 1
            if few:
                for at in range(best, left):
                    heap[at] = heap[at + 1]
            else:
                heap[0] = heap[left]
                self._sink(row, 0, left)
            self._join(layer, expert)

    def _begin(self, layer: int, joins: bool) -> None:
        """Forget what was chosen of a layer, unless more is to join it."""
        base = layer * self.n_experts
        if not joins:
            for at in range(self.n_chosen[layer]):
                self.is_chosen[base + self.chosen[base + at]] = 0
            self.n_chosen[layer] = 0

    def _join(self, layer: int, expert: int) -> None:
        at = layer * self.n_experts
        if not self.is_chosen[at + expert]:
            self.is_chosen[at + expert] = 1
            self.chosen[at + self.n_chosen[layer]] = expert
            self.n_chosen[layer] += 1

    def _sink(self, row: Floats, at: int, n: int) -> None:
        """Put one entry of the heap in its place; the largest score, of equals the lowest expert, stands on top."""
        heap = self.heap
        expert = heap[at]
        score = row[expert]
        while 2 * at + 1 < n:
            below = 2 * at + 1
            lower = heap[below]
            if below + 1 < n:
                other = heap[below + 1]
                if row[other] > row[lower] or (row[other] == row[lower] and other < lower):
                    below += 1
                    lower = other
            if score > row[lower] or (score == row[lower] and expert < lower):
                break
            heap[at] = lower
            at = below
        heap[at] = expert

    def _choose_plain(
        self, first: int, rows: Floats, similarities: Floats, least: int, threshold: bool, joins: bool
    ) -> None:
        """The same with whole arrays at a time."""
        n_experts = self.n_experts
        order, counts = select_many(rows, similarities, least, threshold)
        totals = rows.sum(axis=1)
        if not totals.all():
            counts = np.where(totals > 0, counts, 0)
            totals = np.where(totals > 0, totals, 1.0)
        here = slice(first * n_experts, (first + len(rows)) * n_experts)
        shares = (rows / totals[:, None]).ravel()
        if joins:
            shares = np.maximum(np.array(self.shares[here]), shares)
        self.shares[here] = shares.tolist()
        for i, (experts, count) in enumerate(zip(order.tolist(), counts.tolist(), strict=True)):
            layer = first + i
            if joins:
                for expert in experts[:count]:
                    self._join(layer, expert)
            else:
                base = layer * n_experts
                flags = bytearray(n_experts)
                for expert in experts[:count]:
                    flags[expert] = 1
                self.is_chosen[base : base + n_experts] = flags
                self.chosen[base : base + count] = experts[:count]
                self.n_chosen[layer] = count

    def _base(self, layer: int) -> int:
        """Where a layer's experts begin."""
        if not 0 <= layer < self.n_layers:
            raise ValueError(f"Outlook, got layer {layer}: there are {self.n_layers}")
        return layer * self.n_experts

    # -- what follows from it ---------------------------------------------------------------------------------------

    def visit(self, layer: int, experts: dict[int, int]) -> None:
        """A gate has asked for these: a visit of each, hit or miss."""
        base = self._base(layer)
        expected = self.expected[layer] and self.n_chosen[layer] > 0
        self.expected[layer] = 0
        if expected:
            self.named += self.n_chosen[layer]
        for expert in experts:
            if expert < 0 or expert >= self.n_experts:
                raise ValueError(f"visit, got expert {expert}: there are {self.n_experts}")
            at = base + expert
            self.visits[at] += 1.0
            if self.ranks:
                self.rank[at] = self.believed_shares[at] * self.visits[at]
            if expected:
                self.needed += 1
                self.right += self.is_chosen[at]

    def uncount(self, index: int, n: float) -> None:
        """Take back so many visits of an expert, all of them at most."""
        if not 0 <= index < self.n_layers * self.n_experts:
            raise ValueError(f"uncount, got index {index}: there are {self.n_layers * self.n_experts} experts")
        left = self.visits[index] - n
        self.visits[index] = left = left if left > 0.0 else 0.0
        if self.ranks:
            self.rank[index] = self.believed_shares[index] * left

    def believe(self, layer: int) -> None:
        """What was chosen of a layer holds from now on: probabilities, ranks and bars."""
        base = self._base(layer)
        self.believed[layer] = self.expected[layer] = 1
        if not COMPILED:
            self._believe_plain(base, base + self.n_experts)
            return
        for at in range(base, base + self.n_experts):
            share = self.shares[at]
            self.believed_shares[at] = share
            if self.ranks:
                self.rank[at] = share * self.visits[at]
            if self.bar:
                self.bar_of[at] = self.bar if self.is_chosen[at] else 0

    def _believe_plain(self, start: int, stop: int) -> None:
        shares = self.shares[start:stop]
        self.believed_shares[start:stop] = shares
        if self.ranks:
            visits = self.visits[start:stop]
            self.rank[start:stop] = array("d", [share * n for share, n in zip(shares, visits, strict=True)])
        if self.bar:
            self.bar_of[start:stop] = bytes([self.bar if chosen else 0 for chosen in self.is_chosen[start:stop]])

    def foresee(self, now: int) -> None:
        """Believe what the prediction made after layer `now` has chosen, of all layers that it is about."""
        layer = now + self.distance
        self.believe(layer)
        while self.to_last and layer + 1 < self.n_layers:
            layer += 1
            self.believe(layer)

    def forget(self, layer: int) -> None:
        """The layer has passed: nothing is expected of it any more."""
        base = self._base(layer)
        if self.believed[layer]:
            self.believed[layer] = 0
            if self.bar and not COMPILED:
                self.bar_of[base : base + self.n_experts] = bytes(self.n_experts)
            elif self.bar:
                for at in range(base, base + self.n_experts):
                    self.bar_of[at] = 0

    def ahead(self, now: int, after: tuple[Ticket, ...]) -> RequeueFrom:
        """The prefetches of the layers behind `now` (-1: none has run) of which something is believed.

        `now` has passed: it is forgotten. The nearer a layer and the more probable an expert, the sooner: priority =
        probability / (layer - now). What belongs to layers that the newest prediction is about waits for `after`;
        before the first layer everything does.
        """
        n = self.look_ahead(now)
        return RequeueFrom(self.wishes, 0, n, self.n_fresh, after, now)

    def look_ahead(self, now: int) -> int:
        """`ahead` as wishes: how many there are."""
        if now < -1:
            raise ValueError(f"ahead, got layer {now}: layers count from 0, and -1 stands before them")
        if 0 <= now < self.n_layers:
            self.forget(now)
        n = 0
        fresh = 0
        for gap in range(1, self.reach + 1):
            layer = now + gap
            if gap == self.distance and now >= 0:
                fresh = n
            if layer < self.n_layers and self.believed[layer]:
                base = layer * self.n_experts
                for place in range(self.n_chosen[layer]):
                    at = base + self.chosen[base + place]
                    self.indices[n] = at
                    self.priorities[n] = self.believed_shares[at] / gap
                    n += 1
        self.n_fresh = fresh
        return n

    def named_of(self, layer: int) -> list[tuple[int, float]]:
        """Experts chosen of a layer and how probable each is, in order of asking; none of a layer not believed."""
        base = self._base(layer)
        if not self.believed[layer]:
            return []
        experts = [self.chosen[base + place] for place in range(self.n_chosen[layer])]
        return [(expert, self.believed_shares[base + expert]) for expert in experts]


def select_many(
    rows: Floats, similarities: Floats, least: int, threshold: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`Outlook.choose` with whole arrays: all experts, most probable first [m, E], and how many are chosen [m]."""
    falling = -rows
    order = falling.argsort(axis=1, kind="stable")
    least = min(least, rows.shape[1])
    if not threshold:
        return order, np.full(len(rows), least)
    falling.sort(axis=1)
    reached = falling.cumsum(axis=1)  # less than nothing, as everything here
    targets = np.maximum(np.minimum(similarities - 1.0, 0.0), -1.0) * -reached[:, -1]
    enough = (targets < 0.0) + (reached[:, :-1] > targets[:, None]).sum(axis=1)  # the fewest that reach it
    return order, np.maximum(enough, least)
