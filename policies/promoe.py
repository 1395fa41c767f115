"""ProMoE (arXiv 2410.22134): experts predicted two layers ahead, copied in chunks that a miss may overtake.

Source: Song, Zhong, Chen and Chen, "ProMoE: Fast MoE-based LLM Serving using Proactive Caching"; its code was not
available. Cache: LRU per layer; a transfer is a third of an expert (gate, up or down matrix). A single worker serves
two queues, high (asked by a gate) before low (predicted). At the gate the layer's low tasks are withdrawn, the missing
chunks become high ones, and experts compute in the order of what is ready ("reordered inference").

Its predictor, one small MLP per layer on the CPU fed with hidden states, cannot be trained from routing alone. Here the
gate of a later layer on this layer's gate input stands in (published accuracies: MLP 84.7 %, about 5 points less with a
stride; gate reuse 66.9 % on Qwen2-57B), or on request a labelled surrogate of a given accuracy. Traces record those
scores while generating, so only then is anything predicted. A group of layers smaller than what is predicted takes the
first predictions alone. Several GPUs (not published): each has its own worker and its share of every layer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.common.foretold import drawn, in_turn
from policies.common.placement import by_layer, homes, most_layers
from sim.policy import (
    PREFILL,
    SURROGATE,
    BadInput,
    Cancel,
    Evict,
    Fetch,
    Gate,
    Piece,
    Policy,
    Predict,
    Prefetch,
    RunGpu,
    Steps,
    Surrogate,
    Ticket,
    View,
    param,
)


class Chunks(NamedTuple):
    """An expert's transfers, and what is decided about them."""

    pieces: list[Piece]
    fetches: list[Fetch]
    cancels: list[Cancel]
    evicts: list[Evict]


