"""FineMoE (EuroSys'26, arXiv 2502.05370): expert maps guide prefetching and eviction.

Source: Yu, Cui, Zhang, Wang and Wang, "Taming Latency-Memory Trade-Off in MoE-Based LLM Serving via Fine-Grained
Expert Offloading"; code IntelliSys-Lab/FineMoE-EuroSys26, release 2 (80717e96). Sections cited at each step.
`variant=paper` follows the text; `variant=code` follows release 2 where the two differ:
no prediction during prefill, the last token's embedding, and eviction that may take a prefetched expert not used yet.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from policies._expert_maps import MapStore, Trajectory, as_embedding, as_map, select
from policies._map_cache import MapCache
from sim.api import Param, Policy, Steps
from sim.decisions import DropQueue, Predict, Prefetch, Requeue, Serve
from sim.iterations import PREFILL, Gate, Iteration
from sim.machine import Ticket
from sim.pieces import Piece
from sim.store import StoreSplit
from sim.view import View

# Section 6.7, Figure 15: the distance at which TTFT and TPOT are least; elsewhere the text says three for all.
PUBLISHED_DISTANCE = {"mixtral-8x7b": 3, "qwen1.5-moe-a2.7b": 6, "phi-3.5-moe": 4}


class FineMoe(Policy):
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
        Param("capacity", 1000, "maps in the store (section 6.7: knee at 1K)", low=1, high=100_000),
        Param("mode", "offline", "offline: the store split fills the store (section 6.1); online: it starts empty "
              "(section 6.3)", ("offline", "online")),
        Param("track", "map_tsd", "what is searched (Figure 14a): trajectory only, plus semantic, plus the delta "
              "threshold", ("map_t", "map_ts", "map_tsd")),
        Param("evict", "fine_moe", "what is evicted (Figure 14b): least p x freq (section 4.5), LRU or LFU",
              ("fine_moe", "lru", "lfu")),
        Param("asynchronous", True, "search beside the forward pass (section 4.3); false blocks the host"),
        Param("search_overhead_s", 2e-4, "fixed cost of a search, a few tensor operations in Python (assumed; "
              "section 6.8 bounds all of FineMoE's overhead by 50 ms per iteration)", low=0.0, high=1.0),
        Param("depth", 2, "speculative copies handed to the copy engine at once: one in flight, one behind it "
              "(release 2 keeps 1 in flight)", low=1, high=64),
    )  # fmt: skip
    variant: str
    distance: int | None
    capacity: int
    mode: str
    track: str
    evict: str
    asynchronous: bool
    search_overhead_s: float
    depth: int

    def bind(self, view: View) -> None:
        self.prefetch_depth = self.depth
        published = PUBLISHED_DISTANCE.get(view.model_name, 3)
        self._d = min(int(self.distance or published), view.n_layers)
        self.settings["distance"] = self._d
        self._store = MapStore(self.capacity, view.n_layers, view.n_experts, self._d)
        self._cache = MapCache(view, self.evict, self.variant)
        self._ahead: dict[int, dict[Piece, float]] = {}  # predicted pieces of layers still to come -> probability
        self._paths: list[Trajectory] = []
        self._needed = self._named = self._right = self._searches = 0

    def learn(self, store: StoreSplit) -> None:
        if self.mode == "online":
            return
        maps, embeddings = [], []
        for r in store.iterations():
            rows = (r.start_row, r.stop_row)
            maps.append(as_map(store.trace.scores(*rows)))
            embeddings.append(as_embedding(store.trace.embeddings(*rows), self.variant == "code"))
        if maps:
            self._store.fill(np.stack(maps), np.stack(embeddings))

    # -- searching (section 4.2) ------------------------------------------------------------------------------------

    def iteration_start(self, iteration: Iteration, view: View) -> Steps:
        self._pass(view.n_layers)
        self._paths = [Trajectory(self._store) for _ in iteration.ranges]
        self._embeddings = self._per_range(iteration, view.embeddings(), self.variant == "code")
        self._maps: list[list[NDArray[np.float64]]] = [[] for _ in iteration.ranges]
        if self._blind(iteration.phase) or self.track == "map_t":
            return
        ticket = yield self._search(len(iteration.ranges) * len(self._embeddings[0]), view)
        scores = [self._store.semantic(embedding) for embedding in self._embeddings]
        for target in range(self._d):
            self._predict(target, scores, view)
        yield from self._requeue(-1, (ticket,), view)

    def gate_done(self, gate: Gate, view: View) -> Steps:
        yield Serve()
        self._count_right(gate)
        scores = gate.scores
        at = 0
        for path, r, rows in zip(self._paths, gate.iteration.ranges, self._maps, strict=True):
            n = r.stop_row - r.start_row
            row = scores[at] if n == 1 else np.rint(scores[at : at + n].mean(axis=0))
            path.observe(row)
            rows.append(row)
            at += n
        target = gate.layer + self._d
        tickets: tuple[Ticket, ...] = ()
        if target < view.n_layers and not self._blind(gate.phase):
            prefix = len(self._paths) * (gate.layer + 1) * view.n_experts
            ticket = yield self._search(prefix, view)
            tickets = (ticket,)
            self._predict(target, [path.similarities() for path in self._paths], view)
        yield from self._requeue(gate.layer, tickets, view)

    def iteration_end(self, iteration: Iteration, view: View) -> Steps:
        """Section 4.4: the new maps join the store; the search for what they replace is charged like any other."""
        # In a batch the first newcomer may change the store the others were compared with: they compare again.
        known = self._paths[0].similarities() if len(self._paths) == 1 and self._store.n_maps else None
        for embedding, rows in zip(self._embeddings, self._maps, strict=True):
            self._store.add(np.stack(rows), embedding, known)
        yield self._search(len(self._paths) * (view.n_layers * view.n_experts + len(self._embeddings[0])), view)

    def _blind(self, phase: str) -> bool:
        return self._store.n_maps == 0 or (self.variant == "code" and phase == PREFILL)

    def _search(self, n_values: int, view: View) -> Predict:
        """Compare `n_values` fp32 numbers with every stored map, streamed once from host memory."""
        self._searches += 1
        duration_s = self.search_overhead_s + self._store.n_maps * n_values * 4 / view.prices.cpu_bytes_per_s
        return Predict(duration_s, "side", blocking=not self.asynchronous)

    def _predict(self, layer: int, similarities: list[NDArray[np.float64]], view: View) -> None:
        """Equations 6 to 8 for every sequence; a batch takes the union of the sets and the larger probability."""
        probability = np.zeros(view.n_experts)
        chosen: dict[int, None] = {}
        for scores in similarities:
            best = int(np.argmax(scores))
            row = self._store.maps[layer, :, best]
            similarity = float(scores[best])
            total = row.sum()
            if total <= 0:
                continue
            probability = np.maximum(probability, row / total)
            for expert in select(row, similarity, view.top_k, self.track == "map_tsd"):
                chosen[expert] = None
        self._cache.believe(layer, probability)
        aimed = self._ahead[layer] = {view.piece(layer, expert): float(probability[expert]) for expert in chosen}
        self._cache.aim(aimed, True)

    def _pass(self, now: int) -> None:
        """Predictions for layers up to `now` have had their day."""
        for layer in [layer for layer in self._ahead if layer <= now]:
            self._cache.aim(self._ahead.pop(layer), False)

    def _requeue(self, now: int, tickets: tuple[Ticket, ...], view: View) -> Steps:
        """Section 4.5: PRI = p / (l - l_now), rewritten as the pass moves on; passed layers are dropped."""
        self._pass(now)
        yield DropQueue(up_to_layer=now)
        target = now + self._d if now >= 0 else None
        yield Requeue(
            tuple(
                # Only what this search found waits for it; older predictions are there already.
                Prefetch(piece, p / (layer - now), tickets if target in (None, layer) else ())
                for layer, aimed in self._ahead.items()
                for piece, p in aimed.items()
                if not view.holds(piece)
            )
        )

    @staticmethod
    def _per_range(iteration: Iteration, embeddings: NDArray[np.float32], last: bool) -> list[NDArray[np.float64]]:
        found, at = [], 0
        for r in iteration.ranges:
            n = r.stop_row - r.start_row
            found.append(as_embedding(embeddings[at : at + n], last))
            at += n
        return found

    # -- caching (section 4.5) --------------------------------------------------------------------------------------

    def accessed(self, piece: Piece, hit: bool, view: View) -> None:
        self._cache.used(piece)

    def placed(self, piece: Piece, view: View) -> None:
        self._cache.placed(piece)

    def evicted(self, piece: Piece, view: View) -> None:
        self._cache.evicted(piece)

    def victim(self, piece: Piece, speculative: bool, view: View) -> Piece | None:
        return self._cache.victim(piece.gpu, speculative, view)

    # -- figures of its own -----------------------------------------------------------------------------------------

    def _count_right(self, gate: Gate) -> None:
        predicted = {piece.expert for piece in self._ahead.get(gate.layer, ())}
        if predicted:
            self._needed += len(gate.needs)
            self._named += len(predicted)
            self._right += sum(expert in predicted for expert in gate.needs)

    def stats(self) -> dict[str, float]:
        """predicted_frac: share of the chosen experts that were predicted; right_frac: of the predicted, chosen."""
        return {
            "maps": self._store.n_maps,
            "store_bytes": self._store.n_bytes,
            "searches": self._searches,
            "predicted_frac": self._right / self._needed if self._needed else 0.0,
            "right_frac": self._right / self._named if self._named else 0.0,
        }
