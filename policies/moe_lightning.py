"""MoE-Lightning (ASPLOS'25, arXiv 2411.11217): all experts of the next layers stream in, page by page.

Source: Cao et al., "MoE-Lightning: High-Throughput MoE Inference on Memory-constrained GPUs": CGOPipe (the pipeline of
CPU, GPU and I/O), weights paging, and the policy (N, mu, A_g, F_g, r_w, r_c) that its performance model chooses; partly
known from notes. Built here as far as a policy that places and moves experts can go:

- N is the batch (`--batch`), mu `micro_batch`, r_w `static_share`, F_g `ffn_on_gpu`. A share r_w of the experts never
  leaves the GPU; the others stream through a double buffer of two layers, whatever the gates choose.
- While generating, what a layer streams is cut into as many pages as there are micro-batches. A page is copied from
  pageable to pinned host memory, then to the GPU; the two stages work on different pages at once, so that the link
  waits for a page to be staged and never for a layer. A prompt's layers come whole (CGOPipe is for decoding).
- A layer's experts run once its last page is there. Each runs once per micro-batch and so reads its weights that often:
  the engine computes an expert once, and the difference is charged on the GPU's stream.

What makes the published system is missing, and results say so (label `attention on the GPU`): attention on the CPU
(A_g = 0, the usual choice) with KV caches in host memory (r_c = 0). Here both stay on the GPU (A_g = 1, r_c = 1), so
queries, keys, values and hidden states do not cross the link between pages, and a batch is no larger than the GPU's
memory allows, where the published gain comes from batches of hundreds. Dense weights do not stream. Staging is booked
on the predictor's lane, for want of another. Several GPUs (published as tensor parallelism): each streams its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from sim.policy import (
    DECODE,
    DoesNotFit,
    Evict,
    Fetch,
    Gate,
    Iteration,
    Piece,
    Policy,
    Predict,
    Prefetch,
    RunCpu,
    RunGpu,
    Steps,
    Ticket,
    View,
    param,
)

RING = 2  # layers of the double buffer


class MoeLightning(Policy):
    """A static share of the experts, and a double buffer that all others pass through, page by page."""

    name = "moe_lightning"
    title = "MoE-Lightning: paged streaming of all experts (attention not on the CPU)"
    source = "arXiv 2411.11217 (ASPLOS'25), partly known from notes"
    traits = frozenset({"evicts_eagerly"})  # it forgets a layer when it is done, whatever room there is
    labels = ("attention on the GPU",)
    static_share: float | None = param(
        None,
        "r_w, share of the experts that stays on the GPU (published: chosen by the performance model); left out: "
        "what the budget holds beside the double buffer",
        within=(0.0, 1.0),
    )
    micro_batch: int = param(
        36,
        "mu, tokens of a micro-batch; a layer has as many pages as a step has micro-batches (published for a T4 and "
        "128 tokens: 36)",
        within=(1, 10**6),
    )
    paged: bool = param(True, "cut a layer into pages; false copies it when all of it is staged")
    staging_traffic: float = param(
        2.0,
        "bytes of host memory traffic per byte copied from pageable to pinned memory (a read and a write: assumed); "
        "0 leaves the stage out",
        within=(0.0, 16.0),
    )
    repeat_reads: bool = param(
        True, "every micro-batch reads the experts' weights anew; false as if the whole batch were computed at once"
    )
    ffn_on_gpu: bool = param(True, "F_g: experts on the GPU (the usual choice), or all on the CPU")

    def __init__(self, **values: object) -> None:
        super().__init__(**values)
        if not self.ffn_on_gpu:
            self.traits = frozenset({"cpu", "evicts_eagerly"})  # type: ignore[misc]  # of this instance alone

    # -- what stays -------------------------------------------------------------------------------------------------

    def _owned(self, gpu: int, view: View) -> list[list[Piece]]:
        """A GPU's experts by layer."""
        rows = ([view.piece(layer, expert) for expert in range(view.n_experts)] for layer in range(view.n_layers))
        return [[piece for piece in row if piece.gpu == gpu] for row in rows]

    def _spread(self, n_static: int, owned: list[list[Piece]]) -> list[int]:
        """Static experts by layer: equally many of those that it has any of, what does not divide goes to the first."""
        n_here = sum(map(bool, owned))
        each, more = divmod(n_static, max(1, n_here))
        rank = accumulate((bool(row) for row in owned), initial=0)
        return [min(each + (before < more), len(row)) for before, row in zip(rank, owned, strict=False)]

    def _need(self, static: list[int], owned: list[list[Piece]]) -> int:
        """Experts of room: what stays, and two layers in a row of what does not."""
        if len(owned) <= RING:
            return sum(len(row) for row in owned)
        streamed = [len(row) - n for row, n in zip(owned, static, strict=True)]
        return sum(static) + max(a + b for a, b in zip(streamed, [*streamed[1:], streamed[0]], strict=True))

    def _n_static_of(self, gpu: int, owned: list[list[Piece]], view: View) -> int:
        """Experts of a GPU that stay. Raises DoesNotFit when the share asked for does not fit beside the buffer."""
        total, room = sum(len(row) for row in owned), view.capacity_of(gpu)
        if self.static_share is None:
            return next(n for n in range(total, -1, -1) if self._need(self._spread(n, owned), owned) <= room)
        n_static = int(self.static_share * total)
        need = self._need(self._spread(n_static, owned), owned)
        if need > room:
            raise DoesNotFit(
                f"parameter {self.name}.static_share, got {self.static_share:g}: with the double buffer it takes room "
                f"for {need} experts on GPU {gpu}, which has room for {room}; lower it, or leave it out"
            )
        return n_static

    def min_experts(self, view: View) -> int:
        """The double buffer; `initial` sees what share fits beside it."""
        if not self.ffn_on_gpu:
            return 1
        every = [self._owned(gpu, view) for gpu in range(view.n_gpus)]
        return max(self._need([0] * view.n_layers, owned) for owned in every)

    def initial(self, view: View) -> Iterable[Piece]:
        """The static share, and the first two layers: the prologue is over when the first request comes."""
        if not self.ffn_on_gpu:
            return
        for gpu in range(view.n_gpus):
            owned = self._owned(gpu, view)
            n_static = self._n_static_of(gpu, owned, view)
            for layer, (row, n) in enumerate(zip(owned, self._spread(n_static, owned), strict=True)):
                self._n_static += n
                self._streamed[layer] += row[n:]
                yield from row[:n]
        for layer in range(min(RING, view.n_layers)):
            self._here[layer] = list(self._streamed[layer])
            yield from self._streamed[layer]

    def bind(self, view: View) -> None:
        self._streamed: list[list[Piece]] = [[] for _ in range(view.n_layers)]  # experts that do not stay
        self._here: dict[int, list[Piece]] = {}  # layer -> what the buffer holds or gets of it
        self._n_static = self._n_pages = self._n_layers_streamed = 0
        self._computed: list[Ticket] = []
        self._micro_batches = 1
        self._gpu_s: dict[int, float] = {}

    # -- a layer ----------------------------------------------------------------------------------------------------

    def iteration_start(self, iteration: Iteration, view: View) -> None:
        decoding = iteration.phase == DECODE
        self._micro_batches = -(-iteration.n_tokens // self.micro_batch) if decoding else 1

    def gate_done(self, gate: Gate, view: View) -> Steps:
        """PostAttn: the layer's last page has come; all micro-batches."""
        if not self.ffn_on_gpu:
            yield [RunCpu(expert) for expert in gate.needs]
            return
        came = yield [Fetch(piece) for piece in self._here.get(gate.layer, ())]  # under way since the buffer was free
        loaded = tuple(ticket for ticket in came if ticket is not None)
        self._computed = list((yield [RunGpu(expert, loaded) for expert in gate.needs]))
        again_s = self._again_s(gate, view)
        if again_s > 0.0:
            self._computed.append((yield Predict(again_s, "gpu")))

    def _again_s(self, gate: Gate, view: View) -> float:
        """Seconds that the experts take longer for one micro-batch after the other; GPUs work at the same time."""
        if self._micro_batches == 1 or not self.repeat_reads:
            return 0.0
        ids, longer_s = gate.ids, [0.0] * view.n_gpus
        for start in range(0, len(ids), self.micro_batch):
            counts: dict[int, int] = {}
            for expert in ids[start : start + self.micro_batch].ravel().tolist():
                counts[expert] = counts.get(expert, 0) + 1
            for expert in sorted(counts):
                longer_s[view.piece(gate.layer, expert).gpu] += self._expert_s(counts[expert], view)
        for expert, n_tokens in gate.needs.items():
            longer_s[view.piece(gate.layer, expert).gpu] -= self._expert_s(n_tokens, view)
        return max(longer_s)

    def _expert_s(self, n_tokens: int, view: View) -> float:
        if n_tokens not in self._gpu_s:
            self._gpu_s[n_tokens] = view.prices.gpu_s(n_tokens)
        return self._gpu_s[n_tokens]

    def layer_done(self, layer: int, view: View) -> Steps:
        """The layer's half of the buffer is free once it is computed: the layer after the next comes, page by page."""
        if not self.ffn_on_gpu or view.n_layers <= RING:
            return
        yield [Evict(piece) for piece in self._here.pop(layer)]
        target = (layer + RING) % view.n_layers
        pages = self._pages(target, view)
        self._here[target] = [piece for page in pages for piece in page]
        self._n_pages, self._n_layers_streamed = self._n_pages + len(pages), self._n_layers_streamed + 1
        for page in pages:
            after = tuple(self._computed)
            if self.staging_traffic > 0.0:  # on the host's memory bus, beside everything else
                n_bytes = sum(piece.n_bytes for piece in page)
                staged = yield Predict(self.staging_traffic * n_bytes / view.prices.cpu_bytes_per_s, "side")
                after = (*after, staged)
            yield [Prefetch(piece, after=after) for piece in page]

    def _pages(self, layer: int, view: View) -> list[list[Piece]]:
        """What a layer streams, in pages: whole experts, or equal parts of them where pages outnumber experts."""
        experts = self._streamed[layer]
        n = min(self._micro_batches if self.paged else 1, 64 * len(experts))
        if not experts:
            return []
        n_parts = -(-n // len(experts))
        parts = [part for piece in experts for part in view.matrices(layer, piece.expert, n_parts)]
        return [parts[page * len(parts) // n : (page + 1) * len(parts) // n] for page in range(n)]

    def stats(self) -> dict[str, float]:
        """Experts that never leave; pages per layer, on average."""
        return {
            "static_experts": float(self._n_static),
            "pages_per_layer": self._n_pages / max(1, self._n_layers_streamed),
        }
