"""Mixtral-Offloading: swaps, orders and guesses by hand, from the published code and text.

Numbers of `easy_numbers`: copy of an expert 10 s either way, expert 2 s, attention 1 s, head 1 s.
"""

from __future__ import annotations

import numpy as np
import pytest
from easy_numbers import EXPERT_BYTES, execute_easy, run, setup
from tiny_traces import tiny_header, tiny_trace

from policies.lru import Lru
from policies.mixtral_offloading import MixtralOffloading
from sim.base.errors import DoesNotFit, IllegalDecision
from sim.policy.api import Policy
from sim.policy.decisions import Evict, Fetch, RunGpu, WriteBack
from traces.format.reader import Trace
from traces.format.requests import Request
from traces.format.writer import write_trace


def code(**settings):
    return MixtralOffloading(variant="code", **settings)


def resident(seen):
    return sorted((p.layer, p.expert) for p in seen.engine.residency.resident_pieces())


def test_a_prompt_that_needs_all_eight_flips_the_layer(tmp_path):
    """Card B2: residents 4..7, all active: served first, swapped out all the same; 4 hits, 4 misses."""
    rows = [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    seen = run(code(), tmp_path, rows, room=8, lengths=[(2, 1)])
    assert seen.classes("prefill") == {"hit": 4, "miss": 4}
    assert resident(seen) == [(0, e) for e in range(4)]
    # `load_experts`: three swaps ahead (buffers less one) with the oldest residents; then residents, which stay valid
    # in their buffers until they have run, then what was loaded; the last swap once expert 0 has been consumed.
    assert seen.log == [
        ("fetch", 0, 0),
        ("write_back", 0, 4),
        ("fetch", 0, 1),
        ("write_back", 0, 5),
        ("fetch", 0, 2),
        ("write_back", 0, 6),
        ("gpu", 0, 4),
        ("evict", 0, 4),
        ("gpu", 0, 5),
        ("evict", 0, 5),
        ("gpu", 0, 6),
        ("evict", 0, 6),
        ("gpu", 0, 7),
        ("gpu", 0, 0),
        ("fetch", 0, 3),
        ("write_back", 0, 7),
        ("evict", 0, 7),
        ("gpu", 0, 1),
        ("gpu", 0, 2),
        ("gpu", 0, 3),
    ]


# One layer of 4 experts, 2 offloaded: residents 2, 3 (oldest first). k = 1, five tokens.
STEPS = [[[0]], [[3]], [[0]], [[1]], [[2]]]


def test_five_steps_of_the_code(tmp_path):
    # 0: swap 0 for 2 -> 3 0;  3: hit -> 0 3;  0: hit -> 3 0;  1: swap for 3 -> 0 1;  2: swap for 0 -> 1 2
    seen = run(code(offload_per_layer=2), tmp_path, STEPS, room=6, n_experts=4)
    assert seen.log == [
        ("fetch", 0, 0),
        ("write_back", 0, 2),
        ("evict", 0, 2),
        ("gpu", 0, 0),
        ("gpu", 0, 3),
        ("gpu", 0, 0),
        ("fetch", 0, 1),
        ("write_back", 0, 3),
        ("evict", 0, 3),
        ("gpu", 0, 1),
        ("fetch", 0, 2),
        ("write_back", 0, 0),
        ("evict", 0, 0),
        ("gpu", 0, 2),
    ]
    assert resident(seen) == [(0, 1), (0, 2)]
    # One stream: attention 0..1, up 1..11, down 11..21, expert 21..23, head 24. Hits take 4 s, misses 24 s.
    assert seen.lane("h2d") == [("demand 0.0", 1, 11), ("demand 0.1", 33, 43), ("demand 0.2", 57, 67)]
    assert seen.lane("d2h") == [("write_back 0.2", 11, 21), ("write_back 0.3", 43, 53), ("write_back 0.0", 67, 77)]
    assert seen.lane("gpu")[:3] == [("attention 0", 0, 1), ("expert 0.0", 21, 23), ("head", 23, 24)]
    assert seen.end_s == 24 + 4 + 4 + 24 + 24
    assert seen.result.d2h_bytes == seen.result.h2d_bytes == 3 * EXPERT_BYTES


def test_five_steps_of_the_paper_without_guesses(tmp_path):
    """The same swaps; the way down runs beside the computation: a miss takes 1 + 10 + 2 + 1 s."""
    seen = run(MixtralOffloading(offload_per_layer=2, guesses=0), tmp_path, STEPS, room=6, n_experts=4)
    assert [entry for entry in seen.log if entry[0] == "fetch"] == [("fetch", 0, 0), ("fetch", 0, 1), ("fetch", 0, 2)]
    assert seen.lane("d2h")[0] == ("write_back 0.2", 1, 11)
    assert seen.end_s == 14 + 4 + 4 + 14 + 14
    once = run(MixtralOffloading(offload_per_layer=2, guesses=0, write_back=False), tmp_path, STEPS, 6, n_experts=4)
    assert once.end_s == seen.end_s
    assert once.result.d2h_bytes == 0


def guessed(path, rows, guesses, n_experts=4):
    """A trace whose predictions for layer l + 1 rank `guesses[token][l]` first."""
    experts = np.array(rows)
    n, n_layers, k = experts.shape
    scores = np.zeros((n, n_layers, n_experts))
    for token, layers in enumerate(guesses):
        for layer, order in enumerate(layers):
            for place, expert in enumerate(order):
                scores[token, layer, expert] = (2048 >> place) / 4095
            scores[token, layer, order[0]] += 1 - scores[token, layer].sum()
    header = tiny_header(n_layers, n_experts, k)
    return write_trace(
        path, header, [Request(0, 0, 1, n, "", None, "test")], None, experts=experts, next_scores_1=scores
    )


def test_guesses(tmp_path):
    # Two layers of 4 experts, residents 2 and 3; k = 1, 2 guesses. A prompt token (2, then 3: hits, never
    # guessed for; 7 s), then guesses for layer 1 of three tokens:
    #   token 0: 0, 3. 3 is there: only 0 is loaded; right: it replaces 2, the oldest. -> layer 1: 3 0
    #   token 1: 1, 2. both loaded; wrong: 3 is asked (hit), both discarded, nothing left.  -> 0 3
    #   token 2: 0, 3. both there: nothing loaded; 1 is asked: swapped for 0.               -> 3 1
    rows = [[[2], [3]], [[2], [0]], [[2], [3]], [[2], [1]]]
    guesses = [[[0, 1], [0, 1]], [[0, 3], [0, 1]], [[1, 2], [0, 1]], [[0, 3], [0, 1]]]
    with Trace(guessed(tmp_path / "t", rows, guesses)) as trace:
        seen = execute_easy(setup(MixtralOffloading(offload_per_layer=2), trace, room=8))
    assert seen.log == [
        ("gpu", 0, 2),
        ("gpu", 1, 3),
        ("prefetch", 1, 0),
        ("gpu", 0, 2),
        ("write_back", 1, 2),
        ("evict", 1, 2),
        ("gpu", 1, 0),
        ("prefetch", 1, 1),
        ("prefetch", 1, 2),
        ("gpu", 0, 2),
        ("evict", 1, 1),
        ("evict", 1, 2),
        ("gpu", 1, 3),
        ("gpu", 0, 2),
        ("fetch", 1, 1),
        ("write_back", 1, 0),
        ("evict", 1, 0),
        ("gpu", 1, 1),
    ]
    assert resident(seen) == [(0, 2), (0, 3), (1, 1), (1, 3)]
    # Token 0: attention 7..8, guess 8..18 beside expert 8..10 and attention 10..11; asked at 11: late; 18..20, head 21.
    # Token 1: asked 1 and 2 at 22 (22..32, 2 queued); at 25 wrong: 1 is in flight, 2 is withdrawn.
    assert seen.lane("h2d")[:2] == [("prefetch 1.0", 8, 18), ("prefetch 1.1", 22, 32)]
    assert seen.prefetched() == {"issued": 3, "cancelled": 1, "late": 1, "wasted": 1}


def test_smaller_budgets_offload_more_and_larger_ones_are_left_unused(tmp_path):
    with Trace(tiny_trace(tmp_path / "t", 3, 8, 2, levels={"next_scores_1"})) as trace:
        for room, main in ((3 * 2 + 4, 2), (3 * 4 + 4, 4), (24, 4)):
            seen = execute_easy(setup(MixtralOffloading(), trace, room))
            assert seen.outcome.report.counts.peak_bytes[0] <= (3 * main + 4) * EXPERT_BYTES
            assert len(resident(seen)) == 3 * main
        with pytest.raises(DoesNotFit, match="at least 7 whole experts"):
            execute_easy(setup(MixtralOffloading(), trace, 6))


@pytest.mark.parametrize("make", [code, MixtralOffloading])
@pytest.mark.parametrize("buffers", [2, 3, 4, 7])
def test_buffers_suffice(make, buffers, tmp_path):
    """Main experts and buffers are never exceeded, with more experts needed than resident, and with several GPUs."""
    with Trace(tiny_trace(tmp_path / "t", 3, 8, 3, prompt=6, levels={"next_scores_1"}, seed=buffers)) as trace:
        for room in range(3 + buffers, 24):
            seen = execute_easy(setup(make(buffer_size=buffers, offload_per_layer=5, guesses=8), trace, room))
            main = min(3, (room - buffers) // 3)
            assert seen.outcome.report.counts.peak_bytes[0] <= (3 * main + buffers) * EXPERT_BYTES
        execute_easy(setup(make(buffer_size=buffers), trace, [12, 12], gpus=2))


def test_room_is_not_overwritten_while_it_is_copied_down(tmp_path):
    """An expert may run while it is written back (both only read it); the one that takes its room waits for both."""

    class Swap(Policy):
        name = "swap"

        def initial(self, view):
            return [view.piece(0, 0), view.piece(0, 1)]

        def gate_done(self, gate, view):
            yield WriteBack(view.piece(0, 0))
            yield RunGpu(0)
            yield Evict(view.piece(0, 0))
            yield Fetch(view.piece(0, 2))
            yield RunGpu(1)
            yield RunGpu(2)

    seen = run(Swap(), tmp_path, [[[0, 1, 2]]], room=2, n_experts=4)
    # Attention 0..1; down 1..11 beside experts 0 and 1 (1..5); up 11..21; expert 2 21..23; head 24.
    assert seen.lane("d2h") == [("write_back 0.0", 1, 11)]
    assert seen.lane("h2d") == [("demand 0.2", 11, 21)]
    assert seen.end_s == 24


def test_writing_back_what_is_not_there_is_refused(tmp_path):
    class Wrong(Lru):
        def layer_done(self, layer, view):
            return [WriteBack(view.piece(0, 3))]

    with pytest.raises(IllegalDecision, match=r"WriteBack of .*not resident"):
        run(Wrong(), tmp_path, [[[0]]], room=2, n_experts=4)
