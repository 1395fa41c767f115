"""What the plain caches share: one cache per GPU, or one per layer of it."""

from __future__ import annotations

from typing import ClassVar

from policies.common.homes import by_layer, most_layers
from sim.policy import Param, Piece, Policy, View


class ScopedCache(Policy):
    """A cache whose `scope` is a whole GPU (`global`) or every layer on its own (`layer`).

    Per-layer capacities are equal; what does not divide goes to the first layers, one expert each.
    """

    params: ClassVar[tuple[Param, ...]] = (
        Param(
            "scope",
            "global",
            "one cache over all layers, or one per layer (Mixtral-Offloading section 3.1)",
            choices=("global", "layer"),
        ),
    )
    scope: str

    def min_experts(self, view: View) -> int:
        return most_layers(view) if self.scope == "layer" else 1

    def layer_budgets(self, view: View) -> list[list[int]] | None:
        if self.scope == "global":
            return None
        shares = [by_layer(view.capacity_of(gpu), gpu, view) for gpu in range(view.n_gpus)]
        return [[n * view.expert_bytes for n in of_gpu] for of_gpu in shares]

    @property
    def per_layer(self) -> bool:
        """True when a layer's experts make room for each other alone."""
        return self.scope == "layer"

    def bind(self, view: View) -> None:
        self._stride = view.n_gpus if self.per_layer else 0

    def group(self, piece: Piece) -> int:
        """The cache a piece belongs to: that of its GPU, or of its layer there."""
        return piece.layer * self._stride + piece.gpu
