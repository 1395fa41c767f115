"""Importance: the router, the balancer and the cache by hand, against naive versions, and on small traces.

Numbers of `easy_numbers`: copy of an expert 10 s, expert 2 s on the GPU and 5 s on the CPU, attention 1 s, head 1 s.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from easy_numbers import execute_easy, setup
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_traces import tiny_header, tiny_trace

from policies.importance.balance import Costs, best_front, one_pass, two_pointers, typical
from policies.importance.cache import counted
from policies.importance.policy import Importance
from policies.importance.router import LoneToken, StandIn, Thresholds, Token, route
from sim.base.errors import BadInput
from sim.figures import ServedRates
from sim.policy import ScoreWindow
from traces.format.reader import Trace
from traces.format.requests import Request
from traces.format.writer import write_trace

# -- the router (section 5.1, Algorithm 1) ---------------------------------------------------------------------------


def routed(rows, chosen, there, rule="text", alpha=0.25, **options):
    thresholds = Thresholds(alpha, rule)
    tokens = [Token.of(row, ids, thresholds) for row, ids in zip(rows, chosen, strict=True)]
    return route(tokens, rule, set(there).__contains__, **options)


def scores(n=9, **of):
    return [of.get(f"e{expert}", 0) for expert in range(n)]


#: Section 5.4: tokens 1 and 2 use {1, 2, 4} and {1, 5, 4}; token 3 uses {2, 6, 7}, where 6 is low and 4 an alternative.
BATCH = [
    scores(e1=300, e4=290, e2=220, e3=200),  # beta 200: above 250 top, 2 is low
    scores(e1=300, e4=290, e5=220, e3=200),
    scores(e2=300, e7=290, e6=210, e3=200, e8=195, e4=190),  # 150 to 200 are alternatives
]
CHOSEN = [[1, 4, 2], [1, 4, 5], [2, 7, 6]]


def test_the_example_of_section_5_4():
    """Neither 4 nor 6 is on the GPU; 4 has to be computed for the others anyway: {2, 6, 7} becomes {2, 4, 7}."""
    assert routed(BATCH, CHOSEN, there={2, 5, 7}) == [[1, 4, 2], [1, 4, 5], [2, 7, 4]]
    # Without the batch's top-score set, expert 4 is not on the GPU and no alternative of section 5.1.
    assert routed(BATCH, CHOSEN, there={2, 5, 7}, couple=False, by_batch=False)[2] == [2, 7, 6]
    # 8 is on the GPU and scores higher, but nobody else uses it.
    assert routed(BATCH, CHOSEN, there={2, 5, 7, 8})[2] == [2, 7, 4]
    assert routed(BATCH, CHOSEN, there={2, 5, 7, 8}, by_batch=False)[2] == [2, 7, 8]


#: The same example, with expert 4 low-score for tokens 1 and 2: it is in no top-score set.
LOW_FOR_ALL = [
    scores(e1=300, e2=230, e4=220, e3=200),  # beta 200: 1 is top, 2 and 4 are low
    scores(e1=300, e5=230, e4=220, e3=200),
    scores(e2=300, e7=290, e6=210, e3=200, e4=190),
]
IN_ORDER = [[1, 2, 4], [1, 5, 4], [2, 7, 6]]


def test_an_alternative_that_is_low_for_the_others_and_not_on_the_gpu():
    """Section 5.4: "even if both expert 4 and expert 6 are not in the GPU memory", {2, 4, 7} is computed faster."""
    there = {1, 2, 5, 7}
    assert routed(LOW_FOR_ALL, IN_ORDER, there) == [[1, 2, 4], [1, 5, 4], [2, 7, 4]]
    assert routed(LOW_FOR_ALL, IN_ORDER, there, "alg1")[2] == [2, 7, 4]
    assert routed(LOW_FOR_ALL, IN_ORDER, there, by_batch=False)[2] == [2, 7, 6]
    assert routed(LOW_FOR_ALL, IN_ORDER, there, "code")[2] == [2, 7, 6]
    # What is on the GPU comes first: 3 is an alternative there for all three, and nobody is served by 4 any more.
    assert routed(LOW_FOR_ALL, IN_ORDER, there | {3}) == [[1, 2, 3], [1, 5, 3], [2, 7, 3]]


def test_gathering_goes_to_the_larger_batch():
    """k = 1, beta 200 throughout, nothing on the GPU: tokens 1 and 2 by expert 0, the third by 1, the fourth by 2."""
    both = scores(4, e0=210, e1=200, e2=190)
    third, fourth = scores(4, e1=210, e0=200, e2=190), scores(4, e2=210, e1=200, e0=190)
    # Token 3 leaves a batch of 1 for one of 3; token 4 would have 1 left, whom nobody is served by now, and takes 0.
    assert routed([both, both, third, fourth], [[0], [0], [1], [2]], set()) == [[0]] * 4
    # 1 + 1 is no more than 2: tokens 1 and 2 stay, although 1 is an alternative for them.
    assert routed([both, both, scores(4, e1=900, e3=200)], [[0], [0], [1]], {1}, by_batch=True)[:2] == [[1], [1]]
    assert routed([both, both, scores(4, e1=210, e3=200)], [[0], [0], [1]], set()) == [[0], [0], [1]]
    # A lone token has nobody to join.
    assert routed([both], [[0]], set()) == [[0]]


#: k = 4, beta 1000 (expert 4); T = 1250, R = 750. Expert 0 is top; 1, 2, 3 low; 4, 5, 6 alternatives, 7 below.
ONE = [[2000, 1200, 1150, 1100, 1000, 900, 800, 700, 0]]
FOUR = [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("rule", "there", "expected"),
    [
        ("text", {2, 5, 6}, [0, 5, 2, 6]),  # 2 stays, 1 and 3 are replaced by the two best
        ("text", {2, 6}, [0, 1, 2, 6]),  # the shortfall keeps the higher score, 1
        ("text", {2, 4, 5}, [0, 4, 2, 5]),  # the (k+1)-th expert is an alternative
        ("text", {7, 8}, [0, 1, 2, 3]),
        ("alg1", {2, 5, 6}, [0, 1, 5, 6]),  # 2 goes although it is there
        ("alg1", {2, 4, 5}, [0, 1, 2, 5]),  # scores of beta itself belong to B, not to A
        ("code", {2, 5, 6}, [0, 5, 2, 6]),
        ("code", {2, 4, 6}, [0, 6, 2, 3]),
    ],
)
def test_rules(rule, there, expected):
    assert routed(ONE, FOUR, there, rule) == [expected]


def test_the_code_takes_the_first_found_and_the_text_the_best():
    row = [[2000, 800, 900, 1200, 1000, 0]]  # chosen 0 and 3, beta 1000; alternatives 1 (800) and 2 (900)
    assert routed(row, [[0, 3]], {1, 2}, "text") == [[0, 2]]
    assert routed(row, [[0, 3]], {1, 2}, "code") == [[0, 1]]


def test_an_alternative_in_c_need_not_be_there_yet():
    rows = [scores(5, e1=2000, e0=500, e2=400), scores(5, e0=1100, e3=1000, e2=900, e1=850)]
    # beta 400 and 900, C = {1}: 3 is low and absent, 1 an alternative that is not there yet.
    for rule in ("text", "code"):
        assert routed(rows, [[1, 0], [0, 3]], {0}, rule)[1] == [0, 1]
        assert routed(rows, [[1, 0], [0, 3]], {0}, rule, couple=False, by_batch=False)[1] == [0, 3]


def published_router(rows, there, alpha, k):
    """`replaceset_between_tokens` and `cache_router` of goingshr/SMoE@2de217b, retold: who serves whom."""
    ranked = [sorted(range(len(row)), key=lambda e: row[e], reverse=True) for row in rows]
    lasts = [row[ranks[k]] for row, ranks in zip(rows, ranked, strict=True)]
    top = [
        [e for e in ranks[:k] if row[e] >= last * (1 + alpha)]
        for row, ranks, last in zip(rows, ranked, lasts, strict=True)
    ]
    in_c = {e for experts in top for e in experts}
    served = []
    for row, ranks, last, certain in zip(rows, ranked, lasts, top, strict=True):
        stand_ins, out = set(), list(certain)
        for e in ranks:
            if last * (1 - alpha) < row[e] < last:
                stand_ins.add(e)
        for e in ranks[len(certain) : k]:
            taken = e
            if e not in there and e not in in_c:
                for other in stand_ins:
                    if other in there or other in in_c:
                        taken = other
                        break
                stand_ins.discard(taken)
            out.append(taken)
        served.append(out)
    return served


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_the_code_against_its_published_router(data):
    """64 experts, where a set of them is not walked by id: in {8, 1}, filled in this order, 8 comes first."""
    n_experts, k = data.draw(st.sampled_from([(64, 6), (9, 2)]))
    seed = data.draw(st.integers(0, 2**32 - 1))
    draw = np.random.default_rng(seed)
    rows = [[int(x) for x in draw.gamma(0.6, 400, n_experts)] for _ in range(data.draw(st.integers(1, 3)))]
    there = {int(e) for e in np.flatnonzero(draw.random(n_experts) < 0.4)}
    chosen = [sorted(range(n_experts), key=lambda e, row=row: (-row[e], e))[:k] for row in rows]
    assert routed(rows, chosen, there, "code", alpha=0.25) == published_router(rows, there, Fraction(1, 4), k)


def test_the_first_found_is_not_the_lowest_id():
    row = [scores(64, e2=2000, e0=1500, e3=1000, e8=900, e1=850)]  # chosen 2 and 0, beta 1000: 0 is top at 1.25 x 1000
    row[0][0] = 1200  # low
    assert list({8, 1}) == [8, 1]
    assert routed(row, [[2, 0]], {1, 8}, "code") == [[2, 8]]
    alone = LoneToken(Thresholds(0.25, "code"), "code", 2)
    assert alone.roles(np.array([row]), np.array([[[2, 0]]])) == [([2], [0], [8, 1])]
    # Predicted: three tokens name 40, 33 and 2, one each. The set is filled token by token.
    named = np.array([[scores(64, e40=2000)], [scores(64, e33=2000)], [scores(64, e2=2000)]], dtype=float)
    alone = LoneToken(Thresholds(0.25, "code"), "code", 1)
    assert alone.foreseen_as_code(named) == [[40, 33, 2]]
    assert alone.foreseen(named, True) == [[2, 33, 40]]


def test_a_score_at_the_threshold():
    tops = [Token.of([1250, 1000, 0], [0], Thresholds(0.25, rule)).top for rule in ("text", "alg1", "code")]
    assert tops == [[], [], [0]]
    # (1 + alpha) beta is compared exactly: 0.1 is no binary fraction, 1.1 x 1000 is 1100 all the same.
    assert Token.of([1100, 1000], [0], Thresholds(0.1, "text")).top == []
    assert Token.of([1101, 1000], [0], Thresholds(0.1, "text")).top == [0]


def naive_text(rows, chosen, there, alpha):
    """Section 5.1, sentence by sentence, in fractions."""
    alpha = Fraction(str(alpha))
    betas = [sorted(row, reverse=True)[len(ids)] for row, ids in zip(rows, chosen, strict=True)]
    tops = [{e for e in ids if row[e] > (1 + alpha) * beta} for row, ids, beta in zip(rows, chosen, betas, strict=True)]
    top_score_set = set().union(*tops)
    out = []
    for row, ids, beta, top in zip(rows, chosen, betas, tops, strict=True):
        low = set(ids) - top
        stay = {e for e in low if e in there or e in top_score_set}
        absent = sorted(low - stay, key=lambda e: (row[e], -ids.index(e)))  # lowest first
        a = [
            e
            for e in range(len(row))
            if e not in ids and (1 - alpha) * beta <= row[e] <= beta and (e in there or e in top_score_set)
        ]
        a.sort(key=lambda e: (-sum(e in other for other in chosen), -row[e], e))
        n = min(len(a), len(absent))
        out.append(top | stay | set(absent[n:]) | set(a[:n]))
    # Section 5.4: of what is left to load or compute, token by token.
    for row, ids, beta, now in zip(rows, chosen, betas, out, strict=True):
        for leaving in [e for e in reversed(ids) if e in now and e not in there and e not in top_score_set]:
            size = {e: sum(e in other for other in out) for e in range(len(row))}
            larger = [
                e
                for e in range(len(row))
                if e not in now
                and e not in ids
                and size[e] >= size[leaving]
                and size[e]
                and (1 - alpha) * beta <= row[e] <= beta
            ]
            if larger:
                now.remove(leaving)
                now.add(max(larger, key=lambda e: (size[e], row[e], -e)))
    return out


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_text_rule_against_a_naive_one(data):
    n_experts, k = data.draw(st.sampled_from([(6, 2), (9, 4)]))
    draw_row = st.lists(st.integers(0, 40), min_size=n_experts, max_size=n_experts)
    rows = data.draw(st.lists(draw_row, min_size=1, max_size=3))
    chosen = [sorted(range(n_experts), key=lambda e: (-row[e], e))[:k] for row in rows]
    there = data.draw(st.sets(st.integers(0, n_experts - 1)))
    alpha = data.draw(st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]))
    found = routed(rows, chosen, there, alpha=alpha)
    assert [set(ids) for ids in found] == naive_text(rows, chosen, there, alpha)
    for rule in ("text", "alg1", "code"):
        for row, before, after in zip(rows, chosen, routed(rows, chosen, there, rule, alpha), strict=True):
            assert len(set(after)) == k
            top = Token.of(row, before, Thresholds(alpha, rule)).top
            assert [e for e in before if e in top] == [e for e in after if e in top]
        gathered = {e for ids in routed(rows, chosen, there, rule, alpha) for e in ids}
        assert gathered <= {e for ids in routed(rows, chosen, there, rule, alpha, by_batch=False) for e in ids} | (
            there if rule != "code" else set()
        )


# -- the balancer (section 5.4, Algorithm 2) -------------------------------------------------------------------------


def test_algorithm_2_by_hand():
    missing = [(0, 5), (1, 3), (2, 2), (3, 1)]
    # Load 4 s, CPU 1 s per token. 0 <= 0: load 0 (4). 4 > 0: CPU 3 (1), CPU 2 (3), CPU 1 (6). Then all are given out.
    assert two_pointers(missing, 1.0, 4.0) == ([0], [3, 2, 1])
    # Load 2 s: load 0 (2); CPU 3 (1), CPU 2 (3); 2 <= 3: load 1 (4).
    assert two_pointers(missing, 1.0, 2.0) == ([0, 1], [3, 2])
    # A lone expert is always loaded: 0 <= 0.
    assert two_pointers([(7, 1)], 1.0, 100.0) == ([7], [])
    assert two_pointers([], 1.0, 1.0) == ([], [])
    # Equal batches: the lowest id is at the front.
    assert two_pointers([(2, 1), (1, 1)], 1.0, 1.0) == ([1], [2])


def makespan(missing, load, cpu_s, load_s):
    return max(len(load) * load_s, sum(n for e, n in missing if e not in load) * cpu_s)


def test_algorithm_2_counts_tokens_on_the_cpu():
    """One second a token on the CPU, four a load: load 0 (4 s), CPU 3 (3 s) and 2 (6 s), so that 1 is loaded too (8 s).
    Were an expert's second its price whatever its batch, the CPU would take 1 as well."""
    assert two_pointers([(0, 5), (1, 4), (2, 3), (3, 3)], 1.0, 4.0) == ([0, 1], [3, 2])


