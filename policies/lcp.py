"""Least cache priority: MoEpic's replacement rule as a plain cache of whole experts.

Source: MoEpic (arXiv 2509.08342), section 3.3, equation 4: P = mu * rho ** (nu / omega) of the expert's activations so
far, mu, and the tokens since its last one, nu. On a miss the lowest leaves and the new one always enters; counts
outlive the stay of an expert. Ties are not published: the lowest expert, then the lowest layer, leaves.
"""

from __future__ import annotations

from collections import defaultdict

from policies.common.cache import ScopedCache
from policies.common.priority import Priorities
from sim.policy import Gate, Param, Piece, Serve, Steps, View


class Lcp(ScopedCache):
    """Evict the expert of least priority; what the running layer needs is safe."""

    name = "lcp"
    title = "Least cache priority (MoEpic)"
    source = "arXiv 2509.08342 section 3.3, Table 1"
    params = (
        *ScopedCache.params,
        Param("omega", 128, "observation window, tokens (section 3.3)", low=1, high=10**9),
        Param("rho", 0.25, "weight of activations against intervals (section 3.3)", low=1e-9, high=1 - 1e-9),
        Param("counts", "tokens", "what mu and nu count: tokens (section 3.3), or iterations, a prompt or batch being "
              "one, as `lfu` counts by default", choices=("tokens", "iterations")),
    )  # fmt: skip
    omega: int
    rho: float
    counts: str

    def bind(self, view: View) -> None:
        super().bind(view)
        self._priorities = Priorities(view.n_layers, view.n_experts, self.omega, self.rho)
        self._held: defaultdict[int, dict[Piece, None]] = defaultdict(dict)

    def gate_done(self, gate: Gate, view: View) -> Steps:
        row = gate.iteration.row
        if row is not None:
            tokens = [row[gate.layer]]
        else:
            tokens = gate.ids.tolist() if self.counts == "tokens" else [list(gate.needs)]
        self._priorities.observe(gate.layer, tokens)
        yield Serve()

    def accessed(self, piece: Piece, hit: bool, view: View) -> None:
        if not hit:
            self._held[self.group(piece)][piece] = None

    def evicted(self, piece: Piece, view: View) -> None:
        del self._held[self.group(piece)][piece]

    def victim(self, piece: Piece, speculative: bool, view: View) -> Piece | None:
        keys = self._priorities.keys
        free = (other for other in self._held[self.group(piece)] if view.evictable(other))
        return min(free, key=lambda p: (keys[p.layer][p.expert], p.expert, p.layer), default=None)
