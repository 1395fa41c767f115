"""llama.cpp's way with large batches: experts that lie in host memory are copied to the GPU for the occasion.

Source: ggml-org/llama.cpp@4fc4ec554, ggml/src/ggml-backend.cpp (`ggml_backend_sched`: op offload, copies of used
experts). An expert that a cache holds on the GPU is computed there and not copied again (assumed for the forks that add
a cache).
"""

from __future__ import annotations

import numpy as np

from policies.common.placement import fits_whole, most_of_a_layer
from sim.policy import Decisions, Evict, Fetch, Gate, Policy, RunGpu, Steps, Ticket, View, param


class OpOffload(Policy):
    """Copies what large batches need, from `op_offload_min_batch` tokens on; for smaller ones `serve` answers."""

    op_offload: bool = param(
        True, "large batches are computed on the GPU, experts copied for the occasion (--no-op-offload switches it off)"
    )
    op_offload_min_batch: int = param(
        32, "tokens from which a batch is large (GGML_OP_OFFLOAD_MIN_BATCH)", within=(0, 10**9)
    )
    ubatch: int = param(
        512,
        "tokens of a prompt computed at a time (--ubatch-size); each time the experts are copied again",
        within=(1, 10**9),
    )
    matrices: int = param(
        3, "weight matrices of an expert, each a tensor and a copy of its own (up, gate, down)", within=(1, 16)
    )
    copy_used_only: bool = True

    def workspace(self, view: View) -> int:
        """Experts per GPU kept free for copies: the scheduler holds one tensor (a matrix of every expert) at a time."""
        return -(-most_of_a_layer(view) // self.matrices) if self.op_offload else 0

    def spare(self, view: View) -> int:
        """The same, and nothing where all experts fit."""
        return 0 if fits_whole(view) else self.workspace(view)

    def min_experts(self, view: View) -> int:
        return max(1, self.workspace(view))

    def gate_done(self, gate: Gate, view: View) -> Decisions:
        large = self.op_offload and min(gate.iteration.n_tokens, self.ubatch) >= self.op_offload_min_batch
        return self._copied(gate, view) if large else self.serve(gate, view)

    def serve(self, gate: Gate, view: View) -> Decisions:
        """Serve a layer for a batch that is not large."""
        raise NotImplementedError

    def _copied(self, gate: Gate, view: View) -> Steps:
        """Matrix by matrix onto the GPU, on the one stream: no copy beside a computation, nothing kept afterwards.

        Expert by expert here, tensor by tensor there: the same copies and computations, one after the other.
        """
        last: tuple[Ticket, ...] = ()
        for expert, n_copies in enumerate(self._n_copies(gate, view)):
            if n_copies and view.resident(gate.layer, expert):
                if expert in gate.needs:
                    last = ((yield RunGpu(expert, after=last)),)
                continue
            for time in range(n_copies):
                parts = view.matrices(gate.layer, expert, self.matrices)
                for part in parts:
                    ticket = yield Fetch(part, after=last)
                    last = (ticket,)
                if time == 0 and expert in gate.needs:  # the engine runs an expert once, for the tokens of all ubatches
                    last = ((yield RunGpu(expert, after=last)),)
                yield [Evict(part) for part in parts]

    def _n_copies(self, gate: Gate, view: View) -> list[int]:
        """How often each expert is copied: once for each `ubatch` that uses it, or for each there is."""
        n_tokens = gate.iteration.n_tokens
        if not self.copy_used_only:
            return [-(-n_tokens // self.ubatch)] * view.n_experts
        if n_tokens <= self.ubatch:
            return [int(expert in gate.needs) for expert in range(view.n_experts)]
        ids, copies = gate.ids, [0] * view.n_experts
        for start in range(0, n_tokens, self.ubatch):
            for expert in np.unique(ids[start : start + self.ubatch]).tolist():
                copies[expert] += 1
        return copies