def test_what_algorithm_2_minimises():
    """min max(T_load, T_cpu): an optimum loads the largest batches, as sorting assumes, and `minmax` finds it. The
    greedy run is above it by no more than a load or an expert on the CPU, and is not always at it.
    """
    missed = n_cases = 0
    for batches in product(range(1, 5), repeat=4):
        missing = list(enumerate(batches))
        for load_s in (1.0, 2.0, 3.0, 5.0):
            least = min(makespan(missing, [e for e in range(4) if mask >> e & 1], 1.0, load_s) for mask in range(16))
            ordered = sorted(missing, key=lambda item: -item[1])
            prefixes = [[e for e, _ in ordered[:n]] for n in range(5)]
            assert least == min(makespan(missing, load, 1.0, load_s) for load in prefixes)
            load, on_cpu = two_pointers(missing, 1.0, load_s)
            assert sorted(load + on_cpu) == [0, 1, 2, 3]
            found = makespan(missing, load, 1.0, load_s)
            assert least <= found <= least + max(load_s, *batches)
            load, on_cpu = best_front(missing, 1.0, load_s)
            assert sorted(load + on_cpu) == [0, 1, 2, 3]
            assert makespan(missing, load, 1.0, load_s) == least
            missed += found > least
            n_cases += 1
    assert 0 < missed < n_cases / 2


