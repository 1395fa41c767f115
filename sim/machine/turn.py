"""Experts that run one after the other."""

from __future__ import annotations

from sim.base.flat import floats, ints


class Turn:
    """Whole experts of one layer, in the serving precision and for one token each, in the order in which they run.

    `arrived_s`: when the copy of each had ended. The machine answers with `ends_s`.
    """

    def __init__(self, n_experts: int) -> None:
        self.layer = -1
        self.n = 0
        self.experts = ints(n_experts)
        self.arrived_s = floats(n_experts)
        self.ends_s = floats(n_experts)

    def begin(self, layer: int) -> None:
        """Nobody runs yet."""
        self.layer = layer
        self.n = 0
