"""MoESys (SE-MoE): a ring of layers on the GPU, each with all of its experts, filled in order and never predicted.

Source: MoESys (IEEE Transactions on Services Computing, 2024; earlier SE-MoE, arXiv 2205.10034), ring memory offload
for inference; DuoServe-MoE (arXiv 2509.07379, section 6.1) compares with it as "prefetches all experts for each layer".
It needs no routing: whatever the gate says, all experts of the layer are there. In the steady state a layer takes
max(compute, E x T_load), and the ring holds K x E experts. Several GPUs (not published): each holds its own experts of
the K layers.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from policies.common.placement import homes
from sim.policy import Evict, Fetch, Gate, Piece, Policy, Prefetch, RunGpu, Steps, Ticket, View, param


class MoeSys(Policy):
    """When layer i is done its slot of the ring takes all experts of layer i + K, around the end of the model."""

    name = "moesys"
    title = "MoESys: ring of whole layers"
    source = "arXiv 2205.10034 (SE-MoE); IEEE TSC 2024 (MoESys); arXiv 2509.07379 section 6.1"
    aliases = ("se_moe",)
    traits = frozenset({"evicts_eagerly"})  # its room is K layers, whatever the budget
    layers: int = param(
        2,
        "K, layers whose experts the ring holds: one computes while the next is loaded (the published K is a free "
        "choice; DuoServe's Table 2 fits K = 1)",
        within=(1, 1024),
    )

    def _n_layers(self, view: View) -> int:
        return min(self.layers, view.n_layers)

    def min_experts(self, view: View) -> int:
        """The most experts of K layers in a row that one GPU owns."""
        n, owned = self._n_layers(view), [(homes(view) == gpu).sum(axis=1) for gpu in range(view.n_gpus)]
        return int(max(np.roll(mine, -start)[:n].sum() for mine in owned for start in range(view.n_layers)))

    def initial(self, view: View) -> Iterable[Piece]:
        """The ring is full when the first request comes."""
        return [view.piece(layer, e) for layer in range(self._n_layers(view)) for e in range(view.n_experts)]

    def gate_done(self, gate: Gate, view: View) -> Steps:
        """Compute waits for the load of the whole slot, chosen experts and others."""
        whole = [view.piece(gate.layer, expert) for expert in range(view.n_experts)]
        came = yield [Fetch(piece) for piece in whole]  # under way since its slot was freed
        loaded = tuple(ticket for ticket in came if ticket is not None)
        self._computed: list[Ticket] = list((yield [RunGpu(expert, loaded) for expert in gate.needs]))

    def layer_done(self, layer: int, view: View) -> Steps:
        """The slot is free once the whole layer is computed."""
        n = self._n_layers(view)
        if n == view.n_layers:
            return
        yield [Evict(view.piece(layer, expert)) for expert in range(view.n_experts)]
        for expert in range(view.n_experts):
            yield Prefetch(view.piece((layer + n) % view.n_layers, expert), after=tuple(self._computed))
