"""DeepSpeed ZeRO-Inference: parameters in host memory, fetched for each sub-module and released right after it.

Source: deepspeedai/DeepSpeed@edaa722, runtime/zero/partitioned_param_coordinator.py (`fetch_sub_module`,
`release_sub_module`) and zero/config.py (the published defaults). Limits count elements, as the configuration does.
`granularity=layer` is an MoE block marked as a ZeRO-3 leaf: all its experts are fetched, whatever the gate chose, and
the order of sub-modules recorded in the first pass stays valid, so what follows is prefetched. Before v0.13 (January
2024, pull request 4966) no block could be marked; from then on a program may mark one; since pull request 7604 (October
2025) those of Mixtral, Qwen2-MoE and Qwen3-MoE are marked by default (zero/leaf_module_config.py). `granularity=expert`
fetches the experts that run; their order changes with every token, which invalidates the record, and nothing is
prefetched. `stage3_max_reuse_distance` has no part here: within a pass nothing is used twice.

There is no cache, unless `cache` asks for the one that FineMoE's evaluation adds "for a fair comparison" (arXiv
2502.05370, section 6.1: DeepSpeed's offloading in MoE-Infinity's code). What a layer leaves then stays until its room
is needed, and whoever was computed least often goes first (section 4.5 there: MoE-Infinity's cache is an LFU), of
equals one of the earliest layer, there the one that came first (assumed).

Dense parameters stay on the GPU in this simulator; attention and gate are sub-modules that trigger prefetching, and
fetch nothing themselves. Several GPUs (not published): experts are fetched by the GPU that owns them.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Generator, Iterable, Sequence
from typing import Any

from policies.common.placement import most_of_a_layer, most_on_a_gpu
from sim.policy import (
    BITS_PER_PARAM,
    Decision,
    Evict,
    Fetch,
    Gate,
    Iteration,
    Piece,
    Policy,
    Prefetch,
    RunGpu,
    Steps,
    Ticket,
    View,
    Wait,
    param,
)

Fetching = Generator[Decision | Sequence[Decision], Any, list[Ticket]]


class DeepSpeed(Policy):
    """Fetches what a sub-module needs, then what the recorded order says comes next, within the limits."""

    name = "deepspeed"
    title = "DeepSpeed ZeRO-Inference"
    source = "deepspeedai/DeepSpeed@edaa722 runtime/zero/partitioned_param_coordinator.py"
    aliases = ("zero_inference",)
    traits = frozenset({"evicts_eagerly"})
    granularity: str = param(
        "layer",
        "what is fetched at once: the experts of a layer (a ZeRO-3 leaf; so FineMoE runs it), or each expert that "
        "runs (which MoE-Infinity's figures imply)",
        ("layer", "expert"),
    )
    stage3_max_live_parameters: int = param(
        1_000_000_000, "elements on the GPU beyond which nothing is prefetched (zero/config.py)", within=(0, 10**15)
    )
    stage3_prefetch_bucket_size: int = param(
        50_000_000,
        "elements prefetched per sub-module; the tensor that reaches it is still fetched (zero/config.py)",
        within=(0, 10**15),
    )
    stage3_param_persistence_threshold: int = param(
        100_000, "tensors of fewer elements never leave the GPU (zero/config.py)", within=(0, 10**15)
    )
    max_ongoing_fetches: int = param(
        2, "fetches under way before the host waits for the oldest (`__max_ongoing_fetch_events`)", within=(1, 1024)
    )
    cache: str = param(
        "none",
        "experts that stay when their layer is done: none (DeepSpeed), or as many as there is room for, least "
        "frequently used first to go (FineMoE's baseline, section 6.1 there)",
        ("none", "lfu"),
    )
    tensors_per_expert: int = param(
        3, "tensors an expert consists of: gate, up and down projection (Switch: 2)", within=(1, 64)
    )

    def min_experts(self, view: View) -> int:
        if self._persistent(view):
            return most_on_a_gpu(view)
        return most_of_a_layer(view) if self.granularity == "layer" else 1

    def _elements(self, view: View) -> float:
        """Elements of one tensor of an expert."""
        return view.expert_bytes * 8 / BITS_PER_PARAM[view.piece(0, 0).precision] / self.tensors_per_expert

    def _persistent(self, view: View) -> bool:
        return self._elements(view) < self.stage3_param_persistence_threshold

    def bind(self, view: View) -> None:
        self._n_elements = self._elements(view)
        self._stays = self._persistent(view)
        self._parts: dict[tuple[int, int], list[Piece]] = {}
        self._live: dict[Piece, None] = {}  # on the GPU or on the way there, in order of asking
        self._cached: list[dict[Piece, None]] = [{} for _ in range(view.n_layers)]  # on the GPU, their layer being done
        self._visits: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._fetches: deque[list[Ticket]] = deque()  # under way, oldest first
        self._recorded = False
        self._following: deque[Piece] = deque()  # tensors in recorded order that nothing was asked for yet

    def initial(self, view: View) -> Iterable[Piece]:
        """Persistent parameters only."""
        return [piece for row in range(view.n_layers) for piece in self._layer(row, view)] if self._stays else []

    def _tensors(self, layer: int, expert: int, view: View) -> list[Piece]:
        found = self._parts.get((layer, expert))
        if found is None:
            found = self._parts[layer, expert] = view.matrices(layer, expert, self.tensors_per_expert)
        return found

    def _layer(self, layer: int, view: View) -> list[Piece]:
        return [piece for expert in range(view.n_experts) for piece in self._tensors(layer, expert, view)]

    # -- the hooks of sub-modules -----------------------------------------------------------------------------------

    def iteration_start(self, iteration: Iteration, view: View) -> None:
        """Every pass goes through the recorded order from the start; the first one records it."""
        if self._recorded:
            self._following = deque(piece for layer in range(view.n_layers) for piece in self._layer(layer, view))

    def iteration_end(self, iteration: Iteration, view: View) -> None:
        self._recorded = self.granularity == "layer" and not self._stays
        self._following.clear()

    def layer_enter(self, layer: int, view: View) -> Steps:
        """Attention."""
        yield from self._prefetch(view)

    def gate_input(self, layer: int, view: View) -> Steps:
        """The gate."""
        yield from self._prefetch(view)

    def gate_done(self, gate: Gate, view: View) -> Steps:
        if self._stays:
            yield [RunGpu(expert) for expert in gate.needs]
        elif self.granularity == "layer":
            yield from self._serve_layer(gate, view)
        else:
            for expert in sorted(gate.needs):  # the module list's order
                tickets: list[Ticket] = []
                tensors = self._tensors(gate.layer, expert, view)
                self._take(gate.layer, tensors)
                for piece in tensors:  # each projection is a sub-module of its own
                    if piece not in self._live:
                        yield from self._make_room([piece], gate.layer, view)
                        tickets += yield from self._fetch([piece])
                self._visits[gate.layer, expert] += 1
                yield RunGpu(expert, tuple(tickets))
                yield from self._release(tensors)

    def _serve_layer(self, gate: Gate, view: View) -> Steps:
        """`fetch_sub_module`: fetch what is missing, wait for all of it, prefetch what follows; release afterwards."""
        while self._following and self._following[0].layer <= gate.layer:
            self._following.popleft()
        here = [piece for piece in self._live if piece.layer == gate.layer]
        stayed = list(self._cached[gate.layer])
        self._take(gate.layer, stayed)
        missing: list[Piece] = []
        for expert in range(view.n_experts):
            whole = view.piece(gate.layer, expert)
            if whole in self._live:
                continue
            tensors = [piece for piece in self._tensors(gate.layer, expert, view) if piece not in self._live]
            # One fetch moves all of it: an expert of which nothing is here yet goes as one copy.
            missing += tensors if len(tensors) < self.tensors_per_expert else [whole]
        yield from self._make_room(missing, gate.layer, view)
        came = yield [Fetch(piece) for piece in here]  # prefetched, and now needed: first in, first out
        arrived: list[Ticket] = [ticket for ticket in came if ticket is not None]
        arrived += yield from self._fetch(missing)
        yield from self._prefetch(view)
        for expert in gate.needs:
            self._visits[gate.layer, expert] += 1
            yield RunGpu(expert, tuple(arrived))
        yield from self._release(here + stayed + missing)

    def _fetch(self, pieces: list[Piece]) -> Fetching:
        """One fetch of these tensors; at most so many are under way."""
        if not pieces:
            return []
        yield from self._await_oldest()
        tickets: list[Ticket] = []
        for piece in pieces:
            tickets.append((yield Fetch(piece)))
            self._live[piece] = None
        self._fetches.append(tickets)
        return list(tickets)

    def _prefetch(self, view: View) -> Steps:
        """Following tensors until the bucket is full, as long as few enough are live."""
        allowed = min(self.stage3_max_live_parameters - self._live_elements(), self.stage3_prefetch_bucket_size)
        asked: list[Piece] = []
        free_bytes = [view.free_bytes(gpu) for gpu in range(view.n_gpus)]
        while self._following and len(asked) * self._n_elements < allowed:
            piece = self._following[0]
            cached = self._cached[piece.layer]
            if piece in cached or view.piece(piece.layer, piece.expert) in cached:
                self._following.popleft()
                continue
            if free_bytes[piece.gpu] < piece.n_bytes:
                break
            free_bytes[piece.gpu] -= piece.n_bytes
            asked.append(self._following.popleft())
        if not asked:
            return
        yield from self._await_oldest()
        tickets: list[Ticket] = []
        for piece in asked:
            tickets.append((yield Prefetch(piece)))
            self._live[piece] = None
        self._fetches.append(tickets)

    def _live_elements(self) -> float:
        """Elements of experts on the GPU or on the way there."""
        return math.fsum((piece.stop_frac - piece.start_frac) for piece in self._live) * (
            self._n_elements * self.tensors_per_expert
        )

    def _await_oldest(self) -> Steps:
        while len(self._fetches) >= self.max_ongoing_fetches:
            yield Wait(tuple(self._fetches.popleft()))

    def _release(self, pieces: list[Piece]) -> Steps:
        for piece in pieces:
            del self._live[piece]
            if self.cache == "none":
                yield Evict(piece)
            else:
                self._cached[piece.layer][piece] = None

    # -- the cache that FineMoE's evaluation adds -------------------------------------------------------------------

    def _take(self, layer: int, pieces: list[Piece]) -> None:
        """What has stayed of these is in use again."""
        cached = self._cached[layer]
        for piece in pieces:
            if piece in cached:
                del cached[piece]
                self._live[piece] = None

    def _make_room(self, pieces: list[Piece], layer: int, view: View) -> Steps:
        """Evict until these fit: of what has stayed, but for experts that this layer is still to compute."""
        lacking = [-view.free_bytes(gpu) for gpu in range(view.n_gpus)]
        for piece in pieces:
            lacking[piece.gpu] += piece.n_bytes
        if max(lacking) <= 0:
            return
        stay = [piece for cached in self._cached for piece in cached if piece.layer != layer or view.evictable(piece)]
        for piece in sorted(stay, key=lambda piece: self._visits[piece.layer, piece.expert]):
            if lacking[piece.gpu] > 0:
                lacking[piece.gpu] -= piece.n_bytes
                del self._cached[piece.layer][piece]
                yield Evict(piece)
