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

from collections.abc import Collection, Iterator

from policies.common.hot_cold import SLOTS, HotCold, Slots, overlap_param
from sim.policy import Decision, Evict, Gate, Piece, Prefetch, Ticket, View, param


class LlamaCppLru(HotCold):
    """Slots per layer under LRU; at most `inserts` missed experts per layer and step are uploaded."""

    name = "llama_cpp_lru"
    title = "llama.cpp with per-layer LRU slots, misses on the CPU"
    source = "ggml-org/llama.cpp pull request 27861"
    traits = frozenset({"cpu", "evicts_eagerly"})
    slots: int | None = SLOTS
    inserts: int = param(
        2, "missed experts uploaded per layer and step at most (--moe-expert-cache-inserts)", within=(0, 4096)
    )
    max_batch: int = param(
        8, "tokens per step up to which the cache serves (a port's, for most kernels)", within=(0, 10**9)
    )
    overlap: bool = overlap_param("assumed")

    def bind(self, view: View) -> None:
        self._slots = [[Slots(n) for n in row] for row in self.slots_by_layer(self.slots, view)]

    def admit(self, gate: Gate, hot: Collection[int], results: tuple[Ticket, ...], view: View) -> Iterator[Decision]:
        caches = self._slots[gate.layer]
        missed: list[Piece] = []
        for expert in gate.needs:
            piece = view.piece(gate.layer, expert)
            if expert in hot:
                caches[piece.gpu].use(piece)
            else:
                missed.append(piece)
        inserted = [0] * len(caches)
        for piece in missed[: self.inserts]:
            slots = caches[piece.gpu]
            if inserted[piece.gpu] < slots.n:  # nobody leaves before it has come
                inserted[piece.gpu] += 1
                left = slots.take(piece)
                if left is not None:
                    yield Evict(left)
                yield Prefetch(piece, after=results)
