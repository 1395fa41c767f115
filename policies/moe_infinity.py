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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.common.placement import every
from sim.policy import (
    DECODE,
    PREFILL,
    Evict,
    Fetch,
    Gate,
    Iteration,
    Piece,
    Policy,
    Predict,
    Rank,
    RequestInfo,
    RequeueFrom,
    RunGpu,
    Steps,
    StoreSplit,
    Ticket,
    View,
    Wishes,
    param,
)

FloatArray = NDArray[np.float64]


def activations(ids: NDArray[np.int64], n_experts: int) -> FloatArray:
    """Counts [L, E] of the experts chosen by some tokens, [n, L, K]."""
    n_layers = ids.shape[1]
    at = ids + np.arange(0, n_layers * n_experts, n_experts)[:, None]
    counts: FloatArray = np.bincount(at.ravel(), minlength=n_layers * n_experts).astype(np.float64)
    return counts.reshape(n_layers, n_experts)


def rows_normalised(counts: FloatArray) -> FloatArray:
    """Each layer's counts as shares; rows without any stay zero."""
    total = counts.sum(axis=-1, keepdims=True)
    shares: FloatArray = counts / np.where(total > 0, total, 1.0)
    return shares


class Collection:
    """EAMC (sections 4 and 5): matrices of past requests, at most `capacity`; a newcomer then takes the place of its
    likest. Counts are whole numbers in float64, so sums are exact in any order."""

    def __init__(self, capacity: int, n_layers: int, n_experts: int) -> None:
        self._capacity = capacity
        self._all = np.zeros((0, n_layers, n_experts))
        self._norms = np.zeros(0)  # of whole matrices
        self._row_norms = np.zeros((0, n_layers))
        self._shares: dict[int, FloatArray] = {}
        self.n_replaced = 0  # what was said of a matrix by its number holds until then

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, index: int) -> FloatArray:
        entry: FloatArray = self._all[index]
        return entry

    def shares(self, index: int) -> FloatArray:
        """A matrix with its rows normalised."""
        if index not in self._shares:
            self._shares[index] = rows_normalised(self._all[index])
        return self._shares[index]

    def add(self, counts: FloatArray) -> None:
        """Keep a request's matrix (one without activations is no matrix)."""
        norm = float(np.sqrt((counts * counts).sum()))
        if norm == 0.0:
            return
        row_norms = np.sqrt((counts * counts).sum(axis=1))
        if len(self) < self._capacity:
            self._all = np.concatenate([self._all, counts[None]])
            self._norms = np.append(self._norms, norm)
            self._row_norms = np.concatenate([self._row_norms, row_norms[None]])
            return
        at = int(np.argmax((self._all * counts).sum(axis=(1, 2)) / self._norms))
        self._all[at], self._norms[at], self._row_norms[at] = counts, norm, row_norms
        self._shares.pop(at, None)
        self.n_replaced += 1

    def products(self, layer: int, counts: FloatArray) -> FloatArray:
        """Per matrix, the product of its row of a layer with `counts` [E]."""
        found: FloatArray = self._all[:, layer] @ counts
        return found

    def likest(self, products: FloatArray) -> int:
        """The matrix of largest cosine, given its products with the (partial) present; ties to the first."""
        return int((products / self._norms).argmax())

    def likest_so_far(self, present: FloatArray) -> list[int]:
        """`likest` after each layer of the present matrix [L, E], as its rows become known."""
        products = np.matmul(np.moveaxis(self._all, 0, 1), present[:, :, None])[:, :, 0]
        found: list[int] = (products.cumsum(axis=0) / self._norms).argmax(axis=1).tolist()
        return found

    def likest_ahead(self, live: FloatArray) -> list[int]:
        """2024's code, per current layer l: the matrix of least mean distance to `live`, ties to the first.

        It overwrites rows up to l of the stored matrices with a constant, so only rows after l tell them apart. A
        row without counts has distance 1 to everything.
        """
        norms = np.sqrt((live * live).sum(axis=1)) * self._row_norms
        cosines = (self._all * live).sum(axis=2) / np.where(norms > 0, norms, 1.0)
        after = np.cumsum(cosines[:, ::-1], axis=1)[:, ::-1]  # sums over rows l, l + 1, ...
        after = np.concatenate([after[:, 1:], np.zeros((len(self), 1))], axis=1)
        return [int(at) for at in np.argmax(after, axis=0)]


MAX_ORDERED = 1_000_000  # entries of such that are kept
CAPACITY = {"paper": 120, "code2024": 1000, "code_head": 1}


