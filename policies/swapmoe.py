"""SwapMoE (arXiv 2308.15030): a few experts per layer serve for all, and are exchanged by importance in the background.

Source: Kong et al., "SwapMoE: Serving Off-the-shelf MoE-based Large Language Models with Tunable Memory Budget" (ACL
2024), known here from third-party notes.

- Virtual Experts: n_l experts of every layer are on the GPU; nothing is ever loaded because a gate asks for it.
- Masked gating: the scores of all others count as zero, and what is left is renormalised (lossy).
- Importance of an expert: the sum over the tokens routed to it of |x| |G(x)_i| |E_i|, since the last update. Every
  `frequency` samples the n_l most important ones of a layer become its Virtual Experts.
- Exchanges are asynchronous, one copy at a time, behind everything else. Compute never waits: an expert on its way is
  masked until it is there, and the one it replaces leaves when its copy begins.

Assumed, as the notes do not say: gates count for importance as they are before masking, as otherwise nobody outside
could ever become important; what a sample is, when one token is generated after the other (`sample`); among equals
those who are there stay. |E_i|, the norm of an expert's weights, is in no trace and taken as equal for all. |x| is left
out unless the trace has it (`input_norms`). Not modelled: the offline search that sizes every layer and sets the
frequency under a limit of latency (all layers are equal here). Published with one expert per token and without batches;
a batch is a sample of more tokens. Several GPUs (not published): each has its share of a layer's Virtual Experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from policies.common.placement import asked_by_layer, by_layer, layers_on, most_layers
from policies.lynx import masked_top_k
from sim.policy import (
    FREE,
    NEVER,
    Assignment,
    BadInput,
    Gate,
    Iteration,
    Piece,
    Policy,
    Prefetch,
    Rank,
    RequestInfo,
    Requeue,
    Serve,
    Steps,
    StoreSplit,
    View,
    param,
)

if TYPE_CHECKING:
    pass

NORM_UNIT = 256  # norms in whole 1 / 256, so that sums are exact


class SwapMoe(Policy):
    """Masks what is not there, and swaps by importance."""

    name = "swapmoe"
    title = "SwapMoE: Virtual Experts, masked gating, background swaps"
    source = "arXiv 2308.15030 (ACL 2024), known from third-party notes"
    from_notes = True
    traits = frozenset({"lossy", "timing"})
    needs = frozenset({"experts", "scores"})
    frequency: int = param(1, "samples between updates (published: searched offline; 1 is assumed)", within=(1, 10**9))
    sample: str = param(
        "request", "what is counted as a sample: a request, or a forward pass (not published)", ("request", "pass")
    )
    experts_per_layer: int | None = param(
        None,
        "n_l, Virtual Experts per layer (published: searched offline for each layer); left out: what the budget holds",
        within=(1, 4096),
    )
    input_norms: bool = param(
        False, "weigh a token by the norm of its gate input, as published (needs gate_input_norms)"
    )
    depth: int = param(
        1, "copies of an exchange under way at once to each GPU (published: amortised; 1 is assumed)", within=(1, 1024)
    )

    def __init__(self, **values: object) -> None:
        super().__init__(**values)
        self.prefetch_depth = self.depth
        if self.input_norms:
            self.needs = self.needs | {"gate_input_norms"}

    def min_experts(self, view: View) -> int:
        return most_layers(view)

    def layer_budgets(self, view: View) -> list[list[int]]:
        return [[n * view.expert_bytes for n in self._quotas(gpu, view)] for gpu in range(view.n_gpus)]

    def _quotas(self, gpu: int, view: View) -> list[int]:
        """Virtual Experts by layer on one GPU: equal, what does not divide goes to the first layers."""
        if self.experts_per_layer is None:
            return by_layer(view.capacity_of(gpu), gpu, view)
        here = layers_on(gpu, view)
        each, wanted = view.capacity_of(gpu) // max(1, len(here)), asked_by_layer(self.experts_per_layer, gpu, view)
        if max(1, *wanted) > each:
            raise BadInput(
                f"parameter swapmoe.experts_per_layer, got {self.experts_per_layer}: the expert budget holds {each} "
                f"per layer on GPU {gpu}; lower it, or raise the budget"
            )
        return [max(1, n) if layer in here else 0 for layer, n in enumerate(wanted)]

    def bind(self, view: View) -> None:
        self._room = [self._quotas(gpu, view) for gpu in range(view.n_gpus)]
        self._importance = np.zeros((view.n_layers, view.n_experts))
        # Who makes room is one of the layer that is no Virtual Expert any more, the lowest first.
        self.order = order = Rank(view.n_layers * view.n_experts, per_layer=True)
        self._bars = order.bar.reshape(view.n_layers, view.n_experts)
        self._virtual: list[set[int]] = [set() for _ in range(view.n_layers)]  # as the last update wants them
        self._held: list[set[int]] = [set() for _ in range(view.n_layers)]  # there or on their way
        self._samples = self._updates = self._swaps = 0

    # -- importance -------------------------------------------------------------------------------------------------

    def learn(self, store: StoreSplit) -> None:
        """The first Virtual Experts are those that the store split finds important; without one, the first ids."""
        self._trace = store.trace
        for request in store.requests:
            start, stop = request.first_row, request.first_row + request.prompt_len + request.outputs - 1
            scores, ids = self._trace.scores(start, stop), self._trace.experts[start:stop].astype(np.int64)
            norms = self._norms(start, stop)
            for layer in range(self._trace.n_layers):
                self._weigh(layer, scores[:, layer], ids[:, layer], norms[:, layer])

    def _norms(self, start: int, stop: int) -> NDArray[np.float64]:
        """|x| [n, L] in 1 / 256; 1 throughout where it is not asked for."""
        if not self.input_norms:
            return np.ones((stop - start, self._trace.n_layers))
        return np.rint(self._trace.gate_input_norms(start, stop).astype(np.float64) * NORM_UNIT)

    def _weigh(
        self, layer: int, scores: NDArray[np.float64], ids: NDArray[np.int64], norms: NDArray[np.float64]
    ) -> None:
        """Importance of |x| G(x)_i: scores [n, E], ids [n, k], norms [n]."""
        np.add.at(self._importance[layer], ids, np.take_along_axis(scores, ids, 1) * norms[:, None])

    def initial(self, view: View) -> Iterable[Piece]:
        self._choose(view)
        for layer, virtual in enumerate(self._virtual):
            self._held[layer] = set(virtual)
            yield from (view.piece(layer, expert) for expert in sorted(virtual))

    def _choose(self, view: View) -> None:
        """The most important ones that there is room for; of equals those that are there, then the lowest id."""
        for layer, importance in enumerate(self._importance.tolist()):
            left, chosen, held = [room[layer] for room in self._room], set[int](), self._held[layer]
            for expert in sorted(range(view.n_experts), key=lambda e: (-importance[e], e not in held, e)):
                gpu = view.piece(layer, expert).gpu
                if left[gpu]:
                    left[gpu] -= 1
                    chosen.add(expert)
            self._virtual[layer] = chosen
            self._bars[layer] = FREE
            self._bars[layer, list(chosen)] = NEVER
        self._importance[:] = 0

    # -- samples and exchanges --------------------------------------------------------------------------------------

    def iteration_start(self, iteration: Iteration, view: View) -> Steps:
        """Ask again for whom the last update wants and who could not come yet."""
        self._pass_norms = iteration.gather(self._norms)
        missing = [
            view.piece(layer, expert)
            for layer, virtual in enumerate(self._virtual)
            for expert in sorted(virtual - self._held[layer])
        ]
        yield Requeue(tuple(Prefetch(piece) for piece in missing))

    def iteration_end(self, iteration: Iteration, view: View) -> None:
        if self.sample == "pass":
            self._sampled(view)

    def request_end(self, request: RequestInfo, view: View) -> None:
        if self.sample == "request":
            self._sampled(view)

    def _sampled(self, view: View) -> None:
        self._samples += 1
        if self._samples % self.frequency == 0:
            self._updates += 1
            self._choose(view)

    def placed(self, piece: Piece, view: View) -> None:
        self._held[piece.layer].add(piece.expert)
        self._swaps += 1

    def evicted(self, piece: Piece, view: View) -> None:
        self._held[piece.layer].discard(piece.expert)

    # -- masked gating ----------------------------------------------------------------------------------------------

    def assign(self, gate: Gate, view: View) -> Assignment | None:
        scores, ids = gate.scores, gate.ids
        self._weigh(gate.layer, scores, ids, self._pass_norms[:, gate.layer])
        there = [e for e in self._held[gate.layer] if view.arrived(view.piece(gate.layer, e))]
        if gate.needs.keys() <= set(there):
            return None
        allowed = np.zeros(view.n_experts, dtype=bool)
        allowed[there] = True
        return Assignment(*masked_top_k(scores, ids, allowed))

    def gate_done(self, gate: Gate, view: View) -> Steps:
        yield Serve()

    def stats(self) -> dict[str, float]:
        """Updates of the Virtual Experts, and experts exchanged."""
        return {"updates": self._updates, "swaps": self._swaps}
