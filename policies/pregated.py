"""Pre-gated MoE (ISCA'24, arXiv 2308.12066): each block's gate chooses the experts of the block after it.

Source: Hwang, Wei, Cao, Hwang, Tang, Cao and Yang, "Pre-gated MoE: An Algorithm-System Co-Design for Fast and Scalable
Mixture-of-Expert Inference"; artifact ranggihwang/Pregated_MoE@6b0a666. Its models are fine-tuned so that the pre-gate
is the router: nothing is ever mispredicted. `variant=oracle` replays that (the recorded choice stands for the
pre-gate's) and labels its results `fine-tuned`; `variant=gate_reuse` applies the next layer's gate to this layer's gate
input, as comparisons on models without fine-tuning have to, and fetches what that missed. The artifact's two baselines
are modes. Copies from its expert cache into the working buffers, on the device, are taken to be free.

eMoE (arXiv 2503.06823, Figure 2) finds it 1.2 to 1.6 times as fast as loading on demand where both load a prompt's
active experts once (section 2.1.1): `keep=request` holds what was fetched until no request runs.

Several GPUs (not published): each has buffers, cache and stream of its own. What does not fit the buffers (a batch, a
prompt) passes through them in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from policies.common.foretold import foretold, in_turn
from policies.common.placement import most_of_a_layer
from sim.policy import (
    FREE,
    NEVER,
    PREFILL,
    Decision,
    Evict,
    Fetch,
    Gate,
    Iteration,
    Piece,
    Policy,
    Prefetch,
    Rank,
    RequestInfo,
    RunGpu,
    Steps,
    Ticket,
    View,
    Wait,
    param,
)


class ExpertCache:
    """The artifact's optional cache: up to `capacity` experts of one GPU under LFU (a new entry counts 1), LRU or LIFO;
    ties to what came first."""

    def __init__(self, capacity: int, rule: str) -> None:
        self.capacity = capacity
        self._rule = rule
        self._uses: dict[Piece, int] = {}  # in order of insertion; under LRU, of last use

    def __contains__(self, piece: Piece) -> bool:
        return piece in self._uses

    def used(self, piece: Piece) -> None:
        """A cached expert was found."""
        if self._rule == "lru":
            self._uses[piece] = self._uses.pop(piece)
        else:
            self._uses[piece] += 1

    def insert(self, piece: Piece, may_leave: Callable[[Piece], bool]) -> Piece | None:
        """A fetched expert joins, in place of one that may leave; returns what left, itself when nothing could."""
        victim = None
        if len(self._uses) == self.capacity:
            victim = self._victim([cached for cached in self._uses if may_leave(cached)])
            if victim is None:
                return piece
            del self._uses[victim]
        self._uses[piece] = 1
        return victim

    def _victim(self, candidates: list[Piece]) -> Piece | None:
        if not candidates or self._rule == "lru":
            return candidates[0] if candidates else None
        return candidates[-1] if self._rule == "lifo" else min(candidates, key=self._uses.__getitem__)

    def forget_counts(self) -> None:
        """From the encoder to the decoder, frequencies start anew."""
        self._uses = dict.fromkeys(self._uses, 1)


Buffer = dict[Piece, Ticket | None]  # a working buffer's experts, each with the ticket of its copy
Fetching = Generator[Decision | Sequence[Decision], Any, list[Piece]]


class PreGated(Policy):
    """Copies the experts of layer l + 1 while layer l computes, knowing which they are."""

    name = "pregated"
    title = "Pre-gated MoE: the next block's experts are known"
    source = "arXiv 2308.12066 (ISCA'24); ranggihwang/Pregated_MoE@6b0a666"
    aliases = ("pre_gated",)
    traits = frozenset({"evicts_eagerly"})
    variant: str = param(
        "oracle",
        "the pre-gate is the router, as in the fine-tuned models; or this layer's gate input through a later gate",
        ("oracle", "gate_reuse"),
    )
    mode: str = param(
        "pregated",
        "Pre-gated MoE, or the artifact's baselines: experts fetched after their gate, all experts of the next layer "
        "fetched ahead (as SE-MoE)",
        ("pregated", "on_demand", "prefetch_all"),
    )
    activation_level: int = param(
        1,
        "layers between a pre-gate and the experts it chooses (section 4.1; more than 1 costs accuracy)",
        within=(1, 3),
    )
    prefill: str = param(
        "on_demand",
        "a prompt is served as the artifact serves T5's encoder, on demand, or as decoding is",
        ("on_demand", "as_decode"),
    )
    cache_ratio: float = param(
        0.0,
        "share of all experts that an expert cache keeps beside the buffers (artifact: 0.01 to 0.8, off by default)",
        within=(0.0, 0.8),
    )
    keep: str = param(
        "layer",
        "what was fetched is freed after its layer (artifact), or once no request runs, the oldest before that when "
        "room is short (as eMoE's section 2.1.1 loads)",
        ("layer", "request"),
    )
    cache_policy: str = param("lfu", "what that cache evicts (artifact: LFU)", ("lfu", "lru", "lifo"))

    def __init__(self, **values: object) -> None:
        super().__init__(**values)
        if self.mode == "pregated" and self.variant == "gate_reuse":
            self.needs = frozenset({"experts", f"next_scores_{self.activation_level}"})
        elif self.mode == "pregated":
            self.labels = ("fine-tuned",)
            self.known_ahead = self.activation_level

    def min_experts(self, view: View) -> int:
        """Buffers for the blocks that are current or ahead, each of as many experts as a token may choose."""
        if self.mode == "prefetch_all":
            return 2 * most_of_a_layer(view) + self._cached(view)
        blocks = 1 if self.mode == "on_demand" else 1 + self.activation_level
        return blocks * view.top_k + self._cached(view)

    def _cached(self, view: View) -> int:
        return int(self.cache_ratio * view.n_layers * view.n_experts) // view.n_gpus

    def bind(self, view: View) -> None:
        self._ahead = 0 if self.mode == "on_demand" else 1 if self.mode == "prefetch_all" else self.activation_level
        self._buffers: dict[int, Buffer] = {}
        self._caches = [ExpertCache(self._cached(view), self.cache_policy) for _ in range(view.n_gpus)]
        # Experts per working buffer: an equal part of what the cache leaves (the largest active set is not known yet).
        self._size = [(view.capacity_of(g) - self._cached(view)) // (self._ahead + 1) for g in range(view.n_gpus)]
        self._phase = ""
        self._kept: dict[Piece, None] = {}  # keep=request: outside the buffers, oldest first; they alone make room
        self._n_running = self._n_kept = 0
        self._leaving = Rank(view.n_layers * view.n_experts)
        self._leaving.bar[:] = NEVER
        self.order = self._leaving if self.keep == "request" else None

    def request_start(self, request: RequestInfo, view: View) -> None:
        self._n_running += 1

    def request_end(self, request: RequestInfo, view: View) -> Steps:
        self._n_running -= 1
        if self._n_running or self.keep == "layer":
            return
        for buffer in self._buffers.values():
            yield from self._release(buffer, list(buffer))
        self._buffers = {}
        for piece in list(self._kept):
            self._take(piece)
            yield Evict(piece)

    def evicted(self, piece: Piece, view: View) -> None:
        if piece in self._kept:
            self._take(piece)

    def iteration_start(self, iteration: Iteration, view: View) -> Steps:
        if self._phase == PREFILL != iteration.phase:
            for cache in self._caches:
                cache.forget_counts()
        self._phase = iteration.phase
        for buffer in list(self._buffers.values()):
            yield from self._release(buffer, list(buffer))
        self._buffers = {}

    def gate_done(self, gate: Gate, view: View) -> Steps:
        """Wait for the outstanding fetch, swap the buffers, issue the next fetch, compute."""
        layer = gate.layer
        for done in [other for other in self._buffers if other < layer]:
            buffer = self._buffers.pop(done)
            yield from self._release(buffer, list(buffer))
        buffer = self._buffers.setdefault(layer, {})
        outstanding = [ticket for ticket in buffer.values() if ticket is not None]
        if outstanding:
            yield Wait(tuple(outstanding))
        whole = self.mode == "prefetch_all" and not self._encoding(gate)
        needed = [view.piece(layer, e) for e in (range(view.n_experts) if whole else gate.needs)]
        yield from self._release(buffer, [piece for piece in buffer if piece not in needed])  # gate reuse was wrong
        later = yield from self._fetch([piece for piece in needed if piece not in buffer], buffer, view)
        while True:
            if not later:
                yield from self._issue(gate, view)
            for piece in list(buffer):
                if piece.expert in view.pending_experts():
                    yield RunGpu(piece.expert)
            if not later:
                return
            yield from self._release(buffer, list(buffer))  # more experts than the buffer holds
            later = yield from self._fetch(later, buffer, view)

    def _encoding(self, gate: Gate) -> bool:
        return gate.phase == PREFILL and self.prefill == "on_demand"

    def _fetch(self, needed: list[Piece], buffer: Buffer, view: View) -> Fetching:
        """Fetch on demand and wait; returns what did not fit."""
        tickets: list[Ticket] = []
        later: list[Piece] = []
        for piece in needed:
            if not self._fits(piece, buffer):
                later.append(piece)
            elif not self._found(piece, buffer):
                yield from self._insert(piece, view)
                buffer[piece] = ticket = yield Fetch(piece)
                tickets.append(ticket)
        if tickets:
            yield Wait(tuple(tickets))
        return later

    def _issue(self, gate: Gate, view: View) -> Steps:
        """The fetch that runs while this layer computes."""
        target = gate.layer + self._ahead
        if not self._ahead or target >= view.n_layers or self._encoding(gate):
            return
        buffer = self._buffers.setdefault(target, {})
        for expert in self._chosen(gate, target, view):
            piece = view.piece(target, expert)
            if self._fits(piece, buffer) and not self._found(piece, buffer):
                yield from self._insert(piece, view)
                buffer[piece] = yield Prefetch(piece)

    def _chosen(self, gate: Gate, target: int, view: View) -> Iterable[int]:
        """Experts that the pre-gate chooses for the target layer."""
        if self.mode == "prefetch_all":
            return range(view.n_experts)
        if self.variant == "oracle":
            return gate.iteration.chosen(target)
        return in_turn(foretold(gate, self._ahead, None, view))

    def _fits(self, piece: Piece, buffer: Buffer) -> bool:
        return sum(other.gpu == piece.gpu for other in buffer) < self._size[piece.gpu]

    def _found(self, piece: Piece, buffer: Buffer) -> bool:
        """In the expert cache: copied from there into the buffer. What is kept only changes hands."""
        if piece in self._kept:
            self._take(piece)
            buffer[piece] = None
            return True
        cache = self._caches[piece.gpu]
        if piece in cache:
            cache.used(piece)
            buffer[piece] = None
        return piece in cache

    def _insert(self, piece: Piece, view: View) -> Steps:
        """What is fetched joins the expert cache."""
        victim = self._caches[piece.gpu].insert(piece, view.evictable)
        if victim not in (None, piece) and not any(victim in buffer for buffer in self._buffers.values()):
            yield Evict(victim)

    def _release(self, buffer: Buffer, pieces: Iterable[Piece]) -> Steps:
        for piece in pieces:
            del buffer[piece]
            if piece in self._caches[piece.gpu]:
                continue
            if self.keep == "request":
                self._keep(piece)
            else:
                yield Evict(piece)

    def _keep(self, piece: Piece) -> None:
        """What leaves a buffer stays while there is room, and makes room for others, the oldest first."""
        self._kept[piece] = None
        self._n_kept += 1
        self._leaving.rank[piece.index], self._leaving.bar[piece.index] = self._n_kept, FREE

    def _take(self, piece: Piece) -> None:
        """It is kept no longer."""
        del self._kept[piece]
        self._leaving.bar[piece.index] = NEVER
