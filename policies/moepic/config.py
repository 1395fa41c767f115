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

from policies.lcp import Priorities
from sim.policy import PREFILL, Counts, Gate, Iteration, Range, View, follow_and_count

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


class Sizes(NamedTuple):
    """What one layer's cache sizes come to, whatever the window is; [sizes] each, or [N, sizes].

    n_cached: C. split_frac: theta. cached: A_cache. taken_s: until as many prefetches have ended as the row says, from
    1 (equation 9). gained: what as many bring, from 0 (equation 10).
    """

    n_cached: IntArray
    split_frac: FloatArray
    cached: FloatArray
    taken_s: FloatArray
    gained: FloatArray


def sizes_of(budget: float, odds: Odds, times: Times) -> Sizes:
    """All sizes that a budget allows: theta = V / C is at most 1."""
    n_experts = len(odds.active)
    if budget > 0.0:
        budget = min(budget, float(n_experts))
        sizes = np.arange(math.ceil(budget), n_experts + 1)
        fracs = budget / sizes
    else:
        sizes, fracs = np.zeros(1, dtype=np.int64), np.zeros(1)
    to_copy = 1.0 - odds.cached[:, sizes] * fracs  # of the expert ranked y, with a cache of C: [N, sizes]
    gained = np.zeros((n_experts + 1, len(sizes)))
    np.cumsum(to_copy * odds.active[:, None], axis=0, out=gained[1:])
    return Sizes(sizes, fracs, times.top_k * odds.hit[sizes] * fracs, np.cumsum(to_copy * times.load_s, axis=0), gained)


def best_size(sizes: Sizes, window_s: float, top_k: int) -> LayerPlan:
    """Equation 11: the cache size of the largest m = A_cache + the A_pref of as many prefetches as fit the window."""
    n_done = (sizes.taken_s <= window_s).sum(axis=0)
    loaded = np.minimum(sizes.cached + sizes.gained[n_done, np.arange(len(n_done))], float(top_k))
    best = int((loaded >= loaded.max() - 1e-12).argmax())  # equal but for rounding: the smallest cache
    return LayerPlan(int(sizes.n_cached[best]), float(sizes.split_frac[best]), float(loaded[best]))


class Splits:
    """The sub-problem of all layers, for one budget after the other: most layers keep theirs."""

    def __init__(self, odds: Sequence[Odds], times: Times) -> None:
        self._odds = odds
        self._times = times
        self._sizes: list[dict[float, Sizes]] = [{} for _ in odds]  # by layer and budget
        self._plans: list[dict[tuple[float, float], LayerPlan]] = [{} for _ in odds]  # and window

    def split(self, budgets: Sequence[float]) -> tuple[list[float], list[LayerPlan]]:
        """ExpertSplit: layer by layer, since a layer's window is what the layer before leaves (equations 5 to 7)."""
        times = self._times
        window_s = times.head_s + times.attention_s
        exposed_s, plans = [], []
        for layer, budget in enumerate(budgets):
            plan = self._plans[layer].get((budget, window_s))
            if plan is None:
                plan = self._plans[layer][budget, window_s] = self._plan(layer, budget, window_s)
            hide_s = plan.loaded * times.expert_s
            miss_s = (times.top_k - plan.loaded) * times.load_s
            exposed_s.append(max(0.0, miss_s - hide_s))
            plans.append(plan)
            window_s = (times.moe_s - min(hide_s, miss_s)) + times.attention_s
        return exposed_s, plans

    def _plan(self, layer: int, budget: float, window_s: float) -> LayerPlan:
        sizes = self._sizes[layer].get(budget)
        if sizes is None:
            sizes = self._sizes[layer][budget] = sizes_of(budget, self._odds[layer], self._times)
        return best_size(sizes, window_s, self._times.top_k)


