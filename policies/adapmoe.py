"""AdapMoE (ICCAD'24, arXiv 2408.10284): a cache per layer sized by a dynamic program, gating by sensitivity, one guess.

Source: Zhong, Liang, Wang, Wang, Huang and Li, "AdapMoE: Adaptive Sensitivity-based Expert Gating and Management for
Efficient MoE Inference", and its code PKU-SEC-Lab/AdapMoE@2cfe8df. `variant=code` (the default, since the rules rest on
the code) looks one layer ahead and guesses nothing for the first layer; `variant=paper` looks on to the second and
third layer when all that is likely in the first is there (section 4.2), and predicts the first layer from the last
one's activations of the token before.

Both: experts are copied matrix by matrix (w1, w3, w2) and computation starts with the first; exactly one expert is
prefetched, and the layer it is meant for waits for it even when it was guessed wrong; then its buffer is given back.
Lossy: of a single generated token, later choices of little weight are dropped; replay is open-loop.

Published for Mixtral-8x7B alone: accuracies of prefetching (a_l), shares of tokens with one expert (r_l) and
sensitivities. For other models the first two are counted on the trace's store split, and nothing is dropped without
`score_threshold`. Not published: several GPUs (each divides its own cache; one guess in all), more than two experts
per token (each after the first is dropped on its own).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import comb

import numpy as np

from policies.common.placement import most_layers
from sim.policy import (
    DECODE,
    Assignment,
    Evict,
    Fetch,
    Gate,
    Piece,
    Policy,
    Prefetch,
    RunGpu,
    Steps,
    StoreSplit,
    Ticket,
    View,
    param,
)


def numbers(words: str) -> list[float]:
    return [float(word) for word in words.split()]


def thousandths(words: str) -> list[Fraction]:
    return [Fraction(int(word), 1000) for word in words.split()]


# Per layer of Mixtral-8x7B, in thousandths: how often a prefetch is right (a_l), how many tokens keep one expert (r_l).
ACCURACY = thousandths(
    "0 566 721 789 866 859 830 840 849 801 898 898 893 910 925 881 915 939 905 879 876 893 879 876 888 884 "
    "922 913 886 900 903 850"
)
SINGLE = thousandths(
    "0 35 5 1 0 3 8 34 35 49 13 20 30 5 16 28 64 71 141 280 299 365 414 356 495 521 548 618 780 884 975 858"
)
SENSITIVITY = numbers(
    "46.69 17.30 13.02 7.64 4.17 2.23 1.256 0.844 0.684 0.560 0.513 0.478 0.445 0.436 0.384 0.310 0.233 0.176 "
    "0.138 0.114 0.105 0.0954 0.0862 0.0771 0.0694 0.0611 0.0502 0.0426 0.0335 0.0253 0.0207 0.0229"
)
PUBLISHED_FOR = "mixtral-8x7b"
UNIT = 2**40  # expected loads are compared in these parts, so that equal ones are equal


def expected_loads(n_cached: int, n_experts: int, top_k: int, accuracy: Fraction, single: Fraction) -> Fraction:
    """Loads on demand of one token in one layer: f_l(t).

    With 8 experts and K = 2 this is the code's r (1 - t/8)(1 - a) + (1 - r)[2 P2 (1 - a) + P2 a + P1 (1 - a)], with P2
    and P1 the odds that two or one of the experts are not cached: of j missing ones, a correct prefetch saves one.
    """
    alone = (1 - Fraction(n_cached, n_experts)) * (1 - accuracy)
    several = Fraction(0)
    for n_missing in range(1, top_k + 1):
        ways = comb(n_experts - n_cached, n_missing) * comb(n_cached, top_k - n_missing)
        several += Fraction(ways, comb(n_experts, top_k)) * (n_missing - accuracy)
    return single * alone + (1 - single) * several


def cache_sizes(
    total: int, n_experts: Sequence[int], top_k: int, accuracy: Sequence[Fraction], single: Sequence[Fraction]
) -> list[int]:
    """Experts cached per layer, at least one each, that together make the fewest expected loads (section 4.3); of
    equally good sizes the smaller one.

    Args:
        total: experts to cache; what exceeds all experts is left. n_experts: per layer, those there are.
    """
    total = min(total, sum(n_experts))
    never = np.iinfo(np.int64).max // 2
    best = np.full(total + 1, never, dtype=np.int64)  # by experts used in the layers so far
    best[0] = 0
    chosen = []
    for n, a, r in zip(n_experts, accuracy, single, strict=True):
        found, size = np.full(total + 1, never, dtype=np.int64), np.zeros(total + 1, dtype=np.int64)
        for t in range(min(1, n), min(n, total) + 1):
            loads = round(expected_loads(t, n, min(top_k, n), a, r) * UNIT) if n else 0
            reached = np.full(total + 1, never, dtype=np.int64)
            reached[t:] = np.minimum(best[: total + 1 - t] + loads, never)
            better = reached < found
            found[better], size[better] = reached[better], t
        best = found
        chosen.append(size)
    sizes, left = [], total
    for size in reversed(chosen):
        sizes.append(int(size[left]))
        left -= sizes[-1]
    return sizes[::-1]


def equal_sizes(total: int, n_experts: Sequence[int]) -> list[int]:
    """The same number of experts in every layer; what does not divide goes to the first ones."""
    sizes, left = [0] * len(n_experts), min(total, sum(n_experts))
    while left:
        for layer, n in enumerate(n_experts):
            if left and sizes[layer] < n:
                sizes[layer] += 1
                left -= 1
    return sizes


CHUNK_ROWS = 4096


class Group:
    """The cached experts of one layer on one GPU, least recently used first."""

    def __init__(self, gpu: int, experts: list[int], living: int) -> None:
        self.gpu = gpu
        self.living = living  # experts of the layer that are this GPU's
        self.main = dict.fromkeys(experts)

    def touch(self, expert: int) -> None:
        self.main.pop(expert, None)
        self.main[expert] = None


class AdapMoe(Policy):
    """LRU per layer with sizes of its own, one prefetched expert, and fewer experts where they matter little."""

    name = "adapmoe"
    title = "AdapMoE"
    source = "arXiv 2408.10284 (ICCAD'24); PKU-SEC-Lab/AdapMoE@2cfe8df"
    traits = frozenset({"lossy", "evicts_eagerly"})
    needs = frozenset({"experts", "weights", "next_scores_1"})
    variant: str = param("code", "the published code, or the paper's text where it differs", ("paper", "code"))
    buffers: int = param(6, "spare expert buffers beside the cache (code)", within=(2, 10_000))
    gating: bool = param(
        True,
        "drop later choices of little weight (the paper; the code with --adapgate, as its README runs it); published "
        "sensitivities are Mixtral-8x7B's",
    )
    tolerance: float = param(
        0.005,
        "a choice is dropped when its normalised weight is below sqrt(tolerance / sensitivity) (code)",
        within=(0.0, 1.0),
    )
    score_threshold: float | None = param(
        None,
        "in place of sensitivities: drop below this normalised weight in every layer; without it, models other than "
        "Mixtral-8x7B drop nothing",
        within=(0.0, 1.0),
    )
    tables: str = param(
        "auto",
        "where a_l and r_l come from: published (Mixtral-8x7B), counted on the store split, or published where they "
        "are",
        ("auto", "published", "store"),
    )
    sizes: str = param("dp", "cache sizes: the dynamic program's, or equal ones", ("dp", "equal"))
    prefetch: bool = param(True, "guess one expert of the next layer")
    chunks: int = param(3, "copies per expert: 3 matrices, computed as they arrive (code), or 1", within=(1, 3))

    def __init__(self, **values: object) -> None:
        super().__init__(**values)
        needs = {"experts"} | ({"weights"} if self.gating else set())
        if self.prefetch or self.sizes == "dp":
            needs |= {"next_scores_1"}
        if self.prefetch and self.variant == "paper":
            needs |= {"next_scores_2", "next_scores_3"}
        self.needs = frozenset(needs)

    def min_experts(self, view: View) -> int:
        return most_layers(view) + self.buffers

    def bind(self, view: View) -> None:
        known = view.model_name == PUBLISHED_FOR and view.n_layers == len(ACCURACY)
        self._published = known and self.tables != "store"
        self._thresholds: list[float] | None = None
        if self.gating and self.score_threshold is not None:
            self._thresholds = [self.score_threshold] * view.n_layers
        elif self.gating and known:
            self._thresholds = [math.sqrt(self.tolerance / sensitivity) for sensitivity in SENSITIVITY]
        self._shape = (view.n_layers, view.n_experts, view.top_k)
        none = [Fraction(0)] * view.n_layers
        self._accuracy = ACCURACY if self._published else none
        self._single = SINGLE if self._published and self._thresholds else none
        self._n_learnt = 0
        self._groups: list[list[Group]] = []
        self._pieces: dict[tuple[int, int], list[Piece]] = {}  # what an expert was copied as
        self._guesses: dict[int, tuple[int, Piece, Ticket | None]] = {}  # layer -> expert, piece, event
        self._wrong: list[Piece] = []
        self._guesses_now = False
        self._n_guesses = self._n_right = self._n_used = self._n_hits = self._n_tokens = self._n_single = 0

    # -- sizes (section 4.3) ----------------------------------------------------------------------------------------

    def learn(self, store: StoreSplit) -> None:
        """For models without published tables: a_l, the share of chosen experts that a guess of K would have named,
        and r_l, the share of generated tokens that gating leaves one expert."""
        if self._published or self.sizes != "dp":
            return
        n_layers, _, top_k = self._shape
        right, alone = np.zeros(n_layers, dtype=np.int64), np.zeros(n_layers, dtype=np.int64)
        n_chained = 0
        for request in store.requests:
            start = request.first_row + request.prompt_len
            stop = start + request.outputs - 1
            for a in range(start, stop, CHUNK_ROWS):
                b = min(a + CHUNK_ROWS, stop)
                ids = store.trace.experts[a:b].astype(np.int64)
                ranked = np.argsort(-store.trace.next_scores(1, a, b), axis=2, kind="stable")[..., :top_k]
                same = (ids[:, 1:, :, None] == ranked[:, :-1, None, :]).any(axis=3)
                right[1:] += same.sum(axis=(0, 2))
                right[0] += (ids[1:, 0, :, None] == ranked[:-1, -1, None, :]).any(axis=2).sum()
                n_chained += len(ids) - 1
                if self._thresholds:
                    alone += self._dropped(store.trace.weights(a, b))[:, :, 1:].all(axis=2).sum(axis=0)
                self._n_learnt += b - a
        n = max(1, self._n_learnt * top_k)
        self._accuracy = [Fraction(int(count), n) for count in right]
        # The code guesses nothing for the first layer; the paper has a gate for it.
        first = Fraction(int(right[0]), max(1, n_chained * top_k)) if self.variant == "paper" else Fraction(0)
        self._accuracy[0] = first
        self._single = [Fraction(int(count), max(1, self._n_learnt)) for count in alone]

    def _dropped(self, weights: np.ndarray) -> np.ndarray:
        """Which choices [n, L, K] adaptive gating drops: never the first."""
        thresholds = np.array(self._thresholds)[None, :, None]
        dropped: np.ndarray = weights < thresholds * weights.sum(axis=2, keepdims=True)
        dropped[:, :, 0] = False
        return dropped

    def initial(self, view: View) -> Iterable[Piece]:
        """The highest-numbered experts of every layer (code)."""
        self._groups = [[] for _ in range(view.n_layers)]
        for gpu in range(view.n_gpus):
            mine = [
                [e for e in range(view.n_experts) if view.piece(layer, e).gpu == gpu] for layer in range(view.n_layers)
            ]
            total, n_mine = view.capacity_of(gpu) - self.buffers, [len(experts) for experts in mine]
            if total < sum(map(bool, n_mine)):  # so few live there that all of them have their room
                total = view.capacity_of(gpu)
            if self.sizes == "equal":
                sizes = equal_sizes(total, n_mine)
            else:
                sizes = cache_sizes(total, n_mine, view.top_k, self._accuracy, self._single)
            for layer, (experts, size) in enumerate(zip(mine, sizes, strict=True)):
                group = Group(gpu, experts[len(experts) - size :], len(experts))
                self._groups[layer].append(group)
                for expert in group.main:
                    self._pieces[layer, expert] = [view.piece(layer, expert)]
                    yield view.piece(layer, expert)

    # -- a layer ----------------------------------------------------------------------------------------------------

    def assign(self, gate: Gate, view: View) -> Assignment | None:
        """Adaptive gating (section 4.1): of one generated token, drop what the layer hardly notices."""
        if not self._thresholds or gate.phase != DECODE or gate.iteration.n_tokens != 1:
            return None
        weights = gate.weights[0].tolist()
        least = self._thresholds[gate.layer] * math.fsum(weights)
        kept = [rank == 0 or weight >= least for rank, weight in enumerate(weights)]
        self._n_tokens += 1
        if all(kept):
            return None
        self._n_single += sum(kept) == 1
        ids = gate.ids.copy()
        ids[0, [not keep for keep in kept]] = -1
        total = math.fsum(weight for weight, keep in zip(weights, kept, strict=True) if keep)
        return Assignment(ids, np.array([[w / total if keep else 0.0 for w, keep in zip(weights, kept, strict=True)]]))

    def gate_done(self, gate: Gate, view: View) -> Steps:
        for piece in self._wrong:  # its copy is over: the layer it was meant for has waited for it
            yield Evict(piece)
        self._wrong.clear()
        guessed = -1
        waits: tuple[Ticket, ...] = ()
        if gate.layer in self._guesses:
            guessed, piece, event = self._guesses.pop(gate.layer)
            yield Fetch(piece)  # one copy stream, in order of asking: nothing of this layer overtakes it
            waits = () if event is None else (event,)
            if guessed in gate.needs:
                self._n_right += 1
            else:
                self._wrong.append(piece)
                guessed = -1
        by_group = [
            (group, [expert for expert in sorted(gate.needs) if view.piece(gate.layer, expert).gpu == group.gpu])
            for group in self._groups[gate.layer]
        ]
        by_group = [(group, needed) for group, needed in by_group if needed]
        for group, needed in by_group:
            self._guesses_now = group is by_group[-1][0]  # once for the layer, when nothing of it is left to copy
            yield from self._serve(gate, group, needed, guessed, waits, view)

    def _serve(
        self, gate: Gate, group: Group, needed: list[int], guessed: int, waits: tuple[Ticket, ...], view: View
    ) -> Steps:
        """`load_experts`: cached ones first; others as buffers allow; then, for one step of generation, the guess."""
        layer = gate.layer
        here = [expert for expert in needed if expert in group.main]
        to_load = [e for e in needed if e == guessed] + [e for e in needed if e not in group.main and e != guessed]
        self._n_used += len(needed)
        self._n_hits += len(here)
        for expert in here:
            group.touch(expert)
        pending, kept, unsent, asked = set(needed), set[int](), deque(to_load), False
        for expert in here + to_load:
            must = bool(unsent) and expert == unsent[0]
            while unsent and (must or unsent[0] == guessed or view.free_bytes(group.gpu) >= view.expert_bytes):
                yield from self._swap(layer, group, unsent.popleft(), guessed, pending, kept, view)
                must = False
            if not unsent and not asked:
                asked = True
                yield from self._guess(gate, view)
            yield RunGpu(expert, waits)
            pending.discard(expert)
            if expert in kept:
                kept.discard(expert)
                yield from self._drop(layer, expert)

    def _swap(
        self, layer: int, group: Group, expert: int, guessed: int, pending: set[int], kept: set[int], view: View
    ) -> Steps:
        """A new expert in a free buffer; the buffer of the least recently used one is free once that has run."""
        if expert != guessed:
            pieces = view.matrices(layer, expert, self.chunks)
            yield [Fetch(piece) for piece in pieces]
            self._pieces[layer, expert] = pieces
        victim = next(iter(group.main))
        del group.main[victim]
        group.touch(expert)
        if victim in pending:
            kept.add(victim)
        else:
            yield from self._drop(layer, victim)

    def _drop(self, layer: int, expert: int) -> Iterable[Evict]:
        return [Evict(piece) for piece in self._pieces.pop((layer, expert))]

    def _guess(self, gate: Gate, view: View) -> Steps:
        """Section 4.2: of the K likeliest experts of the next layer, the first that is not there."""
        if not self.prefetch or gate.phase != DECODE or not self._guesses_now:
            return
        for distance in (1, 2, 3) if self.variant == "paper" else (1,):
            layer = gate.layer + distance
            if layer >= view.n_layers:
                if self.variant == "code" or distance > 1:
                    return
                layer = 0
            if layer in self._guesses:
                continue
            scores = gate.next_scores(distance).sum(axis=0)
            for expert in np.argsort(-scores, kind="stable")[: view.top_k].tolist():
                piece = view.piece(layer, expert)
                if expert in self._groups[layer][piece.gpu].main:
                    continue
                if view.free_bytes(piece.gpu) >= view.expert_bytes:
                    event = yield Prefetch(piece)
                    self._pieces[layer, expert] = [piece]
                    self._guesses[layer] = (expert, piece, event)
                    self._n_guesses += 1
                return

    def stats(self) -> dict[str, float]:
        sizes = [len(group.main) for groups in self._groups for group in groups if group.living]
        return {
            "tables_published": float(self._published),
            "tables_tokens": float(self._n_learnt),
            "accuracy_mean": float(math.fsum(self._accuracy) / len(self._accuracy)),
            "size_min": float(min(sizes, default=0)),
            "size_max": float(max(sizes, default=0)),
            "lru_hit_rate": self._n_hits / max(1, self._n_used),  # as the code counts: a right guess is a miss
            "right_frac": self._n_right / max(1, self._n_guesses),
            "single_expert_frac": self._n_single / max(1, self._n_tokens),
            "gating": float(self._thresholds is not None),
        }
