"""Lanes that slow one another, worked out by hand.

Numbers of `easy_numbers` unless a test says otherwise: copy of an expert 10 s, expert 2 s (CPU: 5 s), a token's hidden
state 1 s each way, attention 1 s, head 1 s. In the arithmetic, "at half rate" is a term of 1: 1 / (1 + 1).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from easy_numbers import Run, execute_easy, figure, setup
from test_timeline_compute import OnCpu
from test_timeline_copies import Placed
from tiny_traces import from_rows

from sim.machine.events.bill import TERMS, WAYS
from sim.policy.decisions import Evict, Fetch, Predict, Prefetch, RunGpu, WriteBack
from sim.profiles.hardware import Contention
from traces.format.reader import Trace

GPU_BY_H2D, H2D_BY_GPU, CPU_BY_H2D, H2D_BY_CPU = TERMS


def contended(policy, tmp_path, rows, room, terms: dict[str, float], **world: Any) -> Run:
    with Trace(from_rows(tmp_path / "easy.safetensors", rows, world.pop("n_experts", None))) as trace:
        made = setup(policy, trace, room, **world)
        given = {name: figure(terms.get(name, 0.0)) for name in (*TERMS, *WAYS)}
        hw = msgspec.structs.replace(made.hw, contention=Contention(**given))
        spec = msgspec.structs.replace(made.spec, sim_simulator="simpy")
        return execute_easy(replace(made, hw=hw, spec=spec))


def test_a_copy_beside_an_expert_slows_both(tmp_path):
    # Expert 0 is there. The gate asks for both at 1: copy of 1 and expert 0 start together.
    #   expert 0: 2 s of work at 1 / 1.5: 1..4
    #   copy of 1: beside it at half rate, 1.5 s of its 10 by 4; the other 8.5 s alone: 4..12.5
    #   expert 1: 12.5..14.5, head 14.5..15.5
    seen = contended(Placed([(0, 0)]), tmp_path, [[[0, 1]]], 2, {GPU_BY_H2D: 0.5, H2D_BY_GPU: 1.0})
    assert seen.lane("h2d") == [("demand 0.1", 1, 12.5)]
    assert seen.lane("gpu") == [
        ("attention 0", 0, 1),
        ("expert 0.0", 1, 4),
        ("expert 0.1", 12.5, 14.5),
        ("head", 14.5, 15.5),
    ]
    # Busy 1 + 3 + 2 + 1 s, waited 4..12.5 for the copy. 1 s of the busy time is contention's.
    machine = seen.machine
    assert machine.parts_s() == [7, 8.5, 0, 0, 0, 0, 0]
    assert (machine.streams[0].time.busy_s, machine.h2d[0].busy_s) == (7, 11.5)
    names = [name for name, _ in machine.cost.figures.entries]
    assert names[-2:] == [f"contention.{GPU_BY_H2D}", f"contention.{H2D_BY_GPU}"]
    assert machine.gpu_s[-2:] == [1, 0]


class Later(Placed):
    """Prefetches `ahead[i]` once a search of `seconds[i]` on the side lane, one after the other, is over."""

    def __init__(self, there=(), ahead=(), seconds=()):
        super().__init__(there, ahead)
        self.seconds = seconds

    def request_start(self, request, view):
        for at, seconds in zip(self.ahead, self.seconds, strict=True):
            ticket = yield Predict(seconds, "side")
            yield Prefetch(view.piece(*at), after=(ticket,))


def test_a_copy_that_starts_in_the_middle_of_a_computation(tmp_path):
    # Attention is 4 s of work. The copy runs 2..12 and is itself not slowed; computation beside it is at half rate.
    #   attention 0: 2 s by 2, the other 2 s take until 6; expert 0.0: 2 s of work, 6..10
    #   attention 1: 1 s of its 4 by 12, the other 3 s alone: 10..15; expert 1.0 is there: 15..17; head 17..18
    seen = contended(
        Later([(0, 0)], [(1, 0)], [2.0]), tmp_path, [[[0], [0]]], 2, {GPU_BY_H2D: 1.0}, kernels={"attention": 4}
    )
    assert seen.lane("h2d") == [("prefetch 1.0", 2, 12)]
    assert seen.lane("gpu") == [
        ("attention 0", 0, 6),
        ("expert 0.0", 6, 10),
        ("attention 1", 10, 15),
        ("expert 1.0", 15, 17),
        ("head", 17, 18),
    ]
    assert seen.classes("prefill") == {"hit": 2}


def test_three_changes_of_rate_in_one_computation(tmp_path):
    # Copies of 4 s run 3..7 and 8..12 (searches of 3 s and 5 s). Expert 0.0 is 6 s of work and starts at 1:
    #   1..3 alone: 2 s; 3..7 at half rate: 2 s; 7..8 alone: 1 s; the last second at half rate: 8..10
    # Attention 1: 1 s at half rate: 10..12, as the copy ends; expert 1.0 (6 s): 12..18; head 18..19.
    seen = contended(
        Later([(0, 0)], [(1, 0), (1, 1)], [3.0, 5.0]),
        tmp_path,
        [[[0], [0]]],
        3,
        {GPU_BY_H2D: 1.0},
        n_experts=2,
        kernels={"expert": 6},
        copy_s=4,
    )
    assert seen.lane("h2d") == [("prefetch 1.0", 3, 7), ("prefetch 1.1", 8, 12)]
    assert seen.lane("gpu") == [
        ("attention 0", 0, 1),
        ("expert 0.0", 1, 10),
        ("attention 1", 10, 12),
        ("expert 1.0", 12, 18),
        ("head", 18, 19),
    ]


def test_a_cpu_expert_beside_two_copies_on_one_link(tmp_path):
    # Copies of 2.5 s, hidden states 0.25 s. Gate at 1; experts 1 on the CPU, 0 there, 2 and 3 missing.
    #   down 1..1.25. CPU: 5 s of work, a copy beside it all along: 5 x 1.25 = 6.25 s: 1.25..7.5
    #   copy of 2: 0.25 s alone by 1.25, the other 2.25 s at half rate: 1..5.75
    #   copy of 3: at half rate until 7.5: 0.875 s; the other 1.625 s alone: 5.75..9.125
    #   result: asked first, but ready at 7.5 only, so it follows: 9.125..9.375
    #   expert 0: 1..3; 2: 5.75..7.75; 3: 9.125..11.125; head 11.125..12.125
    seen = contended(OnCpu([(0, 0)]), tmp_path, [[[0, 1, 2, 3]]], 4, {CPU_BY_H2D: 0.25, H2D_BY_CPU: 1.0}, copy_s=2.5)
    assert seen.lane("cpu") == [("expert 0.1", 1.25, 7.5)]
    assert seen.lane("h2d") == [("demand 0.2", 1, 5.75), ("demand 0.3", 5.75, 9.125), ("activations 0.1", 9.125, 9.375)]
    assert seen.lane("gpu") == [
        ("attention 0", 0, 1),
        ("expert 0.0", 1, 3),
        ("expert 0.2", 5.75, 7.75),
        ("expert 0.3", 9.125, 11.125),
        ("head", 11.125, 12.125),
    ]
    assert seen.machine.cpu_s[-2:] == [1.25, 0]


def test_host_memory_couples_the_cpu_with_the_links_of_all_gpus(tmp_path):
    # Two GPUs: 0 and 2 on the first, 1 and 3 on the second. 1 runs on the CPU, 2 and 3 are copied side by side.
    #   down 1..2. CPU: two copies beside it: 5 x (1 + 0.25 + 0.25) = 7.5 s: 2..9.5
    #   both copies: 1 s alone by 2; 7.5 s at 1 / 1.5: 5 s by 9.5; the other 4 s alone: 1..13.5
    #   result 13.5..14.5; experts 2 and 3: 13.5..15.5, each on its GPU; head 15.5..16.5
    seen = contended(OnCpu([(0, 0)]), tmp_path, [[[0, 1, 2, 3]]], 3, {CPU_BY_H2D: 0.25, H2D_BY_CPU: 0.5}, gpus=2)
    assert seen.lane("cpu") == [("expert 0.1", 2, 9.5)]
    assert seen.lane("h2d0") == [("demand 0.2", 1, 13.5), ("activations 0.1", 13.5, 14.5)]
    assert seen.lane("h2d1") == [("demand 0.3", 1, 13.5)]
    assert seen.lane("gpu1") == [("expert 0.3", 13.5, 15.5)]
    assert seen.end_s == 16.5


def test_a_link_slows_only_its_own_gpu(tmp_path):
    # 1.1 is prefetched to GPU 1 while GPU 0 computes: attention 0..1, expert 0.0 1..3, as if alone.
    seen = contended(Placed([(0, 0)], ahead=[(1, 1)]), tmp_path, [[[0], [1]]], 2, {GPU_BY_H2D: 1.0}, gpus=2)
    assert seen.lane("gpu0")[:3] == [("attention 0", 0, 1), ("expert 0.0", 1, 3), ("attention 1", 3, 4)]
    assert seen.lane("h2d1") == [("prefetch 1.1", 0, 10)]


class Swaps(Placed):
    """Fetches what is asked for, then writes what was there back and lets it go."""

    def gate_done(self, gate, view):
        there = list(view.residents())
        for expert in gate.needs:
            yield Fetch(view.piece(gate.layer, expert))
        for piece in there:
            yield WriteBack(piece)
        for expert in gate.needs:
            yield RunGpu(expert)
        for piece in there:
            yield Evict(piece)


def test_copies_up_and_down_slow_each_other(tmp_path):
    # Expert 0.0 is there; 0.1 is asked for at 1, and 0.0 written back.
    #   copy of 0.1: 10 s of work at 1 / 1.5, the write-back lasts beyond it: 1..16
    #   write-back: half rate until 16: 7.5 s; the other 2.5 s alone: 1..18.5
    #   expert 0.1 16..18, head 18..19
    seen = contended(Swaps([(0, 0)]), tmp_path, [[[1]]], 2, {WAYS[0]: 0.5, WAYS[1]: 1.0}, n_experts=2)
    assert seen.lane("h2d") == [("demand 0.1", 1, 16)]
    assert seen.lane("d2h") == [("write_back 0.0", 1, 18.5)]
    assert seen.lane("gpu") == [("attention 0", 0, 1), ("expert 0.1", 16, 18), ("head", 18, 19)]


def test_a_write_back_slows_what_computes_beside_it(tmp_path):
    # Copy of 0.1 1..11. Write-back beside it at half rate: 5 s by 11, the other 5 s alone: 1..16.
    #   expert 0.1: 2 s at half rate: 11..15; head: half a second by 16, the other half alone: 15..16.5
    seen = contended(Swaps([(0, 0)]), tmp_path, [[[1]]], 2, {WAYS[1]: 1.0, WAYS[2]: 1.0}, n_experts=2)
    assert seen.lane("d2h") == [("write_back 0.0", 1, 16)]
    assert seen.lane("gpu") == [("attention 0", 0, 1), ("expert 0.1", 11, 15), ("head", 15, 16.5)]
    assert seen.machine.gpu_s[-1] == 2.5, "beyond what they take alone"


@pytest.mark.parametrize("way", WAYS[:2])
def test_each_direction_has_a_term_of_its_own(tmp_path, way):
    # The slowed one does half of its 10 s by 11, when the other has ended, and the other 5 s alone: 1..16.
    seen = contended(Swaps([(0, 0)]), tmp_path, [[[1]]], 2, {way: 1.0}, n_experts=2)
    ends = {"h2d": 16 if way == WAYS[0] else 11, "d2h": 16 if way == WAYS[1] else 11}
    assert {lane: seen.lane(lane)[0][2] for lane in ends} == ends


@pytest.mark.parametrize(
    ("term", "order", "end_s"),
    [
        (0.0, ["prefetch 1.0", "prefetch 1.1", "demand 0.0"], 47),
        (0.5, ["prefetch 1.0", "demand 0.0", "prefetch 1.1"], 41),
    ],
)
def test_more_contention_may_end_sooner(tmp_path, term, order, end_s):
    # Attention 12 s; two prefetches at 0; layer 0 demands 0.0 at 12.
    #   Nothing contends: the second prefetch is in flight since 10, so the demand copies 20..30; expert 0.0 30..32,
    #   attention 1 32..44, expert 1.0 44..46, head 46..47.
    #   Copies at 1 / 1.5 beside computation: the first does 8 of its 10 s by 12 and ends at 14. The second has not
    #   started when the demand is asked and is overtaken: demand 14..24. So 6 s sooner: expert 0.0 24..26, attention 1
    #   26..38, expert 1.0 38..40, head 40..41. Nobody waits for the second prefetch.
    seen = contended(
        Placed(ahead=[(1, 0), (1, 1)]),
        tmp_path,
        [[[0], [0]]],
        3,
        {H2D_BY_GPU: term},
        n_experts=2,
        kernels={"attention": 12},
    )
    assert [what for what, _, _ in seen.lane("h2d")] == order
    assert seen.end_s == end_s
