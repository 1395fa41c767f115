# cython: boundscheck=True, wraparound=True
"""Who a `Rank` order spares while a layer runs, and who because a prefetch has been aimed at them."""

from __future__ import annotations

from collections.abc import Iterable

from sim.policy.order import FREE, LAST, NOT_FOR_PREFETCH, Rank

_FREE, _NOT_FOR_PREFETCH, _LAST = FREE, NOT_FOR_PREFETCH, LAST  # machine integers where this is compiled


class Spared:
    """Writes the bars of an order of whole experts, so many in each layer."""

    def __init__(self, order: Rank, n_experts: int) -> None:
        self.bar = order.bar.data
        self.n_experts = n_experts
        self.shielded: list[int] = []
        self.aimed: list[int] = []

    def shield(self, layer: int, experts: Iterable[int]) -> None:
        """These of a layer make room for nobody while others can, until `unshield`."""
        first = layer * self.n_experts
        for expert in experts:
            self.bar[first + expert] = _LAST
            self.shielded.append(first + expert)

    def unshield(self) -> None:
        """The layer is over."""
        for index in self.shielded:
            self.bar[index] = _NOT_FOR_PREFETCH if index in self.aimed else _FREE
        self.shielded.clear()

    def aim(self, layer: int, experts: Iterable[int]) -> None:
        """These of a layer, and no longer those before them, make room for no prefetch."""
        for index in self.aimed:
            if index not in self.shielded:
                self.bar[index] = _FREE
        self.aimed.clear()
        first = layer * self.n_experts
        for expert in experts:
            self.bar[first + expert] = _NOT_FOR_PREFETCH
            self.aimed.append(first + expert)
