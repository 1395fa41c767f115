"""Random: the floor under every cache that looks at something.

Source: MoEpic (arXiv 2509.08342, Table 1) compares with RND, "randomly selecting cached experts" (section 2.2). Its
figures are the share cached, whichever experts are hot (16.41 % with 10 of 60 cached): a choice made once
(`selection=static`). Random replacement, which its section 4.4 puts in LCP's place, does better than that wherever some
experts are asked for more often than others, since those come back more often.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from random import Random as Draws

from policies.common.cache import ScopedCache
from policies.common.placement import by_layer, every
from sim.policy import NEVER, Piece, Rank, View, param


class Random(ScopedCache):
    """Evict any resident expert with equal chance; what the running layer needs is safe.

    With `selection=static` a random choice is cached and stays. All others pass through a buffer of K experts, oldest
    first out, which is part of the budget.
    """

    name = "random"
    title = "Random replacement"
    source = "arXiv 2509.08342 Table 1 (RND), section 4.4"
    one_size = "its draws fall on other experts in each size"
    selection: str = param(
        "replaced",
        "replaced: a missing expert takes a random resident's place; static: a random choice is cached for good, "
        "less K experts' room that all others pass through (RND of MoEpic's Table 1)",
        ("replaced", "static"),
    )
    seed: int = param(0, "seed of the draws; --seed sets it too", within=(0, 2**63 - 1))
    _leaving: Rank

    def min_experts(self, view: View) -> int:
        return view.top_k if self.selection == "static" else super().min_experts(view)

    def layer_budgets(self, view: View) -> list[list[int]] | None:
        return None if self.selection == "static" else super().layer_budgets(view)  # the buffer is every layer's

    def bind(self, view: View) -> None:
        super().bind(view)
        # Only `Random.random` is promised to stay the same from one Python to the next.
        self._draw = Draws(self.seed).random  # noqa: S311 - a simulation, not a secret
        self._held: defaultdict[int, list[Piece]] = defaultdict(list)
        self._at: dict[Piece, int] = {}  # where each one stands in its list
        self._n_passed = 0
        if self.selection == "static":  # oldest first out of the buffer
            self.order = self._leaving = Rank(view.n_layers * view.n_experts)

    def initial(self, view: View) -> Iterator[Piece]:
        """The static choice: of each GPU's experts, or of each layer's there."""
        if self.selection != "static":
            return
        pieces = every(view)
        for gpu in range(view.n_gpus):
            mine = [piece for piece in pieces if piece.gpu == gpu]
            room = view.capacity_of(gpu)
            room = len(mine) if room >= len(mine) else room - view.top_k
            if self.scope == "global":
                yield from self._chosen(mine, room)
                continue
            for layer, n in enumerate(by_layer(room, gpu, view)):
                yield from self._chosen([piece for piece in mine if piece.layer == layer], n)

    def _chosen(self, pieces: list[Piece], n: int) -> Iterator[Piece]:
        """`n` of them, each with equal chance."""
        for left in range(len(pieces), max(0, len(pieces) - n), -1):
            piece = pieces.pop(int(self._draw() * left))
            self._leaving.bar[piece.index] = NEVER
            yield piece

    def accessed(self, piece: Piece, hit: bool, view: View) -> None:
        if hit:
            return
        if self.selection == "static":
            self._n_passed += 1
            self._leaving.rank[piece.index] = self._n_passed
            return
        self._hold(piece)

    def placed(self, piece: Piece, view: View) -> None:
        """In host memory above a drive experts also come ahead of their use."""
        if self.selection != "static":
            self._hold(piece)

    def _hold(self, piece: Piece) -> None:
        held = self._held[self.group(piece)]
        self._at[piece] = len(held)
        held.append(piece)

    def evicted(self, piece: Piece, view: View) -> None:
        if self.selection == "static":
            return
        held = self._held[self.group(piece)]
        last = held.pop()
        at = self._at.pop(piece)
        if last is not piece:
            held[at], self._at[last] = last, at

    def victim(self, piece: Piece, speculative: bool, view: View) -> Piece | None:
        held = self._held[self.group(piece)]
        for left in range(len(held), 0, -1):  # what is drawn and cannot leave goes behind what can still be drawn
            at = int(self._draw() * left)
            candidate = held[at]
            if view.evictable(candidate):
                return candidate
            held[at] = other = held[left - 1]
            held[left - 1] = candidate
            self._at[other], self._at[candidate] = at, left - 1
        return None
