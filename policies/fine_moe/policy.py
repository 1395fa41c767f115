"""FineMoE (EuroSys'26, arXiv 2502.05370): expert maps guide prefetching and eviction.

Source: Yu, Cui, Zhang, Wang and Wang, "Taming Latency-Memory Trade-Off in MoE-Based LLM Serving via Fine-Grained
Expert Offloading"; code IntelliSys-Lab/FineMoE-EuroSys26, release 2 (80717e96). Sections cited at each step.
`variant=paper` follows the text, and release 1 (5c58468) where the text leaves something open: what is predicted for a
prompt, and of how many layers. `variant=code` follows release 2 where the two differ: no prediction during prefill,
the last token's embedding, one layer at a time, and eviction that may take a prefetched expert not used yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from policies.fine_moe.map_store import Floats
from policies.fine_moe.tracks import CountTrack, GateTrack, MapTrack, Track
from sim.policy import (
    FREE,
    LAST,
    SURROGATE,
    BadInput,
    Decision,
    Decisions,
    Foresee,
    Gate,
    Iteration,
    Outlook,
    Piece,
    Policy,
    Predict,
    Prefetch,
    Rank,
    RequestInfo,
    Serve,
    Steps,
    StoreSplit,
    Surrogate,
    Ticket,
    View,
    Wait,
    param,
)

SERVE = Serve()
MAX_GATE_DISTANCE = 3  # the farthest gates that traces record for this layer's input (traces/FORMAT.md)
# Section 6.7, Figure 15: the distance at which TTFT and TPOT are least; elsewhere the text says three for all.
PUBLISHED_DISTANCE = {"mixtral-8x7b": 3, "qwen1.5-moe-a2.7b": 6, "phi-3.5-moe": 4}
PREFILL_OF = {"paper": "release1", "code": "none"}
HORIZON_OF = {"paper": "all", "code": "distance"}


class FineMoe(Policy):
    """Searches a store of past iterations for the one most like the current one, and trusts its gate scores."""

    name = "fine_moe"
    title = "FineMoE: expert-map search"
    source = "arXiv 2502.05370 (EuroSys'26); IntelliSys-Lab/FineMoE-EuroSys26@80717e96"
    aliases = ("finemoe", "fmoe")
    traits = frozenset({"timing"})
    needs = frozenset({"experts", "scores", "embeddings"})
    variant: str = param("paper", "the paper's text, or release 2 of the code where it differs", ("paper", "code"))
    distance: int | None = param(
        None,
        "layers between a prediction and its target; published: Mixtral 3, Qwen1.5-MoE 6, Phi-3.5-MoE 4 (section "
        "6.7), 3 for any other model",
        within=(1, 64),
    )
    horizon: str | None = param(
        None,
        "layers that a prediction is about: all from `distance` ahead to the last (all: l in [L] in equations 6 to 8 "
        "and PRI_prefetch of sections 4.3 and 4.5; release 1), or the one `distance` ahead (distance: the layer that "
        "section 4.2.2 searches for; release 2). Left out: all for paper, distance for code, for track=speculate, "
        "whose gate names one layer, and for asynchronous=false, which would wait for all",
        ("all", "distance"),
    )
    prefill: str | None = param(
        None,
        "what is predicted for a prompt, of whose tokens the text says nothing; each is a map of its own: what "
        "searches for all of them name in the first `distance` layers, and for the last one in the others "
        "(release1); what searches for all of them name in every layer (union: assumed); what the mean of them "
        "names, one map (mean: assumed); nothing (none: release 2). Left out: release1 for paper, none for code",
        ("release1", "union", "mean", "none"),
    )
    capacity: int = param(1000, "maps in the store (section 6.7: knee at 1K)", within=(1, 100_000))
    mode: str = param(
        "offline",
        "offline: the store split fills the store (section 6.1); online: it starts empty (section 6.3)",
        ("offline", "online"),
    )
    track: str = param(
        "map_tsd",
        "what predicts (Figure 14a): the next gates on this gate's input, request-level hit counts, or maps by "
        "trajectory, with semantic search, with the delta threshold",
        ("speculate", "hit_count", "map_t", "map_ts", "map_tsd"),
    )
    predictor: str = param(
        "gate_reuse",
        "what track=speculate asks: a later gate on this layer's gate input (next_scores of the trace, in prompts "
        "where it has theirs); or surrogate:SHARE, a labelled stand-in that is right for so many, in prompts, too",
    )
    evict: str = param(
        "fine_moe", "what is evicted (Figure 14b): least p x freq (section 4.5), LRU or LFU", ("fine_moe", "lru", "lfu")
    )
    freq: str = param(
        "visits",
        "what freq in p x freq counts, and what LFU does: every gate that asks for the expert, found or not, and for "
        "good (visits: section 4.5's cache visit frequency; release 2); those that find it (hits: section 4.5's less "
        "frequently hit); those since it was loaded (since_loaded: release 1)",
        ("visits", "hits", "since_loaded"),
    )
    asynchronous: bool = param(
        True, "search and prefetch beside the forward pass (section 4.3); false: a layer waits until both are finished"
    )
    search_overhead_s: float = param(
        2e-4,
        "fixed cost of a search, a few tensor operations in Python (assumed; section 6.8 bounds all of FineMoE's "
        "overhead by 50 ms per iteration)",
        within=(0.0, 1.0),
    )
    depth: int = param(
        2,
        "speculative copies handed to each GPU's copy engine at once: one in flight, one behind it, so that one "
        "follows the other as from a worker thread (release 1, MoE-Infinity's code); release 2 keeps 1 in flight",
        within=(1, 64),
    )

    def __init__(self, **values: object) -> None:
        super().__init__(**values)
        if self.track == "hit_count":
            self.needs = frozenset({"experts"})
        elif self.track == "speculate" and self.predictor.startswith(SURROGATE):
            self.needs, self.labels = frozenset({"experts"}), (SURROGATE,)
        elif self.track == "speculate":
            if (self.distance or 0) > MAX_GATE_DISTANCE:
                raise BadInput(
                    f"parameter fine_moe.distance, got {self.distance} with track=speculate: traces record "
                    f"the gates of {MAX_GATE_DISTANCE} layers ahead at most; lower it"
                )
            self.distance = self.settings["distance"] = self.distance or MAX_GATE_DISTANCE
            self.needs = frozenset({"experts", f"next_scores_{self.distance}"})
        if self.track == "speculate" and self.horizon == "all":
            raise BadInput(
                "parameter fine_moe.horizon, got 'all' with track=speculate: a gate is asked about one layer; "
                "leave it out"
            )
        if self.predictor != "gate_reuse" and not self.labels:
            raise BadInput(
                f"parameter fine_moe.predictor, got {self.predictor!r} with track={self.track}: gate_reuse, "
                "or surrogate:0.85 with track=speculate; take one of them"
            )

    def bind(self, view: View) -> None:
        self.prefetch_depth = self.depth if self.asynchronous else None
        published = PUBLISHED_DISTANCE.get(view.model_name, 3)
        self._d = min(int(self.distance or published), view.n_layers)
        self.settings["distance"] = self._d
        one_layer = self.track == "speculate" or not self.asynchronous
        self.settings["horizon"] = horizon = self.horizon or ("distance" if one_layer else HORIZON_OF[self.variant])
        self._to_last = horizon == "all"
        self._bind_cache(view, self._d, self._to_last)
        self._track = self._tracking(view)
        self._maps = self._track if isinstance(self._track, MapTrack) else None
        self._foreseeing = self._foresee  # one name for one work: it is asked for once per iteration
        self._cpu_bytes_per_s = view.prices.cpu_bytes_per_s
        self._predicts: list[Predict] = []  # by layer
        self._steps: list[list[Decision]] = []  # what a layer comes to of which a prediction is made
        self._predicts_of = (-1, -1)  # maps stored, and sequences searched for, when those were worked out
        self._searches = self._ended = self._unasked = 0

    def _tracking(self, view: View) -> Track:
        if self.track == "speculate":
            stand_in = Surrogate(self.predictor, view.top_k, view.n_experts, 0) if self.labels else None
            return GateTrack(view, self._d, self.outlook, stand_in)
        if self.track == "hit_count":
            return CountTrack(view, self._d, self.outlook)
        self.settings["prefill"] = prefill = self.prefill or PREFILL_OF[self.variant]
        semantic, threshold = self.track != "map_t", self.track == "map_tsd"
        last = self.variant == "code"
        return MapTrack(view, self.capacity, self._d, self.outlook, prefill, last, semantic, threshold)

    def learn(self, store: StoreSplit) -> None:
        if self.mode == "offline" or self.track == "speculate":
            self._track.learn(store)

    # -- searching (section 4.2) ------------------------------------------------------------------------------------

    def iteration_start(self, iteration: Iteration, view: View) -> Steps:
        n_foretold = self._track.start(iteration, view)
        self._layer_searches(len(iteration.ranges) if self._maps is None else self._maps.n_searched)
        if n_foretold:
            ticket = yield self._search(self._track.start_values())
            self._searches += 1
            for layer in range(n_foretold):
                self.outlook.believe(layer)
            if self.asynchronous:
                yield self.outlook.ahead(-1, (ticket,))
            else:
                yield from self._load(range(n_foretold), view)

    def gate_done(self, gate: Gate, view: View) -> Decisions:
        """Section 4.3: search and prefetch while the layer computes."""
        if not self.asynchronous:
            return self._between(gate, view)
        layer = gate.layer
        self._visit(layer, gate.needs, view)
        # Of all layers at once, where that can be: nothing is believed of it before the layer has been served.
        told: bool | None = None if self._maps is None else gate.at_once(self._foreseeing)
        if told is None:
            return self._beside(gate)
        if not told:
            return [SERVE, Foresee(self.outlook, layer)]
        self._searches += 1
        if self._to_last and self._maps is not None:
            self._maps.choose_from(layer)
        return self._steps[layer]

    def _beside(self, gate: Gate) -> Steps:
        """Serve, then search for this layer alone; section 4.5: the queue is rewritten as the pass moves on."""
        layer = gate.layer
        yield SERVE
        told = self._track.step(gate, layer + self._d)
        self._searches += told
        yield Foresee(self.outlook, layer, self._predicts[layer] if told else None)

    def _between(self, gate: Gate, view: View) -> Steps:
        """What others do: the layer waits until search and prefetch are finished."""
        layer, outlook = gate.layer, self.outlook
        target = layer + self._d
        told: bool | None = None if self._maps is None else gate.at_once(self._foreseeing)
        if self._track.step(gate, target) if told is None else told:
            if told and self._to_last and self._maps is not None:
                self._maps.choose_from(layer)
            yield self._predicts[layer]
            self._searches += 1
            outlook.foresee(layer)
        outlook.forget(layer)
        yield from self._load(range(target, view.n_layers) if self._to_last else [target], view)
        self._visit(layer, gate.needs, view)
        yield SERVE

    def _foresee(self, scores: Floats) -> list[bool]:
        """By layer, whether its gate says something of later ones; scores of all of them [n, L, E]."""
        assert self._maps is not None
        n_layers = self.outlook.n_layers
        n_told = n_layers - self._d if self._maps.along(scores) else 0
        return [True] * n_told + [False] * (n_layers - n_told)

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
            self._predicts = [self._search(self._track.step_values(layer)) for layer in range(self.outlook.n_layers)]
            self._steps = [
                [SERVE, Foresee(self.outlook, layer, predict)] for layer, predict in enumerate(self._predicts)
            ]

    def _load(self, layers: Iterable[int], view: View) -> Steps:
        """What others do, says section 4.3: nothing is computed before prediction and prefetching are finished."""
        tickets: list[Ticket | None] = []
        for layer in (layer for layer in layers if layer < view.n_layers):
            named = sorted(self.outlook.named_of(layer), key=lambda named: -named[1])
            tickets += yield [Prefetch(view.piece(layer, expert)) for expert, _ in named]
        yield Wait(tuple(ticket for ticket in tickets if ticket is not None))

    # -- the cache (section 4.5) ------------------------------------------------------------------------------------
    # State of all experts lies in rows by `Piece.index`. Highest 1 / (p * freq) is evicted first, that is least
    # p * freq; ties go to the lowest expert, then lowest layer. The paper leaves open what protects an expert that was
    # prefetched and has freq = 0. Text (`paper`): its prediction does, until its layer has passed, as long as any other
    # expert can go; after that it is ranked by p * freq like all others, one never visited first. Release 2 (`code`):
    # nothing, but only a demand may take it.

    def _bind_cache(self, view: View, distance: int, to_last: bool) -> None:
        """Size the state. The rule `evict` is fine_moe (p x freq), lru or lfu (the ablation of Figure 14b)."""
        # The order of leaving: least rank, whoever holds the expert; who is aimed at leaves last, or what no gate has
        # asked for since it was prefetched leaves for no other prefetch.
        self.order = Rank(view.n_layers * view.n_experts, spares_unused=self.variant == "code")
        by_worth = self.evict == "fine_moe"
        bar = LAST if self.variant == "paper" else FREE
        self.outlook = Outlook(view.n_layers, view.n_experts, distance, self.order, bar, by_worth, to_last)
        # None where the outlook ranks; else the same memory, for single numbers: a quarter of what numpy takes.
        self.ranks: Any = None if by_worth else self.order.rank.data
        self._clock = 0

    def _visit(self, layer: int, needs: dict[int, int], view: View) -> None:
        """A gate has asked for these."""
        outlook = self.outlook
        outlook.visit(layer, needs)
        if self.ranks is not None:
            self._rank_otherwise(layer, needs, view)
        elif self.freq == "hits":
            base = layer * view.n_experts
            for expert in needs:
                if not view.resident(layer, expert):
                    outlook.uncount(base + expert, 1.0)

    def evicted(self, piece: Piece, view: View) -> None:
        if self.freq == "since_loaded":
            if self.ranks is None:
                self.outlook.uncount(piece.index, math.inf)
            elif self.evict == "lfu":
                self.ranks[piece.index] = 0.0

    def _rank_otherwise(self, layer: int, needs: dict[int, int], view: View) -> None:
        """Their ranks by LRU or LFU.

        None of these can leave before it has run, so its rank may change before it is fetched.
        """
        base, ranks = layer * view.n_experts, self.ranks
        if self.evict == "lru":
            # Those that are there are used before those that are to come.
            for expert in sorted(needs, key=lambda expert: not view.resident(layer, expert)):
                self._clock += 1
                ranks[base + expert] = float(self._clock)
        else:
            for expert in needs:
                if self.freq != "hits" or view.resident(layer, expert):
                    ranks[base + expert] += 1.0

    # -- figures of its own -----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """predicted_frac: share of the chosen experts that were predicted; right_frac: of the predicted, chosen.

        semantic_similarity, trajectory_similarity: of the maps found, on average (Figure 16a). unasked_experts: held as
        an iteration ends though no gate has asked for them since they were prefetched, on average.
        """
        outlook = self.outlook
        found = self._track.similarities() if isinstance(self._track, MapTrack) else (0.0, 0.0)
        return {
            "maps": self._track.n_stored,
            "store_bytes": self._track.store.n_bytes if isinstance(self._track, MapTrack) else 0,
            "searches": self._searches,
            "semantic_similarity": found[0],
            "trajectory_similarity": found[1],
            "predicted_frac": outlook.right / outlook.needed if outlook.needed else 0.0,
            "right_frac": outlook.right / outlook.named if outlook.named else 0.0,
            "unasked_experts": self._unasked / self._ended if self._ended else 0.0,
        }
