"""MoEpic's cache configurator (arXiv 2509.08342, section 3.4): equations 5 to 11 and Algorithm 1.

Budgets V are in whole experts, times in seconds. Where the paper leaves something open: of equally good cache sizes the
smallest is taken, of equally good layers the lowest; a layer whose budget would not stay positive gives nothing away; a
budget beyond all N experts is worth N; m is at most K (it stands for activated experts).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.common.priority import CHUNK_ROWS, Priorities, places, places_before
from sim.policy import PREFILL, Gate, Iteration, Range, View

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class Times(NamedTuple):
    """Latency metrics of Algorithm 1 and K."""

    attention_s: float
    moe_s: float
    head_s: float
    load_s: float
    top_k: int

    @property
    def expert_s(self) -> float:
        """T_exp = T_moe / K."""
        return self.moe_s / self.top_k


class Odds(NamedTuple):
    """One layer's three probabilities (section 3.4.2).

    hit: H(C), [N + 1], C from 0. active: P(y), [N]. cached: PH(y, C), [N, N + 1].
    """

    hit: FloatArray
    active: FloatArray
    cached: FloatArray


class LayerPlan(NamedTuple):
    """What the sub-problem gives for one layer: C*, theta* = V / C*, and m."""

    n_cached: int
    split_frac: float
    loaded: float


def split_layer(budget: float, window_s: float, odds: Odds, times: Times) -> LayerPlan:
    """Equation 11: the cache size of the largest m, given V and the prefetching window."""
    n_experts = len(odds.active)
    if budget <= 0.0:
        return LayerPlan(0, 0.0, _loaded(np.zeros(1, dtype=np.int64), np.zeros(1), window_s, odds, times)[0])
    budget = min(budget, float(n_experts))
    sizes = np.arange(math.ceil(budget), n_experts + 1)  # theta = V / C is at most 1
    fracs = budget / sizes
    loaded = _loaded(sizes, fracs, window_s, odds, times)
    best = int(np.flatnonzero(loaded >= loaded.max() - 1e-12)[0])  # equal but for rounding: the smallest cache
    return LayerPlan(int(sizes[best]), float(fracs[best]), float(loaded[best]))


def _loaded(sizes: IntArray, fracs: FloatArray, window_s: float, odds: Odds, times: Times) -> FloatArray:
    """m per cache size: A_cache + the A_pref (equation 10) of as many prefetches (equation 9) as fit the window."""
    to_copy = 1.0 - odds.cached[:, sizes] * fracs  # of the expert ranked y, with a cache of C: [N, sizes]
    taken_s = np.cumsum(to_copy * times.load_s, axis=0)
    gained = np.cumsum(to_copy * odds.active[:, None], axis=0)
    n_done = (taken_s <= window_s).sum(axis=0)
    prefetched = np.where(n_done > 0, gained[np.maximum(n_done, 1) - 1, np.arange(len(sizes))], 0.0)
    cached = times.top_k * odds.hit[sizes] * fracs
    return np.minimum(cached + prefetched, float(times.top_k))


def split_all(budgets: Sequence[float], odds: Sequence[Odds], times: Times) -> tuple[list[float], list[LayerPlan]]:
    """ExpertSplit: layer by layer, since a layer's window is what the layer before leaves (equations 5 to 7)."""
    window_s = times.head_s + times.attention_s
    exposed_s, plans = [], []
    for budget, layer in zip(budgets, odds, strict=True):
        plan = split_layer(budget, window_s, layer, times)
        hide_s = plan.loaded * times.expert_s
        miss_s = (times.top_k - plan.loaded) * times.load_s
        exposed_s.append(max(0.0, miss_s - hide_s))
        plans.append(plan)
        window_s = (times.moe_s - min(hide_s, miss_s)) + times.attention_s
    return exposed_s, plans


def allocate(
    budgets: Sequence[float], granularity: float, odds: Sequence[Odds], times: Times
) -> tuple[list[float], list[LayerPlan]]:
    """VramAllocation: move zeta * V_e from the layer that loses least to the one that gains most, while it pays."""
    v = list(budgets)
    step = granularity * math.fsum(v)
    now_s, plans = split_all(v, odds, times)
    while True:
        more_s, _ = split_all([budget + step for budget in v], odds, times)
        less_s, _ = split_all([budget - step for budget in v], odds, times)
        profits = [a - b for a, b in zip(now_s, more_s, strict=True)]
        gainer = max(range(len(v)), key=lambda i: (profits[i], -i))
        givers = [i for i in range(len(v)) if i != gainer and v[i] - step > 1e-9]
        if not givers:
            return v, plans
        giver = min(givers, key=lambda i: (less_s[i] - now_s[i], i))
        moved = list(v)
        moved[gainer] += step
        moved[giver] -= step
        moved_s, moved_plans = split_all(moved, odds, times)
        if math.fsum(moved_s) >= math.fsum(now_s):
            return v, plans
        v, now_s, plans = moved, moved_s, moved_plans


