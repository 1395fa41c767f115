"""SiDA-MoE (MLSys 2024, arXiv 2310.18859): a hash table foretells every layer's experts, and they are what is executed.

Source: Du et al., "SiDA: Sparsity-Inspired Data-Aware Serving for Efficient and Scalable Large Mixture-of-Experts
Models", and its code timlee0212/SiDA-MoE@7528828 (src/utils/manager.py `move_experts`, src/model/soda_moe.py,
src/latency_with_hash.py). A thread of its own predicts, ahead of the forward pass, which experts each token will use in
every layer (the hash table); the routers are removed, so what was foretold is computed, right or wrong (lossy).
`variant=code` moves experts in bulk before the pass and waits: those not foretold back to the host, then the others up.
`variant=paper` keeps what there is room for, first in, first out, and a layer waits for its own experts alone.

The published predictor (two LSTM layers with SparseMax attention over embeddings) is not public for these models;
`policies/common/foretold.py` says what stands in, and `--predictor surrogate:SHARE` takes a published hit rate
(top 3 of Switch-base-8: 0.99 SST2, 0.97 MRPC, 0.92 MultiRC). A token runs as many experts as its model's gate would
choose; the code's top 3 on models of one expert per token cannot be expressed. The predictor's memory is not charged.

Published for encoders that classify. Generating (not published): a token's table can only be made once the token is
known, so it is waited for; tables of prompts come from the queue. When memory is short, what does not fit before the
pass follows as layers are over. Several GPUs (the code has them): each has its own cache.
"""

from __future__ import annotations

import numpy as np

from policies.common.foretold import Forecasting
from sim.policy import (
    PREFILL,
    Assignment,
    Evict,
    Fetch,
    Gate,
    Iteration,
    Predict,
    Serve,
    Steps,
    Ticket,
    View,
    Wait,
    WriteBack,
    param,
)


class Sida(Forecasting):
    """Executes what was foretold; loads it before the pass."""

    name = "sida"
    title = "SiDA-MoE: a hash table instead of routers"
    source = "arXiv 2310.18859 (MLSys 2024); timlee0212/SiDA-MoE@7528828 src/utils/manager.py"
    aliases = ("sida_moe",)
    traits = frozenset({"lossy"})
    needs = frozenset({"experts", "token_ids", "weights"})
    variant: str = param(
        "paper",
        "the paper's cache, first in first out, or the public code's bulk moves, both ways, that the host waits for",
        ("paper", "code"),
    )
    predict_s: float = param(1e-3, "seconds per prediction (assumed)", within=(0.0, 60.0))
    ahead: bool = param(True, "tables of prompts are ready in the queue; false: they are waited for, too")

    def __init__(self, **values: object) -> None:
        super().__init__(**values)
        if self.variant == "code":
            self.traits = frozenset({"lossy", "evicts_eagerly"})  # type: ignore[misc]  # of this instance alone

    def iteration_start(self, iteration: Iteration, view: View) -> Steps:
        known = self.ahead and all(r.phase == PREFILL for r in iteration.ranges)
        yield Predict(self.predict_s, "side", blocking=not known)
        self.foretell(iteration)
        self.plan(view.piece(layer, e) for layer in range(view.n_layers) for e in sorted(self.foretold(layer)))
        if self.variant == "code":
            yield from self._move(view)
        else:
            yield from self.load(view)

    def _move(self, view: View) -> Steps:
        """`move_experts`: down first, "to avoid OOM", then up; both are done when the pass begins."""
        down = [piece for piece in view.residents() if piece not in self.expected]
        down.sort(key=lambda piece: piece.gpu)
        for piece in down:
            ticket = yield WriteBack(piece)
            yield Wait((ticket,))
            yield Evict(piece)
        tickets: list[Ticket] = []
        for piece in self.fill(view):
            tickets.append((yield Fetch(piece)))
            self.loaded(piece)
        yield Wait(tuple(tickets))

    def assign(self, gate: Gate, view: View) -> Assignment:
        """The hash table routes; its weights are the shares of what it was made from."""
        self.count(gate.layer, gate.ids)
        shares = self.scores[:, gate.layer]
        total = np.maximum(shares.sum(axis=1, keepdims=True), 1)
        return Assignment(self.ids[:, gate.layer], shares / total)

    def gate_done(self, gate: Gate, view: View) -> Steps:
        self.passed(gate.layer)
        yield Serve()
        yield from self.load(view)
