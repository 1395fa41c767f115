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

from collections.abc import Collection, Generator, Iterable
from typing import Any

import numpy as np

from policies._surrogate import PREFIX, Surrogate
from sim.policy import (
    PREFILL,
    BadInput,
    Cancel,
    Decision,
    Evict,
    Fetch,
    Gate,
    Param,
    Piece,
    Policy,
    Predict,
    Prefetch,
    RunGpu,
    Steps,
    Ticket,
    View,
)

Demanding = Generator[Decision, Any, tuple[Ticket, ...]]


class ProMoe(Policy):
    """Prefetches by chunks, early; what the gate asks for overtakes, and what is ready is computed first."""

    name = "promoe"
    title = "ProMoE: predicted chunks, reordered inference"
    source = "arXiv 2410.22134"
    traits = frozenset({"timing"})
    needs = frozenset({"experts", "next_scores_2"})
    params = (
        Param("predictor", "gate_reuse", "a later gate on this layer's gate input (next_scores of the trace); or "
              "surrogate:SHARE or surrogate:ALL/ANY, a labelled stand-in"),
        Param("stride", 2, "layers between a prediction and its target (published: one more than layer by layer)",
              low=1, high=3),
        Param("predictor_s", 2e-4, "time of a prediction, on the CPU (published: about 200 us)", low=0.0, high=60.0),
        Param("chunks", 3, "transfers per expert (published: its three matrices)", low=1, high=64),
        Param("preempt", True, "withdraw a layer's low tasks at its gate (early preemption)"),
        Param("reorder", True, "compute what is ready first; false takes the gate's order"),
        Param("depth", 2, "chunks handed to each GPU's copy engine at once. The worker takes one whenever it is free; "
              "this engine only looks at polling points, so one more must be at hand (assumed). No more than that: a "
              "chunk at hand has its room, and the published victim loses its place only as a copy starts", low=1,
              high=1024),
        Param("seed", 0, "for a surrogate's draws", low=0, high=2**63 - 1),
    )  # fmt: skip
    predictor: str
    stride: int
    predictor_s: float
    chunks: int
    preempt: bool
    reorder: bool
    depth: int
    seed: int

    def __init__(self, **values: object) -> None:
        super().__init__(**values)
        self.needs = frozenset({"experts", f"next_scores_{self.stride}"})
        if self.predictor.startswith(PREFIX):
            self.needs, self.labels = frozenset({"experts"}), (PREFIX,)
        elif self.predictor != "gate_reuse":
            raise BadInput(f"promoe.predictor, got {self.predictor!r}: gate_reuse, or surrogate:0.85; take one of them")

    def min_experts(self, view: View) -> int:
        return view.n_layers

    def layer_budgets(self, view: View) -> list[list[int]]:
        return [[n * view.expert_bytes for n in self._shares(gpu, view)] for gpu in range(view.n_gpus)]

    def _shares(self, gpu: int, view: View) -> list[int]:
        """Experts per layer: equal caches; what does not divide goes to the first layers."""
        each, more = divmod(view.capacity_of(gpu), view.n_layers)
        return [each + (layer < more) for layer in range(view.n_layers)]

    def bind(self, view: View) -> None:
        self.prefetch_depth = self.depth
        groups = [(gpu, layer) for gpu in range(view.n_gpus) for layer in range(view.n_layers)]
        self._room = {(gpu, layer): self._shares(gpu, view)[layer] for gpu, layer in groups}
        # Per GPU and layer the experts that have a chunk there or on its way, least recently accessed first.
        self._lru: dict[tuple[int, int], dict[int, None]] = {group: {} for group in groups}
        self._parts: dict[tuple[int, int], list[Piece]] = {}
        self._stale: list[Piece] = []  # chunks of experts whose place has been taken
        self._surrogate = (
            Surrogate(self.predictor, view.top_k, view.n_experts, self.seed) if self.labels else None
        )
        self._gating = -1  # the layer whose gate is about to speak
        self._aimed: dict[int, dict[int, None]] = {}  # by layer to come: experts named, in order
        self._n = self._right = 0

    def _chunks(self, layer: int, expert: int, view: View) -> list[Piece]:
        found = self._parts.get((layer, expert))
        if found is None:
            found = self._parts[layer, expert] = view.matrices(layer, expert, self.chunks)
        return found

    # -- a gate has spoken ------------------------------------------------------------------------------------------

    def gate_input(self, layer: int, view: View) -> Steps:
        """Until the gate has spoken, nobody in its layer loses its place to a prediction any more.

        So low tasks of experts that have no place and would find none are withdrawn: a chunk of theirs would else take
        free bytes that belong to an expert which is still to be completed, and that may be the one the gate asks for.
        """
        yield from self._sweep()
        self._gating = layer
        taken = {group: len(held) for group, held in self._lru.items() if group[1] == layer}
        for expert in self._aimed.get(layer, ()):
            group = self._group(layer, expert, view)
            if expert in self._lru[group]:
                continue
            if taken[group] < self._room[group]:
                taken[group] += 1
                continue
            for chunk in self._chunks(layer, expert, view):
                yield Cancel(chunk)

    def gate_done(self, gate: Gate, view: View) -> Steps:
        self._gating = -1
        aimed = self._aimed.pop(gate.layer, {})
        self._count(gate, aimed)
        # The layer's low tasks are withdrawn; those of experts it needs become high ones.
        for expert in sorted(aimed):
            for chunk in self._chunks(gate.layer, expert, view):
                if (expert in gate.needs and not view.holds(chunk)) or (expert not in gate.needs and self.preempt):
                    yield Cancel(chunk)
        waiting = self._in_order(gate, view)
        asked = False
        coming: list[tuple[int, tuple[Ticket, ...]]] = []
        while waiting or coming:
            while (found := next((e for e in waiting if self._admits(gate.layer, e, view)), None)) is not None:
                waiting.remove(found)
                coming.append((found, (yield from self._demand(gate.layer, found, view))))
            if not asked:
                asked = True
                yield from self._predict(gate, view)
            expert, tickets = coming.pop(0)
            yield RunGpu(expert, tickets)

    def _in_order(self, gate: Gate, view: View) -> list[int]:
        """Cached experts, those on their way by the chunks that have arrived, then the others."""
        if not self.reorder:
            return list(gate.needs)
        ready = {e: sum(view.arrived(c) for c in self._chunks(gate.layer, e, view)) for e in gate.needs}
        return sorted(gate.needs, key=lambda e: (-ready[e], e not in self._lru[self._group(gate.layer, e, view)]))

    def _group(self, layer: int, expert: int, view: View) -> tuple[int, int]:
        return view.piece(layer, expert).gpu, layer

    def _admits(self, layer: int, expert: int, view: View) -> bool:
        """It has a place, or one is free or holds what the layer does not need any more."""
        group = self._group(layer, expert, view)
        held = self._lru[group]
        return expert in held or len(held) < self._room[group] or self._leaves(group, expert, view) is not None

    def _leaves(self, group: tuple[int, int], newcomer: int, view: View) -> int | None:
        """The least recently accessed expert that may go."""
        layer = group[1]
        others = (e for e in self._lru[group] if e != newcomer and view.evictable(view.piece(layer, e)))
        return next(others, None)

    def _demand(self, layer: int, expert: int, view: View) -> Demanding:
        """High tasks for the chunks that are missing; chunks on their way go ahead of what nobody waits for."""
        group = self._group(layer, expert, view)
        held = self._lru[group]
        if expert not in held and len(held) == self._room[group]:
            victim = self._leaves(group, expert, view)
            assert victim is not None
            for chunk in [c for c in self._chunks(layer, victim, view) if view.holds(c)]:
                yield Evict(chunk)
            held.pop(victim, None)
        held.pop(expert, None)
        held[expert] = None
        tickets: list[Ticket] = []
        for chunk in self._chunks(layer, expert, view):
            if chunk in self._stale:  # it has its place again
                self._stale.remove(chunk)
            ticket = yield Fetch(chunk)
            if ticket is not None:
                tickets.append(ticket)
        return tuple(tickets)

    # -- low tasks --------------------------------------------------------------------------------------------------

    def _predict(self, gate: Gate, view: View) -> Steps:
        """Predict `stride` layers ahead and queue what is missing, chunk by chunk, in the order of prediction."""
        target = gate.layer + self.stride
        if target >= view.n_layers or gate.phase == PREFILL:
            return
        ticket = yield Predict(self.predictor_s, "side", basis="measured")
        named = list(dict.fromkeys(self._named(gate, target, view)))
        self._aimed[target] = dict.fromkeys(named)
        taken = dict.fromkeys(self._lru, 0)
        for expert in named:
            group = self._group(target, expert, view)
            taken[group] += 1
            if taken[group] > self._room[group]:
                continue
            if expert in self._lru[group]:  # asking counts as an access
                del self._lru[group][expert]
                self._lru[group][expert] = None
            for chunk in self._chunks(target, expert, view):
                if not view.holds(chunk):
                    yield Prefetch(chunk, 0.0, (ticket,))

    def _named(self, gate: Gate, target: int, view: View) -> Iterable[int]:
        """Experts predicted for the target layer: every token's first choice, then the second ..."""
        if self._surrogate is not None:
            truth = gate.iteration.ids(target).tolist()
            rows = [r.start_row for r in gate.iteration.ranges]
            named = [self._surrogate.name(row, target, ids) for row, ids in zip(rows, truth, strict=True)]
            return [expert for choices in zip(*named, strict=True) for expert in choices]
        best = np.argsort(-gate.next_scores(self.stride), axis=1, kind="stable")[:, : view.top_k]
        return [int(expert) for expert in best.T.reshape(-1)]

    def placed(self, piece: Piece, view: View) -> None:
        """A predicted chunk found room; where that room belongs to an expert still to come, somebody has no place."""
        group = (piece.gpu, piece.layer)
        held = self._lru[group]
        if piece.expert in held:
            return
        held[piece.expert] = None
        if len(held) > self._room[group]:
            leaving = self._leaves(group, piece.expert, view)
            self._lose(group, piece.expert if leaving is None else leaving, view)

    def _lose(self, group: tuple[int, int], expert: int, view: View) -> list[Piece]:
        """An expert loses its place: what it has there is given up. Returns that."""
        del self._lru[group][expert]
        chunks = [chunk for chunk in self._chunks(group[1], expert, view) if view.holds(chunk)]
        self._stale += chunks
        return chunks

    def evicted(self, piece: Piece, view: View) -> None:
        if piece in self._stale:
            self._stale.remove(piece)
        if not any(view.holds(chunk) for chunk in self._chunks(piece.layer, piece.expert, view)):
            self._lru[piece.gpu, piece.layer].pop(piece.expert, None)

    def victim(self, piece: Piece, speculative: bool, view: View) -> Piece | None:
        """When a new expert's first chunk starts, the victim loses its place, and so all of its chunks."""
        group = (piece.gpu, piece.layer)
        held = self._lru[group]
        if piece.expert not in held and len(held) == self._room[group]:
            leaving = self._leaves(group, piece.expert, view)
            if leaving is None or piece.layer == self._gating:
                return None
            self._lose(group, leaving, view)
        here = (c for c in self._stale if (c.gpu, c.layer) == group and view.evictable(c))
        return next(here, None)

    def _sweep(self) -> Steps:
        """Give up what is left of experts that have lost their place."""
        for chunk in list(self._stale):
            yield Evict(chunk)

    # -- figures of its own -----------------------------------------------------------------------------------------

    def _count(self, gate: Gate, aimed: Collection[int]) -> None:
        if aimed:
            self._n += len(gate.needs)
            self._right += sum(expert in aimed for expert in gate.needs)

    def stats(self) -> dict[str, float]:
        """predicted_frac: share of the chosen experts that were predicted (published for its MLP: 84.7 %)."""
        return {"predicted_frac": self._right / self._n if self._n else 0.0}