def allocate(
    budgets: Sequence[float], granularity: float, odds: Sequence[Odds], times: Times
) -> tuple[list[float], list[LayerPlan]]:
    """VramAllocation: move zeta * V_e from the layer that loses least to the one that gains most, while it pays."""
    v = list(budgets)
    step = granularity * math.fsum(v)
    splits = Splits(odds, times)
    now_s, plans = splits.split(v)
    while True:
        more_s, _ = splits.split([budget + step for budget in v])
        less_s, _ = splits.split([budget - step for budget in v])
        profits = [a - b for a, b in zip(now_s, more_s, strict=True)]
        gainer = max(range(len(v)), key=lambda i: (profits[i], -i))
        givers = [i for i in range(len(v)) if i != gainer and v[i] - step > 1e-9]
        if not givers:
            return v, plans
        giver = min(givers, key=lambda i: (less_s[i] - now_s[i], i))
        moved = list(v)
        moved[gainer] += step
        moved[giver] -= step
        moved_s, moved_plans = splits.split(moved)
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
        self._alone = (1,) * view.top_k  # tokens of the experts of one that is alone
        self._is_alone = False
        self._experts_s: dict[tuple[int, ...], float] = {}
        self._attention_s = self._head_s = self._shared_s = 0.0
        self._alone_s = self._alone_last_s = 0.0  # after a layer of one that is alone, and after its last

    def begin(self, iteration: Iteration) -> None:
        """What does not depend on the layer."""
        prices, ranges = self._prices, iteration.ranges
        self._attention_s = math.fsum((r.stop_row - r.start_row) * prices.attention_s(r.context) for r in ranges)
        self._head_s = sum(_n_out(r) for r in ranges) * prices.head_s()
        self._shared_s = iteration.n_tokens * prices.shared_s()
        self._is_alone = iteration.n_tokens == 1
        if self._is_alone:
            self._alone_s, self._alone_last_s = (
                self._longest_s(self._alone, 0.0),
                self._longest_s(self._alone, self._head_s),
            )

    def longest_s(self, gate: Gate) -> float:
        """Twice the longest there can be after a gate: prefetches go out one by one, so what could not start before the
        next gate speaks is never asked for (and costs the host nothing)."""
        ends = gate.layer == self._last
        if self._is_alone:
            return self._alone_last_s if ends else self._alone_s
        return self._longest_s(tuple(gate.needs.values()), self._head_s if ends else 0.0)

    def _longest_s(self, counts: tuple[int, ...], head_s: float) -> float:
        experts_s = self._experts_s.get(counts)
        if experts_s is None:
            prices = self._prices
            experts_s = math.fsum(max(prices.gpu_s(n), prices.expert_s()) for n in counts)
            self._experts_s[counts] = experts_s
        moe_s = experts_s + self._shared_s
        return 2.0 * (moe_s + self._attention_s + head_s)


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
        self._counts = Counts(
            by_place=np.zeros((n_layers, n_experts), dtype=np.int64),
            by_forecast=np.zeros((n_layers, n_experts), dtype=np.int64),
            by_both=np.zeros((n_layers, n_experts, n_experts), dtype=np.int64),
        )

    def record(self, before: Priorities, ids: IntArray, predicted: FloatArray | None, known: NDArray[np.bool_]) -> None:
        """Add tokens.

        Args:
            before: priorities before the first of them. ids: activated, [n, L, K].
            predicted: scores predicted for each layer, [n, L, E]; read where `known` [n, L].
        """
        follow_and_count(before.state(ids), ids, predicted, known, self._counts)
        self.n_tokens += len(ids)
        if predicted is not None:
            self._n_predicted += known.sum(axis=0)

    def odds(self, prefetch: str, evict: str = "lcp") -> list[Odds]:
        """The probabilities: as counted for `speculative` prefetching and a cache kept by priority; as they must be
        when experts are prefetched or cached at random, or nothing is prefetched."""
        counts = self._counts
        n_layers, n_experts = counts.by_place.shape
        zero = np.zeros((n_layers, 1))
        hit = np.concatenate([zero, np.cumsum(counts.by_place, axis=1) / max(1, self.n_tokens * self._top_k)], axis=1)
        n = np.maximum(self._n_predicted, 1)
        cached = np.cumsum(counts.by_both, axis=2) / n[:, None, None]
        cached = np.concatenate([np.zeros((n_layers, n_experts, 1)), cached], axis=2)
        if evict == "random":  # whoever is asked for is among C of N with equal chance
            hit = np.broadcast_to(np.arange(n_experts + 1) / n_experts, hit.shape)
            cached = np.broadcast_to(np.arange(n_experts + 1) / n_experts, cached.shape)
        active = counts.by_forecast / n[:, None]
        if prefetch == "random":
            active = np.full_like(active, self._top_k / n_experts)
            cached = np.broadcast_to(np.arange(n_experts + 1) / n_experts, cached.shape)
        elif prefetch == "none":
            active = np.zeros_like(active)
        return [Odds(hit[layer], active[layer], cached[layer]) for layer in range(n_layers)]
