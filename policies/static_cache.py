"""Experts pinned by a profile of routed counts: the hot ones run on the GPU, the cold ones on the CPU, at once.

Source: thecodacus/llama.cpp pull request 5 and README: from a profile that `llama-moe-trace` records, the `slots` most
routed experts of every layer are pinned on the GPU and never leave (`--moe-cache-profile`, `--moe-cache-slots`). The
hot and the cold chain of a layer overlap (asynchronous CPU splits, pull request 9, on by default), and their results
are merged; a worker thread computes the cold one and is joined (`overlap_layer_s` of the stack).

The profile is the trace's store split, or a file: `llama-moe-trace` CSV, a llama-imatrix GGUF (tokens by expert over
some text: the same counts, from a tool that everybody has), what `moesim traces convert` made of either, or a trace,
counted whole. Ties go to the lowest id.

All or nothing: slots that do not fit are refused here, where the fork goes on without a cache. From
`op_offload_min_batch` tokens on what is not pinned is copied to the GPU for the occasion, as in llama.cpp; pinned
experts are not copied again (assumed; the fork's prompts gain from the cache, too).

Several GPUs (not published): each pins the most routed of its own experts.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from policies.common.hot_cold import SLOTS, HotCold, overlap_param
from policies.common.placement import uses
from sim.policy import Gate, Piece, Predict, Steps, StoreSplit, View, param, routed_counts

STORE = "store"


class StaticCache(HotCold):
    """Per layer the most routed experts of a profile on the GPU for good; all others on the CPU."""

    name = "static_cache"
    title = "Static expert cache: pinned by a profile of counts"
    source = "thecodacus/llama.cpp pull request 5, README"
    traits = frozenset({"cpu"})
    copies_mapped = True
    slots: int | None = SLOTS
    profile: str = param(
        STORE,
        "where the counts are from: store (the trace's store split), or a file: llama-moe-trace CSV, llama-imatrix "
        "GGUF, counts that `moesim traces convert` wrote, a trace",
        file=True,
    )
    overlap: bool = overlap_param("async CPU splits")

    def bind(self, view: View) -> None:
        self._slots = self.slots_by_layer(self.slots, view)
        self._shape = (view.n_layers, view.n_experts)

    def learn(self, store: StoreSplit) -> None:
        from_store = self.profile == STORE
        self._counts: NDArray[np.int64] = (
            uses(store, self.name) if from_store else routed_counts(self.profile, *self._shape)
        )

    def initial(self, view: View) -> Iterable[Piece]:
        placed: list[Piece] = []
        pinned = 0
        for layer in range(view.n_layers):
            left = list(self._slots[layer])
            for expert in np.argsort(-self._counts[layer], kind="stable").tolist():
                piece = view.piece(layer, expert)
                if left[piece.gpu]:
                    left[piece.gpu] -= 1
                    placed.append(piece)
                    pinned += int(self._counts[layer, expert])
        self._covered = pinned / max(1.0, float(self._counts.sum(dtype=np.float64)))  # of a file, beyond 64 bits
        return placed

    def serve(self, gate: Gate, view: View) -> Steps:
        if self.overlap and view.prices.overlap_layer_s():  # the graph has both chains, whatever a token asks for
            yield Predict(view.prices.overlap_layer_s(), "host", basis="overlap")
        yield from super().serve(gate, view)

    def stats(self) -> dict[str, float]:
        """Share of the profile's traffic that the pinned experts cover: what would be hit on the profile itself."""
        return {"profile_covered_frac": self._covered}
