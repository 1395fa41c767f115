"""What FineMoE's searcher may track (EuroSys'26, arXiv 2502.05370, section 4.2), and what Figure 14a puts in its place.

A track answers twice: before an iteration, for the layers nothing has been seen of yet, and after each gate, for the
layer `distance` ahead. An answer is a row of scores per sequence and how alike the source of that row was; of several
sequences the outlook takes the union of the sets and the larger probability.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from policies.common.foretold import drawn
from policies.fine_moe.map_store import MapStore, Trajectory, as_embedding, as_embeddings, as_map
from sim.policy import (
    DECODE,
    PREFILL,
    Gate,
    Iteration,
    Outlook,
    RequestInfo,
    StoreSplit,
    Surrogate,
    View,
    bundled,
    inverse_norm,
    origin,
    recalled,
)

Floats = NDArray[np.float64]
ALIKE = np.ones(1)  # the gate itself is asked


class Track:
    """What FineMoE needs of a way to track; costs are in numbers compared with all that is stored, and how many."""

    @property
    def n_stored(self) -> int:
        return 0

    def learn(self, store: StoreSplit) -> None:
        """Take in the store split."""

    def start(self, iteration: Iteration, view: View) -> int:
        """Choose for the first layers, and say for how many: for none where the track is blind."""
        return 0

    def step(self, gate: Gate, target: int) -> bool:
        """Take in a gate and choose for layer `target`, and all after it where the outlook is `to_last`.

        False where nothing can be said of them.
        """
        raise NotImplementedError

    def end(self, iteration: Iteration) -> None:
        """Keep what an iteration has shown."""

    def request_end(self, request: RequestInfo) -> None:
        """Keep what a request has shown."""

    def start_values(self) -> int:
        return 0

    def step_values(self, layer: int) -> int:
        return 0

    def end_values(self) -> int:
        return 0


class CountTrack(Track):
    """Request-level hit counts, what MoE-Infinity tracks: the past request whose counts are most like those so far."""

    def __init__(self, view: View, distance: int, outlook: Outlook) -> None:
        self._outlook, self._top_k = outlook, view.top_k
        self._shape = (view.n_layers, view.n_experts)
        self._distance = distance
        self._stored = np.zeros((0, view.n_layers * view.n_experts))
        self._inverse = np.zeros(0)
        self._running: dict[int, Floats] = {}
        self._n_ranges = 0

    @property
    def n_stored(self) -> int:
        return len(self._stored)

    def learn(self, store: StoreSplit) -> None:
        for request in store.requests:
            last_row = request.first_row + request.prompt_len + request.outputs - 1
            ids = store.trace.experts[request.first_row : last_row].astype(np.int64)
            counts = np.zeros(self._shape)
            np.add.at(counts, (np.arange(self._shape[0])[None, :, None], ids), 1.0)
            self._keep(counts)

    def _keep(self, counts: Floats) -> None:
        self._stored = np.concatenate([self._stored, counts.reshape(1, -1)])
        self._inverse = inverse_norm((self._stored * self._stored).sum(axis=1))

    def start(self, iteration: Iteration, view: View) -> int:
        self._n_ranges = len(iteration.ranges)
        for r in iteration.ranges:
            self._running.setdefault(r.request.index, np.zeros(self._shape))
        if not self.n_stored or not any(r.context for r in iteration.ranges):
            return 0
        self._search(iteration, 0, self._distance)
        return self._distance

    def step(self, gate: Gate, target: int) -> bool:
        ids, at = gate.ids, 0
        for r in gate.iteration.ranges:
            n = r.stop_row - r.start_row
            np.add.at(self._running[r.request.index][gate.layer], ids[at : at + n], 1.0)
            at += n
        if not self.n_stored or target >= self._shape[0]:
            return False
        self._search(gate.iteration, target, self._shape[0] if self._outlook.to_last else target + 1)
        return True

    def _search(self, iteration: Iteration, first: int, stop: int) -> None:
        """Choose for layers `first` to `stop` by the counts that are most like each request's so far."""
        # Of a new request nothing has been counted yet.
        known = [r for r in iteration.ranges if first or r.context]
        for i, r in enumerate(known):
            counts = self._running[r.request.index].reshape(-1)
            alike = (self._stored @ counts) * self._inverse * float(inverse_norm(counts.dot(counts)))
            best = int(alike.argmax())
            rows = self._stored[best].reshape(self._shape)[first:stop]
            similarities = np.full(stop - first, alike[best])
            self._outlook.choose(first, rows, similarities, self._top_k, False, i > 0)

    def request_end(self, request: RequestInfo) -> None:
        self._keep(self._running.pop(request.index))

    def start_values(self) -> int:
        return len(self._running) * self._stored.shape[1]

    def step_values(self, layer: int) -> int:
        return self._n_ranges * self._stored.shape[1]


