"""What HybriMoE copies: an expert's matrices one by one, and what is said of all of them at once."""

from __future__ import annotations

from typing import NamedTuple

from sim.policy import Evict, Fetch, Piece, Prefetch, View


class Copies(NamedTuple):
    """An expert's matrices, as pieces, and what is said of all of them."""

    parts: tuple[Piece, ...]
    fetch: list[Fetch]
    prefetch: list[Prefetch]
    evict: list[Evict]


class Experts:
    """The copies that every expert comes in, each made when it is first asked for.

    Args:
        matrices: copies per expert.
    """

    def __init__(self, matrices: int, view: View) -> None:
        self._matrices = matrices
        self._view = view
        self._known: list[Copies | None] = [None] * (view.n_layers * view.n_experts)

    def of(self, at: int) -> Copies:
        """What an expert, `layer * n_experts + expert`, is copied in."""
        found = self._known[at]
        if found is None:
            parts = tuple(self._view.matrices(*divmod(at, self._view.n_experts), self._matrices))
            found = self._known[at] = Copies(
                parts, list(map(Fetch, parts)), list(map(Prefetch, parts)), list(map(Evict, parts))
            )
        return found
