"""FineMoE (EuroSys'26, arXiv 2502.05370): expert maps guide prefetching and eviction.

Source: Yu, Cui, Zhang, Wang and Wang, "Taming Latency-Memory Trade-Off in MoE-Based LLM Serving via Fine-Grained
Expert Offloading"; code IntelliSys-Lab/FineMoE-EuroSys26, release 2 (80717e96). Sections cited at each step.
`variant=paper` follows the text, and release 1 (5c58468) where the text says nothing: what is predicted for a prompt.
`variant=code` follows release 2 where the two differ: no prediction during prefill, the last token's embedding, and
eviction that may take a prefetched expert not used yet.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from policies.common.surrogate import PREFIX, Surrogate
from policies.fine_moe.expert_maps import Floats
from policies.fine_moe.map_cache import Aims, MapCache, Ready
from policies.fine_moe.maps import MapTrack
from policies.fine_moe.tracks import CountTrack, Foretold, Found, GateTrack, Track, foretold
from sim.policy import (
    BadInput,
    Gate,
    Iteration,
    Param,
    Predict,
    Prefetch,
    RequestInfo,
    RequeueFrom,
    Serve,
    Steps,
    StoreSplit,
    Ticket,
    View,
    Wait,
    Wishes,
)

SERVE = Serve()
MAX_GATE_DISTANCE = 3  # the farthest gates that traces record for this layer's input (traces/FORMAT.md)
# Section 6.7, Figure 15: the distance at which TTFT and TPOT are least; elsewhere the text says three for all.
PUBLISHED_DISTANCE = {"mixtral-8x7b": 3, "qwen1.5-moe-a2.7b": 6, "phi-3.5-moe": 4}
PREFILL_OF = {"paper": "union", "code": "none"}


class FineMoe(MapCache):
    """Searches a store of past iterations for the one most like the current one, and trusts its gate scores."""

    name = "fine_moe"
    title = "FineMoE: expert-map search"
    source = "arXiv 2502.05370 (EuroSys'26); IntelliSys-Lab/FineMoE-EuroSys26@80717e96"
    aliases = ("finemoe", "fmoe")
    traits = frozenset({"timing"})
    needs = frozenset({"experts", "scores", "embeddings"})
    params = (
        Param("variant", "paper", "the paper's text, or release 2 of the code where it differs", ("paper", "code")),
        Param("distance", None, "layers between a prediction and its target; published: Mixtral 3, Qwen1.5-MoE 6, "
              "Phi-3.5-MoE 4 (section 6.7), 3 for any other model", low=1, high=64),
        Param("prefill", None, "what is predicted for a prompt, of which the text says nothing: the union of what "
              "searches for each of its tokens name, each stored as a map (union: release 1; the paper's TTFT rests on "
              "it); what one map names, the tokens' mean (mean); nothing (none: release 2). Left out: union for paper, "
              "none for code", ("union", "mean", "none")),
        Param("capacity", 1000, "maps in the store (section 6.7: knee at 1K)", low=1, high=100_000),
        Param("mode", "offline", "offline: the store split fills the store (section 6.1); online: it starts empty "
              "(section 6.3)", ("offline", "online")),
        Param("track", "map_tsd", "what predicts (Figure 14a): the next gates on this gate's input, request-level hit "
              "counts, or maps by trajectory, with semantic search, with the delta threshold",
              ("speculate", "hit_count", "map_t", "map_ts", "map_tsd")),
        Param("predictor", "gate_reuse", "what track=speculate asks: a later gate on this layer's gate input "
              "(next_scores of the trace); or surrogate:SHARE, a labelled stand-in that is right for so many"),
        Param("evict", "fine_moe", "what is evicted (Figure 14b): least p x freq (section 4.5), LRU or LFU",
              ("fine_moe", "lru", "lfu")),
        Param("asynchronous", True, "search and prefetch beside the forward pass (section 4.3); false: a layer waits "
              "until both are finished"),
        Param("search_overhead_s", 2e-4, "fixed cost of a search, a few tensor operations in Python (assumed; "
              "section 6.8 bounds all of FineMoE's overhead by 50 ms per iteration)", low=0.0, high=1.0),
        Param("depth", 2, "speculative copies handed to each GPU's copy engine at once: one in flight, one behind it "
              "(release 2 keeps 1 in flight)", low=1, high=64),
    )  # fmt: skip
    variant: str
    distance: int | None
    prefill: str | None
    capacity: int
    mode: str
    track: str
    predictor: str
    evict: str
    asynchronous: bool
    search_overhead_s: float
    depth: int

    def __init__(self, **values: object) -> None:
        super().__init__(**values)
        if self.track == "hit_count":
            self.needs = frozenset({"experts"})
        elif self.track == "speculate" and self.predictor.startswith(PREFIX):
            self.needs, self.labels = frozenset({"experts"}), (PREFIX,)
        elif self.track == "speculate":
            if (self.distance or 0) > MAX_GATE_DISTANCE:
                raise BadInput(f"parameter fine_moe.distance, got {self.distance} with track=speculate: traces record "
                               f"the gates of {MAX_GATE_DISTANCE} layers ahead at most; lower it")  # fmt: skip
            self.distance = self.settings["distance"] = self.distance or MAX_GATE_DISTANCE
            self.needs = frozenset({"experts", f"next_scores_{self.distance}"})
        if self.predictor != "gate_reuse" and not self.labels:
            raise BadInput(f"parameter fine_moe.predictor, got {self.predictor!r} with track={self.track}: gate_reuse, "
                           "or surrogate:0.85 with track=speculate; take one of them")  # fmt: skip

    def bind(self, view: View) -> None:
        self.prefetch_depth = self.depth if self.asynchronous else None
        published = PUBLISHED_DISTANCE.get(view.model_name, 3)
        self._d = min(int(self.distance or published), view.n_layers)
        self.settings["distance"] = self._d
        self._track = self._tracking(view)
        self._maps = self._track if isinstance(self._track, MapTrack) else None
        self.bind_cache(view)
        self._cpu_bytes_per_s = view.prices.cpu_bytes_per_s
        # By layer what has been foretold of it, until it has passed; none of the last ones' successors.
        self._ahead: list[Aims | None] = [None] * (view.n_layers + self._d + 1)
        self._ready: Ready | None = None  # where all layers have been foretold together, what each one queues
        self._predicts: list[Predict] = []  # by layer
        self._predicts_of = (-1, -1)  # maps stored, and sequences searched for, when those were worked out
        self._needed = self._named = self._right = self._searches = self._ended = self._unasked = 0

    def _tracking(self, view: View) -> Track:
        if self.track == "speculate":
            stand_in = Surrogate(self.predictor, view.top_k, view.n_experts, 0) if self.labels else None
            return GateTrack(view, self._d, stand_in)
        if self.track == "hit_count":
            return CountTrack(view, self._d)
        self.settings["prefill"] = prefill = self.prefill or PREFILL_OF[self.variant]
        semantic, threshold = self.track != "map_t", self.track == "map_tsd"
        return MapTrack(view, self.capacity, self._d, prefill, self.variant == "code", semantic, threshold)

    def learn(self, store: StoreSplit) -> None:
        if self.mode == "offline":
            self._track.learn(store)

    # -- searching (section 4.2) ------------------------------------------------------------------------------------

    def iteration_start(self, iteration: Iteration, view: View) -> Steps:
        self._ready = None
        found = self._track.start(iteration, view)
        self._layer_searches(len(iteration.ranges) if self._maps is None else self._maps.n_spans)
        if found:
            ticket = yield self._search(self._track.start_values())
            self._searches += 1
            aims = self._aims(self._told(0, found.values(), view))
            for layer in found:
                self._aim(layer, aims)
            if self.asynchronous:
                yield self._requeue(-1, (ticket,))
            else:
                yield from self._load(found, view)

    def gate_done(self, gate: Gate, view: View) -> Steps:
        layer, needs = gate.layer, gate.needs
        aims = self._ahead[layer]
        if aims is not None:
            self._count_right(aims, layer, needs)
        if self.asynchronous:
            self.visit(layer, needs, view)
            yield SERVE
        target = layer + self._d
        aims = self._step(gate, target, view)
        tickets: tuple[Ticket, ...] = ()
        if aims is not None:
            tickets = ((yield self._predicts[layer]),)
            self._searches += 1
            self._aim(target, aims)
        if self._ahead[layer] is not None:
            self._ahead[layer] = None
            self.forget(layer)
        if self.asynchronous:
            yield self._requeue(layer, tickets)
        else:
            yield from self._load([target], view)
            self.visit(layer, needs, view)
            yield SERVE

    def _step(self, gate: Gate, target: int, view: View) -> Aims | None:
        """What is to be expected of the layer `target`: of all layers at once where that can be."""
        if self._maps is not None:
            known: tuple[Aims | None] | None = gate.at_once(self._foresee)
            if known is not None:
                return known[0]
        found = self._track.step(gate, target)
        return self._aims(self._told(target, [found], view)) if found else None

    def _foresee(self, scores: Floats) -> list[tuple[Aims | None]]:
        """By layer, what its gate says of the one `distance` ahead, from the scores of all of them [n, L, E]."""
        assert self._maps is not None
        told = self._maps.along(scores)
        n_told = 0 if told is None else self._n_layers - self._d
        aims = None if told is None else self._aims(told)
        self._ready = None if aims is None else Ready(aims, self._d)
        return [(aims,)] * n_told + [(None,)] * (self._n_layers - n_told)

    def _told(self, first: int, found: Iterable[list[Found]], view: View) -> Foretold:
        """What was found of some layers, from the `first` on, for every sequence."""
        several = [(np.array([one.row for one in rows]), np.array([one.similarity for one in rows]))
                   for rows in zip(*found, strict=True)]  # fmt: skip
        return foretold(first, several, view.top_k, self.track == "map_tsd")

    def _aims(self, told: Foretold) -> Aims:
        return Aims(told, self._visits, self._aim_bar)

    def iteration_end(self, iteration: Iteration, view: View) -> Steps:
        """Section 4.4: what was seen joins the store; the search for what it replaces is charged like any other."""
        self._ended += 1
        self._unasked += view.unused_prefetches
        self._track.end(iteration)
        n_values = self._track.end_values()
        if n_values:
            self._searches += 1
            yield self._search(n_values)

    def request_end(self, request: RequestInfo, view: View) -> None:
        self._track.request_end(request)

    def _search(self, n_values: int) -> Predict:
        """Compare `n_values` fp32 numbers with every stored map, streamed once from host memory."""
        duration_s = self.search_overhead_s + self._track.n_stored * n_values * 4 / self._cpu_bytes_per_s
        return Predict(duration_s, "side", blocking=not self.asynchronous)

    def _layer_searches(self, n_sequences: int) -> None:
        """What the search after each layer of this iteration takes; a store that is full takes as long every time."""
        of = (self._track.n_stored, n_sequences)
        if of != self._predicts_of:
            self._predicts_of = of
            self._predicts = [self._search(self._track.step_values(layer)) for layer in range(self._n_layers)]

    def _aim(self, layer: int, aims: Aims) -> None:
        self._ahead[layer] = aims
        self.believe(aims, layer)

    def _requeue(self, now: int, after: tuple[Ticket, ...]) -> RequeueFrom:
        """Section 4.5: PRI = p / (l - l_now), rewritten as the pass moves on; passed layers are dropped."""
        ready = self._ready
        if ready is not None and now + 1 >= ready.first:
            return RequeueFrom(ready.wishes, *ready.slices[now + 1 - ready.first], after, now)
        # Layers that have not been foretold together: their queue is put together for this once.
        indices: list[int] = []
        priorities: list[float] = []
        fresh = 0
        for gap in range(1, self._d + 1):
            aims = self._ahead[now + gap]
            if gap == self._d and now >= 0:
                fresh = len(indices)  # only what this search found waits for it; older predictions are there already
            if aims is not None:
                start, stop = aims.starts[now + gap - aims.first], aims.starts[now + gap - aims.first + 1]
                indices += aims.indices[start:stop].tolist()
                priorities += (aims.likely[start:stop] / gap).tolist()
        return RequeueFrom(Wishes(indices, priorities), 0, len(indices), fresh, after, now)

    def _load(self, layers: Iterable[int], view: View) -> Steps:
        """What others do, says section 4.3: nothing is computed before prediction and prefetching are finished."""
        tickets: list[Ticket] = []
        for layer in layers:
            aims = self._ahead[layer]
            if aims is None:
                continue
            start, stop = aims.starts[layer - aims.first], aims.starts[layer - aims.first + 1]
            aimed = zip(aims.experts[start:stop], aims.likely[start:stop].tolist(), strict=True)
            for expert, _ in sorted(aimed, key=lambda aimed: -aimed[1]):
                ticket = yield Prefetch(view.piece(layer, expert))
                if ticket is not None:
                    tickets.append(ticket)
        yield Wait(tuple(tickets))

    # -- figures of its own -----------------------------------------------------------------------------------------

    def _count_right(self, aims: Aims, layer: int, needs: dict[int, int]) -> None:
        i = layer - aims.first
        named = aims.experts[aims.starts[i] : aims.starts[i + 1]]
        if named:
            self._needed += len(needs)
            self._named += len(named)
            for expert in named:
                if expert in needs:
                    self._right += 1

    def stats(self) -> dict[str, float]:
        """predicted_frac: share of the chosen experts that were predicted; right_frac: of the predicted, chosen.

        semantic_similarity, trajectory_similarity: of the maps found, on average (Figure 16a). unasked_experts: held as
        an iteration ends though no gate has asked for them since they were prefetched, on average.
        """
        found = self._track.similarities() if isinstance(self._track, MapTrack) else (0.0, 0.0)
        return {
            "maps": self._track.n_stored,
            "store_bytes": self._track.store.n_bytes if isinstance(self._track, MapTrack) else 0,
            "searches": self._searches,
            "semantic_similarity": found[0],
            "trajectory_similarity": found[1],
            "predicted_frac": self._right / self._needed if self._needed else 0.0,
            "right_frac": self._right / self._named if self._named else 0.0,
            "unasked_experts": self._unasked / self._ended if self._ended else 0.0,
        }
