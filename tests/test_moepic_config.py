"""MoEpic's configurator: equations 4 to 11 worked by hand, and Algorithm 1 against plain loops and all cases."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.lcp import Priorities
from policies.moepic.config import LayerPlan, Odds, Splits, Statistics, Times, allocate, best_size, sizes_of
from sim.policy.standings import places_before

# One layer of 4 experts, K = 2. H(C), P(y) of y = 1..4, PH(y, C).
HIT = np.array([0.0, 0.4, 0.7, 0.9, 1.0])
ACTIVE = np.array([0.9, 0.6, 0.3, 0.2])
CACHED = np.array(
    [[0.0, 0.5, 0.8, 0.9, 1.0], [0.0, 0.3, 0.6, 0.8, 1.0], [0.0, 0.2, 0.4, 0.7, 1.0], [0.0, 0.0, 0.2, 0.6, 1.0]]
)
ODDS = Odds(HIT, ACTIVE, CACHED)
TIMES = Times(attention_s=1.0, moe_s=4.0, head_s=2.0, load_s=10.0, top_k=2)


def split_layer(budget, window_s, odds, times):
    return best_size(sizes_of(budget, odds, times), window_s, times.top_k)


class TestEquationsByHand:
    def test_eqs_9_10_11(self):
        # V = 1, window 11 s. C = 1: theta 1, A_cache 2 x .4 = .8; prefetches take (1 - .5) 10 = 5, (1 - .3) 10 = 7:
        # only the first ends in time and brings .5 x .9 = .45: m = 1.25. C = 2: theta 1/2, A_cache .7; (1 - .4) 10 =
        # 6 and (1 - .3) 10 = 7 > 5: m = .7 + .6 x .9 = 1.24. C = 3: theta 1/3, .6; 7 s, then 7.33: m = .6 + .7 x .9 =
        # 1.23. C = 4: theta 1/4, .5; 7.5, 7.5: .5 + .675.
        assert split_layer(1.0, 11.0, ODDS, TIMES) == LayerPlan(1, 1.0, pytest.approx(1.25))
        # In a window of 15 s two prefetches of C = 2 end (6 + 7 = 13), and of C = 1 (5 + 7 = 12), of C = 3 (14.33), C
        # = 4: .8 + .45 + .7 x .6 = 1.67;  .7 + .54 + .7 x .6 = 1.66;  .6 + .63 + (1 - .8/3) .6 = 1.67;  .5 + .675 +
        # .45
        assert split_layer(1.0, 15.0, ODDS, TIMES).loaded == pytest.approx(1.67)

    def test_without_a_window_whole_experts_are_best_here(self):
        # m = 2 H(C) V / C: .8, .7, .6, .5 for C = 1..4.
        assert split_layer(1.0, 0.0, ODDS, TIMES) == LayerPlan(1, 1.0, 0.8)

    def test_a_fractional_budget_rounds_the_cache_up(self):
        # theta must not exceed 1: V = 1.5 starts at C = 2, theta 3/4, m = 1.4 x .75 = 1.05; C = 3: .9; C = 4: .75
        assert split_layer(1.5, 0.0, ODDS, TIMES) == LayerPlan(2, 0.75, pytest.approx(1.05))

    def test_budgets_beyond_all_experts_and_none_at_all(self):
        assert split_layer(9.0, 0.0, ODDS, TIMES) == LayerPlan(4, 1.0, 2.0)
        # Nothing cached: prefetches of 10 s each: .9 + .6 in a window of 25 s.
        assert split_layer(0.0, 25.0, ODDS, TIMES) == LayerPlan(0, 0.0, pytest.approx(1.5))

    def test_eqs_5_6_7(self):
        # Layer 1: window 2 + 1 = 3 s, nothing can be prefetched: m = .8. T_exp = 4 / 2 = 2: T_hide = 1.6, T_miss =
        # 1.2 x 10 = 12, exposed 10.4; window 2 = (4 - min(1.6, 12)) + 1 = 3.4 s. Layer 2 is the same: 10.4.
        exposed_s, plans = Splits([ODDS, ODDS], TIMES).split([1.0, 1.0])
        assert exposed_s == pytest.approx([10.4, 10.4])
        assert [plan.n_cached for plan in plans] == [1, 1]
        # With copies of 1 s: window 3 s takes (1 - .5), (1 - .3), (1 - .2), (1 - 0) = 3.0 s: all four:
        # m = min(2, .8 + .45 + .42 + .24 + .2) = 2: nothing exposed, window 2 = 4 - min(4, 0) + 1.
        assert Splits([ODDS], TIMES._replace(load_s=1.0)).split([1.0])[0] == [0.0]

    def test_eq_4(self):
        p = Priorities(1, 3, omega=128, rho=0.25)
        # 0 twice, then 64 tokens later 1 once: mu rho^(nu / omega) = 2 x .25^(64/128) = 1 = 1 x .25^0: a tie, exactly.
        p.observe(0, [[0], [0]])
        p.observe(0, [[2]] * 63)
        p.observe(0, [[1]])
        assert p.keys[0][0] == p.keys[0][1]
        assert p.ranking(0) == [2, 0, 1]
        p.observe(0, [[1]])
        assert p.ranking(0) == [2, 1, 0]


@given(
    st.lists(st.sampled_from([0, 1, 2, 3]), min_size=1, max_size=60),
    st.sampled_from([1, 16, 128]),
    st.sampled_from([0.01, 0.25, 0.9]),
)
@settings(max_examples=60, deadline=None)
def test_keys_order_experts_as_equation_4_does(tokens, omega, rho):
    p = Priorities(1, 4, omega, rho)
    for token in tokens:
        p.observe(0, [[token]])

    def priority(expert):
        last = max((at for at, token in enumerate(tokens) if token == expert), default=None)
        return 0.0 if last is None else tokens.count(expert) * rho ** ((len(tokens) - 1 - last) / omega)

    for a, b in itertools.combinations(range(4), 2):
        if not math.isclose(priority(a), priority(b), rel_tol=1e-6):
            assert (priority(a) < priority(b)) == (p.keys[0][a] < p.keys[0][b])


@given(st.integers(0, 10**6), st.integers(0, 12), st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_places_before_each_token(seed, n_earlier, n):
    draw = np.random.default_rng(seed)
    ids = np.stack([np.stack([draw.permutation(5)[:2] for _ in range(3)]) for _ in range(n_earlier + n)])
    p = Priorities(3, 5, 4, 0.5)
    for row in ids[:n_earlier]:
        for layer in range(3):
            p.observe(layer, [row[layer].tolist()])
    found = places_before(p.state(ids[n_earlier:]), ids[n_earlier:])
    for at, row in enumerate(ids[n_earlier:]):
        for layer in range(3):
            assert [int(found[at, layer, e]) for e in p.ranking(layer)] == [0, 1, 2, 3, 4]
            p.observe(layer, [row[layer].tolist()])


@given(st.integers(0, 10**6), st.integers(0, 12), st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_tokens_observed_together_or_one_by_one(seed, n_earlier, n):
    draw = np.random.default_rng(seed)
    ids = np.stack([np.stack([draw.permutation(5)[:2] for _ in range(3)]) for _ in range(n_earlier + n)])
    together, alone = Priorities(3, 5, 4, 0.5), Priorities(3, 5, 4, 0.5)
    together.observe_all(ids[:n_earlier])
    together.observe_all(ids[n_earlier:])
    for layer in range(3):
        alone.observe(layer, ids[:, layer].tolist())
    assert (together.keys, together.uses, together.ranking(1)) == (alone.keys, alone.uses, alone.ranking(1))


def odds_of(seed, n_layers, n_experts, top_k):
    """Plausible odds: increasing in C, P falling in y and summing to K."""
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(n_layers):
        popularity = np.sort(draw.random(n_experts))[::-1]
        hit = np.concatenate([[0.0], np.cumsum(popularity) / popularity.sum()])
        active = np.sort(draw.random(n_experts))[::-1]
        active = np.minimum(1.0, active * top_k / active.sum())
        cached = np.array([np.linspace(0.0, 1.0, n_experts + 1) ** draw.uniform(0.4, 1.0) for _ in range(n_experts)])
        found.append(Odds(hit, active, cached))
    return found


@given(st.integers(0, 10**6), st.integers(2, 12), st.integers(1, 4), st.floats(0.0, 60.0), st.integers(1, 6))
@settings(max_examples=200, deadline=None)
def test_no_equation_pays_for_a_split(seed, n_experts, top_k, window_s, budget):
    """Where a larger cache adds ever less (PH concave, K H the sum of PH P), PH(y, C) V / C falls with C: split experts
    are there less often and take longer to prefetch. Whole ones lose no more than the rest of a window that is too
    short for one prefetch more."""
    top_k, budget = min(top_k, n_experts), min(budget, n_experts)
    falling = np.sort(np.random.default_rng(seed).random((n_experts, n_experts)), axis=1)[:, ::-1]
    cached = np.concatenate([np.zeros((n_experts, 1)), np.cumsum(falling, axis=1)], axis=1) / falling.sum(1)[:, None]
    active = odds_of(seed, 1, n_experts, top_k)[0].active
    odds = Odds(active @ cached / top_k, active, cached)
    best = split_layer(float(budget), window_s, odds, TIMES._replace(top_k=top_k)).loaded
    cut_short = [loaded(budget, c, window_s, odds, top_k, True) for c in range(budget, n_experts + 1)]
    assert max(cut_short) <= cut_short[0] + 1e-9
    assert best - loaded(budget, budget, window_s, odds, top_k, False) <= active.max() + 1e-9


def loaded(budget, c, window_s, odds, top_k, partial):
    """m of equation 11 with a cache of c; `partial`: a prefetch that the window cuts short counts as far as it came."""
    theta = budget / c
    m, left_s = top_k * odds.hit[c] * theta, window_s
    for y in range(len(odds.active)):
        share = 1.0 - odds.cached[y][c] * theta
        if share * 10.0 > left_s:
            m += left_s / 10.0 * odds.active[y] if partial else 0.0
            break
        left_s -= share * 10.0
        m += share * odds.active[y]
    return min(m, top_k)


def naive_split(budget, window_s, odds, times):
    """Equation 11 in plain loops."""
    n, best = len(odds.active), None
    for c in range(1, n + 1) if budget > 0 else [0]:
        theta = min(budget, n) / c if c else 0.0
        if theta > 1:
            continue
        m, spent_s = times.top_k * odds.hit[c] * theta, 0.0
        for y in range(n):
            share = 1.0 - odds.cached[y][c] * theta
            spent_s += share * times.load_s
            if spent_s > window_s:
                break
            m += share * odds.active[y]
        m = min(m, times.top_k)
        if best is None or m > best[2] + 1e-12:
            best = (c, theta, m)
    return best


def naive_exposed(budgets, odds, times):
    window_s, found = times.head_s + times.attention_s, []
    for budget, layer in zip(budgets, odds, strict=True):
        m = naive_split(budget, window_s, layer, times)[2]
        hide_s, miss_s = m * times.moe_s / times.top_k, (times.top_k - m) * times.load_s
        found.append(max(0.0, miss_s - hide_s))
        window_s = times.moe_s - min(hide_s, miss_s) + times.attention_s
    return found


CASES = st.tuples(st.integers(0, 10**6), st.integers(2, 4), st.integers(2, 6), st.sampled_from([0.3, 1.0, 3.0, 12.0]))


@given(CASES)
@settings(max_examples=60, deadline=None)
def test_sub_problem_equals_plain_loops(case):
    seed, n_layers, n_experts, load_s = case
    times = TIMES._replace(load_s=load_s, top_k=min(2, n_experts))
    odds = odds_of(seed, n_layers, n_experts, times.top_k)
    budgets = [float(b) for b in np.random.default_rng(seed).uniform(0.2, n_experts, n_layers)]
    exposed_s, plans = Splits(odds, times).split(budgets)
    assert exposed_s == pytest.approx(naive_exposed(budgets, odds, times), abs=1e-9)
    assert all(plan.split_frac <= 1.0 for plan in plans)
    assert [p.n_cached * p.split_frac for p in plans] == pytest.approx([min(b, n_experts) for b in budgets])


@given(CASES, st.sampled_from([0.02, 0.1]))
@settings(max_examples=30, deadline=None)
def test_allocation_ends_where_its_own_next_move_does_not_pay(case, zeta):
    seed, n_layers, n_experts, load_s = case
    times = TIMES._replace(load_s=load_s, top_k=2)
    odds = odds_of(seed, n_layers, n_experts, 2)
    start = [n_experts / 3] * n_layers
    found, plans = allocate(start, zeta, odds, times)
    assert sum(found) == pytest.approx(sum(start))
    assert min(found) > 0
    assert plans == Splits(odds, times).split(found)[1]
    total = sum(naive_exposed(found, odds, times))
    assert total <= sum(naive_exposed(start, odds, times)) + 1e-9
    step = zeta * sum(start)
    now, more, less = (naive_exposed([b + d for b in found], odds, times) for d in (0.0, step, -step))
    gainer = max(range(n_layers), key=lambda i: (round(now[i] - more[i], 9), -i))
    givers = [i for i in range(n_layers) if i != gainer and found[i] > step]
    if givers:
        giver = min(givers, key=lambda i: (round(less[i] - now[i], 9), i))
        moved = [b + step * (i == gainer) - step * (i == giver) for i, b in enumerate(found)]
        assert sum(naive_exposed(moved, odds, times)) >= total - 1e-6


def test_allocation_finds_the_best_of_all_where_copies_rule():
    """No window to prefetch in, hit rates concave in the budget: giving to who gains most ends at the optimum."""
    times = Times(attention_s=0.0, moe_s=1e-9, head_s=0.0, load_s=1.0, top_k=1)
    skewed = np.array([0.0, 0.7, 0.9, 0.97, 1.0])
    even = np.array([0.0, 0.25, 0.5, 0.75, 1.0])
    odds = [Odds(hit, np.zeros(4), np.zeros((4, 5))) for hit in (even, skewed, even)]
    found, plans = allocate([2.0, 2.0, 2.0], 1 / 6, odds, times)
    grid = [v for v in itertools.product(range(1, 5), repeat=3) if sum(v) == 6]
    best = min(sum(naive_exposed([float(b) for b in v], odds, times)) for v in grid)
    assert sum(naive_exposed(found, odds, times)) == pytest.approx(best)
    assert found == pytest.approx([3.0, 1.0, 2.0])
    assert [plan.split_frac for plan in plans] == pytest.approx([1.0, 1.0, 1.0])


def test_statistics_by_hand():
    """One layer, 3 experts, K = 1. Tokens 0, 0, 2; rankings before them: 0 1 2; 0 1 2; 0 1 2 (0 was used twice)."""
    p, s = Priorities(1, 3, 128, 0.25), Statistics(1, 3, 1)
    ids = np.array([[[0]], [[0]], [[2]]])
    predicted = np.array([[[3.0, 2.0, 1.0]], [[1.0, 2.0, 3.0]], [[1.0, 3.0, 2.0]]])
    s.record(p, ids, predicted, np.array([[False], [True], [True]]))
    (odds,) = s.odds("speculative")
    assert odds.hit.tolist() == [0, 2 / 3, 2 / 3, 1]  # 0 is in a cache of one; 2 only in one of three
    # Token 1 was predicted 2, 1, 0 and chose 0: y = 3. Token 2 was predicted 1, 2, 0 and chose 2: y = 2.
    assert odds.active.tolist() == [0, 0.5, 0.5]
    # y = 1 named 2 (place 2) and 1 (place 1); y = 2 named 1 and 2; y = 3 named 0 twice (place 0).
    assert odds.cached.tolist() == [[0, 0, 0.5, 1], [0, 0, 0.5, 1], [0, 1, 1, 1]]
    assert s.odds("none")[0].active.tolist() == [0, 0, 0]
    assert s.odds("random")[0].active.tolist() == [1 / 3] * 3
    assert s.odds("random")[0].cached[0].tolist() == [0, 1 / 3, 2 / 3, 1]
    assert Fraction(s.n_tokens) == 3