def test_few_misses_where_algorithm_2_loads_first():
    """A load takes 3 s, an expert on the CPU 1 s: one and two misses of a lone token are done there after 1 and 2 s."""
    assert best_front([(7, 1)], 1.0, 3.0) == ([], [7])
    assert best_front([(7, 1), (2, 1)], 1.0, 3.0) == ([], [7, 2])
    assert best_front([(7, 1), (2, 1), (4, 1)], 1.0, 3.0) == ([], [7, 4, 2])  # 3 s either way: the fewest loads
    assert best_front([(7, 1), (2, 1), (4, 1), (5, 1)], 1.0, 3.0) == ([2], [7, 5, 4])
    assert [len(two_pointers([(e, 1) for e in range(n)], 1.0, 3.0)[0]) for n in range(1, 5)] == [1] * 4


def test_the_pass_of_the_code():
    missing = [(0, 5), (1, 3), (2, 2), (3, 1)]
    # 0 < 0 is false: the largest goes to the CPU (3 s, whatever its tokens); load 1 (2), load 2 (4); CPU 3 (6).
    assert one_pass(missing, 3.0, 2.0) == ([1, 2], [0, 3])
    assert one_pass([(7, 1)], 100.0, 1.0) == ([], [7])


def test_costs_of_the_code():
    costs = Costs(2)
    assert costs.of(0) == (0.05, 0.05)  # a load is thought to cost what the CPU does
    costs.measured(0, [0.01], 1, 0.004)  # the CPU was done after the load: nothing was left to wait for
    assert costs.of(0) == (pytest.approx(0.03), pytest.approx(0.03))  # the guess and one measurement
    costs.measured(0, [0.01], 2, 0.015)  # 30 ms of loads, of which 20 were waited for: 10 each
    # CPU: 0.05 is more than a deviation off. Loads: 0.002 (the guess), 0 and 0.01: mean 0.004, deviation 0.0043.
    assert costs.of(0) == (pytest.approx(0.01), pytest.approx(0.001))
    assert costs.of(1) == (0.05, 0.05)  # another layer has measured nothing itself
    for _ in range(10):
        costs.measured(1, [], 1, 1.0)
    costs.measured(1, [0.5, 0.5], 0, 1.0)
    assert costs.of(1) == (pytest.approx(0.5), 1.0)  # only ten are kept
    assert typical([1.0] * 9 + [100.0]) == 1.0  # more than one standard deviation off
    assert typical([1.0, 3.0]) == 2.0


