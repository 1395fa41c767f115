"""llama.cpp's way with large batches: experts that lie in host memory are copied to the GPU for the occasion.

Source: ggml-org/llama.cpp@4fc4ec554, ggml/src/ggml-backend.cpp (`ggml_backend_sched`: op offload, copies of used
experts). An expert that a cache holds on the GPU is computed there and not copied again (assumed for the forks that add
a cache).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from policies.common.homes import most_of_a_layer
from policies.common.placement import fits_whole
from sim.policy import Evict, Fetch, Gate, Param, RunGpu, Steps, Ticket, View

if TYPE_CHECKING:
    from collections.abc import Mapping

PARAMS = (
    Param(
        "op_offload",
        True,
        "large batches are computed on the GPU, experts copied for the occasion (--no-op-offload switches it off)",
    ),
    Param(
        "op_offload_min_batch",
        32,
        "tokens from which a batch is large (GGML_OP_OFFLOAD_MIN_BATCH)",
        low=0,
        high=10**9,
    ),
    Param(
        "ubatch",
        512,
        "tokens of a prompt computed at a time (--ubatch-size); each time the experts are copied again",
        low=1,
        high=10**9,
    ),
    Param(
        "matrices",
        3,
        "weight matrices of an expert, each a tensor and a copy of its own (up, gate, down)",
        low=1,
        high=16,
    ),
)


class OpOffload(NamedTuple):
    """From how many tokens on (None: never), in how many copies per expert, how many tokens at a time."""

    min_batch: int | None
    ubatch: int
    matrices: int
    copy_used_only: bool = True

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> OpOffload:
        """As the settings of a policy say that has `PARAMS` among its parameters."""
        min_batch = settings["op_offload_min_batch"] if settings["op_offload"] else None
        return cls(min_batch, settings["ubatch"], settings["matrices"], settings.get("copy_used_only", True))

    def workspace(self, view: View) -> int:
        """Experts per GPU kept free for copies: the scheduler holds one tensor (a matrix of every expert) at a time."""
        return 0 if self.min_batch is None else -(-most_of_a_layer(view) // self.matrices)

    def spare(self, view: View) -> int:
        """The same, and nothing where all experts fit."""
        return 0 if fits_whole(view) else self.workspace(view)

    def takes(self, n_tokens: int) -> bool:
        """Whether a batch is large."""
        return self.min_batch is not None and min(n_tokens, self.ubatch) >= self.min_batch

    def steps(self, gate: Gate, view: View) -> Steps:
        """Matrix by matrix onto the GPU, on the one stream: no copy beside a computation, nothing kept afterwards.

        Expert by expert here, tensor by tensor there: the same copies and computations, one after the other.
        """
        last: tuple[Ticket, ...] = ()
        for expert, n_copies in enumerate(self._copies(gate, view)):
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
                for part in parts:
                    yield Evict(part)

    def _copies(self, gate: Gate, view: View) -> list[int]:
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
