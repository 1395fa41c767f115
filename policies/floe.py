"""FloE (arXiv 2505.05950): experts that shrink on the link, foretold one layer ahead, in a least-recently-used cache.

Source: Zhou et al., "FloE: On-the-Fly MoE Inference on Memory-constrained GPU" (ICML 2025), known here from third-party
notes. An expert crosses the link with its up projection in two bits and, of gate and down projection, the channels
alone that the current token activates: about a tenth. So an expert of 352 MB becomes 9.3 times smaller,

    1 / (1/3 x 2/16 + 2/3 x 1/10) = 9.23 by this arithmetic.

Routing traces say nothing of channels. Sparsity enters as a size, and the nearest this simulator has is an expert of
two bits throughout: 8 times smaller (`compressed`), so copies take 16 % longer than the published factor would have
them, and the computation is priced as that of two-bit weights. While generating, the next layer's predicted experts are
copied during this layer (inter-expert prediction), the missing ones on demand.

Two readings bound what the notes leave open, namely whether channels that came for one token serve later ones:
`channels=kept` (the default, optimistic) caches a compressed expert as if they did; `channels=token` has them copied
anew for every pass. The published small networks for prediction are not public: the next gate on this layer's gate
input stands in, or `--predictor surrogate:0.88` with the published precision. Their time is left out. The cache's rule
is not in the notes (LRU). Batches and prompts (published: single tokens) take every token's experts; prompts are not
predicted for. A result tells how much ran compressed, and not what sparsity cost the model.
"""

from __future__ import annotations

from policies.common.foretold import foretold, in_turn
from policies.lru import Lru
from sim.policy import (
    PREFILL,
    SURROGATE,
    Assignment,
    BadInput,
    Evict,
    Gate,
    Piece,
    Prefetch,
    Serve,
    Steps,
    Surrogate,
    View,
    param,
)


class Floe(Lru):
    """Copies and caches compressed experts, those of the next layer ahead of time."""

    name = "floe"
    title = "FloE: compressed experts, predicted one layer ahead"
    source = "arXiv 2505.05950 (ICML 2025), known from third-party notes"
    from_notes = True
    traits = frozenset({"lossy"})
    needs = frozenset({"experts", "weights", "next_scores_1"})
    compressed: str = param(
        "int2",
        "what stands for a compressed expert: int2 is 8 times smaller than 16 bits, the nearest to the published "
        "9.3; int4 4 times",
        ("int2", "int4"),
    )
    channels: str = param(
        "kept",
        "whether the channels that came for one token serve later ones, or are copied anew for every pass (the notes "
        "do not say)",
        ("kept", "token"),
    )
    predictor: str = param(
        "gate_reuse",
        "the next gate on this layer's gate input (next_scores_1); none; or surrogate:SHARE or surrogate:ALL/ANY, a "
        "labelled stand-in (published: 0.88)",
    )
    seed: int = param(0, "for a surrogate's draws", within=(0, 2**63 - 1))
    scope = "global"

    def __init__(self, **values: object) -> None:
        super().__init__(**values)
        if self.channels == "token":
            self.traits = frozenset({"lossy", "evicts_eagerly"})  # type: ignore[misc]  # of this instance alone
        if self.predictor != "gate_reuse":
            self.needs = frozenset({"experts", "weights"})
        if self.predictor.startswith(SURROGATE):
            self.labels = (SURROGATE,)
        elif self.predictor not in ("gate_reuse", "none"):
            raise BadInput(f"floe.predictor, got {self.predictor!r}: write gate_reuse, none, or surrogate:0.88")

    def bind(self, view: View) -> None:
        super().bind(view)
        drawn = self.predictor.startswith(SURROGATE)
        self._surrogate = Surrogate(self.predictor, view.top_k, view.n_experts, self.seed) if drawn else None
        self._aimed: tuple[int, set[int]] = (-1, set())  # (layer, experts predicted for it)
        self._n = self._right = 0

    def assign(self, gate: Gate, view: View) -> Assignment:
        """Routing stays; every expert may run compressed."""
        return Assignment(gate.ids, gate.weights, dict.fromkeys(gate.needs, self.compressed))

    def gate_done(self, gate: Gate, view: View) -> Steps:
        layer, (aimed_at, aimed) = gate.layer, self._aimed
        if aimed_at == layer:
            self._n, self._right = self._n + len(aimed), self._right + len(aimed & gate.needs.keys())
        yield Serve()
        if self.channels == "token":
            for expert in sorted(aimed | gate.needs.keys() if aimed_at == layer else gate.needs):
                piece = self._piece(layer, expert, view)
                if view.holds(piece):
                    yield Evict(piece)
        if layer + 1 < view.n_layers and gate.phase != PREFILL and self.predictor != "none":
            named = in_turn(foretold(gate, 1, self._surrogate, view))  # of every token, best first
            self._aimed = (layer + 1, set(named))
            yield [Prefetch(self._piece(layer + 1, expert, view)) for expert in named]

    def _piece(self, layer: int, expert: int, view: View) -> Piece:
        return view.part(layer, expert, 0.0, 1.0, self.compressed)

    def stats(self) -> dict[str, float]:
        """Share of the experts predicted that the gate then chose (published precision: 0.88)."""
        return {"predicted_right_frac": self._right / self._n if self._n else 0.0}