class GateTrack(Track):
    """Speculation: the gate of the layer ahead on this layer's gate input, as Mixtral-Offloading and ProMoE predict.

    In prompts only where the trace records such scores of theirs. A `surrogate` stands in for the gate, in prompts as
    well: what it names is equally probable.
    """

    def __init__(self, view: View, distance: int, outlook: Outlook, surrogate: Surrogate | None = None) -> None:
        self._outlook, self._top_k = outlook, view.top_k
        self._distance, self._n_layers, self._n_experts = distance, view.n_layers, view.n_experts
        self._surrogate = surrogate
        self._in_prompts = surrogate is not None

    def learn(self, store: StoreSplit) -> None:
        """Whether gates ahead are recorded of prompts, too."""
        self._in_prompts = self._in_prompts or f"next_scores_{self._distance}" in store.trace.levels_prefill

    def step(self, gate: Gate, target: int) -> bool:
        if (gate.phase != DECODE and not self._in_prompts) or target >= self._n_layers:
            return False
        rows = self._named(gate, target) if self._surrogate else np.ascontiguousarray(gate.next_scores(self._distance))
        for i in range(len(rows)):
            self._outlook.choose(target, rows[i : i + 1], ALIKE, self._top_k, False, i > 0)
        return True

    def _named(self, gate: Gate, target: int) -> Floats:
        """The stand-in's answer as scores, by sequence [n, E]."""
        assert self._surrogate is not None
        every = drawn(self._surrogate, gate.iteration, target)
        rows = np.zeros((len(every), self._n_experts))
        for row, named in zip(rows, every, strict=True):
            row[named] = 1.0
        return rows


KEPT = ".fine_moe.maps"
"""Files of `policies/data` with what a bundled trace teaches at the published parameters; `tools/keep_maps.py` makes
them."""
KEPT_FORMAT = 1  # raised when another store would be learned from the same trace


def kept_for(store: StoreSplit) -> Path | None:
    """Where the maps of a trace of this name are kept; None where none are."""
    return bundled("policies.data", KEPT).get(store.trace.path.name.removesuffix(".safetensors"))


