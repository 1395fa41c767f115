"""MoE-Infinity (arXiv 2401.14361): activation matrices of past requests tell which experts the next layers will need.

Source: Xue, Fu, Lu, Mai and Marina, "MoE-Infinity: Offloading-Efficient MoE Model Serving" (v3), and
EfficientMoE/MoE-Infinity. Its behaviours differ, and papers that compare with it mean any of them:

- `variant=paper`: the current iteration's matrix is matched with the collection by cosine after every layer; prefetches
  of later layers in order of share x closeness; the expert of least (share + epsilon) x (1 - layer / L) is evicted
  (Algorithm 1). Requests that end join the collection.
- `variant=code2024` (up to 350f0dd, August 2024): predicts on the host inside every layer; its matching sees later rows
  only (`Collection.likest_ahead`); nothing joins the collection; only experts of layers that have run may be evicted,
  the most visited first.
- `variant=code_head` (d617801): no prediction and no prefetching; the least visited expert is evicted, counts are never
  reset. Its free-room counter also counts hits, so that room is lost for good: `phantom_slots=true` replicates it.

Where 2024's code has nothing it may evict for a demanded expert (layer 0 with a full cache), the same order over all
experts is used: what the code does then is not known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np

from policies._eam import Collection, activations, of_range
from sim.policy import (
    DECODE,
    PREFILL,
    Evict,
    Fetch,
    Gate,
    Iteration,
    Param,
    Piece,
    Policy,
    Predict,
    Prefetch,
    RequestInfo,
    Requeue,
    RunGpu,
    Steps,
    StoreSplit,
    Ticket,
    View,
)

CAPACITY = {"paper": 120, "code2024": 1000, "code_head": 1}


class MoeInfinity(Policy):
    """Prefetches and evicts by the activation matrix of the most similar past request."""

    name = "moe_infinity"
    title = "MoE-Infinity: activation-aware offloading"
    source = "arXiv 2401.14361 v3; EfficientMoE/MoE-Infinity@350f0dd and @d617801"
    traits = frozenset({"timing"})
    params = (
        Param("variant", "paper", "the paper (v3), the code of August 2024, or that of March 2026",
              ("paper", "code2024", "code_head")),
        Param("capacity", None, "matrices in the collection; published: 120 (paper), 1000 (code2024)", low=1,
              high=100_000),
        Param("mode", "offline", "offline: the store split fills the collection; online: it starts empty (as FineMoE's "
              "section 6.3 runs it)", ("offline", "online")),
        Param("epsilon", 1e-8, "added to shares and counts, so that every expert has an order (code)", low=0.0,
              high=1.0),
        Param("lookup_s", 2.1e-8, "time of a lookup per matrix in the collection (paper: 21 us at 1,000)", low=0.0,
              high=1.0),
        Param("guarded", True, "paper: a prefetch evicts only what scores less than itself (assumed); false: whatever "
              "scores least"),
        Param("phantom_slots", False, "code_head: hits use up free room, as the code's counter has it"),
        Param("evict", "variant", "the variant's own rule, or one of the repository's simulator: LRU, LRU that spares "
              "this layer and the next two, LFU", ("variant", "lru", "lru_ds", "lfu")),
        Param("queue", 16, "prefetches queued at a time; the queue is replaced at every layer", low=1, high=100_000),
    )  # fmt: skip
    variant: str
    capacity: int | None
    mode: str
    epsilon: float
    lookup_s: float
    guarded: bool
    phantom_slots: bool
    evict: str
    queue: int

    def bind(self, view: View) -> None:
        shape = self._shape = (view.n_layers, view.n_experts)
        self.settings["capacity"] = capacity = int(self.capacity or CAPACITY[self.variant])
        self._predicts = self.variant != "code_head"
        self.prefetch_depth = 1 if self._predicts else None  # one worker per GPU, one copy at a time
        # v3 keeps prompts and generation apart; the code does not.
        both = {phase: Collection(capacity, *shape) for phase in (PREFILL, DECODE)}
        self._collections = both if self.variant == "paper" else dict.fromkeys(both, both[PREFILL])
        self._traced: dict[int, dict[str, np.ndarray]] = {}  # active request -> phase -> counts
        self._live = np.zeros(shape)  # all active requests' counts together
        self._matched: list[int] = []
        self._products = np.zeros(0)
        self._shares = np.zeros(shape)  # pEAM, rows normalised
        self._resident = [np.zeros(shape, dtype=bool) for _ in range(view.n_gpus)]
        self._home = [[view.piece(layer, e).gpu for e in range(shape[1])] for layer in range(shape[0])]
        n = shape[0] + (self.variant == "code2024")
        self._closeness = (1.0 - np.arange(shape[0]) / n)[:, None]  # of a layer that many layers on
        self._decay = 1.0 - np.arange(shape[0]) / shape[0]
        self._visits = np.zeros(shape)
        self._last = np.zeros(shape)
        self._clock = 0
        self._free = [view.capacity_of(gpu) for gpu in range(view.n_gpus)]  # the counter of code_head
        self._n_dry = self._n_asked = 0

    def learn(self, store: StoreSplit) -> None:
        """The offline collection: the store split's requests."""
        if not self._predicts or self.mode == "online":
            return
        for request in store.requests:
            start, middle = request.first_row, request.first_row + request.prompt_len
            end = middle + request.outputs - 1
            ids = store.trace.experts[start:end].astype(np.int64)
            n = middle - start
            self._keep({PREFILL: activations(ids[:n], self._shape[1]), DECODE: activations(ids[n:], self._shape[1])})

    def _keep(self, counts: dict[str, np.ndarray]) -> None:
        if self.variant == "paper":
            for phase, matrix in counts.items():
                self._collections[phase].add(matrix)
        else:
            self._collections[PREFILL].add(counts[PREFILL] + counts[DECODE])

    # -- tracing ----------------------------------------------------------------------------------------------------

    def iteration_start(self, iteration: Iteration, view: View) -> None:
        collection = self._collections[iteration.phase]
        self._products = np.zeros(len(collection))
        if self.variant == "code2024" and len(collection):
            self._matched = collection.likest_ahead(self._live)

    def iteration_end(self, iteration: Iteration, view: View) -> None:
        if not self._predicts:
            return
        for index, r in enumerate(iteration.ranges):
            counts = of_range(iteration, index, *self._shape)
            traced = self._traced.setdefault(r.request.index, {p: np.zeros(self._shape) for p in (PREFILL, DECODE)})
            traced[r.phase] += counts
            self._live += counts

    def request_end(self, request: RequestInfo, view: View) -> None:
        if not self._predicts:
            return
        counts = self._traced.pop(request.index)
        self._live -= counts[PREFILL] + counts[DECODE]
        if self.variant == "paper":
            self._keep(counts)

    # -- a layer ----------------------------------------------------------------------------------------------------

    def gate_done(self, gate: Gate, view: View) -> Steps:
        if self.variant == "code2024":
            yield from self._look_ahead(gate, view)
        yield from self._serve(gate, view)
        if self.variant == "paper":
            yield from self._look_ahead(gate, view)

    def _serve(self, gate: Gate, view: View) -> Steps:
        """Experts are dispatched in ascending order; each is computed once it is there."""
        layer, here = gate.layer, []
        unsent: deque[tuple[Piece, bool]] = deque()  # and whether an expert must leave, whatever room there is
        for expert in sorted(gate.needs):
            piece = view.piece(layer, expert)
            self._clock += 1
            self._visits[layer, expert] += 1
            self._last[layer, expert] = self._clock
            exhausted = self.phantom_slots and not self._free[piece.gpu]
            self._free[piece.gpu] = max(0, self._free[piece.gpu] - 1)
            if view.holds(piece):
                here.append(piece)
                yield Fetch(piece)  # one that is still queued goes first
            else:
                unsent.append((piece, exhausted and self.variant == "code_head"))
        left = here + [piece for piece, _ in unsent]
        yield from self._send(unsent, view)
        while left:
            # A queued prefetch of a later one may have taken the room that the first one needs.
            piece = next(piece for piece in left if view.holds(piece))
            left.remove(piece)
            yield RunGpu(piece.expert)
            yield from self._send(unsent, view)

    def _send(self, unsent: deque[tuple[Piece, bool]], view: View) -> Iterator[Evict | Fetch]:
        while unsent:
            piece, must_evict = unsent[0]
            victim = self.victim(piece, False, view)
            if victim is None and (must_evict or view.free_bytes(piece.gpu) < piece.n_bytes):
                return  # until one of the layer's own experts has run
            if must_evict and victim is not None:
                yield Evict(victim)
            yield Fetch(piece)
            self._resident[piece.gpu][piece.layer, piece.expert] = True
            unsent.popleft()

    # -- predicting and prefetching ---------------------------------------------------------------------------------

    def _look_ahead(self, gate: Gate, view: View) -> Steps:
        collection = self._collections[gate.phase]
        if not len(collection):
            return
        layer, (n_layers, n_experts) = gate.layer, self._shape
        lane = "host" if self.variant == "code2024" else "side"
        ticket: Ticket = yield Predict(self.lookup_s * len(collection), lane)
        if self.variant == "code2024":
            first = layer
            scores = (collection[self._matched[layer]][layer:] + self.epsilon) * self._closeness[: n_layers - layer]
        else:
            counts = np.zeros(n_experts)
            counts[list(gate.needs)] = list(gate.needs.values())
            self._products += collection.products(layer, counts)
            self._shares, first = collection.shares(collection.likest(self._products)), layer + 1
            scores = (self._shares[first:] + self.epsilon) * self._closeness[1 : n_layers - layer]
        self._n_asked += 1
        self._n_dry += layer > 0 and not view.queued()
        absent = ~np.logical_or.reduce(self._resident)[first:]
        scores = np.where(absent, scores, -1.0)
        order = np.argsort(-scores, axis=None, kind="stable")[: self.queue].tolist()
        wanted = [
            Prefetch(view.piece(first + at // n_experts, at % n_experts), float(scores.flat[at]), (ticket,))
            for at in order
            if scores.flat[at] >= 0.0
        ]
        yield Requeue(tuple(wanted))

    # -- eviction ---------------------------------------------------------------------------------------------------

    def placed(self, piece: Piece, view: View) -> None:
        self._resident[piece.gpu][piece.layer, piece.expert] = True

    def evicted(self, piece: Piece, view: View) -> None:
        self._resident[piece.gpu][piece.layer, piece.expert] = False
        if self.variant == "code2024":
            self._visits[piece.layer, piece.expert] = 0

    def victim(self, piece: Piece, speculative: bool, view: View) -> Piece | None:
        ranks, there = self._ranks(), self._resident[piece.gpu].copy()
        there[view.layer, view.owed()] = False
        if self.variant == "code2024" and self.evict == "variant":
            done = there.copy()
            done[view.layer :] = False  # what is ahead is in the list of candidates for prefetching
            if speculative or done.any():
                there = done
        elif self.evict == "lru_ds":
            spared = there.copy()
            spared[view.layer : view.layer + 3] = False
            there = spared if speculative or spared.any() else there
        if not there.any():
            return None
        # Flat order is layer by layer; code_head's ties go to the lowest expert of any layer.
        if self.variant == "code_head" and self.evict == "variant":
            expert, layer = divmod(int(np.argmin(np.where(there, ranks, np.inf).T)), self._shape[0])
        else:
            layer, expert = divmod(int(np.argmin(np.where(there, ranks, np.inf))), self._shape[1])
        refused = speculative and self.variant == "paper" and self.evict == "variant" and self.guarded
        if refused and ranks[layer, expert] >= ranks[piece.layer, piece.expert]:
            return None
        return view.piece(layer, expert)

    def _ranks(self) -> np.ndarray:
        """Who leaves first has the least."""
        if self.evict in ("lru", "lru_ds"):
            return self._last
        if self.evict == "lfu" or self.variant == "code_head":
            return self._visits
        if self.variant == "code2024":
            return -self._visits
        ranks: np.ndarray = (self._shares + self.epsilon) * self._decay[:, None]
        return ranks

    def stats(self) -> dict[str, float]:
        collections = {id(c): len(c) for c in self._collections.values()}
        return {
            "collected": float(sum(collections.values())) if self._predicts else 0.0,
            "lookups": float(self._n_asked),
            "queue_ran_dry_frac": self._n_dry / max(1, self._n_asked),
            "resident_experts": float(sum(int(there.sum()) for there in self._resident)),
        }
