"""FreeToken: one array of slots for all layers' experts; what is missing is fetched, or shared between link and CPU.

Source: FlashML-org/FreeToken@0ab982f, python/freetoken: moe/offload_cache.py (slots, prefill), moe/offload_kernels.py
(`ensure_experts_hybrid`: who leaves, who is fetched, the split), layers/moe.py (`_decode_hybrid`: the order of a
layer), moe/bench_profile.py and moe/benchbw.py (`recommend`, `load_hybrid_fetch_fraction`), engine/engine.py.

Generating, the backend `offload` fetches a layer's missing experts in one gather on the compute stream, and then
computes all of the layer's experts. `hybrid` hands part of what is missing to the CPU first, then fetches the rest
and computes it with the hits, and merges. Of m missing experts q are fetched: of the two integers around f x m the one
with the smaller max(q (1 - f), (m - q) f). f is pcie / (pcie + cpu) of the bandwidths measured together, pcie / cpu of
those measured alone (older profiles); without a profile q is at most 1. The most recently active are fetched and enter
the cache; what the CPU computes does not. `auto` is hybrid where the CPU reads experts more than `threshold` times as
fast as the link brings them, each alone, and offload else.

A prompt runs through all experts of every layer, copied whole into two buffers of a layer each, which take the first
slots: the next layer comes while this one computes. These slots are empty afterwards and the first to be filled.
With fewer slots than two layers have experts, a layer is copied into the first slots once its gate has spoken.

What the benchmark would measure are this run's prices: an expert's bytes over the time of one token on the CPU, and of
its copy, each as one of many. What submitting to the CPU and merging costs the host belongs to the stack
(`hybrid_layer_s`), and so does that a gather pays no copy's latency (`copy_calls: 0`; elsewhere every expert does).
Assumed: of equally old slots the lowest leaves in offload, too (there a library decides). Not modelled:
`--moe-cpu-layers`; the multiprocessors that the gather takes; small banks that make a call block the host. Several
GPUs (published as tensor parallelism): each has slots for the experts that live on it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.common.placement import every, most_of_a_layer, of_a_layer
from sim.policy import (
    PREFILL,
    Decision,
    Evict,
    Fetch,
    Gate,
    Iteration,
    Piece,
    Policy,
    Predict,
    Prefetch,
    Prices,
    RunCpu,
    RunGpu,
    Steps,
    Ticket,
    View,
    param,
)

Gathering = Generator[Decision, Any, list[Ticket]]

EMPTY = -1
GATHER_TRAFFIC = 2.0  # a copy inside the GPU reads and writes its memory


def seconds(prices: Prices, overlapped: bool) -> tuple[float, float]:
    """What one more of a layer's experts takes on the CPU for a token, and to be copied: both at once, or each alone.

    The benchmark measures layers of experts, so that what is paid once (latency, overhead of a region) hardly counts.
    """
    slower_cpu, slower_copy = prices.slower_together() if overlapped else (1.0, 1.0)
    return prices.another_cpu_s(1) * slower_cpu, (prices.copy_s() - prices.copy_s(0)) * slower_copy


def fetch_fraction(cpu_s: float, copy_s: float, overlapped: bool) -> float:
    """f, the share of missing experts that is fetched (`load_hybrid_fetch_fraction`)."""
    if overlapped:
        return cpu_s / (cpu_s + copy_s) if cpu_s + copy_s > 0.0 else 0.0
    return cpu_s / copy_s if cpu_s < copy_s else 1.0


def n_fetched(n_missing: int, fraction: float) -> int:
    """q: how many of the missing are fetched, so that the later of link and CPU is done soonest; a tie: the CPU's.

    In units of 2**-16, as the kernel counts.
    """
    one = 1 << 16
    share = min(one, max(0, round(fraction * one)))
    if share == 0:
        return 0
    low = n_missing * share >> 16
    cost_low, cost_high = (max(q * (one - share), (n_missing - q) * share) for q in (low, low + 1))
    return min(n_missing, low if cost_low <= cost_high else low + 1)


class Slots:
    """The slots of one GPU: what each holds, and the step that used it last.

    Args:
        n: slots. n_borrowed: the first of them, which a prompt's buffers take.
    """

    def __init__(self, n: int, n_borrowed: int) -> None:
        self.n_borrowed = n_borrowed
        self.holds = [EMPTY] * n  # `Piece.index`
        self._usage: NDArray[np.int64] = np.zeros(n, dtype=np.int64)
        self._of: dict[int, int] = {}

    def slot_of(self, piece: int) -> int:
        """The slot that holds a piece, `EMPTY` where none does."""
        return self._of.get(piece, EMPTY)

    def use(self, piece: int, step: int) -> None:
        """A hit."""
        self._usage[self._of[piece]] = step

    def take(self, piece: int, step: int) -> int:
        """The slot used longest ago, of equals the lowest, holds this piece from now on; returns what it held."""
        slot = int(self._usage.argmin())
        left = self.holds[slot]
        if left != EMPTY:
            del self._of[left]
        self.put(slot, piece, step)
        return left

    def put(self, slot: int, piece: int, step: int) -> None:
        """Fill an empty slot."""
        self.holds[slot], self._of[piece] = piece, slot
        self._usage[slot] = step

    def clear(self, slot: int) -> int:
        """Empty a slot, so that it is filled first; returns what it held."""
        left = self.holds[slot]
        self._of.pop(left, None)
        self.holds[slot] = EMPTY
        self._usage[slot] = 0
        return left


class FreeToken(Policy):
    """Slots under LRU for all layers; a layer's misses are fetched in one go, or shared out between link and CPU."""

    name = "freetoken"
    title = "FreeToken: offload, or hybrid with the CPU (q*)"
    source = "FlashML-org/FreeToken@0ab982f python/freetoken/moe, layers/moe.py, engine/engine.py"
    aliases = ("free_token",)
    traits = frozenset({"cpu", "evicts_eagerly"})
    backend: str = param(
        "auto",
        "offload: the GPU computes everything; hybrid: the CPU computes part of what is missing; auto: hybrid where "
        "the CPU is more than `threshold` times as fast as the link (--moe-backend)",
        ("auto", "offload", "hybrid"),
    )
    profile: str = param(
        "overlapped",
        "bandwidths the split rests on (`ft bench bw`): CPU and link measured together, each alone (older profiles), "
        "or none, which is a cap of 1 and, under auto, offload",
        ("overlapped", "alone", "none"),
    )
    threshold: float = param(
        2.0,
        "auto: hybrid above this ratio of the CPU's bandwidth to the link's, each alone (benchbw.py, --threshold)",
        within=(0.0, 1e6),
    )
    max_fetch: int | None = param(
        None,
        "hybrid: experts fetched per layer and step at most, in place of the split (--moe-hybrid-max-fetch)",
        within=(0, 65536),
    )
    fetch_order: str = param(
        "recency",
        "hybrid: which of the missing are fetched: active most recently, or of the lowest ids (FREETOKEN_HYBRID_FETCH)",
        ("recency", "lowest_id"),
    )
    prefill_overlap: bool = param(
        True, "two buffers for prompts, as far as the slots suffice; false is --disable-moe-prefill-overlap"
    )
    prefill_hit_d2d: bool = param(
        False,
        "with two buffers: experts that lie in other slots are copied inside the GPU, not over the link "
        "(--moe-prefill-hit-d2d, off by default)",
    )

    def __init__(self, **values: object) -> None:
        super().__init__(**values)
        if self.backend == "offload":
            self.traits = frozenset({"evicts_eagerly"})  # type: ignore[misc]  # of this instance alone

    # -- slots ------------------------------------------------------------------------------------------------------

    def min_experts(self, view: View) -> int:
        """`validate_rebuild`: a layer's experts."""
        return most_of_a_layer(view)

    def bind(self, view: View) -> None:
        n_all = view.n_layers * view.n_experts
        self._pieces = every(view)
        self._slots: list[Slots] = []
        sizes = [of_a_layer(gpu, view) for gpu in range(view.n_gpus)]
        rooms = [min(view.capacity_of(gpu), n_all) for gpu in range(view.n_gpus)]
        self._overlaps = self.prefill_overlap and all(n >= 2 * size for n, size in zip(rooms, sizes, strict=True))
        for n, size in zip(rooms, sizes, strict=True):
            self._slots.append(Slots(n, 2 * size if self._overlaps else size))
        self._step = 0
        self._active = [-1] * n_all  # the step each expert was asked for in last
        self._buffers: dict[int, list[Piece]] = {}  # of a prompt: layer -> what the buffer holds or gets of it
        self._n_missing = self._n_fetched = 0
        self._choose(view)

    def _choose(self, view: View) -> None:
        """Which backend runs, and how it shares what is missing out."""
        cpu_s, copy_s = seconds(view.prices, overlapped=False)
        measured = self.profile != "none"
        self._hybrid = self.backend == "hybrid"
        if self.backend == "auto":
            self._hybrid = measured and copy_s > self.threshold * cpu_s
        overlapped = self.profile == "overlapped"
        pair = seconds(view.prices, overlapped)
        self._fraction = fetch_fraction(*pair, overlapped) if measured else 0.0
        self._cap = self.max_fetch if self.max_fetch is not None or measured else 1

    # -- generating -------------------------------------------------------------------------------------------------

    def gate_done(self, gate: Gate, view: View) -> Steps:
        if gate.phase == PREFILL:
            yield from self._prompt(gate, view)
            return
        base = gate.layer * view.n_experts
        self._step += 1
        missing: list[int] = []
        for expert in gate.needs:
            slots = self._slots[self._pieces[base + expert].gpu]
            if slots.slot_of(base + expert) == EMPTY:
                missing.append(expert)
            else:
                slots.use(base + expert, self._step)
        missing.sort()
        fetched = self._split(base, missing) if self._hybrid else missing
        self._n_missing, self._n_fetched = self._n_missing + len(missing), self._n_fetched + len(fetched)
        on_cpu = set(missing).difference(fetched)
        if self._hybrid and not on_cpu and view.prices.hybrid_layer_s() > 0.0:
            # The graph is the same for every token: the host submits, waits and merges, were it nothing.
            yield Predict(view.prices.hybrid_layer_s(), "host", basis="stack")
        for expert in gate.needs:
            self._active[base + expert] = self._step
            if expert in on_cpu:  # `decode_submit`
                yield RunCpu(expert)
        tickets: list[Ticket] = []
        for expert in fetched:
            piece = self._pieces[base + expert]
            left = self._slots[piece.gpu].take(piece.index, self._step)
            if left != EMPTY:
                yield Evict(self._pieces[left])
            tickets.append((yield Fetch(piece)))
        for expert in gate.needs:
            if expert not in on_cpu:
                yield RunGpu(expert, tuple(tickets))  # on the stream that gathered

    def _split(self, base: int, missing: list[int]) -> list[int]:
        """Those of the missing experts that are fetched."""
        n = n_fetched(len(missing), self._fraction) if self._cap is None else min(len(missing), self._cap)
        if self.fetch_order == "recency":
            missing = sorted(missing, key=lambda expert: (-self._active[base + expert], expert))
        return missing[:n]

    # -- prompts ----------------------------------------------------------------------------------------------------

    def gate_input(self, layer: int, view: View) -> Steps | None:
        """No copy of a prompt depends on its gates; what the slots hold goes before they speak."""
        if view.phase != PREFILL:
            return None
        return self._stream(layer, view) if self._overlaps else self._make_way(layer, view)

    def _stream(self, layer: int, view: View) -> Steps:
        """The next layer comes into one buffer, while this one computes from the other (`_wait_prefill_overlap`)."""
        if layer == 0:  # what lies in the slots of the buffers is lost, and no hit
            for slots in self._slots:
                yield from self._clear(slots, range(slots.n_borrowed))
        for ahead in range(layer, min(layer + 2, view.n_layers)):
            if ahead not in self._buffers:
                yield from self._fill(ahead, view)

    def _clear(self, slots: Slots, which: Iterable[int]) -> Steps:
        for slot in which:
            left = slots.clear(slot)
            if left != EMPTY:
                yield Evict(self._pieces[left])

    def _prompt(self, gate: Gate, view: View) -> Steps:
        """Every copy of the layer, then its experts."""
        # What is in a buffer has been on its way since that was free.
        coming = self._buffers[gate.layer] if self._overlaps else self._materialize(gate.layer, view)
        came = yield [Fetch(piece) for piece in coming]
        tickets: list[Ticket] = [ticket for ticket in came if ticket is not None]
        if self._overlaps and self.prefill_hit_d2d:
            tickets += yield from self._gather(gate, view)
        yield [RunGpu(expert, tuple(tickets)) for expert in gate.needs]

    def _fill(self, layer: int, view: View) -> Steps:
        """`prefetch_prefill_layer`: all experts of a layer into the buffer that the layer before the last one had."""
        yield from self._release(layer - 2)
        here: list[Piece] = []
        for gpu, slots in enumerate(self._slots):
            for piece in self._layer(layer, gpu, view):
                if slots.slot_of(piece.index) == EMPTY:
                    here.append(piece)
                elif not self.prefill_hit_d2d:
                    # It is there, and comes all the same: in halves, since no piece is on a GPU twice.
                    here += view.matrices(layer, piece.expert, 2)
        self._buffers[layer] = here
        yield [Prefetch(piece) for piece in here]

    def _layer(self, layer: int, gpu: int, view: View) -> list[Piece]:
        base = layer * view.n_experts
        return [piece for piece in self._pieces[base : base + view.n_experts] if piece.gpu == gpu]

    def _gather(self, gate: Gate, view: View) -> Gathering:
        """Experts that lie in other slots join the buffer, on the stream that computes (`_prefetch_split`)."""
        base = gate.layer * view.n_experts
        n_here = [
            sum(slots.slot_of(base + expert) != EMPTY for expert in range(view.n_experts)) for slots in self._slots
        ]
        if not any(n_here):
            return []
        seconds = max(n_here) * view.expert_bytes * GATHER_TRAFFIC / view.prices.gpu_bytes_per_s
        return [(yield Predict(seconds, "gpu", basis="datasheet"))]

    def _release(self, layer: int) -> Steps:
        """A buffer's layer has been computed."""
        yield [Evict(piece) for piece in self._buffers.pop(layer, ())]

    def _make_way(self, layer: int, view: View) -> Steps:
        """Without buffers a layer goes into the first slots, and none of it is elsewhere (`materialize_layer`)."""
        for gpu, slots in enumerate(self._slots):
            where = [slots.slot_of(piece.index) for piece in self._layer(layer, gpu, view)]
            yield from self._clear(slots, sorted({*range(slots.n_borrowed), *where} - {EMPTY}))

    def _materialize(self, layer: int, view: View) -> list[Piece]:
        """All experts of a layer, in the first slots."""
        self._step += 1
        coming: list[Piece] = []
        for gpu, slots in enumerate(self._slots):
            for slot, piece in enumerate(self._layer(layer, gpu, view)):
                slots.put(slot, piece.index, self._step)
                coming.append(piece)
        return coming

    def iteration_end(self, iteration: Iteration, view: View) -> Steps:
        """After a prompt its buffers' slots are empty, and filled first."""
        for layer in list(self._buffers):
            yield from self._release(layer)

    def stats(self) -> dict[str, float]:
        """Whether the CPU computes part of what is missing, the share f to fetch, and the share fetched of all missing
        while generating."""
        return {
            "hybrid": float(self._hybrid),
            "fetch_fraction": self._fraction,
            "fetched_frac": self._n_fetched / self._n_missing if self._n_missing else 0.0,
        }