class ProMoe(Policy):
    """Prefetches by chunks, early; what the gate asks for overtakes, and what is ready is computed first."""

    name = "promoe"
    title = "ProMoE: predicted chunks, reordered inference"
    source = "arXiv 2410.22134"
    traits = frozenset({"timing"})
    needs = frozenset({"experts", "next_scores_2"})
    predictor: str = param(
        "gate_reuse",
        "a later gate on this layer's gate input (next_scores of the trace); or surrogate:SHARE or "
        "surrogate:ALL/ANY, a labelled stand-in",
    )
    stride: int = param(
        2, "layers between a prediction and its target (published: one more than layer by layer)", within=(1, 3)
    )
    predictor_s: float = param(2e-4, "time of a prediction, on the CPU (published: about 200 us)", within=(0.0, 60.0))
    chunks: int = param(3, "transfers per expert (published: its three matrices)", within=(1, 64))
    preempt: bool = param(True, "withdraw a layer's low tasks at its gate (early preemption)")
    reorder: bool = param(True, "compute what is ready first; false takes the gate's order")
    depth: int = param(
        2,
        "chunks handed to each GPU's copy engine at once. The worker takes one whenever it is free; this engine only "
        "looks at polling points, so one more must be at hand (assumed). No more than that: a chunk at hand has its "
        "room, and the published victim loses its place only as a copy starts",
        within=(1, 1024),
    )
    seed: int = param(0, "for a surrogate's draws", within=(0, 2**63 - 1))

    def __init__(self, **values: object) -> None:
        super().__init__(**values)
        self.needs = frozenset({"experts", f"next_scores_{self.stride}"})
        if self.predictor.startswith(SURROGATE):
            self.needs, self.labels = frozenset({"experts"}), (SURROGATE,)
        elif self.predictor != "gate_reuse":
            raise BadInput(f"promoe.predictor, got {self.predictor!r}: gate_reuse, or surrogate:0.85; take one of them")

    def min_experts(self, view: View) -> int:
        return most_layers(view)

    def layer_budgets(self, view: View) -> list[list[int]]:
        return [[n * view.expert_bytes for n in self._shares(gpu, view)] for gpu in range(view.n_gpus)]

    def _shares(self, gpu: int, view: View) -> list[int]:
        """Experts per layer: equal caches; what does not divide goes to the first layers."""
        return by_layer(view.capacity_of(gpu), gpu, view)

    def bind(self, view: View) -> None:
        self.prefetch_depth = self.depth
        n_layers, n_experts = self._shape = (view.n_layers, view.n_experts)
        gpus = range(view.n_gpus)
        self._home = homes(view).tolist()
        self._room = list(zip(*[self._shares(gpu, view) for gpu in gpus], strict=True))  # by layer and GPU
        # Per layer and GPU the experts that have a chunk there or on its way, least recently accessed first.
        self._lru: list[list[dict[int, None]]] = [[{} for _ in gpus] for _ in range(n_layers)]
        self._parts: list[list[Chunks | None]] = [[None] * n_experts for _ in range(n_layers)]
        self._stale: list[Piece] = []  # chunks of experts whose place has been taken
        self._surrogate = Surrogate(self.predictor, view.top_k, view.n_experts, self.seed) if self.labels else None
        self._top_k = view.top_k
        self._runs = [RunGpu(expert) for expert in range(n_experts)]
        self._asked: set[Piece] = set()  # chunks that wait for room, to be copied early
        self._gating = -1  # the layer whose gate is about to speak
        self._aimed: list[list[int]] = [[] for _ in range(n_layers)]  # by layer to come: experts named, in order
        self._prediction = Predict(self.predictor_s, "side", basis="measured")
        self._reads = f"next_scores_{self.stride}"
        self._names = self._best
        self._n = self._right = 0

    def _chunks(self, layer: int, expert: int, view: View) -> Chunks:
        found = self._parts[layer][expert]
        if found is None:
            pieces = view.matrices(layer, expert, self.chunks)
            found = self._parts[layer][expert] = Chunks(
                pieces,
                [Fetch(piece) for piece in pieces],
                [Cancel(piece) for piece in pieces],
                [Evict(piece) for piece in pieces],
            )
        return found

    # -- a gate has spoken ------------------------------------------------------------------------------------------

    def gate_input(self, layer: int, view: View) -> list[Evict | Cancel]:
        """Until the gate has spoken, nobody in its layer loses its place to a prediction any more.

        So low tasks of experts that have no place and would find none are withdrawn: a chunk of theirs would else take
        free bytes that belong to an expert which is still to be completed, and that may be the one the gate asks for.
        What is left of experts that have lost their place is given up before.
        """
        self._gating = layer
        found: list[Evict | Cancel] = self._swept(view) if self._stale else []
        aimed = self._aimed[layer]
        if aimed:
            home, lru, room = self._home[layer], self._lru[layer], self._room[layer]
            taken = [len(held) for held in lru]
            for expert in aimed:
                gpu = home[expert]
                if expert in lru[gpu]:
                    continue
                if taken[gpu] < room[gpu]:
                    taken[gpu] += 1
                else:
                    queued = self._asked
                    found += [one for one in self._chunks(layer, expert, view).cancels if one.piece in queued]
        return found

    def _swept(self, view: View) -> list[Evict | Cancel]:
        """Give up all that is stale; with its last chunk an expert that has got a place again loses it."""
        gone, self._stale = self._stale, []
        for chunk in gone:
            held = self._lru[chunk.layer][chunk.gpu]
            if chunk.expert in held:
                kept = view.held_of(self._chunks(chunk.layer, chunk.expert, view).pieces)
                if all(one in gone for one in kept):
                    del held[chunk.expert]
        return [Evict(chunk) for chunk in gone]

    def gate_done(self, gate: Gate, view: View) -> Steps:
        self._gating = -1
        layer, needs = gate.layer, gate.needs
        parts, holds, stale, queued = self._parts[layer], view.holds, self._stale, self._asked
        aimed = self._aimed[layer]
        if aimed:
            self._aimed[layer] = []
            self._n += len(needs)
            self._right += len([expert for expert in aimed if expert in needs])
            # The layer's low tasks are withdrawn; those of experts it needs become high ones.
            for expert in sorted(aimed):
                needed = expert in needs
                if needed or self.preempt:
                    chunks = parts[expert] or self._chunks(layer, expert, view)
                    for cancel in chunks.cancels:
                        piece = cancel.piece
                        if piece in queued:
                            yield cancel
                            queued.discard(piece)
                        elif not needed and holds(piece) and not view.arrived(piece):
                            yield cancel  # what waits nowhere and is not on its way has nothing to be withdrawn
                            if not holds(piece):
                                if piece in stale:
                                    stale.remove(piece)
                                self._left(self._lru[layer][piece.gpu], piece, view)
        home, runs = self._home[layer], self._runs
        lru, room = self._lru[layer], self._room[layer]
        waiting = self._in_order(layer, needs, lru, view)
        coming: list[RunGpu] = []
        asked = False
        while waiting or coming:
            at = 0
            while at < len(waiting):
                expert, here = waiting[at]
                gpu = home[expert]
                held = lru[gpu]
                if expert not in held and len(held) == room[gpu]:
                    victim = self._leaves(held, layer, expert, view)
                    if victim is None:  # until one of those that are there has run
                        at += 1
                        continue
                    del held[victim]
                    leaving = parts[victim] or self._chunks(layer, victim, view)
                    there = view.held_of(leaving.pieces)
                    yield leaving.evicts if len(there) == len(leaving.pieces) else [Evict(chunk) for chunk in there]
                    if stale:
                        stale[:] = [chunk for chunk in stale if chunk not in there]
                del waiting[at]
                # High tasks for the chunks that are missing; chunks on their way go ahead of what nobody waits for.
                held.pop(expert, None)
                held[expert] = None
                at = 0
                if here and not stale:  # nothing to be asked for, or to be waited for
                    coming.append(runs[expert])
                    continue
                chunks = parts[expert] or self._chunks(layer, expert, view)
                if stale:
                    for chunk in chunks.pieces:
                        if chunk in stale:  # it has its place again
                            stale.remove(chunk)
                came = yield chunks.fetches
                queued.difference_update(chunks.pieces)
                tickets = tuple([ticket for ticket in came if ticket is not None])
                coming.append(RunGpu(expert, tickets) if tickets else runs[expert])
            if not asked:
                asked = True
                target = layer + self.stride
                if target < self._shape[0] and gate.phase != PREFILL:
                    yield from self._predict(gate, target, view)
            if waiting:  # until one of those that are there has run
                yield coming.pop(0)
            else:
                yield coming
                return

    def _in_order(
        self, layer: int, needs: dict[int, int], lru: list[dict[int, None]], view: View
    ) -> list[tuple[int, bool]]:
        """Cached experts, those on their way by the chunks that have arrived, then the others; and who is all there."""
        n_arrived, parts = view.n_arrived, self._parts[layer]
        if not self.reorder or len(needs) == 1:
            return [(expert, False) for expert in needs]
        home, all_there = self._home[layer], -self.chunks
        order = []
        for at, expert in enumerate(needs):
            ready = n_arrived((parts[expert] or self._chunks(layer, expert, view)).pieces)
            order.append((-ready, expert not in lru[home[expert]], at, expert))
        order.sort()
        return [(expert, ready == all_there) for ready, _, _, expert in order]

    def _leaves(self, held: dict[int, None], layer: int, newcomer: int, view: View) -> int | None:
        """The least recently accessed expert of a layer that may go."""
        pending = view.pending_experts() if layer == view.layer else ()
        for expert in held:
            if expert != newcomer and expert not in pending:
                return expert
        return None

    # -- low tasks --------------------------------------------------------------------------------------------------

    def _predict(self, gate: Gate, target: int, view: View) -> Steps:
        """Predict `stride` layers ahead and queue what is missing, chunk by chunk, in the order of prediction."""
        after: tuple[Ticket, ...] = ((yield self._prediction),)
        named = self._aimed[target] = self._named(gate, target)
        home, lru, room = self._home[target], self._lru[target], self._room[target]
        taken = [0] * len(lru)
        parts, holds, queued = self._parts[target], view.holds, self._asked
        for expert in named:
            gpu = home[expert]
            taken[gpu] += 1
            if taken[gpu] > room[gpu]:
                continue
            held = lru[gpu]
            if expert in held:  # asking counts as an access
                del held[expert]
                held[expert] = None
            for chunk in (parts[expert] or self._chunks(target, expert, view)).pieces:
                if not holds(chunk):
                    queued.add(chunk)
                    yield Prefetch(chunk, 0.0, after)

    def _named(self, gate: Gate, target: int) -> list[int]:
        """Experts predicted for the target layer: every token's first choice, then the second ..."""
        if self._surrogate is not None:
            return in_turn(drawn(self._surrogate, gate.iteration, target))
        named: list[int] = gate.by_layer(self._names, self._reads)
        return list(dict.fromkeys(named)) if gate.iteration.n_tokens > 1 else named

    def _best(self, scores: NDArray[np.float64]) -> list[list[int]]:
        """By layer, the experts that its gate input makes most of, [n, L, E] of scores: all first choices first."""
        best = (-scores).argsort(axis=2, kind="stable")[:, :, : self._top_k]
        found: list[list[int]] = best.transpose(1, 2, 0).reshape(scores.shape[1], -1).tolist()
        return found

    def placed(self, piece: Piece, view: View) -> None:
        """A predicted chunk found room; where that room belongs to an expert still to come, somebody has no place."""
        gpu, layer, expert = piece.gpu, piece.layer, piece.expert
        self._asked.discard(piece)
        held = self._lru[layer][gpu]
        if expert in held:
            return
        held[expert] = None
        if len(held) > self._room[layer][gpu]:
            leaving = self._leaves(held, layer, expert, view)
            self._lose(held, layer, expert if leaving is None else leaving, view)

    def _lose(self, held: dict[int, None], layer: int, expert: int, view: View) -> None:
        """An expert loses its place: what it has there is given up."""
        del held[expert]
        self._stale.extend(view.held_of(self._chunks(layer, expert, view).pieces))

    def _left(self, held: dict[int, None], piece: Piece, view: View) -> None:
        """A chunk has left, or is about to: with the last one its expert has no place any more.

        What leaves does so by a decision or an answer of this policy alone, so `evicted` would tell it nothing new.
        """
        if piece.expert in held:
            chunks = self._chunks(piece.layer, piece.expert, view).pieces
            if all(chunk is piece for chunk in view.held_of(chunks)):
                del held[piece.expert]

    def victim(self, piece: Piece, speculative: bool, view: View) -> Piece | None:
        """When a new expert's first chunk starts, the victim loses its place, and so all of its chunks."""
        gpu, layer = piece.gpu, piece.layer
        held = self._lru[layer][gpu]
        if piece.expert not in held and len(held) == self._room[layer][gpu]:
            leaving = None if layer == self._gating else self._leaves(held, layer, piece.expert, view)
            if leaving is None:
                return None
            self._lose(held, layer, leaving, view)
        stale = self._stale
        for chunk in stale:
            if chunk.layer == layer and chunk.gpu == gpu and view.evictable(chunk):
                stale.remove(chunk)
                self._left(held, chunk, view)
                return chunk
        return None

    # -- figures of its own -----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """predicted_frac: share of the chosen experts that were predicted (published for its MLP: 84.7 %)."""
        return {"predicted_frac": self._right / self._n if self._n else 0.0}
