"""Experts foretold, by later gates, by drafts or for a whole pass, and a cache that is filled by such a forecast.

SiDA-MoE and ExpertFlow train a network that reads the tokens of a batch and names the experts of every layer at once.
Their weights are not public, and routing traces hold token ids rather than the texts they were trained on. What stands
in is learnt from the store split of the trace: how often tokens of each id went to each expert. Like those networks it
knows the input alone, all layers at once; unlike them it knows nothing of the context.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from sim.policy import (
    DECODE,
    FREE,
    LAST,
    SURROGATE,
    BadInput,
    Gate,
    Iteration,
    Piece,
    Policy,
    Prefetch,
    Rank,
    Steps,
    StoreSplit,
    Surrogate,
    Ticket,
    TokenPaths,
    View,
    param,
)

Ids = NDArray[np.int64]
OR_SURROGATE = ", or a surrogate (--predictor surrogate:0.85)"


def rows_of(iteration: Iteration) -> list[int]:
    """The trace row of each token."""
    return [row for r in iteration.ranges for row in range(r.start_row, r.stop_row)]


def drawn(surrogate: Surrogate, iteration: Iteration, layer: int) -> list[list[int]]:
    """Experts that a stand-in names for a layer, by token."""
    chosen = iteration.ids(layer).tolist()
    return [surrogate.name(row, layer, ids) for row, ids in zip(rows_of(iteration), chosen, strict=True)]


def foretold(gate: Gate, distance: int, surrogate: Surrogate | None, view: View) -> list[list[int]]:
    """Experts of a later layer, by token, likeliest first: by that layer's gate on this layer's input, or a stand-in.

    Args:
        distance: layers ahead; without a stand-in the trace level `next_scores_DISTANCE` is read.
    """
    if surrogate is not None:
        return drawn(surrogate, gate.iteration, gate.layer + distance)
    found: list[list[int]] = np.argsort(-gate.next_scores(distance), axis=1, kind="stable")[:, : view.top_k].tolist()
    return found


def in_turn(named: Iterable[Sequence[int]]) -> list[int]:
    """Experts named by some tokens, each once: every token's first choice, then the second ones."""
    return list(dict.fromkeys(expert for choices in zip(*named, strict=True) for expert in choices))


class DraftRouting:
    """What a draft says of the routing of the tokens that it drafts: a labelled stand-in, right as often as told.

    Its passes read these tokens one by one; the i-th puts out the next, so nothing foretells the last one's experts.

    Args:
        text: as `Surrogate` takes it. best: experts named for each token and layer, the surest first.
    """

    def __init__(self, text: str, view: View, seed: int, best: int) -> None:
        self._surrogate = Surrogate(text, view.top_k, view.n_experts, seed)
        self._best = min(best, view.top_k)
        self.n_named = 0
        self.n_right = 0

    def passes(
        self, iteration: Iteration, tickets: Sequence[Ticket], layers: range
    ) -> Iterator[tuple[tuple[Ticket, ...], list[list[int]]]]:
        """Of each pass: what its answer waits for, and the experts that it names, by layer."""
        chosen = iteration.all_ids()[:, layers.start : layers.stop].tolist()
        rows: dict[int, list[tuple[int, int, int]]] = {}  # of each request: (place, row, number in the iteration)
        at = 0
        for r in iteration.ranges:
            n = r.stop_row - r.start_row
            if r.phase == DECODE:
                rows.setdefault(r.request.index, []).extend((r.context + i, r.start_row + i, at + i) for i in range(n))
            at += n
        drafted = [sorted(own)[:-1] for own in rows.values()]
        for number in range(max((len(own) for own in drafted), default=0)):
            here = [own[number] for own in drafted if number < len(own)]
            named = [
                self._named(layer, [(row, chosen[i][layer - layers.start]) for _, row, i in here]) for layer in layers
            ]
            yield tuple(tickets[number : number + 1]), named

    def _named(self, layer: int, tokens: Sequence[tuple[int, Sequence[int]]]) -> list[int]:
        found: dict[int, None] = {}
        for row, truth in tokens:
            said = self._surrogate.name(row, layer, truth)[: self._best]
            self.n_named += len(said)
            self.n_right += sum(expert in truth for expert in said)
            found.update(dict.fromkeys(said))
        return list(found)

    def stats(self) -> dict[str, float]:
        """Share of the experts named that verification asked for."""
        return {"predicted_right_frac": self.n_right / self.n_named if self.n_named else 0.0}


