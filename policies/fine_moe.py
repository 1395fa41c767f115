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

from policies._expert_maps import Floats
from policies._fine_moe_maps import MapTrack
from policies._fine_moe_tracks import Answer, CountTrack, GateTrack, Track
from policies._map_cache import MapCache
from policies._surrogate import PREFIX, Surrogate
from sim.policy import (
    BadInput,
    Gate,
    Iteration,
    Param,
    Piece,
    Predict,
    Prefetch,
    RequestInfo,
    Requeue,
    Serve,
    Steps,
    StoreSplit,
    Ticket,
    View,
    Wait,
    Wanted,
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
        self.bind_cache(view)
        self._cpu_bytes_per_s = view.prices.cpu_bytes_per_s
        self._ahead: dict[int, dict[Piece, float]] = {}  # predicted pieces of layers still to come -> probability
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
        self._pass(view.n_layers)
        found = self._track.start(iteration, view)
        if found:
            ticket = yield self._search(self._track.start_values())
            for layer, rows in found.items():
                self._predict(layer, rows, view)
            if self.asynchronous:
                yield self._requeue(-1, (ticket,))
            else:
                yield from self._load(found)

    def gate_done(self, gate: Gate, view: View) -> Steps:
        if self.asynchronous:
            yield SERVE
        layer = gate.layer
        self._count_right(gate)
        found = self._track.step(gate, layer + self._d)
        tickets: tuple[Ticket, ...] = ()
        if found:
            ticket = yield self._search(self._track.step_values(gate))
            tickets = (ticket,)
            self._predict(layer + self._d, found, view)
        self._pass(layer)
        if self.asynchronous:
            yield self._requeue(layer, tickets)
        else:
            yield from self._load([layer + self._d])
            yield SERVE

    def iteration_end(self, iteration: Iteration, view: View) -> Steps:
        """Section 4.4: what was seen joins the store; the search for what it replaces is charged like any other."""
        self._ended += 1
        self._unasked += self.unasked()
        self._track.end(iteration)
        n_values = self._track.end_values()
        if n_values:
            yield self._search(n_values)

    def request_end(self, request: RequestInfo, view: View) -> None:
        self._track.request_end(request)

    def _search(self, n_values: int) -> Predict:
        """Compare `n_values` fp32 numbers with every stored map, streamed once from host memory."""
        self._searches += 1
        duration_s = self.search_overhead_s + self._track.n_stored * n_values * 4 / self._cpu_bytes_per_s
        return Predict(duration_s, "side", blocking=not self.asynchronous)

    def _predict(self, layer: int, found: list[Answer], view: View) -> None:
        """Equations 6 to 8 for every sequence; a batch takes the union of the sets and the larger probability."""
        probability: Floats | None = None
        chosen: dict[int, None] = {}
        for one in found:
            settled = one.settled(view.top_k, self.track == "map_tsd")
            if settled is not None:
                experts, shares = settled
                probability = shares if probability is None else np.maximum(probability, shares)
                chosen.update(dict.fromkeys(experts))
        likely = self.believe(layer, np.zeros(view.n_experts) if probability is None else probability)
        aimed = self._ahead[layer] = {view.piece(layer, expert): likely[expert] for expert in chosen}
        self.aim(aimed)

    def _pass(self, now: int) -> None:
        """Predictions for layers up to `now` have had their day."""
        for layer in [layer for layer in self._ahead if layer <= now]:
            self.passed(self._ahead.pop(layer))

    def _requeue(self, now: int, tickets: tuple[Ticket, ...]) -> Requeue:
        """Section 4.5: PRI = p / (l - l_now), rewritten as the pass moves on; passed layers are dropped."""
        wanted: list[Wanted] = []
        for layer, aimed in self._ahead.items():
            # Only what this search found waits for it; older predictions are there already.
            after = tickets if now < 0 or layer == now + self._d else ()
            gap = layer - now
            wanted += [(piece, p / gap, after) for piece, p in aimed.items()]
        return Requeue(wanted, now)

    def _load(self, layers: Iterable[int]) -> Steps:
        """What others do, says section 4.3: nothing is computed before prediction and prefetching are finished."""
        tickets: list[Ticket] = []
        for layer in layers:
            for piece, _ in sorted(self._ahead.get(layer, {}).items(), key=lambda aimed: -aimed[1]):
                ticket = yield Prefetch(piece)
                if ticket is not None:
                    tickets.append(ticket)
        yield Wait(tuple(tickets))

    # -- figures of its own -----------------------------------------------------------------------------------------

    def _count_right(self, gate: Gate) -> None:
        aimed = self._ahead.get(gate.layer)
        if aimed:
            self._needed += len(gate.needs)
            self._named += len(aimed)
            needs = gate.needs
            self._right += sum([piece.expert in needs for piece in aimed])

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
