"""HOBBIT (arXiv 2411.01433): missing experts of little weight come in low precision, or not at all.

Source: Tang et al., "HOBBIT: A Mixed Precision Expert Offloading System for Fast MoE Inference", section 3: token-level
dynamic loading (importance and its thresholds T1, T2), layer-level adaptive prefetching (stacked gates), sequence-level
multidimensional caching (the weighted score). No code is public.

Assumed, as the paper leaves it open or calibrates it: how the budget is divided between the two caches, the four
weights of the score, caches that begin empty. The classes are about missing experts: one that is there in high
precision is used as it is, and one to be skipped is computed if it is there in either. The CPU computes misses in the
optional mode, but nothing says what fills the caches then: here what it computes is loaded behind, while there is room,
and prefetching alone replaces. (Loading every such miss asks as much of the link as loading it on demand.)

Batches (not published): an expert is needed in the highest precision that any token needs it in, and skipped when all
tokens skip it; records start anew with each request. Several GPUs: each has its own two caches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.common.placement import every
from sim.policy import (
    DECODE,
    PREFILL,
    Assignment,
    Evict,
    Fetch,
    Gate,
    Iteration,
    Piece,
    Policy,
    Prefetch,
    RequestInfo,
    RunCpu,
    RunGpu,
    Steps,
    Ticket,
    View,
    param,
)

HIGH, LOW, SKIP = range(3)  # what an expert has to be computed in, most important first


def classes_of(weights: NDArray[np.float64], t1: float, t2: float) -> NDArray[np.int64]:
    """Class of each (token, rank) [n, k]: by the share of gate weight that the ranks before it have together.

    s_i = sum of the normalised weights of ranks j < i; high up to T1, low up to T2, skipped above. The heaviest has
    s = 0. Weights are as the router ranks them, heaviest first.
    """
    before = np.cumsum(weights, axis=1)
    total = before[:, -1:].copy()
    before[:, 1:] = before[:, :-1].copy()
    before[:, 0] = 0.0
    share = np.divide(before, total, out=np.zeros_like(before), where=total > 0)
    return (share > t1).astype(np.int64) + (share > t2)


def classes_of_token(weights: list[float], t1: float, t2: float) -> list[int]:
    """The same of a single token, the common case, without arrays: the same sums in the same order."""
    befores, total = [], 0.0
    for weight in weights:
        befores.append(total)
        total += weight
    if not total > 0:
        return [HIGH] * len(weights)
    return [(before / total > t1) + (before / total > t2) for before in befores]


def needed(ids: NDArray[np.int64], classes: NDArray[np.int64]) -> dict[int, int]:
    """Expert -> the most important class that any token has for it."""
    found: dict[int, int] = {}
    for expert, level in zip(ids.ravel().tolist(), classes.ravel().tolist(), strict=True):
        found[expert] = min(level, found.get(expert, SKIP))
    return found


class Weights(NamedTuple):
    """Shares of the four criteria in the score: recency, uses, uses in high precision, distance of the layer."""

    lru: float
    lfu: float
    lhu: float
    fld: float


class Records:
    """Uses of every expert since the sequence began, and the score by which experts leave (the least first).

    score = w_lru R/T + w_lfu F/T + w_lhu H/T + w_fld (1 - ((l_t - l_i + l_n) mod l_n) / l_n), with R the time of the
    last use, F uses, H uses in high precision, T the time; l_i the expert's layer, l_t the current one, l_n layers.

    Args:
        ahead: count a layer's distance forwards, from the current one to it; else as the formula is printed.
    """

    def __init__(self, n_layers: int, n_experts: int, weights: Weights, ahead: bool) -> None:
        self._shape = (n_layers, n_experts)
        self._weights = weights
        sign = 1 if ahead else -1
        self._distant = [
            [
                weights.fld * (1 - (sign * (layer - current) % n_layers) / n_layers)
                for layer in range(n_layers)
                for _ in range(n_experts)
            ]
            for current in range(n_layers)
        ]
        self.reset()

    def reset(self) -> None:
        """Begin a sequence."""
        n_layers, n_experts = self._shape
        self.time = 0
        self._counted = [0.0] * (n_layers * n_experts)  # w_lfu F + w_lhu H, experts of all layers in a row
        self.used = [0.0] * (n_layers * n_experts)  # w_lru R + w_lfu F + w_lhu H

    def place(self, layer: int, expert: int) -> int:
        """Where an expert stands in that row."""
        return layer * self._shape[1] + expert

    def use(self, layer: int, expert: int, level: int) -> None:
        """An expert is asked for."""
        w, at = self._weights, self.place(layer, expert)
        self._counted[at] += w.lfu + (w.lhu if level == HIGH else 0.0)
        self.used[at] = w.lru * self.time + self._counted[at]

    def by_layer(self, current: int) -> list[float]:
        """The part of every expert's score that its layer's distance from the current one gives."""
        return self._distant[current]

    def score(self, layer: int, expert: int, current: int) -> float:
        """The whole score of one expert."""
        at = self.place(layer, expert)
        return self.used[at] / max(1, self.time) + self._distant[current][at]


class TwoCaches:
    """What one GPU holds in high and in low precision, each with room of its own.

    Args:
        rooms: pieces of each class that fit.
    """

    def __init__(self, rooms: tuple[int, int], records: Records) -> None:
        self.rooms = rooms
        self._records = records
        # Pieces, and where their experts stand in the records.
        self._held: tuple[dict[Piece, int], dict[Piece, int]] = ({}, {})

    def full(self, level: int) -> bool:
        """True when one has to leave before another can come."""
        return len(self._held[level]) >= self.rooms[level]

    def loser(
        self, level: int, current: int, safe: Container[Piece], evictable: Callable[[Piece], bool]
    ) -> Piece | None:
        """Who leaves: the least score among those that are neither safe nor needed, ties to the lowest id."""
        used, distant, time = self._records.used, self._records.by_layer(current), max(1, self._records.time)
        held = self._held[level]
        scores = [used[at] / time + distant[at] for at in held.values()]
        pieces = list(held)
        for _ in pieces:
            least = min(scores)
            index = scores.index(least)
            if scores.count(least) > 1:
                ties = (i for i, score in enumerate(scores) if score == least)
                index = min(ties, key=lambda i: held[pieces[i]])
            if pieces[index] not in safe and evictable(pieces[index]):
                return pieces[index]
            scores[index] = math.inf
        return None

    def add(self, level: int, piece: Piece) -> None:
        """It has come."""
        self._held[level][piece] = self._records.place(piece.layer, piece.expert)

    def remove(self, level: int, piece: Piece) -> None:
        """It leaves."""
        del self._held[level][piece]


LOOKAHEAD = 3


class Hobbit(Policy):
    """Two precisions, two caches; loads by importance, prefetches for the first later layer that misses something."""

    name = "hobbit"
    title = "HOBBIT: mixed precision by importance, two caches"
    source = "arXiv 2411.01433 section 3 (no public code)"
    traits = frozenset({"lossy"})
    needs = frozenset({"experts", "weights", *(f"next_scores_{d}" for d in range(1, LOOKAHEAD + 1))})
    t1: float = param(
        0.6,
        "an expert is needed in high precision while those before it have up to this share of the gate's weight (T1)",
        within=(0.0, 1.0),
    )
    t2: float = param(0.9, "in low precision up to this share (T2); above it is skipped", within=(0.0, 1.0))
    skip: str = param(
        "missing",
        "whether an expert of the third class is left out when it is missing, always, or never (loaded in low "
        "precision)",
        ("missing", "always", "never"),
    )
    low_precision: str = param(
        "int4", "the low precision (published: int4 beside fp16, int2 beside int8)", ("int4", "int2", "int8")
    )
    low_frac: float = param(
        0.2, "share of the expert budget that the low-precision cache has (assumed)", within=(0.0, 1.0)
    )
    w_lru: float = param(0.25, "weight of recency in the score (assumed; published: calibrated)", within=(0.0, 1.0))
    w_lfu: float = param(0.25, "weight of the number of uses (assumed)", within=(0.0, 1.0))
    w_lhu: float = param(0.25, "weight of the number of uses in high precision (assumed)", within=(0.0, 1.0))
    w_fld: float = param(0.25, "weight of the layer's distance (assumed)", within=(0.0, 1.0))
    fld: str = param(
        "text",
        "the distance as the formula is printed, which keeps the layers just passed, or counted ahead, which keeps "
        "those that come next, as the name (farthest layer distance) says",
        ("text", "ahead"),
    )
    reset: bool = param(True, "records begin anew with each sequence")
    lookahead: int = param(
        LOOKAHEAD, "layers whose gates are stacked (p, 1 to 3 recommended); 0 prefetches nothing", within=(0, LOOKAHEAD)
    )
    cpu_misses: bool = param(
        False, "compute missing experts on the CPU (the optional mode); they are loaded behind while a cache has room"
    )

    def __init__(self, **values: object) -> None:
        super().__init__(**values)
        self.needs = frozenset({"experts", "weights", *(f"next_scores_{d}" for d in range(1, self.lookahead + 1))})
        if self.cpu_misses:
            self.traits = frozenset({"lossy", "cpu"})  # type: ignore[misc]  # of this instance alone

    def min_experts(self, view: View) -> int:
        return 2

    def bind(self, view: View) -> None:
        weights = Weights(self.w_lru, self.w_lfu, self.w_lhu, self.w_fld)
        self._records = Records(view.n_layers, view.n_experts, weights, ahead=self.fld == "ahead")
        self._classes: dict[int, int] = {}  # of the experts of the layer being served
        self._predicted: set[Piece] = set()  # of layers to come: they stay
        self._counts = [0, 0, 0]
        self._n_asked = self._missed = 0.0  # of generated tokens; a miss in low precision counts by its bytes
        experts = range(view.n_experts)
        parts = [[view.part(layer, e, 0.0, 1.0, self.low_precision) for e in experts] for layer in range(view.n_layers)]
        self._low: list[list[Piece]] = parts  # every expert in the low precision
        self._caches = [TwoCaches(self._rooms(gpu, view), self._records) for gpu in range(view.n_gpus)]

    def _rooms(self, gpu: int, view: View) -> tuple[int, int]:
        """Pieces in high and in low precision; with room for everything in high there is no need of low."""
        pieces = every(view)
        budget, low_bytes = view.free_bytes(gpu), self._low[0][0].n_bytes
        if sum(piece.n_bytes for piece in pieces if piece.gpu == gpu) <= budget:
            return budget // view.expert_bytes, 0
        n_low = min(int(self.low_frac * budget), budget - view.expert_bytes) // low_bytes
        return (budget - n_low * low_bytes) // view.expert_bytes, n_low

    def request_start(self, request: RequestInfo, view: View) -> None:
        if self.reset:
            self._records.reset()

    def iteration_start(self, iteration: Iteration, view: View) -> None:
        self._records.time += 1
        self._predicted.clear()

    # -- which precision --------------------------------------------------------------------------------------------

    def assign(self, gate: Gate, view: View) -> Assignment | None:
        """Classes by importance; drops what is skipped; allows low precision for what is not there in high."""
        ids, weights = gate.ids, gate.weights
        if len(ids) == 1:
            levels = classes_of_token(weights[0].tolist(), self.t1, self.t2)
            self._classes = dict(zip(ids[0].tolist(), levels, strict=True))
        else:
            classes = classes_of(weights, self.t1, self.t2)
            self._classes, levels = needed(ids, classes), classes.ravel().tolist()
        if gate.phase == DECODE:
            for level in levels:
                self._counts[level] += 1
        dropped = [
            expert for expert, level in self._classes.items() if level == SKIP and self._left_out(gate, expert, view)
        ]
        if dropped:
            gone = np.isin(ids, dropped)
            ids, weights = np.where(gone, -1, ids), np.where(gone, 0.0, weights)
        lower = {
            expert: self.low_precision
            for expert, level in self._classes.items()
            if level != HIGH and not view.resident(gate.layer, expert)
        }
        return Assignment(ids, weights, lower) if lower or dropped else None

    def _left_out(self, gate: Gate, expert: int, view: View) -> bool:
        there = view.resident(gate.layer, expert) or view.holds(self._low[gate.layer][expert])
        return self.skip == "always" or (self.skip == "missing" and not there)

    def _version(self, layer: int, expert: int, level: int, view: View) -> tuple[Piece, bool]:
        """(the piece that serves a need, whether it has its room): high if there; low if enough and there is such."""
        whole = view.piece(layer, expert)
        if view.holds(whole):
            return whole, True
        if level == HIGH or not self._caches[whole.gpu].rooms[LOW]:
            return whole, False
        low = self._low[layer][expert]
        return low, view.holds(low)

    # -- a layer ----------------------------------------------------------------------------------------------------

    def gate_done(self, gate: Gate, view: View) -> Steps:
        layer = gate.layer
        self._predicted = {piece for piece in self._predicted if piece.layer > layer}
        ready: list[int] = []
        loads: list[Ticket] = []
        waiting: list[Piece] = []
        for expert in gate.needs:
            self._records.use(layer, expert, self._classes[expert])
            piece, there = self._version(layer, expert, self._classes[expert], view)
            if there:
                ready.append(expert)
                arrival = yield Fetch(piece)  # one that a prefetch has still to bring goes first
                loads += [arrival] if arrival is not None else []
            else:
                waiting.append(piece)
        if gate.phase == DECODE:
            self._n_asked += len(gate.needs)
            self._missed += sum(piece.n_bytes / view.expert_bytes for piece in waiting)
        on_cpu = waiting if self.cpu_misses else []
        yield [RunCpu(piece.expert) for piece in on_cpu]
        if self.cpu_misses:
            waiting = []
        for piece in waiting:
            loser, can_come = self._loser(piece, view)
            if not can_come:  # more than the cache holds: what is there runs first
                yield from self._run(ready, loads)
                loser, _ = self._loser(piece, view)
            yield from self._admit(piece, loser)
            loads.append((yield Fetch(piece)))
            ready.append(piece.expert)
        yield from self._prefetch(gate, view)
        yield from self._run(ready, loads)
        for piece in on_cpu:
            if not self._caches[piece.gpu].full(self._level(piece)):
                yield from self._admit(piece, None)
                yield Prefetch(piece)

    def _run(self, ready: list[int], loads: list[Ticket]) -> Steps:
        """Run them once every load of the layer has ended: the main thread waits for all."""
        yield [RunGpu(expert, after=tuple(loads)) for expert in ready]
        ready.clear()
        loads.clear()

    # -- the caches -------------------------------------------------------------------------------------------------

    def _level(self, piece: Piece) -> int:
        return HIGH if piece.serving else LOW

    def _loser(self, piece: Piece, view: View, speculative: bool = False) -> tuple[Piece | None, bool]:
        """(who leaves for `piece`, whether it can come): nobody has to leave while there is room.

        What is predicted stays while others can leave, and from other predictions in any case.
        """
        cache, level = self._caches[piece.gpu], self._level(piece)
        if not cache.full(level):
            return None, True
        loser = cache.loser(level, view.layer, self._predicted, view.evictable)
        if loser is None and not speculative:
            loser = cache.loser(level, view.layer, (), view.evictable)
        return loser, loser is not None

    def _admit(self, piece: Piece, loser: Piece | None) -> Steps:
        cache, level = self._caches[piece.gpu], self._level(piece)
        if loser is not None:
            cache.remove(level, loser)
            yield Evict(loser)
        cache.add(level, piece)

    # -- prefetching ------------------------------------------------------------------------------------------------

    def _prefetch(self, gate: Gate, view: View) -> Steps:
        """Look one layer further until something is missing there, and load that; what is predicted stays."""
        for distance in range(1, min(self.lookahead, view.n_layers - 1 - gate.layer) + 1):
            missing: list[Piece] = []
            for piece, there in self._wanted(gate, distance, view):
                self._predicted.add(piece)
                missing += [] if there else [piece]
            for piece in missing:
                loser, can_come = self._loser(piece, view, speculative=True)
                if can_come:
                    yield from self._admit(piece, loser)
                    yield Prefetch(piece)
            if missing:
                return

    def _wanted(self, gate: Gate, distance: int, view: View) -> Iterator[tuple[Piece, bool]]:
        """The pieces a later layer is predicted to need, and whether they have their room."""
        layer = gate.layer + distance
        if gate.phase == PREFILL:  # of a prompt nearly all experts are wanted
            levels: dict[int, int] = dict.fromkeys(range(view.n_experts), HIGH)
        elif gate.iteration.n_tokens == 1:
            row = gate.next_scores(distance)[0].tolist()
            named = sorted(range(view.n_experts), key=lambda e: -row[e])[: view.top_k]
            classes = classes_of_token([row[e] for e in named], self.t1, self.t2)
            levels = dict(zip(named, classes, strict=True))
        else:
            scores = gate.next_scores(distance)
            ids = np.argsort(-scores, axis=1, kind="stable")[:, : view.top_k]
            levels = needed(ids, classes_of(np.take_along_axis(scores, ids, 1), self.t1, self.t2))
        for expert, level in levels.items():
            if level != SKIP or self.skip == "never":
                yield self._version(layer, expert, level, view)

    def stats(self) -> dict[str, float]:
        """Share of a generated token's experts by the precision they are needed in (published: 67, 30 and 3 %).

        `miss_penalty` is what the weights of the score are to be calibrated by: misses per expert run, one in low
        precision counted as B_low / B_high of one.
        """
        total = max(1, sum(self._counts))
        names = ("needed_high_frac", "needed_low_frac", "needed_skip_frac")
        shares = {name: n / total for name, n in zip(names, self._counts, strict=True)}
        return shares | {"miss_penalty": self._missed / max(1.0, self._n_asked)}