class MapTrack(Track):
    """Expert maps: semantic search for the first layers, then trajectory search (section 4.2).

    A decode token is a map. Of a prompt, `prefill` says: one map, the mean of its tokens' (`mean`), or one of each
    token, stored on its own: all are searched for (`union`), or all by meaning and the last one by trajectory
    (`release1`); or the mean is stored and nothing predicted (`none`).

    Args:
        outlook: takes the choices. last: a map's embedding is that of its last token, not their mean. semantic: search
            the first layers by embedding. threshold: choose by delta, see `Outlook.choose`.
    """

    def __init__(
        self,
        view: View,
        capacity: int,
        distance: int,
        outlook: Outlook,
        prefill: str,
        last: bool,
        semantic: bool,
        threshold: bool = True,
    ) -> None:
        self._outlook = outlook
        self.store = MapStore(capacity, view.n_layers, view.n_experts, distance)
        self._prefill, self._last, self._semantic = prefill, last, semantic
        self._distance = distance
        self._top_k, self._threshold = view.top_k, threshold
        self._by_token = prefill in ("union", "release1")
        self._found: list[tuple[list[int], list[float]]] = []  # of each map searched for: slot and likeness, by layer
        self._led: list[int] = []  # which of the iteration's maps are searched for by trajectory
        self._paths: list[Trajectory] = []  # where gates speak one by one
        self._passed: list[Floats] = []  # maps, where all layers are known
        self._spans: list[tuple[int, int]] = []  # rows of the iteration that make up one map each
        self._blind = True
        self._embeddings: list[Floats] = []
        self._has_alike = False  # whether the store has been searched by the last of them
        self._sums, self._counts = [0.0, 0.0], [0, 0]  # similarities of maps found by meaning, by trajectory

    @property
    def n_stored(self) -> int:
        return self.store.n_maps

    @property
    def n_searched(self) -> int:
        """Maps of the iteration that are searched for by trajectory."""
        return len(self._led)

    def learn(self, store: StoreSplit) -> None:
        """Fill the store with the maps of these requests, or with those that are kept of the same ones."""
        file = kept_for(store)
        kept = None if file is None else recalled(file, self.origin(store))
        if kept is not None:
            self.store.fill(kept["maps"].astype(np.float64), kept["embeddings"].astype(np.float64))
            return
        maps, embeddings = [], []
        for request in store.requests:
            rows = (request.first_row, request.first_row + request.prompt_len + request.outputs - 1)
            scores, meanings = store.trace.scores(*rows), store.trace.embeddings(*rows)
            n = request.prompt_len
            if not self._by_token:  # a prompt is one map
                maps.append(as_map(scores[:n])[None])
                embeddings.append(as_embedding(meanings[:n], self._last)[None])
                scores, meanings = scores[n:], meanings[n:]
            maps.append(scores)
            embeddings.append(as_embeddings(meanings))
        if maps:
            self.store.fill(np.concatenate(maps), np.concatenate(embeddings))

    def origin(self, store: StoreSplit) -> str:
        """What decides which maps are learned, as a digest."""
        own = {"capacity": self.store.capacity, "distance": self._distance}
        return origin(store, {"fine_moe": KEPT_FORMAT, "by_token": self._by_token, "last": self._last, **own})

    def _within(self, start: int, stop: int, phase: str) -> list[tuple[int, int]]:
        """Rows that make up one map each: single tokens, or what runs of a prompt together."""
        if phase == PREFILL and not self._by_token:
            return [(start, stop)]
        return [(row, row + 1) for row in range(start, stop)]

    def start(self, iteration: Iteration, view: View) -> int:
        self._spans, self._led, at = [], [], 0
        for r in iteration.ranges:
            first = len(self._spans)
            self._spans += self._within(at, at + r.stop_row - r.start_row, r.phase)
            at += r.stop_row - r.start_row
            self._led += range(len(self._spans) - 1 if self._prefill == "release1" else first, len(self._spans))
        self._paths, self._passed = [], []
        meanings = view.embeddings()
        self._embeddings = [as_embedding(meanings[start:stop], self._last) for start, stop in self._spans]
        self._has_alike = False
        self._blind = self.store.n_maps == 0 or (self._prefill == "none" and iteration.phase == PREFILL)
        if self._blind or not self._semantic:
            return 0
        stored, search = self.store.meanings, self.store.search()
        joins = False
        for embedding in self._embeddings:
            slot = stored.nearest(embedding, self.store.n_maps)
            similarity = float(stored.alike_array[slot])
            self._sums[0] += similarity
            self._outlook.choose_path(search, slot, similarity, 0, self._distance, self._top_k, self._threshold, joins)
            self._has_alike = joins = True
        self._counts[0] += len(self._embeddings)
        return self._distance

    def along(self, scores: Floats) -> bool:
        """What `step` finds for each layer from `distance` on, from the scores of all gates [n, L, E] at once.

        Where a prediction is about all layers to the last, the next one changes it: `choose_from` is to be asked.
        """
        self._passed = [as_map(scores[start:stop]) for start, stop in self._spans]
        self._found = []
        m = self.store.n_layers - self._distance
        if self._blind:
            return False
        for i, at in enumerate(self._led):
            search = self.store.along(self._passed[at])
            if not m:
                continue
            similarities = search.similarity_array[:m].tolist()
            self._sums[1] += sum(similarities)
            self._counts[1] += m
            if self._outlook.to_last:
                self._found.append((search.slot_array[:m].tolist(), similarities))
            else:
                self._outlook.choose_found(search, self._distance, m, self._top_k, self._threshold, i > 0)
        return m > 0 and bool(self._led)

    def choose_from(self, layer: int) -> None:
        """Choose for all layers that the prediction after `layer` is about, by what `along` has found."""
        search, first = self.store.search(), layer + self._distance
        m = self.store.n_layers - first
        for i, (slots, similarities) in enumerate(self._found):
            slot, similarity = slots[layer], similarities[layer]
            self._outlook.choose_path(search, slot, similarity, first, m, self._top_k, self._threshold, i > 0)

    def _choose(self, first: int, slots: NDArray[np.int64], similarities: Floats, joins: bool) -> None:
        """Choose for the layers from `first` on by the maps in these slots."""
        rows = self.store.rows(first, slots)
        self._outlook.choose(first, rows, similarities, self._top_k, self._threshold, joins)

    def step(self, gate: Gate, target: int) -> bool:
        """Take in a gate where later ones have not spoken, and choose for layer `target` (on), where there is one."""
        if gate.layer == 0:
            self._paths = [Trajectory(self.store) for _ in self._spans]
        scores = gate.scores
        for path, (start, stop) in zip(self._paths, self._spans, strict=True):
            path.observe(np.array(as_map(scores[start:stop])))
        if self._blind or target >= self.store.n_layers:
            return False
        m = self.store.n_layers - target if self._outlook.to_last else 1
        for i, at in enumerate(self._led):
            slot, similarity = self._paths[at].nearest()
            self._sums[1] += similarity
            self._choose(target, np.full(m, slot), np.full(m, similarity), i > 0)
        self._counts[1] += len(self._led)
        return True

    def similarities(self) -> tuple[float, float]:
        """Mean similarity of the maps found by meaning, and by trajectory; 9 digits, whatever the order of adding."""
        meaning, way = (round(total / n, 9) if n else 0.0 for total, n in zip(self._sums, self._counts, strict=True))
        return meaning, way

    def end(self, iteration: Iteration) -> None:
        """Section 4.4: the new maps join the store."""
        store = self.store
        passed = [np.stack(path.rows) for path in self._paths] or self._passed
        if len(passed) > 1:  # the first newcomer may change the store the others were compared with: compare again
            store.fill(np.stack(passed), np.stack(self._embeddings))
            return
        trajectory = semantic = norms = None
        if self._paths:
            trajectory = self._paths[0].similarities() if store.n_maps else None
        elif not self._blind:
            search = store.search()  # what it has found last was by this map
            trajectory, norms = search.whole_array[: store.n_maps], search.own_array
        if self._has_alike:
            semantic = store.meanings.alike_array[: store.n_maps]
        store.add(passed[0], self._embeddings[0], trajectory, semantic, norms)

    def start_values(self) -> int:
        return len(self._embeddings) * len(self._embeddings[0])

    def step_values(self, layer: int) -> int:
        return len(self._led) * (layer + 1) * self.store.n_experts

    def end_values(self) -> int:
        return len(self._spans) * (self.store.n_layers * self.store.n_experts + len(self._embeddings[0]))
