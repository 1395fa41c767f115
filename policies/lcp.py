"""Least cache priority: MoEpic's replacement rule as a plain cache of whole experts.

Source: MoEpic (arXiv 2509.08342), section 3.3, equation 4: P = mu * rho ** (nu / omega) of the expert's activations so
far, mu, and the tokens since its last one, nu. On a miss the lowest leaves and the new one always enters; counts
outlive the stay of an expert. Ties are not published: the lowest expert, then the lowest layer, leaves.

Every expert's P decays at the same rate, so at any moment P orders experts as `omega * ln(mu) / ln(1/rho) + t` does,
where t is the last token that activated them: a key that changes only then. Keys are rounded to 2**-20 of a token and
kept as integers: equal priorities stay equal, nothing underflows, and no machine's `pow` has a say.
"""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

import numpy as np
from numpy.typing import NDArray

from policies.common.cache import ScopedCache
from sim.policy import Decision, Gate, Keys, Rank, Serve, View, follow, param

UNIT_BITS = 20
NEVER = -(2**62)  # the key of an expert that was never activated: P = 0
LOG_ERROR = 1e-12  # any machine's logarithm and a product of it are nearer than this, as a share
CHUNK_ROWS = 256  # tokens looked at together, to bound memory


class Priorities:
    """Keys of all experts.

    Args:
        omega: observation window in tokens. rho: in (0, 1).

    Attributes:
        keys: [n_layers][n_experts]; the larger, the higher the priority. uses: mu, the same shape.
    """

    def __init__(self, n_layers: int, n_experts: int, omega: float, rho: float) -> None:
        self.n_experts = n_experts
        self.keys = [[NEVER] * n_experts for _ in range(n_layers)]
        self.uses = [[0] * n_experts for _ in range(n_layers)]
        self._tokens = [0] * n_layers  # tokens each layer has seen
        with localcontext() as context:
            context.prec = 40
            self._per_ln = Decimal(omega) / -Decimal(rho).ln() * 2**UNIT_BITS
        self._per_ln_float = float(self._per_ln)
        self._of_uses = [NEVER]

    def copy(self) -> Priorities:
        """The same state, to be compared with what comes after."""
        other = Priorities.__new__(Priorities)
        other.n_experts, other._of_uses = self.n_experts, self._of_uses
        other._per_ln, other._per_ln_float = self._per_ln, self._per_ln_float
        other.keys, other.uses = [list(row) for row in self.keys], [list(row) for row in self.uses]
        other._tokens = list(self._tokens)
        return other

    def of_uses(self, uses: int) -> int:
        """omega * ln(uses) / ln(1/rho) in units of a key."""
        table = self._of_uses
        while len(table) <= uses:
            near = self._per_ln_float * math.log(len(table))
            whole = round(near)
            if abs(near - whole) + near * LOG_ERROR < 1 / 2:
                table.append(whole)
                continue
            with localcontext() as context:
                context.prec = 40
                table.append(int((self._per_ln * Decimal(len(table)).ln()).to_integral_value()))
        return table[uses]

    def observe(self, layer: int, tokens: list[list[int]]) -> None:
        """Tokens pass a layer, each with the experts it activates."""
        keys, uses = self.keys[layer], self.uses[layer]
        at, table = self._tokens[layer], self._of_uses
        for chosen in tokens:
            at += 1
            for expert in chosen:
                n = uses[expert] = uses[expert] + 1
                keys[expert] = (table[n] if n < len(table) else self.of_uses(n)) + (at << UNIT_BITS)
        self._tokens[layer] = at

    def observe_all(self, ids: NDArray[np.int64]) -> None:
        """Tokens pass all layers, one after the other: experts activated, [n, L, K]."""
        state = self.state(ids)
        follow(state, ids)
        self.keys, self.uses, self._tokens = state.by_expert.tolist(), state.uses.tolist(), state.n_tokens.tolist()

    def state(self, ids: NDArray[np.int64]) -> Keys:
        """A copy in arrays, with the worth of as many uses as there are once tokens have passed that activate `ids`."""
        uses = np.array(self.uses, dtype=np.int64)
        first = np.arange(len(uses))[None, :, None] * self.n_experts
        after = uses + np.bincount((first + ids).ravel(), minlength=uses.size).reshape(uses.shape)
        self.of_uses(int(after.max(initial=0)))
        n_tokens = np.array(self._tokens, dtype=np.int64)
        return Keys(np.array(self.keys), uses, n_tokens, np.array(self._of_uses), 1 << UNIT_BITS)

    def ranking(self, layer: int) -> list[int]:
        """Experts of a layer from the highest priority down; ties to the lowest id."""
        keys = self.keys[layer]
        return sorted(range(self.n_experts), key=lambda expert: -keys[expert])


SERVE = (Serve(),)


class Lcp(ScopedCache):
    """Evict the expert of least priority; what the running layer needs is safe."""

    name = "lcp"
    title = "Least cache priority (MoEpic)"
    source = "arXiv 2509.08342 section 3.3, Table 1"
    ranks_by_trace = True
    omega: int = param(128, "observation window, tokens (section 3.3)", within=(1, 10**9))
    rho: float = param(0.25, "weight of activations against intervals (section 3.3)", within=(1e-9, 1 - 1e-9))
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