# -- the score window (section 5.3) ----------------------------------------------------------------------------------


def test_window_against_a_naive_one():
    rng = np.random.default_rng(3)
    means, seen = np.zeros(8), {0: [], 1: []}
    window = ScoreWindow(3, 4, means)
    for step in range(10):
        scores = rng.integers(0, 4096, (1 + step % 3, 2, 4)).astype(float)
        every = counted(scores)
        for layer in range(2):
            assert counted(scores[:, layer, None]) == [every[layer]]
            seen[layer].append(np.rint(scores[:, layer].mean(axis=0)))
            window.observe(layer, every[layer])
            average = np.stack(seen[layer][-3:]).sum(axis=0) / len(seen[layer][-3:])
            assert np.array_equal(means.reshape(2, 4)[layer], average)
        window.end()


@pytest.mark.parametrize("rule", ["text", "alg1", "code"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_token_alone_is_routed_as_a_batch_of_one(rule, data):
    k = data.draw(st.integers(1, 3))
    row = data.draw(st.lists(st.integers(0, 30), min_size=k, max_size=6))
    chosen = data.draw(st.permutations(range(len(row))))[:k]
    there = data.draw(st.sets(st.integers(0, 5)))
    thresholds = Thresholds(0.25, rule)
    alone = LoneToken(thresholds, rule, k)
    ((top, low, near),) = alone.roles(np.array([[row]], dtype=float), np.array([[chosen]]))
    token = Token.of(row, chosen, thresholds)
    assert top == token.top
    swaps = alone.swaps(low, near, there.__contains__)
    assert [swaps.get(e, e) for e in chosen] == route([token], rule, there.__contains__)[0]
    best = sorted(range(len(row)), key=lambda e: (-row[e], e))[:k]
    assert alone.foreseen(np.array([[row]], dtype=float), True) == [Token.of(row, best, thresholds).top]
    assert alone.foreseen(np.array([[row]], dtype=float), False) == [best]


# -- on traces -------------------------------------------------------------------------------------------------------


def written(path, rows, k, predicted=None, prompt=1):
    """A trace of one request from whole gate scores, `rows[token][layer]` summing to 4095, and predicted ones."""
    whole = np.array(rows, dtype=float)
    n, n_layers, n_experts = whole.shape
    assert (whole.sum(axis=-1) == 4095).all()
    experts = np.argsort(-whole, axis=-1, kind="stable")[..., :k]
    levels = {"scores": whole / 4095}
    if n_layers > 1:
        levels["shared_scores"] = np.array(predicted, dtype=float) / 4095
    header = tiny_header(n_layers, n_experts, k)
    return write_trace(path, header, [Request(0, 0, prompt, n, "", None, "test")], None, experts=experts, **levels)


FIVE_STEPS = [
    [[1500, 1200, 500, 600, 295]],  # prompt: 0 and 1
    [[1000, 300, 900, 1500, 395]],  # 3 top (beta 900, T 1125), 0 low and there
    [[200, 900, 1000, 395, 1600]],  # 4 top; 2 low and absent: 1 scores beta and is there
    [[500, 395, 1500, 1400, 300]],  # 2 and 3 top, both absent: one is loaded, one computed
    [[2000, 1000, 600, 300, 195]],  # 0 and 1
]


def test_five_steps(tmp_path):
    """One layer, room for 3 of 5; residents at the start: 0, 1, 2. Averages of scores decide who leaves."""
    with Trace(written(tmp_path / "t", FIVE_STEPS, 2)) as trace:
        seen = execute_easy(setup(Importance(prefetch="none"), trace, room=3))
    assert seen.log == [
        ("gpu", 0, 0),
        ("gpu", 0, 1),
        # 1: 750, 2: 700; 0 is shielded
        ("evict", 0, 2),
        ("fetch", 0, 3),
        ("gpu", 0, 0),
        ("gpu", 0, 3),
        # 0: 900, 3: 831.7; 1 is shielded
        ("evict", 0, 3),
        ("fetch", 0, 4),
        ("gpu", 0, 1),
        ("gpu", 0, 4),
        # 0: 800, 1: 698.8, 4: 647.5. Algorithm 2: 2 is loaded, 3 goes to the CPU
        ("evict", 0, 4),
        ("fetch", 0, 2),
        ("cpu", 0, 3),
        ("gpu", 0, 2),
        ("gpu", 0, 0),
        ("gpu", 0, 1),
    ]
    assert seen.classes("decode") == {"hit": 3, "miss": 3, "cpu": 1, "substituted": 1}
    # Prompt 1 + 2 + 2 + 1. A load: 1 + 10 + 2 + 1, hits run meanwhile. The CPU's result (1 s down, 5 s, 1 s back) waits
    # for the link until 45 and comes before expert 2 is done at 47. The last token as the prompt.
    assert seen.end_s == 6 + 14 + 14 + 14 + 6
    loss = seen.outcome.report.counts.tally.loss
    assert (loss.changed, loss.activations) == (1, 10)
    kept = 1 - (1000 - 900) / (2700 + 2500 + 2600 + 2900 + 3000)
    assert seen.result.gate_mass_kept == pytest.approx(kept)


@pytest.mark.parametrize(("barrier", "gpu"), [(0, [(17, 19), (27, 29)]), (1, [(27, 29), (29, 31)])])
def test_loaded_experts_run_as_they_arrive_or_when_all_have(tmp_path, barrier, gpu):
    """Room for 2 of 4: the generated token lacks both. Prompt 0..6, attention 6..7, copies 7..17 and 17..27."""
    rows = [[[1800, 1500, 400, 395]], [[395, 400, 1500, 1800]]]
    with Trace(written(tmp_path / "t", rows, 2)) as trace:
        policy = Importance(prefetch="none", balance="load", barrier=barrier)
        seen = execute_easy(setup(policy, trace, room=2))
    assert seen.lane("h2d") == [("demand 0.2", 7, 17), ("demand 0.3", 17, 27)]
    assert [(start_s, end_s) for what, start_s, end_s in seen.lane("gpu") if what[-1] in "23"] == gpu
    assert Importance(barrier=barrier).settings["barrier"] == barrier


#: Two layers of 4, k = 2. Layer 0 asks for 0 and 1; foreseen for layer 1 are 3, then 2; 3 and 1 are asked for.
TWO_LAYERS = [[[1800, 1500, 400, 395], [400, 1500, 395, 1800]]] * 2
FORESEEN = [[[300, 395, 1500, 1900]]] * 2


def test_prefetching(tmp_path):
    """The best foreseen is copied once the prediction is there; the next waits in the queue, which the gate clears."""
    policy = Importance(prefill_prefetch=0, prediction_s=1.0, balance="load", evict="fifo")
    rows = [[[400, 395, 1800, 1500], [1800, 1500, 400, 395]], TWO_LAYERS[0]]
    with Trace(written(tmp_path / "t", rows, 2, FORESEEN)) as trace:
        seen = execute_easy(setup(policy, trace, room=6))  # at the start 0.0 to 0.3, 1.0 and 1.1
    assert seen.log == [
        ("gpu", 0, 2),
        ("gpu", 0, 3),
        ("gpu", 1, 0),
        ("gpu", 1, 1),
        ("gpu", 0, 0),
        ("gpu", 0, 1),
        ("evict", 0, 2),
        ("prefetch", 1, 3),
        ("gpu", 1, 1),
        ("gpu", 1, 3),  # what is there runs first, then what is under way
    ]
    # Prompt: 1 + 4 + 1 + 4 + 1 = 11. Attention 12, experts to 16, prediction to 17, copy 17 to 27; gate at 18: late.
    assert seen.lane("h2d") == [("prefetch 1.3", 17, 27)]
    assert seen.prefetched() == {"issued": 1, "late": 1}
    stats = seen.outcome.setup.policy.stats()
    assert (stats["predicted"], stats["top_right_frac"], stats["active_frac"]) == (2, 0.5, 0.5)


#: Layer 1 of a token: 0 and 1 have top scores, 2 and 3 are chosen besides, 4 to 9 are not.
FOUR_OF_TEN = Token(scores=[900, 800, 300, 290, 10, 9, 8, 7, 6, 5], chosen=[0, 1, 2, 3], top=[0, 1], near=[])


def test_the_stand_in_is_as_right_as_it_is_told():
    drawn = [e for row in range(4000) for e in StandIn("surrogate:0.82/0.95", 0).name([(row, FOUR_OF_TEN)], 1)]
    assert len(drawn) == 2 * 4000  # as many as have top scores
    others = [e for e in drawn if e > 1]
    assert 1 - len(others) / len(drawn) == pytest.approx(0.82, abs=0.015)
    assert sum(e < 4 for e in others) / len(others) == pytest.approx(0.95, abs=0.015)
    assert sorted(StandIn("surrogate:1", 0).name([(7, FOUR_OF_TEN)], 1)) == [0, 1]
    assert min(StandIn("surrogate:0", 0).name([(7, FOUR_OF_TEN)], 1)) >= 4  # no second share: never active
    all_top = Token([900, 800, 10, 9], [0, 1], [0, 1], [])
    assert sorted(StandIn("surrogate:0/1", 0).name([(7, all_top)], 1)) == [2, 3]  # nobody else is active
    two = StandIn("surrogate:1", 0).name([(1, FOUR_OF_TEN), (2, all_top)], 1)
    assert sorted(two) == [0, 1]
    with pytest.raises(BadInput, match="write recorded, or surrogate"):
        StandIn("surrogate:2", 0)


def facts(policy, trace, **world):
    seen = execute_easy(setup(policy, trace, **{"room": 8, "batch": 2, **world}))
    return seen.log, seen.end_s


#: Every parameter, the value it is changed to, and what else must be set for that to show.
KNOBS = {
    "variant": ("code", {}),
    "alpha": (0.9, {}),
    "low_score_rule": ("alg1", {"alpha": 0.9}),
    "couple": (False, {"alpha": 0.9}),
    "prefer_batch": (0, {"alpha": 0.9, "low_score_rule": "alg1"}),
    "prefetch": ("top_k", {}),
    "predictor": ("surrogate:0/0", {}),
    "seed": (1, {"predictor": "surrogate:0.5/0.5"}),
    "prefill_prefetch": (0, {}),
    "depth": (3, {"prefetch": "top_k"}),
    "prediction_s": (1.0, {}),
    "evict": ("lru", {}),
    "score_window": (1, {}),
    "shield": (False, {}),
    "balance": ("cpu", {}),
    "prefill_cpu": (1, {}),
    "barrier": (1, {}),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("importance") / "t"
    with Trace(tiny_trace(path, 3, 8, 2, n_requests=8, outputs=8, levels={"scores", "shared_scores"})) as trace:
        yield trace


@pytest.mark.parametrize("name", KNOBS)
def test_no_parameter_is_dead(name, tiny):
    value, others = KNOBS[name]
    assert facts(Importance(**others), tiny) != facts(Importance(**others, **{name: value}), tiny)


def test_nothing_is_lost_while_everything_is_there(tiny):
    for variant in ("paper", "code"):
        seen = execute_easy(setup(Importance(variant=variant), tiny, room=24))
        assert seen.result.gate_mass_kept == 1.0
        assert not {entry[0] for entry in seen.log} - {"gpu"}
        assert seen.outcome.setup.policy.stats()["cache_ratio"] == 1.0


def test_the_cache_ratio_of_all_policies_is_the_one_of_the_public_code(tmp_path, tiny):
    """Five steps by hand, after the prompt: 0 is there, 3 not; 1 (for 2), 4 not; neither 2 nor 3; 0 and 1."""
    with Trace(written(tmp_path / "t", FIVE_STEPS, 2)) as trace:
        seen = execute_easy(setup(Importance(prefetch="none"), trace, room=3))
    # The gate says of 2 that it is substituted; what served in its place is there.
    assert seen.classes("decode") == {"hit": 3, "miss": 3, "cpu": 1, "substituted": 1}
    assert seen.result.served_hit_rates == ServedRates(hit=4 / 8, partial_hit=0, late_hit=0, miss=4 / 8)
    assert seen.result.cache_ratio == 4 / 8 == seen.outcome.setup.policy.stats()["cache_ratio"]
    for variant in ("paper", "code"):  # against the policy's own count, with copies under way
        seen = execute_easy(setup(Importance(variant=variant, alpha=0.9), tiny, room=8, batch=2))
        assert seen.result.substituted_rate > 0 and seen.result.late_hit_rate > 0
        assert seen.result.cache_ratio == pytest.approx(seen.outcome.setup.policy.stats()["cache_ratio"], abs=1e-12)