class MoeInfinity(Policy):
    """Prefetches and evicts by the activation matrix of the most similar past request."""

    name = "moe_infinity"
    title = "MoE-Infinity: activation-aware offloading"
    source = "arXiv 2401.14361 v3; EfficientMoE/MoE-Infinity@350f0dd and @d617801"
    traits = frozenset({"timing"})
    variant: str = param(
        "paper", "the paper (v3), the code of August 2024, or that of March 2026", ("paper", "code2024", "code_head")
    )
    capacity: int | None = param(
        None, "matrices in the collection; published: 120 (paper), 1000 (code2024)", within=(1, 100_000)
    )
    mode: str = param(
        "offline",
        "offline: the store split fills the collection; online: it starts empty (as FineMoE's section 6.3 runs it)",
        ("offline", "online"),
    )
    epsilon: float = param(
        1e-8, "added to shares and counts, so that every expert has an order (code)", within=(0.0, 1.0)
    )
    lookup_s: float = param(
        2.1e-8, "time of a lookup per matrix in the collection (paper: 21 us at 1,000)", within=(0.0, 1.0)
    )
    guarded: bool = param(
        True, "paper: a prefetch evicts only what scores less than itself (assumed); false: whatever scores least"
    )
    phantom_slots: bool = param(False, "code_head: hits use up free room, as the code's counter has it")
    evict: str = param(
        "variant",
        "the variant's own rule, or one of the repository's simulator: LRU, LRU that spares this layer and the next "
        "two, LFU",
        ("variant", "lru", "lru_ds", "lfu"),
    )
    queue: int = param(16, "prefetches queued at a time; the queue is replaced at every layer", within=(1, 100_000))
    depth: int = param(
        1,
        "speculative copies handed to each GPU's copy engine at once (code: a worker per GPU, one copy at a time; as "
        "it takes the next one when that ends, 2 is as near: one in flight, one behind it)",
        within=(1, 64),
    )

    def bind(self, view: View) -> None:
        shape = self._shape = (view.n_layers, view.n_experts)
        n = shape[0] * shape[1]
        self.settings["capacity"] = capacity = int(self.capacity or CAPACITY[self.variant])
        self._predicts = self.variant != "code_head"
        self.prefetch_depth = self.depth if self._predicts else None
        # v3 keeps prompts and generation apart; the code does not.
        both = {phase: Collection(capacity, *shape) for phase in (PREFILL, DECODE)}
        self._collections = both if self.variant == "paper" else dict.fromkeys(both, both[PREFILL])
        self._traced: dict[int, dict[str, np.ndarray]] = {}  # active request -> phase -> counts
        self._live = np.zeros(shape)  # all active requests' counts together
        self._matched: list[int] = []
        self._products = np.zeros(0)
        # What is asked for after a layer, by phase, matrix matched and layer: pieces and priorities, best first.
        self._orders: dict[tuple[str, int, int], Wishes] = {}
        self._worths: dict[tuple[str, int], np.ndarray] = {}  # ranks, by phase and matrix matched
        self._orders_at = 0  # matrices replaced when they were worked out
        self._n_ordered = 0
        self._ranked_for = (0, "", 0)  # matrices replaced, phase and matrix that ranks rest on now
        self._pieces = every(view)
        self._gpu = np.array([piece.gpu for piece in self._pieces])
        self._held = view.held
        self._is_held = self._held.data  # the same memory, for single numbers
        self._capacity = view.capacity
        self._capacity_of = [view.capacity_of(gpu) for gpu in range(view.n_gpus)]
        self._least_capacity = min(self._capacity_of)
        self._simple = self.variant != "code_head" and not self.phantom_slots
        self._fetches = [Fetch(piece) for piece in self._pieces]
        self._runs = [RunGpu(expert) for expert in range(shape[1])]
        n_closer = shape[0] + (self.variant == "code2024")
        self._closeness = (1.0 - np.arange(shape[0]) / n_closer)[:, None]  # of a layer that many layers on
        self._decay = (1.0 - np.arange(shape[0]) / shape[0])[:, None]
        # Who leaves first has the least rank; what a gate asks for changes that of visits and of recency at once.
        self._ranked_by = self._rule()
        self._rank = np.zeros(n)
        self._by_expert = self.variant == "code_head" and self.evict == "variant"
        if self._ranked_by != "most_visits" and self.evict != "lru_ds":  # those are asked for a `victim`
            guarded = self.guarded and self._ranked_by == "shares"
            self.order = Rank(n, ties="expert" if self._by_expert else "index", guarded=guarded)
            self._rank = self.order.rank
        if self._ranked_by == "shares":
            self._rank[:] = ((np.zeros(shape) + self.epsilon) * self._decay).ravel()
        self._ranks: Any = self._rank.data  # the same memory, for single numbers
        self._clock = 0
        self._free = list(self._capacity_of)  # the counter of code_head
        self._n_dry = self._n_asked = 0

    def _rule(self) -> str:
        if self.evict == "variant":
            return {"paper": "shares", "code2024": "most_visits", "code_head": "visits"}[self.variant]
        return "visits" if self.evict == "lfu" else "last"

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
        collection = self._collection = self._collections[iteration.phase]
        n_past = len(collection)
        self._products = np.zeros(n_past)
        if n_past:
            ahead = self.variant == "code2024"
            self._lookup = Predict(self.lookup_s * n_past, "host" if ahead else "side")
        replaced = sum([one.n_replaced for one in self._collections.values()])  # it only grows
        if replaced != self._orders_at or self._n_ordered > MAX_ORDERED:
            self._orders, self._worths, self._orders_at, self._n_ordered = {}, {}, replaced, 0
        if self.variant == "code2024" and len(collection):
            self._matched = collection.likest_ahead(self._live)

    def iteration_end(self, iteration: Iteration, view: View) -> None:
        if not self._predicts:
            return
        ids, start = iteration.all_ids(), 0
        for r in iteration.ranges:
            stop = start + r.stop_row - r.start_row
            counts = activations(ids[start:stop], view.n_experts)
            traced = self._traced.setdefault(r.request.index, {p: np.zeros(self._shape) for p in (PREFILL, DECODE)})
            traced[r.phase] += counts
            self._live += counts
            start = stop

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
        if self._simple and len(gate.needs) < self._least_capacity:
            # Nothing has to run before the next one finds room.
            first, held, fetches, runs = gate.layer * self._shape[1], self._is_held, self._fetches, self._runs
            needs = sorted(gate.needs)
            if self._ranked_by != "shares":
                self._visit(first, needs)
            order: list[int] = []
            absent: list[int] = []
            for expert in needs:
                (order if held[first + expert] else absent).append(expert)
            order += absent
            for expert in order:
                yield fetches[first + expert]  # one that is still queued goes first
            for expert in order:
                yield runs[expert]
        else:
            yield from self._serve(gate, view)
        if self.variant == "paper":
            yield from self._look_ahead(gate, view)

    def _serve(self, gate: Gate, view: View) -> Steps:
        """Experts are dispatched in ascending order; each is computed once it is there."""
        first = gate.layer * self._shape[1]
        needs = sorted(gate.needs)
        self._visit(first, needs)
        here = [expert for expert in needs if view.holds(self._pieces[first + expert])]
        unsent: deque[tuple[int, bool]] = deque()  # and whether an expert must leave, whatever room there is
        if self.phantom_slots or len(here) < len(needs):
            for expert in needs:
                must_evict = self._exhausted(first + expert) and self.variant == "code_head"
                if expert not in here:
                    unsent.append((expert, must_evict))
        fetches, runs = self._fetches, self._runs
        for expert in here:
            yield fetches[first + expert]  # one that is still queued goes first
        left = here + [expert for expert, _ in unsent]
        yield from self._send(first, unsent, view)
        while unsent:
            # A queued prefetch of a later one may have taken the room that the first one needs.
            expert = next(expert for expert in left if view.holds(self._pieces[first + expert]))
            left.remove(expert)
            yield runs[expert]
            yield from self._send(first, unsent, view)
        for expert in left:
            yield runs[expert]

    def _visit(self, first: int, experts: list[int]) -> None:
        ranks = self._ranks
        if self._ranked_by == "last":
            for expert in experts:
                self._clock += 1
                ranks[first + expert] = float(self._clock)
        elif self._ranked_by != "shares":
            step = 1.0 if self._ranked_by == "visits" else -1.0
            for expert in experts:
                ranks[first + expert] += step

    def _exhausted(self, at: int) -> bool:
        """Whether the counter of free room has run out, which hits lower as well."""
        if not self.phantom_slots:
            return False
        gpu = self._pieces[at].gpu
        exhausted = not self._free[gpu]
        self._free[gpu] = max(0, self._free[gpu] - 1)
        return exhausted

    def _send(self, first: int, unsent: deque[tuple[int, bool]], view: View) -> Iterator[Evict | Fetch]:
        while unsent:
            expert, must_evict = unsent[0]
            piece = self._pieces[first + expert]
            if must_evict:
                there = self._dispensable(piece, view)
                if not there.any():
                    return  # until one of the layer's own experts has run
                yield Evict(self._least(there))
            elif view.free_bytes(piece.gpu) < piece.n_bytes and not self._somebody_leaves(piece, view):
                return
            yield self._fetches[first + expert]
            unsent.popleft()

    def _somebody_leaves(self, piece: Piece, view: View) -> bool:
        """Whether a full GPU holds an expert that the layer does not need."""
        pending = view.pending_experts()
        return self._capacity_of[piece.gpu] > len(pending) or bool(self._dispensable(piece, view).any())

    def _dispensable(self, piece: Piece, view: View) -> NDArray[np.bool_]:
        """Experts on the piece's GPU that the layer does not need."""
        there: NDArray[np.bool_] = (self._held != 0) & (self._gpu == piece.gpu)
        for expert in view.pending_experts():
            there[view.layer * self._shape[1] + expert] = False
        return there

    def _least(self, there: NDArray[np.bool_]) -> Piece:
        """Who leaves of these: flat order is layer by layer, that of code_head expert by expert."""
        ranks = np.where(there, self._rank, np.inf)
        if not self._by_expert:
            return self._pieces[int(ranks.argmin())]
        expert, layer = divmod(int(ranks.reshape(self._shape).T.argmin()), self._shape[0])
        return self._pieces[layer * self._shape[1] + expert]

    # -- predicting and prefetching ---------------------------------------------------------------------------------

    def _look_ahead(self, gate: Gate, view: View) -> Steps:
        collection = self._collection
        if not len(self._products):
            return
        ahead = self.variant == "code2024"
        ticket: Ticket = yield self._lookup
        if ahead:
            matched = self._matched[gate.layer]
        else:
            matched = self._likest(gate, collection)
        ordered = self._ordered(gate.phase, collection, matched, gate.layer, ahead)
        if self._ranked_by == "shares" and self._ranked_for != (self._orders_at, gate.phase, matched):
            self._ranked_for = (self._orders_at, gate.phase, matched)
            self._rank[:] = self._worth(gate.phase, collection, matched)
        self._n_asked += 1
        self._n_dry += gate.layer > 0 and not view.waiting
        yield RequeueFrom(ordered, 0, len(ordered), 0, (ticket,), None, self.queue)

    def _likest(self, gate: Gate, collection: Collection) -> int:
        """The past request most like the iteration so far."""
        known: int | None = gate.at_once(self._likest_so_far, "ids")
        if known is not None:
            return known
        counts = np.zeros(self._shape[1])
        counts[list(gate.needs)] = list(gate.needs.values())
        self._products += collection.products(gate.layer, counts)
        return collection.likest(self._products)

    def _likest_so_far(self, ids: NDArray[np.int64]) -> list[int]:
        """The same after each layer, from what all gates choose [n, L, K]."""
        return self._collection.likest_so_far(activations(ids, self._shape[1]))

    def _ordered(self, phase: str, collection: Collection, matched: int, layer: int, own: bool) -> Wishes:
        """Experts of the layers after this one (`own`: and of this one) by share x closeness, ties to the lowest."""
        key = (phase, matched, layer)
        found = self._orders.get(key)
        if found is None:
            n_layers, n_experts = self._shape
            first = layer if own else layer + 1
            past = collection[matched] if own else collection.shares(matched)
            scores = ((past[first:] + self.epsilon) * self._closeness[first - layer : n_layers - layer]).ravel()
            order = (-scores).argsort(kind="stable")[: self._capacity + self.queue]  # no more than those can be there
            found = self._orders[key] = Wishes(order + first * n_experts, scores[order])
            self._n_ordered += len(order)
        return found

    def _worth(self, phase: str, collection: Collection, matched: int) -> np.ndarray:
        """What Algorithm 1 ranks by, all experts."""
        found = self._worths.get((phase, matched))
        if found is None:
            found = ((collection.shares(matched) + self.epsilon) * self._decay).ravel()
            self._worths[phase, matched] = found
        return found

    # -- eviction ---------------------------------------------------------------------------------------------------

    def evicted(self, piece: Piece, view: View) -> None:
        if self.variant == "code2024" and self._ranked_by != "last":
            self._ranks[piece.index] = 0.0

    def victim(self, piece: Piece, speculative: bool, view: View) -> Piece | None:
        """Asked where no order is named: who is protected rests on the layer that runs."""
        there = self._dispensable(piece, view)
        spared, now = there.copy(), view.layer * self._shape[1]
        if self._ranked_by == "most_visits":
            spared[now:] = False  # what is ahead is in the list of candidates for prefetching
        else:
            spared[now : now + 3 * self._shape[1]] = False
        if speculative or spared.any():
            there = spared
        return self._least(there) if there.any() else None

    def stats(self) -> dict[str, float]:
        collections = {id(c): len(c) for c in self._collections.values()}
        return {
            "collected": float(sum(collections.values())) if self._predicts else 0.0,
            "lookups": float(self._n_asked),
            "queue_ran_dry_frac": self._n_dry / max(1, self._n_asked),
            "resident_experts": float(np.count_nonzero(self._held)),
        }
