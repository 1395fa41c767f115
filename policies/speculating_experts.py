"""Speculating Experts (arXiv 2603.19289): the next layer's experts are foretold, copied meanwhile, and executed.

Source: the paper, and axonn-ai/yalis, branch offload_prefetch (selective offloading, default vectors). A layer's
experts are foretold by the gate of that layer on the residual before this layer's experts plus the weighted mean
outputs ("default vectors") of the experts that it chose. The k named for each token are copied into a second set of
buffers while this layer computes; layer i has the set i mod 2, and nothing is kept from one token to the next. Layer 0
is always loaded on demand. A prompt's layers are copied whole, one ahead.

`mode=execute` computes what was named, with no gate asked and nothing fetched again: what the model says changes, and
results are labelled lossy. Replay is open-loop: what the changed hidden states would have asked for later is not known.
`mode=exact` fetches what the gate then asks for beside what was named.

Default vectors are not in traces. `predictor=recorded` is the closest that is: the next layer's gate on this layer's
gate input, that is without what this layer's experts add (label `gate reuse`). A surrogate is right as often as told,
layer by layer if need be: of Qwen3-30B-A3B the paper reports about 0.9 from the third predicted layer on and less for
the first two, which it gives no figures for; of gpt-oss-120b and 20b 0.83 and 0.88 with trained estimators.

A layer is one kernel there, so its experts wait for all copies of the layer, wrongly foretold ones included (assumed).
Weights of what is executed are those that the model's own gate would give it. Several GPUs (not published): each has
both sets for the experts that live on it. A batch's tokens name experts together.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from policies.common.foretold import foretold, in_turn
from policies.common.placement import homes
from sim.policy import (
    PREFILL,
    SURROGATE,
    Assignment,
    BadInput,
    Evict,
    Fetch,
    Gate,
    Iteration,
    Piece,
    Policy,
    Predict,
    Prefetch,
    RunGpu,
    Steps,
    StoreSplit,
    Surrogate,
    Ticket,
    View,
    param,
)

Ids = NDArray[np.int64]


class SpeculatingExperts(Policy):
    """Two sets of buffers: one computes, the other gets what the next layer is expected to choose."""

    name = "speculating_experts"
    title = "Speculating Experts: the next layer's experts, foretold and copied or executed"
    source = "arXiv 2603.19289; axonn-ai/yalis branch offload_prefetch"
    traits = frozenset({"evicts_eagerly", "lossy"})
    needs = frozenset({"experts", "scores", "next_scores_1"})
    mode: str = param(
        "execute",
        "execute: what was foretold is computed, whatever the gate says (speculative execution: lossy); exact: what "
        "the gate asks for is fetched where it was not foretold",
        ("execute", "exact"),
    )
    predictor: str = param(
        "recorded",
        "recorded: the next gate on this layer's gate input, from the trace; none: everything on demand; or a "
        "labelled stand-in: surrogate:0.9, or by layer from the second on, the last for all others: "
        "surrogate:0.6,0.7,0.9",
    )
    predict_s: float = param(
        0.0, "seconds of a prediction on the GPU's stream (not published: taken to be free)", within=(0.0, 60.0)
    )
    seed: int = param(0, "for a surrogate's draws", within=(0, 2**63 - 1))

    def __init__(self, **values: object) -> None:
        super().__init__(**values)
        self._drawn = self.predictor.startswith(SURROGATE)
        levels = {"experts"}
        if self.predictor == "recorded":
            levels.add("next_scores_1")
            self.labels = ("gate reuse",)
        elif self._drawn:
            self.labels = (SURROGATE,)
        elif self.predictor != "none":
            raise BadInput(
                f"{self.name}.predictor, got {self.predictor!r}: write recorded, none, or a surrogate as in "
                "surrogate:0.9 or surrogate:0.6,0.7,0.9"
            )
        if self.mode == "execute":
            levels.add("scores")  # which say how much of the gate's weight was kept
        else:
            self.traits = frozenset({"evicts_eagerly"})  # type: ignore[misc]  # of this instance alone
        self.needs = frozenset(levels)

    def min_experts(self, view: View) -> int:
        """Two layers: a prompt's come whole."""
        owned = [(homes(view) == gpu).sum(axis=1).tolist() for gpu in range(view.n_gpus)]
        return max(max(map(sum, pairwise(mine)), default=mine[0]) for mine in owned)

    def bind(self, view: View) -> None:
        self._sets: dict[int, dict[Piece, None]] = {}  # layer -> what its buffers hold or get
        self._named: dict[int, Ids] = {}  # layer -> experts foretold per token of this iteration [n, k]
        self._surrogates: list[Surrogate] = []
        self._n = self._right = 0

    def learn(self, store: StoreSplit) -> None:
        if self._drawn:
            shares = self.predictor.removeprefix(SURROGATE).removeprefix(":").split(",")
            shape = (store.trace.top_k, store.trace.n_experts)
            self._surrogates = [Surrogate(f"{SURROGATE}:{share}", *shape, self.seed) for share in shares]

    # -- foretelling ------------------------------------------------------------------------------------------------

    def _foretell(self, gate: Gate, view: View) -> Ids:
        """Experts of the next layer [n, k], likeliest first."""
        ahead = self._surrogates[min(gate.layer, len(self._surrogates) - 1)] if self._drawn else None
        return np.array(foretold(gate, 1, ahead, view))

    def assign(self, gate: Gate, view: View) -> Assignment | None:
        """Speculative execution: what was foretold runs, whatever this gate says."""
        named = self._named.get(gate.layer)
        if named is None:
            return None
        self._count(named, gate.ids)
        return Assignment(named)

    def _count(self, named: Ids, chosen: Ids) -> None:
        found = (named[:, :, None] == chosen[:, None, :]).any(axis=1)
        self._n, self._right = self._n + found.size, self._right + int(found.sum())

    # -- layers -----------------------------------------------------------------------------------------------------

    def layer_enter(self, layer: int, view: View) -> Steps | None:
        """A prompt's layers come whole: the first when it begins, each following one beside the one that computes."""
        return self._whole(layer, view) if view.phase == PREFILL else None

    def _whole(self, layer: int, view: View) -> Steps:
        yield from self._free(layer)
        for ahead in range(layer, min(layer + 2, view.n_layers)):
            if ahead not in self._sets:
                pieces = [view.piece(ahead, expert) for expert in range(view.n_experts)]
                self._sets[ahead] = dict.fromkeys(pieces)
                yield [Prefetch(piece) for piece in pieces]

    def _free(self, layer: int) -> Steps:
        """The set that the next layer takes has been computed with."""
        for done in [other for other in self._sets if other < layer]:
            yield [Evict(piece) for piece in self._sets.pop(done)]

    def gate_done(self, gate: Gate, view: View) -> Steps:
        layer = gate.layer
        here = self._sets.setdefault(layer, {})
        here |= dict.fromkeys(view.piece(layer, expert) for expert in gate.needs)
        came = yield [Fetch(piece) for piece in here]  # under way, or missing
        tickets = tuple(ticket for ticket in came if ticket is not None)
        if gate.phase != PREFILL:
            if self.mode == "exact" and layer in self._named:
                self._count(self._named[layer], gate.ids)
            yield from self._free(layer)
            if self.predictor != "none" and layer + 1 < view.n_layers:
                yield from self._speculate(gate, view)
        yield [RunGpu(expert, tickets) for expert in gate.needs]

    def _speculate(self, gate: Gate, view: View) -> Steps:
        """Predict the next layer, and copy what was named into the other set."""
        after: tuple[Ticket, ...] = ()
        if self.predict_s > 0.0:
            after = ((yield Predict(self.predict_s, "gpu")),)
        named = self._named[gate.layer + 1] = self._foretell(gate, view)
        pieces = [view.piece(gate.layer + 1, expert) for expert in in_turn(named.tolist())]
        self._sets[gate.layer + 1] = dict.fromkeys(pieces)
        yield [Prefetch(piece, after=after) for piece in pieces]

    def iteration_end(self, iteration: Iteration, view: View) -> Steps:
        """Nothing is kept from one token to the next."""
        self._named.clear()
        yield from self._free(view.n_layers)

    def stats(self) -> dict[str, float]:
        """Share of the experts chosen by the gates after the first that were foretold."""
        return {"foretold_frac": self._right / self._n if self._n else 0.0}