def _n_out(r: Range) -> int:
    """Tokens that come out of a range."""
    return r.puts_out if r.phase == PREFILL else r.stop_row - r.start_row


class Windows:
    """How long a prefetching window can be."""

    def __init__(self, view: View) -> None:
        self._prices = view.prices
        self._last = view.n_layers - 1
        self._experts_s: dict[tuple[int, ...], float] = {}
        self._attention_s = self._head_s = self._shared_s = 0.0

    def begin(self, iteration: Iteration) -> None:
        """What does not depend on the layer."""
        prices, ranges = self._prices, iteration.ranges
        self._attention_s = math.fsum((r.stop_row - r.start_row) * prices.attention_s(r.context) for r in ranges)
        self._head_s = sum(_n_out(r) for r in ranges) * prices.head_s()
        self._shared_s = iteration.n_tokens * prices.shared_s()

    def longest_s(self, gate: Gate) -> float:
        """Twice the longest there can be after a gate: prefetches go out one by one, so what could not start before the
        next gate speaks is never asked for (and costs the host nothing)."""
        counts = tuple(gate.needs.values())
        experts_s = self._experts_s.get(counts)
        if experts_s is None:
            prices = self._prices
            experts_s = math.fsum(max(prices.gpu_s(n), prices.expert_s()) for n in counts)
            self._experts_s[counts] = experts_s
        moe_s = experts_s + self._shared_s
        return 2.0 * (moe_s + self._attention_s + (self._head_s if gate.layer == self._last else 0.0))


class Statistics:
    """Counts behind the probabilities, over all tokens so far.

    A cache of C experts is taken to hold the C of highest priority before the token (the paper does not say how sizes
    that are not in use are observed). Layers and tokens without a prediction (of a prompt traces record none) count
    for H only.
    """

    def __init__(self, n_layers: int, n_experts: int, top_k: int) -> None:
        self._top_k = top_k
        self.n_tokens = 0
        self._n_predicted = np.zeros(n_layers, dtype=np.int64)
        self._hits = np.zeros((n_layers, n_experts), dtype=np.int64)  # activations by place in the ranking
        self._active = np.zeros((n_layers, n_experts), dtype=np.int64)  # by y
        self._cached = np.zeros((n_layers, n_experts, n_experts), dtype=np.int64)  # by y and place

    def record(self, before: Priorities, ids: IntArray, predicted: FloatArray | None, known: NDArray[np.bool_]) -> None:
        """Add tokens.

        Args:
            before: priorities before the first of them. ids: activated, [n, L, K].
            predicted: scores predicted for each layer, [n, L, E]; read where `known` [n, L].
        """
        place = places_before(before, ids)
        n_layers, n_experts = self._hits.shape
        first = np.arange(n_layers)[None, :, None] * n_experts
        self._hits += _counted(first + np.take_along_axis(place, ids, 2), self._hits)
        self.n_tokens += len(ids)
        if predicted is None or not known.any():
            return
        chosen = np.zeros(predicted.shape, dtype=bool)
        np.put_along_axis(chosen, ids, True, axis=2)
        y = first + places(predicted)
        self._active += _counted(y[chosen & known[:, :, None]], self._active)
        self._cached += _counted((y * n_experts + place)[known], self._cached)
        self._n_predicted += known.sum(axis=0)

    def odds(self, prefetch: str, evict: str = "lcp") -> list[Odds]:
        """The probabilities: as counted for `speculative` prefetching and a cache kept by priority; as they must be
        when experts are prefetched or cached at random, or nothing is prefetched."""
        n_layers, n_experts = self._hits.shape
        zero = np.zeros((n_layers, 1))
        hit = np.concatenate([zero, np.cumsum(self._hits, axis=1) / max(1, self.n_tokens * self._top_k)], axis=1)
        n = np.maximum(self._n_predicted, 1)
        cached = np.cumsum(self._cached, axis=2) / n[:, None, None]
        cached = np.concatenate([np.zeros((n_layers, n_experts, 1)), cached], axis=2)
        if evict == "random":  # whoever is asked for is among C of N with equal chance
            hit = np.broadcast_to(np.arange(n_experts + 1) / n_experts, hit.shape)
            cached = np.broadcast_to(np.arange(n_experts + 1) / n_experts, cached.shape)
        active = self._active / n[:, None]
        if prefetch == "random":
            active = np.full_like(active, self._top_k / n_experts)
            cached = np.broadcast_to(np.arange(n_experts + 1) / n_experts, cached.shape)
        elif prefetch == "none":
            active = np.zeros_like(active)
        return [Odds(hit[layer], active[layer], cached[layer]) for layer in range(n_layers)]


def _counted(at: IntArray, like: IntArray) -> IntArray:
    """How often each place of an array is named, by its number from the first."""
    return np.bincount(at.ravel(), minlength=like.size).reshape(like.shape)


__all__ = ["CHUNK_ROWS", "LayerPlan", "Odds", "Statistics", "Times", "Windows", "allocate", "split_all", "split_layer"]
