"""Top-k choices from Gaussian scores: how popularity and correlation decide which experts two tokens share.

Every expert of a layer has a score b + g: b says how popular it is, g is standard normal and differs from token to
token; the K highest are chosen. If two tokens' g correlate with r, their choices overlap by a share that grows with r.
That map, tabulated by simulation, turns overlaps observed in a trace into correlations, and back.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from traces.format.layout import Array, Floats

GRID = np.array([0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.995, 1.0])
_DRAWS = 1 << 17  # normal numbers per simulation: overlaps are known to about 0.5 %
_ROUNDS = 40


def halved(too_low: Callable[[float], bool], low: float, high: float, rounds: int) -> tuple[float, float]:
    """The ends of what is left of an interval that is halved so often: `too_low` of the lower, not of the higher."""
    for _ in range(rounds):
        middle = (low + high) / 2
        low, high = (middle, high) if too_low(middle) else (low, middle)
    return low, high


def chosen_mask(scores: Array, k: int) -> Array:
    """The k highest as a boolean mask; which of several equal ones does not matter to a simulation."""
    least = -np.partition(-scores, k - 1, axis=-1)[..., k - 1 : k]  # a third of what argpartition takes
    mask: Array = scores >= least
    if np.count_nonzero(mask) > k * (scores.size // scores.shape[-1]):  # equal ones, which are rare
        mask = np.zeros(scores.shape, bool)
        np.put_along_axis(mask, np.argpartition(-scores, k - 1, axis=-1)[..., :k], True, axis=-1)
    return mask


def popularity_bias(share: Floats, k: int, rng: np.random.Generator) -> Floats:
    """(E,) b such that each expert is among the k highest of b + g with its share of tokens; the mean of b is 0.

    share: (E,) probability that a token chooses the expert; sums to k. A share of 0 is read as once in ten thousand.
    """
    n_experts = len(share)
    if k == n_experts:
        return np.zeros(n_experts)
    noise = rng.standard_normal((max(64, _DRAWS // n_experts), n_experts))
    target = np.clip(share, 1e-4, 1 - 1e-4)
    odds = np.log(target / (1 - target))
    bias = 0.5 * (odds - odds.mean())
    for _ in range(_ROUNDS):
        got = np.clip(chosen_mask(noise + bias, k).mean(axis=0), 1e-5, 1 - 1e-5)
        bias += 0.4 * (odds - np.log(got / (1 - got)))
        bias -= bias.mean()
    return np.asarray(bias)


def overlap_table(bias: Floats, k: int, rng: np.random.Generator, drawn: Array | None = None) -> Floats:
    """(len(GRID),) expected share of one token's experts that are also another's, whose g correlates with r of GRID.

    drawn: (n, E) tokens' g, where it is no independent normal numbers; the other token's is r of it and noise.
    """
    n_experts = len(bias)
    n = max(64, _DRAWS // n_experts) if drawn is None else len(drawn)
    one, fresh = rng.standard_normal((2, n, n_experts))
    one = one if drawn is None else drawn
    first = chosen_mask(one + bias, k)
    shares = [(first & chosen_mask(r * one + np.sqrt(1 - r * r) * fresh + bias, k)).sum() / (n * k) for r in GRID]
    return np.maximum.accumulate(np.array(shares))  # noise must not make the map fold back


def to_correlation(overlap: float, table: Floats) -> float:
    """The r in [0, 1] whose overlap this is; beyond the table's ends, the end.

    Between the entries the angle arccos(r) is interpolated, in which the overlap is nearly linear, also close to r = 1.
    """
    return float(np.cos(np.interp(overlap, table, np.arccos(GRID))))


def gate_scores(logits: Array, score: str) -> Array:
    """Gate scores of router logits (..., E): softmax over the experts, or the sigmoid of each."""
    if score == "sigmoid":
        return np.asarray(1.0 / (1.0 + np.exp(-logits)))
    raised = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(raised / raised.sum(axis=-1, keepdims=True))
