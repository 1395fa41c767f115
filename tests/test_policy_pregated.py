"""Pre-gated MoE and its artifact's baselines: timelines by hand, closed forms, the expert cache's rules.

Copy of an expert 10 s, expert 2 s, attention 1 s, head 1 s, unless a test says otherwise.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from easy_numbers import EXPERT_BYTES, execute_easy, run, setup
from tiny_traces import tiny_header, tiny_trace
from tiny_traces import tiny_trace as seeded_trace

from policies.on_demand import OnDemand
from policies.pregated import ExpertCache, PreGated
from sim.base.errors import DoesNotFit
from traces.format.reader import Trace
from traces.format.requests import Request
from traces.format.writer import write_trace

KNOBS = {
    "variant": "gate_reuse",
    "mode": "on_demand",
    "activation_level": 2,
    "prefill": "as_decode",
    "cache_ratio": 0.25,
    "keep": "request",
    "cache_policy": "lifo",
}
# Three layers of four experts, k = 1; a prompt token, then four.
STEPS = [[[0], [1], [2]], [[3], [3], [3]], [[0], [1], [0]], [[0], [1], [2]], [[2], [0], [3]]]


def ends(seen):
    return [end for what, _, end in seen.lane("gpu") if what == "head"]


def test_five_steps(tmp_path):
    seen = run(PreGated(), tmp_path, STEPS, room=8, n_experts=4)
    # The prompt is served on demand: 3 x (1 + 10 + 2) + 1. Decoding: the first layer fetches its own expert, every
    # other one is fetched while the layer before computes.
    assert ends(seen) == [40, 74, 108, 142, 176]
    assert seen.log[:8] == [
        ("fetch", 0, 0),
        ("gpu", 0, 0),
        ("evict", 0, 0),
        ("fetch", 1, 1),
        ("gpu", 1, 1),
        ("evict", 1, 1),
        ("fetch", 2, 2),
        ("gpu", 2, 2),
    ]
    decode = [entry for entry in seen.log[8:] if entry[0] != "evict"]
    assert decode == [
        entry
        for token in STEPS[1:]
        for entry in [
            ("fetch", 0, token[0][0]),
            ("prefetch", 1, token[1][0]),
            ("gpu", 0, token[0][0]),
            ("prefetch", 2, token[2][0]),
            ("gpu", 1, token[1][0]),
            ("gpu", 2, token[2][0]),
        ]
    ]
    assert [span for span in seen.lane("gpu") if 40 <= span[1] < 74] == [
        ("attention 0", 40, 41),
        ("expert 0.3", 51, 53),
        ("attention 1", 53, 54),
        ("expert 1.3", 61, 63),
        ("attention 2", 63, 64),
        ("expert 2.3", 71, 73),
        ("head", 73, 74),
    ]
    assert list(seen.outcome.report.counts.peak_bytes) == [2 * EXPERT_BYTES]
    assert "fine-tuned" in seen.result.caveats


@pytest.mark.parametrize(("copy_s", "kernel_s"), [(10.0, 1.0), (4.0, 1.0), (2.0, 1.0), (1.0, 1.0)])
def test_closed_forms(copy_s, kernel_s, tmp_path):
    """Per token of L layers, with attention a, an expert x, a head h and a copy c (k = 1).

    on demand L (a + c + x) + h; pre-gated a + c + x + (L - 1) max(c, x + a) + (x where the last wait was a copy) + h;
    all experts: E c for every c, but for the first layer's, where there is no wait shorter than all of them.
    """
    n_layers, n_experts = 3, 4
    a, x, h = 1.0, 2.0, 1.0

    def token(c):
        computed = a + c + x  # the first layer is fetched after its gate
        copied = a + c
        for _ in range(n_layers - 1):
            copied = copied + c  # issued when the copy before has been waited for
            computed = max(computed + a, copied) + x
            copied = max(computed - x, copied)
        return computed + h

    def per_token(mode):
        seen = run(PreGated(mode=mode), tmp_path, STEPS, room=8, n_experts=4, copy_s=copy_s)
        return np.diff(ends(seen)).tolist(), seen.outcome.report.counts.peak_bytes[0] // EXPERT_BYTES

    assert per_token("on_demand") == ([n_layers * (a + copy_s + x) + h] * 4, 1)
    assert per_token("pregated") == ([token(copy_s)] * 4, 2)
    assert per_token("prefetch_all") == ([token(n_experts * copy_s)] * 4, 8)


def test_published_ratios_are_the_closed_forms_limits(tmp_path):
    """Figure 10: at most 2 over on-demand (published 1.7, 1.9 at most), E over prefetching all (125 of 128)."""
    rows = [[[0]] * 40] * 3

    def block(mode, copy_s):
        seen = run(PreGated(mode=mode), tmp_path, rows, room=80, n_experts=8, copy_s=copy_s)
        return np.diff(ends(seen))[-1]

    assert block("on_demand", 3.0) / block("pregated", 3.0) == pytest.approx(2, rel=0.05)  # copy as long as the rest
    assert block("prefetch_all", 1000.0) / block("pregated", 1000.0) == pytest.approx(8, rel=0.001)


def guessed(path, rows, guesses, distance=1):
    """A trace whose predictions `distance` layers ahead name one expert per token and layer."""
    experts = np.array(rows)
    n, n_layers, k = experts.shape
    scores = np.zeros((n, n_layers if distance == 1 else n_layers - distance, 4))
    for token, layers in enumerate(guesses):
        for layer, expert in enumerate(layers[: scores.shape[1]]):
            scores[token, layer, expert] = 1.0
    scores[scores.sum(axis=-1) == 0] = [1.0, 0, 0, 0]
    header = tiny_header(n_layers, 4, k)
    return write_trace(
        path,
        header,
        [Request(0, 0, 1, n, "", None, "test")],
        None,
        experts=experts,
        **{f"next_scores_{distance}": scores},
    )


def test_gate_reuse_fetches_what_it_missed(tmp_path):
    # Two layers. Token 1: told 1, asked 1. Token 2: told 2, asked 3: the copy is awaited, thrown away, 3 is fetched.
    rows, guesses = [[[0], [0]], [[0], [1]], [[0], [3]]], [[0], [1], [2]]
    with Trace(guessed(tmp_path / "t", rows, guesses)) as trace:
        seen = execute_easy(setup(PreGated(variant="gate_reuse"), trace, 8))
    assert seen.log[5:] == [
        ("evict", 1, 0),
        ("fetch", 0, 0),
        ("prefetch", 1, 1),
        ("gpu", 0, 0),
        ("evict", 0, 0),
        ("gpu", 1, 1),
        ("evict", 1, 1),
        ("fetch", 0, 0),
        ("prefetch", 1, 2),
        ("gpu", 0, 0),
        ("evict", 0, 0),
        ("evict", 1, 2),
        ("fetch", 1, 3),
        ("gpu", 1, 3),
    ]
    # Token 1: 1 + 10 (fetch) + 10 (prefetch) + 2 + 1; token 2: ten more.
    assert np.diff(ends(seen)).tolist() == [24, 34]
    assert "fine-tuned" not in seen.result.caveats


def test_an_activation_level_of_two_looks_two_layers_ahead(tmp_path):
    seen = run(PreGated(activation_level=2), tmp_path, STEPS[:2], room=8, n_experts=4)
    decode = [entry for entry in seen.log[8:] if entry[0] != "evict"]
    assert decode == [("fetch", 0, 3), ("prefetch", 2, 3), ("gpu", 0, 3), ("fetch", 1, 3), ("gpu", 1, 3), ("gpu", 2, 3)]


# -- the expert cache -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "left"),
    [
        ("lfu", ["b", "c"]),  # a is used twice; b goes; then c and d count 1 each: c came first
        ("lru", ["b", "c"]),  # a was used last but for what is inserted
        ("lifo", ["c", "d"]),  # the newest goes
    ],
)
def test_cache_rules(rule, left):
    cache = ExpertCache(3, rule)
    for piece in "abc":
        assert cache.insert(piece, lambda _: True) is None
    cache.used("a")
    assert [cache.insert(piece, lambda _: True) for piece in "de"] == left


def test_lru_and_lfu_part_where_frequency_and_age_disagree():
    def third_out(rule):
        cache = ExpertCache(2, rule)
        for piece in "ab":
            cache.insert(piece, lambda _: True)
        cache.used("a")
        cache.used("a")
        cache.used("b")
        return cache.insert("c", lambda _: True)

    assert (third_out("lfu"), third_out("lru")) == ("b", "a")


def test_a_cache_without_room_or_with_nothing_that_may_leave():
    assert ExpertCache(0, "lfu").insert("a", lambda _: True) == "a"
    cache = ExpertCache(1, "lifo")
    cache.insert("a", lambda _: True)
    assert cache.insert("b", lambda piece: piece != "a") == "b"
    assert "a" in cache
    assert "b" not in cache


def test_frequencies_start_anew_in_the_decoder():
    cache = ExpertCache(2, "lfu")
    cache.insert("a", lambda _: True)
    cache.insert("b", lambda _: True)
    cache.used("a")
    cache.forget_counts()
    assert cache.insert("c", lambda _: True) == "a"  # used more often before; now both count 1, and a came first
    assert cache.insert("d", lambda _: True) == "b"  # a new entry counts 1, too


@pytest.mark.parametrize(
    ("before", "now", "anew"),
    [("prefill", "decode", 1), ("decode", "decode", 0), ("decode", "prefill", 0), ("prefill", "prefill", 0)],
)
def test_they_do_so_when_a_prompt_is_over(before, now, anew):
    policy, told = PreGated(cache_ratio=0.25), []
    policy._phase, policy._buffers = before, {}
    policy._caches = [SimpleNamespace(forget_counts=lambda: told.append(1))]
    assert list(policy.iteration_start(SimpleNamespace(phase=now), None)) == []
    assert len(told) == anew


def test_cached_experts_are_not_fetched_again(tmp_path):
    """Tokens 2 and 3 share their experts of layers 0 and 1; a quarter of 12 experts is a cache of three."""
    seen = run(PreGated(cache_ratio=0.25), tmp_path, STEPS, room=8, n_experts=4)
    copies = [entry[1:] for entry in seen.log if entry[0] in ("fetch", "prefetch")]
    assert copies[:3] == [(0, 0), (1, 1), (2, 2)]  # the prompt's
    assert copies[3:6] == [(0, 3), (1, 3), (2, 3)]  # each takes the oldest place: 0.0, 1.1, 2.2 leave
    assert seen.outcome.report.counts.peak_bytes[0] <= 5 * EXPERT_BYTES
    assert seen.result.h2d_bytes < run(PreGated(), tmp_path, STEPS, 8, n_experts=4).result.h2d_bytes


# -- every parameter does something -----------------------------------------------------------------------------------


@pytest.mark.parametrize("knob", KNOBS)
def test_no_knob_is_dead(knob, tmp_path):
    base = {"cache_ratio": 0.25} if knob == "cache_policy" else {}
    with Trace(tiny_trace(tmp_path / "t", 3, 6, 2, outputs=9, levels={"next_scores_1"})) as trace:
        one, other = (execute_easy(setup(PreGated(**base | more), trace, 18)) for more in ({}, {knob: KNOBS[knob]}))
    assert one.log != other.log


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"mode": "on_demand"},
        {"mode": "prefetch_all"},
        {"prefill": "as_decode"},
        {"activation_level": 3},
        {"cache_ratio": 0.3},
        {"cache_ratio": 0.3, "cache_policy": "lifo", "mode": "prefetch_all"},
        {"variant": "gate_reuse", "cache_ratio": 0.2, "cache_policy": "lru", "prefill": "as_decode"},
    ],
)
@pytest.mark.parametrize(("gpus", "batch"), [(1, 1), (2, 3), (3, 1)])
def test_buffers_suffice(settings, gpus, batch, tmp_path):
    levels = {"next_scores_1", "next_scores_2", "next_scores_3"}
    with Trace(seeded_trace(tmp_path / "t", 4, 8, 3, prompt=5, outputs=6, n_requests=6, levels=levels)) as trace:
        made = setup(PreGated(**settings), trace, 32)
        need = made.policy.min_experts(_Shape(gpus))
        for room in (need, need + 1, 32):
            execute_easy(setup(PreGated(**settings), trace, room, gpus=gpus, batch=batch))
        with pytest.raises(DoesNotFit, match=f"at least {need} whole"):
            execute_easy(setup(PreGated(**settings), trace, need - 1, gpus=gpus))


@pytest.mark.parametrize(
    ("settings", "need"),
    [
        ({}, 6),
        ({"mode": "on_demand"}, 3),
        ({"activation_level": 3}, 12),
        ({"mode": "prefetch_all"}, 16),
        ({"cache_ratio": 0.25}, 6 + 8),
        ({"cache_ratio": 0.25, "mode": "on_demand"}, 3 + 8),
    ],
)
def test_room_is_the_active_experts_of_consecutive_blocks(settings, need):
    """Three active experts a block: two blocks of them; one on demand; all of two blocks as SE-MoE; plus the cache."""
    assert PreGated(**settings).min_experts(_Shape(1)) == need


def test_every_tokens_first_choice_goes_before_any_second():
    gate = SimpleNamespace(next_scores=lambda _: np.array([[9.0, 5.0, 1.0, 0.0], [1.0, 0.0, 9.0, 5.0]]))
    policy = PreGated(variant="gate_reuse")
    policy._ahead = 1
    assert list(policy._chosen(gate, 1, SimpleNamespace(top_k=2))) == [0, 2, 1, 3]


class _Shape:
    n_layers, n_experts, top_k = 4, 8, 3

    def __init__(self, gpus):
        self.n_gpus = gpus

    def piece(self, layer: int, expert: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=(layer * self.n_experts + expert) % self.n_gpus)


def once_each(seen):
    """Fetches and prefetches of a log, and whether none was made twice."""
    copies = [what[1:] for what in seen.log if what[0] in ("fetch", "prefetch")]
    return sorted(copies), len(copies) == len(set(copies))


@pytest.mark.parametrize("make", [PreGated, OnDemand])
def test_kept_for_the_request_each_active_expert_is_copied_once(make, tmp_path):
    """eMoE, section 2.1.1: a prompt's active experts are there once each, in as much memory, and leave with it."""
    seen = run(make(keep="request"), tmp_path, STEPS, room=12, n_experts=4)
    active = sorted({(layer, row[layer][0]) for row in STEPS for layer in range(3)})
    assert once_each(seen) == (active, True)
    assert list(seen.outcome.report.counts.peak_bytes) == [len(active) * EXPERT_BYTES]
    assert sorted(what[1:] for what in seen.log if what[0] == "evict") == active
    assert [what[0] for what in seen.log[-len(active) :]] == ["evict"] * len(active)
    assert seen.end_s < run(make(), tmp_path, STEPS, room=12, n_experts=4).end_s


@pytest.mark.parametrize("make", [PreGated, OnDemand])
def test_what_is_kept_makes_room_oldest_first(make, tmp_path):
    """Room for five of eight: whatever the request needs is there when it runs, and copied again when it had to go."""
    seen = run(make(keep="request"), tmp_path, STEPS, room=5, n_experts=4)
    assert seen.outcome.report.counts.peak_bytes[0] <= 5 * EXPERT_BYTES
    copies, once = once_each(seen)
    assert not once
    assert len(copies) < 3 * len(STEPS), "something is still found"
    assert sum(what[0] == "gpu" for what in seen.log) == 3 * len(STEPS)


@pytest.mark.parametrize("make", [PreGated, OnDemand])
def test_the_next_request_starts_from_nothing(make, tmp_path):
    seen = run(make(keep="request"), tmp_path, STEPS[:2] * 2, room=12, n_experts=4, lengths=[(1, 2), (1, 2)])
    once = {(layer, row[layer][0]) for row in STEPS[:2] for layer in range(3)}
    assert once_each(seen)[0] == sorted([*once, *once])
