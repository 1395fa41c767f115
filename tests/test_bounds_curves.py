"""The lower bound under measured curves of any shape, and worked out by hand where experts may run on the CPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from random import Random

import msgspec
import pytest
from easy_numbers import cost_of, execute_easy, figure, setup
from test_bounds_hunt import CpuPlayer, Player
from tiny_traces import from_rows, tiny_trace

from policies.gpu_only import GpuOnly
from policies.lru import Lru
from sim.bounds.time_bound import Bounds, lower_bound
from sim.machine.cost import Cost
from sim.policy.api import Policy
from sim.policy.decisions import RunCpu, RunGpu
from sim.profiles.curves import Curve, Curves
from sim.run import execute
from traces.format.reader import Trace


def curve(**points):
    at = tuple(float(x[1:]) for x in points)
    return Curve(at=at, seconds=tuple(points.values()), iqr_s=(0.0,) * len(at), n=(1,) * len(at))


def measured(made, operations, launches=None):
    """The setup with these curves for its model."""
    curves = Curves(
        model=made.model.id,
        precision="bf16",
        operations=operations,
        launches={name: figure(s) for name, s in (launches or {}).items()},
    )
    return replace(made, hw=msgspec.structs.replace(made.hw, curves=curves))


ATTENTION = {"attention": curve(_1=1.0), "attention_decode": curve(_1=1.0, _6=11.0, _20=12.0)}  # rises, then flattens


def test_attention_that_flattens_out(tmp_path):
    """Where price is not convex in context, the middle of a window costs more than its mean."""
    with Trace(tiny_trace(tmp_path / "t", 2, 4, 2, n_requests=2, prompt=2, outputs=14, levels=set())) as trace:
        made = measured(setup(GpuOnly(), trace, 8), ATTENTION)
        result = execute(made).result
        assert result.lower_bound.above_frac == pytest.approx(0, abs=1e-9)
        assert result.lower_bound.tpot_s <= result.tpot_s.mean
        # Positions 3..15: 5, 7, 9 and 11 s up to 6, then 1/14 s more for each: the first stretch, and the rest.
        (request,) = made.requests
        bound = Bounds(made, cpu=False)
        cuts = bound._convex(request.first_row + 2, 13, 2)
        assert [(a - request.first_row, b - request.first_row) for a, b in cuts] == [(2, 5), (5, 15)]
        attention_s = [5, 7, 9, *(11 + i / 14 for i in range(10))]
        others_s = 2 * 2 * 2.0 + 1  # two layers of two experts of 2 s, the head
        assert result.tpot_s.mean == pytest.approx(2 * sum(attention_s) / 13 + others_s)


def test_experts_that_cost_less_for_more_tokens(tmp_path):
    """Noise may have it so; the least of the prices counts, and the longest runs first."""
    operations = {"expert": curve(_1=6.0, _2=2.0, _8=4.0), "cpu_expert": curve(_1=7.0, _2=1.0, _8=8.0)}
    with Trace(tiny_trace(tmp_path / "t", 2, 4, 2, n_requests=6, prompt=3, outputs=5, levels=set())) as trace:
        for room in (3, 8):
            for rng in map(Random, range(12)):
                for kind in (Player, CpuPlayer):
                    world = {"batch": 3, "copy_s": 0.5, "launch_s": 0.5, "cpu_s": 1.0}
                    made = measured(setup(kind(rng), trace, room, **world), operations, {"expert": 0.5})
                    result, bound = execute(made, bounds=False).result, lower_bound(made)
                    assert bound.tpot_s <= result.tpot_s.mean
                    assert bound.ttft_s <= result.ttft_s.mean


class Ordered(Policy):
    """Everything is there; experts run in this order, those on the CPU first."""

    name = "ordered"
    traits = frozenset({"cpu"})

    def __init__(self, order=(), on_cpu=()):
        super().__init__()
        self.in_turn, self.on_cpu = order, on_cpu

    def initial(self, view):
        return [view.piece(0, expert) for expert in range(view.n_experts)]

    def gate_done(self, gate, view):
        return [*map(RunCpu, self.on_cpu), *map(RunGpu, self.in_turn)]


# Prompts of experts 0, 0 and 1: two tokens for 0, one for 1; and of three experts with 3, 2 and 1 tokens.
TWO, THREE = [[[0]], [[0]], [[1]]], [[[0]], [[0]], [[0]], [[1]], [[1]], [[2]]]


@pytest.mark.parametrize("seconds", [(3.0, 2.0, 1.0), (1.0, 2.0, 3.0), (2.0, 5.0, 1.0), (4.0, 4.0, 0.5)])
@pytest.mark.parametrize("launch_s", [0.25, 1.5, 4.0])
def test_the_best_order_is_the_bound(seconds, launch_s, tmp_path):
    """Whatever one, two and three tokens cost: of all orders, run in the engine, the quickest takes what it says."""
    with Trace(from_rows(tmp_path / "t", THREE, 3, [(6, 1)])) as trace:
        operations = {"expert": curve(**{f"_{n + 1}": s for n, s in enumerate(seconds)})}
        launches, ends = {"expert": launch_s}, []
        for order in permutations(range(3)):
            made = measured(setup(Ordered(order), trace, 3), operations, launches)
            ends.append(execute(made, bounds=False).result.ttft_s.mean)
        assert lower_bound(made, cpu=False).ttft_s == pytest.approx(min(ends), rel=1e-9)


def test_what_the_dearest_expert_costs(tmp_path):
    """One token takes 6 s and two take 2; the first goes to the CPU, for 1 s, and no more than 6 s are saved."""
    with Trace(from_rows(tmp_path / "t", TWO, 2, [(3, 1)])) as trace:
        operations = {"expert": curve(_1=6.0, _2=2.0), "cpu_expert": curve(_1=1.0)}
        made = measured(setup(Ordered((0,), (1,)), trace, 2, copy_s=0.1), operations)
        assert lower_bound(made).ttft_s <= execute(made, bounds=False).result.ttft_s.mean


# -- by hand, where experts may run on the CPU -------------------------------------------------------------------------


class AllOnCpu(Policy):
    name = "all_on_cpu"
    traits = frozenset({"cpu"})

    def gate_done(self, gate, view):
        return [RunCpu(expert) for expert in gate.needs]


def test_what_the_cheapest_expert_costs_on_the_cpu(tmp_path):
    """Two layers of six experts with two tokens, 1 s each, and one with one token, 200 s; copies take 100 s."""
    rows = [[[e], [e]] for e in (0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6)]
    with Trace(from_rows(tmp_path / "t", rows, 7, [(13, 1)])) as trace:
        made = measured(setup(AllOnCpu(), trace, 1, copy_s=100.0), {"cpu_expert": curve(_1=200.0, _2=1.0)})
        made = replace(made, hw=msgspec.structs.replace(made.hw, d2h=made.hw.p2p))
        assert lower_bound(made).ttft_s <= execute(made, bounds=False).result.ttft_s.mean


class OneOnCpu(AllOnCpu):
    """Expert 0 stays; all others run on the CPU."""

    name = "one_on_cpu"

    def initial(self, view):
        return [view.piece(0, 0)]

    def gate_done(self, gate, view):
        return [RunCpu(expert) if expert else RunGpu(expert) for expert in gate.needs]


def test_what_is_there_stays_while_others_run_on_the_cpu(tmp_path):
    """One expert fits: on the GPU it would have to leave for every other."""
    with Trace(from_rows(tmp_path / "t", [[[i % 2]] for i in range(9)], 2)) as trace:
        made = setup(OneOnCpu(), trace, 1, copy_s=10_000.0, cpu_s=1.0)
        made = replace(made, hw=msgspec.structs.replace(made.hw, d2h=made.hw.p2p))
        seen = execute_easy(made)
        assert seen.outcome.report.counts.tally.n_demand == 0
        assert lower_bound(made).tpot_s <= seen.result.tpot_s.mean


# Three tokens, experts 1, 2 and 3, room for one: one is there, two are copied (10 s), or run on the CPU for 1 s up the
# link. A token computes for 4 s, 2 s of them the expert; after the last copy come a kernel of 1 s and the head (1 s).
@pytest.mark.parametrize(
    ("world", "cpu", "least_s"),
    [
        ({}, False, 20 + 1 + 1),
        # x on the CPU: 1 + 5 x there, 21 - 9 x on the link, 12 - 2 x computing. 1 + 5 x = 12 - 2 x at 11 / 7.
        ({}, True, 1 + 5 * 11 / 7),
        # Computing is free: x of results on the link, 20 - 9 x of both.
        ({"kernel_s": 0.0, "cpu_s": 0.5}, True, 2),
        ({"kernel_s": 0.0, "cpu_s": 5.0}, True, 5 * 20 / 14),
        ({"cpu_s": 50.0}, True, 1 + 50 * 20 / 59),
        # Two GPUs with room for one each: 1 and 3 share the second, so one of them is copied; the first computes for
        # 2 + 4 + 2 s. 1 + 5 x = 8 - 2 x at 1.
        ({"gpus": 2}, True, 6),
        ({"gpus": 2}, False, 10 + 1 + 1),
        # 4 s per launch of a kernel, 10 s of a copy or for the CPU: 4 x (1 + 2 + 1) x 3 + 2 x 10.
        ({"launch_s": 4.0, "copy_launch_s": 10.0}, False, 48 + 20),
        ({"launch_s": 4.0, "copy_launch_s": 10.0, "cpu_s": 1.0}, True, 48 + 20 - 3 * 8),
        # Attention ends at 5, the expert's last kernel at 14, the head at 18; without an expert 5 and 10.
        ({"launch_s": 4.0, "copy_launch_s": 1.0}, False, 3 * 18),
        ({"launch_s": 4.0, "copy_launch_s": 1.0, "cpu_s": 1.0}, True, 3 * 10),
    ],
)
def test_bounds_by_hand(world, cpu, least_s, tmp_path):
    with Trace(from_rows(tmp_path / "t", [[[e]] for e in range(4)], 4)) as trace:
        assert lower_bound(setup(Lru(), trace, 1, **world), cpu).tpot_s == pytest.approx(least_s / 3, rel=1e-9)


def test_two_links_by_hand(tmp_path):
    # Six tokens; each GPU uses three experts, of which two are copied: 40 s over two links. With so slow a CPU, less
    # than one part in 10,000 of an expert runs there: 1 + 10^6 x = 21 - 5 x.
    with Trace(from_rows(tmp_path / "t", [[[e]] for e in range(7)], 7)) as trace:
        bound = lower_bound(setup(Lru(), trace, 1, gpus=2, cpu_s=1e6), cpu=True)
        assert bound.tpot_s == pytest.approx((1 + 1e6 * 20 / 1_000_005) / 6, rel=1e-9)


def test_handing_an_expert_to_the_cpu_may_be_cheaper_than_a_copy(tmp_path):
    with Trace(tiny_trace(tmp_path / "t", 2, 6, 2, prompt=2, outputs=6, levels=set())) as trace:
        made = setup(AllOnCpu(), trace, 1, copy_s=0.1, copy_launch_s=9.0, cpu_s=0.1)
        made = measured(made, {"cpu_expert": curve(_1=0.1)}, {"cpu_expert": 0.1})
        result = execute(made).result
        assert result.lower_bound.tpot_s <= result.tpot_s.mean


def test_a_part_of_a_measured_expert_is_launched_like_one(tmp_path):
    with Trace(from_rows(tmp_path / "t", [[[0, 1]]], 2)) as trace:
        cost: Cost = cost_of(measured(setup(Lru(), trace, 2), {"expert": curve(_1=2.0)}, {"expert": 0.5}))
        assert (cost.launches.part(1 / 3, True).all_s, cost.launches.part(1 / 3, False).first_s) == (0.5, 0.5)
