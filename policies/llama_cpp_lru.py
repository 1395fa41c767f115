"""llama.cpp with an LRU cache per layer for experts in host memory: hits on the GPU, misses on the CPU, few uploads.

Source: ggml-org/llama.cpp pull request 27861 (csantiago78, open): `--moe-expert-cache N` slots per layer of host
experts, `--moe-expert-cache-inserts` uploads per layer and decode step at most (2). Hits are computed on the GPU by a
second chain of operations, misses on the CPU. A port reported there (pjsgsy) holds the cache to as many tokens as the
GPU's kernels for few rows take: 8 for most quantisations.

Assumed: of a step's misses the first ones in router order are uploaded; uploads run behind the layer's CPU results,
beside the layers that follow; GPU and CPU share a layer at the same time (`overlap`); what large batches use changes
nothing in the cache. Not modelled: layers whose experts are all on the GPU (`-ncmoe` below all; `llama_cpp` has that),
the cost of remapping ids (the stack's host figures stand for it).

Several GPUs (not published): each has slots for its own experts.
"""

from __future__ import annotations

from policies.common.hot_cold import OVERLAP, SLOTS, Slots, hot_and_cold, slots_by_layer
from policies.common.op_offload import PARAMS, OpOffload
from sim.policy import Evict, Gate, Param, Policy, Prefetch, Steps, View


class LlamaCppLru(Policy):
    """Slots per layer under LRU; at most `inserts` missed experts per layer and step are uploaded."""

    name = "llama_cpp_lru"
    title = "llama.cpp with per-layer LRU slots, misses on the CPU"
    source = "ggml-org/llama.cpp pull request 27861"
    traits = frozenset({"cpu", "evicts_eagerly"})
    params = (
        SLOTS,
        Param(
            "inserts",
            2,
            "missed experts uploaded per layer and step at most (--moe-expert-cache-inserts)",
            low=0,
            high=4096,
        ),
        Param("max_batch", 8, "tokens per step up to which the cache serves (a port's, for most kernels)", low=0),
        Param("overlap", True, OVERLAP + " (assumed)"),
        *PARAMS,
    )
    slots: int | None
    inserts: int
    max_batch: int
    overlap: bool

    def __init__(self, **values: object) -> None:
        super().__init__(**values)
        self._large = OpOffload.of(self.settings)

    def min_experts(self, view: View) -> int:
        return max(1, self._large.workspace(view))

    def bind(self, view: View) -> None:
        slots = slots_by_layer(self.name, self.slots, self._large.spare(view), view)
        self._slots = [[Slots(n) for n in row] for row in slots]

    def gate_done(self, gate: Gate, view: View) -> Steps:
        layer, n_tokens = gate.layer, gate.iteration.n_tokens
        if self._large.takes(n_tokens):
            yield from self._large.steps(gate, view)
            return
        if n_tokens > self.max_batch:
            yield from hot_and_cold(gate, view, ())
            return
        pieces = [view.piece(layer, expert) for expert in gate.needs]
        missed = [piece for piece in pieces if not view.holds(piece)]
        hot = {piece.expert for piece in pieces}.difference(piece.expert for piece in missed)
        results = yield from hot_and_cold(gate, view, hot, self.overlap)
        caches = self._slots[layer]
        for piece in pieces:
            if piece.expert in hot:
                caches[piece.gpu].use(piece)
        inserted = [0] * len(caches)
        for piece in missed[: self.inserts]:
            slots = caches[piece.gpu]
            if inserted[piece.gpu] < slots.n:  # nobody leaves before it has come
                inserted[piece.gpu] += 1
                left = slots.take(piece)
                if left is not None:
                    yield Evict(left)
                yield Prefetch(piece, after=results)
