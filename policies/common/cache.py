"""What the plain caches share: one cache per GPU, or one per layer of it."""

from __future__ import annotations

from typing import ClassVar

from policies.common.placement import by_layer, most_layers
from sim.policy import ParamValue, Piece, Policy, View, param


def scope_param(default: str) -> str:
    """The parameter that says whether a cache is one per layer or one over all layers of a GPU."""
    doc = "layer: one cache per layer (Mixtral-Offloading section 3.1); global: one over all layers of a GPU"
    return param(default, doc, ("layer", "global"))


class ScopedCache(Policy):
    """A cache whose `scope` is every layer on its own (`layer`) or a whole GPU (`global`).

    One per layer is the default: a token uses the layers in turn, so one LRU over all layers that holds less than a
    token uses evicts every expert before its next use. Per-layer capacities are equal; the experts that are left over
    go to the first layers, one each.
    """

    scope: str = scope_param("layer")
    as_one_list: ClassVar[dict[str, ParamValue]] = {"scope": "global"}

    def min_experts(self, view: View) -> int:
        return most_layers(view) if self.scope == "layer" else 1

    def fits_smaller(self, view: View) -> str:
        return "keep one cache over all layers, --set scope=global" if self.per_layer else ""

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
