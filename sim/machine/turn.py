"""Experts that are copied and run one after the other."""

from __future__ import annotations

from sim.base.flat import floats, ints


class Turn:
    """Whole experts of one layer, in the serving precision, in the order in which they run.

    The first `n_here` of `n` were resident; the others, of `n_bytes` each, come for pieces that are `leaving`, by
    `Piece.index`. `first` is the index of the layer's expert 0. `arrived_s`: when the copy of each has ended.
    The machine answers with that (`demand_turn`), or with `ends_s` (`run_turn`, for one token each).
    """

    def __init__(self, n_experts: int, n_bytes: int) -> None:
        self._n_experts = n_experts
        self.n_bytes = n_bytes
        self.layer = -1
        self.first = 0
        self.n = 0
        self.n_here = 0
        self.n_leaving = 0
        self.experts = ints(n_experts)
        self.leaving = ints(n_experts)
        self.arrived_s = floats(n_experts)
        self.ends_s = floats(n_experts)

    def begin(self, layer: int) -> None:
        """Nobody runs or comes yet."""
        self.layer = layer
        self.first = layer * self._n_experts
        self.n = 0
        self.n_here = 0
        self.n_leaving = 0
