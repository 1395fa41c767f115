"""Pending experts: what the gate of the layer being served has asked for and what is not computed yet."""

from __future__ import annotations

from collections.abc import Sequence

from sim.base.flat import ints
from sim.workload.iterations import Block


class PendingExperts:
    """Experts of one layer with their tokens, in the order of the gate.

    `layer`: the layer being served, -1 between iterations. `tokens`: by expert, 0 where it is not pending. `order` and
    `asked`: experts and their tokens as the gate asked for them.
    """

    def __init__(self, n_experts: int) -> None:
        self.layer = -1
        self.n_experts = n_experts
        self.tokens = ints(n_experts)
        self.order = ints(n_experts)
        self.asked = ints(n_experts)
        self.n = 0  # experts in `order`, of which `n_left` have not run
        self.n_left = 0
        self.n_tokens = 0  # behind all of them

    def begin(self) -> None:
        """Nothing is asked for yet."""
        if self.n_left:
            for at in range(self.n):
                self.tokens[self.order[at]] = 0
        self.n = 0
        self.n_left = 0
        self.n_tokens = 0

    def add(self, expert: int, n_tokens: int) -> None:
        """The gate asks for one more expert."""
        self.order[self.n] = expert
        self.asked[self.n] = n_tokens
        self.n += 1
        self.n_left += 1
        self.n_tokens += n_tokens
        self.tokens[expert] = n_tokens

    def add_row(self, block: Block, at: int, n: int) -> None:
        """The gate of one token asks for `n` experts, `block.ids[at:at + n]`."""
        for i in range(n):
            expert = block.ids[at + i]
            self.order[i] = expert
            self.asked[i] = 1
            self.tokens[expert] = 1
        self.n = n
        self.n_left = n
        self.n_tokens = n

    def settle(self, expert: int) -> None:
        """An expert has run."""
        self.tokens[expert] = 0
        self.n_left -= 1

    def tokens_by_expert(self) -> Sequence[int]:
        """`tokens`, to look at."""
        return self.tokens

    def experts(self) -> list[int]:
        """Experts still pending, in the order of the gate."""
        return [self.order[at] for at in range(self.n) if self.tokens[self.order[at]]]

    def tokens_of(self, layer: int, expert: int) -> int:
        """Tokens that an expert is pending for; 0 where it is none of the layer's, or has run."""
        return self.tokens[expert] if layer == self.layer and layer >= 0 and 0 <= expert < self.n_experts else 0
