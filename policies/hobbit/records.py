"""HOBBIT's importance classes, and its two caches under one weighted score."""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.policy import Piece

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
