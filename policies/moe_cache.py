"""llama.cpp's moe-cache: one pool of experts on the GPU; the CPU computes what misses it while the GPU computes hits.

Source: ggml-org/llama.cpp discussion 24528 and pull request 24524 (leloch), as noonghunna/club-3090 and
TheTom/llama-cpp-turboquant (pull requests 284, 327) run it. The operation stays on the CPU: one thread sends the rows
of cached experts to the GPU, the others compute the rest meanwhile, then they join. An expert is admitted after so many
touches: 1 where the pool takes every expert there is, 2 where it takes a part of them and has room, 8 where somebody
has to leave for it; or a fixed number (`admit_after`; 64 in their best configuration). Batches of up to `max_batch`
tokens are served; from `op_offload_min_batch` on experts are copied for the occasion, as without a cache; batches
between the two are helped by nothing.

Assumed: the one used longest ago makes room; who leaves starts again from no touches; uploads run behind the layer's
CPU results, beside the layers that follow. Its unit is a matrix: slots, lookups and evictions that it prints are three
times those here, where an expert is computed in one place and so comes whole. Not modelled: soft mode (its choice of
layers whose experts all lie on the GPU: `llama_cpp` has those), the reserve of memory (a run caps memory by
`--vram`), the least size of a unit or slab.

Several GPUs: a pool on each, for its own experts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from policies.common.hot_cold import HotCold, Slots
from policies.common.placement import fits_whole
from sim.policy import Decision, Evict, Gate, Piece, Prefetch, Ticket, View, param

FILLING, PARTIAL, REPLACING = 1, 2, 8  # touches


class MoeCache(HotCold):
    """A pool over all layers; experts join it after some touches and leave least recently used."""

    name = "moe_cache"
    title = "llama.cpp moe-cache: hits on GPU, misses on CPU at once"
    source = "ggml-org/llama.cpp pull request 24524, discussion 24528"
    traits = frozenset({"cpu", "evicts_eagerly"})
    pool: int | None = param(
        None,
        "experts that the pools hold, over all GPUs (a third of the matrices); without it as many as fit beside what "
        "op offload needs",
        within=(0, 10**7),
    )
    admit_after: int | None = param(
        None,
        "touches after which an expert is admitted (ADMIT_AFTER); without it 1, 2 or 8 by how full the pool is",
        within=(1, 10**9),
    )
    replace_after: int | None = param(
        None,
        "touches after which an expert takes another's place; without it admit_after, or 8 without that",
        within=(1, 10**9),
    )
    max_batch: int = param(8, "tokens per step up to which the cache serves (MAX_BATCH)", within=(0, 10**9))

    def bind(self, view: View) -> None:
        rooms = self.pool_by_gpu("pool", self.pool, view)
        self._pools = [Slots(room) for room in rooms]
        complete = fits_whole(view) and sum(rooms) >= view.n_layers * view.n_experts
        self._admit_after = self.admit_after or (FILLING if complete else PARTIAL)
        self._replace_after = self.replace_after or self.admit_after or REPLACING
        self._touches = [0] * (view.n_layers * view.n_experts)  # of those outside the pool

    def admit(self, gate: Gate, hot: Collection[int], results: tuple[Ticket, ...], view: View) -> Iterator[Decision]:
        missed: list[Piece] = []
        for expert in gate.needs:
            piece = view.piece(gate.layer, expert)
            if expert in hot:
                self._pools[piece.gpu].use(piece)
            else:
                missed.append(piece)
        for piece in missed:
            self._touches[piece.index] += 1
            pool = self._pools[piece.gpu]
            bar = self._replace_after if pool.full else self._admit_after
            if self._touches[piece.index] < bar or not pool.n:
                continue
            self._touches[piece.index] = 0
            left = pool.take(piece)
            if left is not None:
                yield Evict(left)
            yield Prefetch(piece, after=results)
