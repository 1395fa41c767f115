"""Experts that run one after the other."""

from __future__ import annotations

from sim.base.flat import floats, ints


class Turn:
    """Whole experts of one layer, in the serving precision, in the order in which they run.

    `tokens`: how many each runs for, one each if `all_single`. `arrived_s`: when its copy had ended, if `all_known`.
    The machine answers with `ends_s`.
    """

    def __init__(self, n_experts: int) -> None:
        self.layer = -1
        self.n = 0
        self.all_known = True
        self.all_single = True
        self.experts = ints(n_experts)
        self.tokens = ints(n_experts)
        self.arrived_s = floats(n_experts)
        self.ends_s = floats(n_experts)

    def begin(self, layer: int) -> None:
        """Nobody runs yet."""
        self.layer = layer
        self.n = 0
        self.all_known = True
        self.all_single = True