class Forecasting(Policy):
    """A policy with a forecast of the whole pass: its `expected` are loaded in order, and leave last.

    Who was loaded first leaves first. Whoever is needed by the layer that runs, or foretold for one to come, stays
    while others can go; when nobody else can go for a demand, the last of the forecast does.
    """

    needs = frozenset({"experts", "token_ids"})
    predictor: str = param(
        "tokens",
        "tokens: where tokens of the same id were routed on the store split; or surrogate:SHARE or surrogate:ALL/ANY, "
        "a labelled stand-in",
    )
    seed: int = param(0, "for a surrogate's draws", within=(0, 2**63 - 1))

    def __init__(self, **values: object) -> None:
        super().__init__(**values)
        if self.predictor.startswith(SURROGATE):
            self.needs, self.labels = frozenset({"experts"}), (SURROGATE,)
        elif self.predictor != "tokens":
            raise BadInput(f"{self.name}.predictor, got {self.predictor!r}: write tokens, or surrogate:0.85")

    def bind(self, view: View) -> None:
        n = view.n_layers * view.n_experts
        self.order = order = Rank(n)
        self._rank, self._bar = order.rank.data, order.bar.data
        self._turns = [0] * n  # by `Piece.index`, numbered as they were loaded
        self._n_loaded = 0
        self.expected: dict[Piece, None] = {}
        self.ids = np.zeros((0, 0, 0), dtype=np.int64)  # foretold [n, L, K] for the iteration that runs
        self.scores = self.ids
        self._n_layers = view.n_layers
        self._n = self._right = 0

    def learn(self, store: StoreSplit) -> None:
        is_drawn = self.predictor.startswith(SURROGATE)
        trace = store.trace
        self._surrogate = Surrogate(self.predictor, trace.top_k, trace.n_experts, self.seed) if is_drawn else None
        self._paths = None if is_drawn else TokenPaths(store, self.name, OR_SURROGATE)

    def foretell(self, iteration: Iteration) -> None:
        """Take the forecast for an iteration."""
        if self._paths is not None:
            self.ids, self.scores = self._paths.of(iteration)
        elif self._surrogate is not None:  # all scores alike
            by_layer = [drawn(self._surrogate, iteration, layer) for layer in range(self._n_layers)]
            self.ids = np.stack([np.array(named, dtype=np.int64) for named in by_layer], axis=1)
            self.scores = np.ones_like(self.ids)

    def foretold(self, layer: int) -> list[int]:
        """Experts foretold for a layer by any token, those with the highest scores together first."""
        if len(self.ids) == 1:
            return [int(expert) for expert in self.ids[0, layer]]
        total: dict[int, int] = {}
        for expert, score in zip(
            self.ids[:, layer].ravel().tolist(), self.scores[:, layer].ravel().tolist(), strict=True
        ):
            total[expert] = total.get(expert, 0) + score
        return sorted(total, key=lambda e: (-total[e], e))

    def count(self, layer: int, chosen: Ids) -> None:
        """Compare with what the gates chose [n, K]."""
        found = (self.ids[:, layer, :, None] == chosen[:, None, :]).any(axis=1)
        self._n, self._right = self._n + found.size, self._right + int(found.sum())

    # -- the cache --------------------------------------------------------------------------------------------------

    def plan(self, pieces: Iterable[Piece]) -> None:
        """What the pass will need, in the order it is to be loaded."""
        for piece in self.expected:
            self._over(piece)
        self.expected = dict.fromkeys(pieces)
        for at, piece in enumerate(self.expected):
            self._rank[piece.index], self._bar[piece.index] = -at, LAST

    def passed(self, layer: int) -> None:
        """A layer's gate has spoken: its forecast has had its day."""
        for piece in [piece for piece in self.expected if piece.layer <= layer]:
            del self.expected[piece]
            self._over(piece)

    def _over(self, piece: Piece) -> None:
        """It is not foretold any more."""
        self._rank[piece.index], self._bar[piece.index] = self._turns[piece.index], FREE

    def loaded(self, piece: Piece) -> None:
        """To the end of the line of those who leave first."""
        self._n_loaded += 1
        self._turns[piece.index] = self._n_loaded
        if piece not in self.expected:
            self._rank[piece.index] = self._n_loaded

    def fill(self, view: View) -> Iterator[Piece]:
        """Pieces of the forecast that can be loaded now, in order; a GPU without room waits until some is free."""
        full: set[int] = set()
        for piece in list(self.expected):
            if piece.gpu in full or view.holds(piece):
                continue
            if view.free_bytes(piece.gpu) < piece.n_bytes and not self._somebody_leaves(piece.gpu, view):
                full.add(piece.gpu)
                if len(full) == view.n_gpus:
                    return
                continue
            yield piece

    def load(self, view: View) -> Steps:
        """Queue what can be loaded now."""
        for piece in self.fill(view):
            yield Prefetch(piece)

    def _somebody_leaves(self, gpu: int, view: View) -> bool:
        """Whether anybody makes room for a forecast."""
        return any(p.gpu == gpu and p not in self.expected and view.evictable(p) for p in view.residents())

    def placed(self, piece: Piece, view: View) -> None:
        self.loaded(piece)

    def accessed(self, piece: Piece, hit: bool, view: View) -> None:
        if not hit:
            self.loaded(piece)

    def stats(self) -> dict[str, float]:
        """Share of the experts chosen by the gates that were foretold."""
        return {"foretold_frac": self._right / self._n if self._n else 0.0}
