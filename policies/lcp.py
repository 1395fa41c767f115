"""Least cache priority: MoEpic's replacement rule as a plain cache of whole experts.

Source: MoEpic (arXiv 2509.08342), section 3.3, equation 4: P = mu * rho ** (nu / omega) of the expert's activations so
far, mu, and the tokens since its last one, nu. On a miss the lowest leaves and the new one always enters; counts
outlive the stay of an expert. Ties are not published: the lowest expert, then the lowest layer, leaves.
"""

from __future__ import annotations

from policies.common.cache import ScopedCache
from policies.common.priority import NEVER, Priorities
from sim.policy import Decision, Gate, Rank, Serve, View, param

SERVE = (Serve(),)


class Lcp(ScopedCache):
    """Evict the expert of least priority; what the running layer needs is safe."""

    name = "lcp"
    title = "Least cache priority (MoEpic)"
    source = "arXiv 2509.08342 section 3.3, Table 1"
    ranks_by_trace = True
    omega: int = param(128, "observation window, tokens (section 3.3)", low=1, high=10**9)
    rho: float = param(0.25, "weight of activations against intervals (section 3.3)", low=1e-9, high=1 - 1e-9)
    counts: str = param(
        "tokens",
        "what mu and nu count: tokens (section 3.3), or iterations, a prompt or batch being one, as `lfu` counts by "
        "default",
        ("tokens", "iterations"),
    )

    def bind(self, view: View) -> None:
        super().bind(view)
        self._priorities = Priorities(view.n_layers, view.n_experts, self.omega, self.rho)
        self.order = order = Rank(view.n_layers * view.n_experts, self.per_layer)
        order.rank[:] = NEVER
        # Keys are whole numbers; up to 2**53, far beyond any published omega and rho, a float holds them exactly.
        self._ranks = list(order.rank.reshape(view.n_layers, view.n_experts))

    def gate_done(self, gate: Gate, view: View) -> tuple[Decision, ...]:
        layer, row = gate.layer, gate.iteration.row
        if row is not None:
            tokens = [row[layer]]
        else:
            tokens = gate.ids.tolist() if self.counts == "tokens" else [list(gate.needs)]
        self._priorities.observe(layer, tokens)
        keys, ranks = self._priorities.keys[layer], self._ranks[layer]
        for expert in gate.needs:
            ranks[expert] = keys[expert]
        return SERVE
