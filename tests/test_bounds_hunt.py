"""Hunting for anything faster than the lower bound: wild machines, every lossless policy, and players who see all.

`test_bounds` derives and searches exhaustively in small cases; here are the cases a proof forgets: parts of experts,
several GPUs and requests, frameworks that cost host time, measured curves of any shape.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from random import Random

import msgspec
import pytest
from easy_numbers import EXPERT_BYTES, cost_of, execute_easy, figure, setup
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_traces import from_rows, tiny_trace

from policies.gpu_only import GpuOnly
from policies.lru import Lru
from sim.api import Policy
from sim.bound_path import Clocks
from sim.bounds import Bounds, lower_bound
from sim.checks import seeded
from sim.checks.behaviour import others
from sim.checks.world import MODEL, World
from sim.cost import Cost
from sim.curves import Curve, Curves
from sim.decisions import Evict, Fetch, Prefetch, RunCpu, RunGpu, RunPart
from sim.errors import BadInput, DoesNotFit
from sim.fluid import TERMS
from sim.hardware import Contention
from sim.memory import BudgetRule, Demand, plan
from sim.pieces import Pieces
from sim.registry import policies
from sim.run import execute
from traces.reader import Trace

QUICK = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


# -- every policy on machines nobody has -------------------------------------------------------------------------------


def scaled(quantity, factor):
    return msgspec.structs.replace(quantity, value=quantity.value * factor)


def wild_hardware(rng, hw):
    """Its rates off by up to a hundred times, its latencies and launches by ten or gone; contention in some."""

    def rate(quantity):
        return scaled(quantity, 10 ** rng.uniform(-2, 2) if rng.random() < 0.6 else 1.0)

    def seconds(quantity):
        return scaled(quantity, rng.choice((0, 0.1, 1, 1, 10)))

    def link(of):
        bandwidth, latency = rate(of.bandwidth_bytes_per_s), seconds(of.latency_s)
        return msgspec.structs.replace(of, bandwidth_bytes_per_s=bandwidth, latency_s=latency)

    gpu, host, cpu = hw.gpu, hw.host, hw.cpu
    terms = {name: figure(rng.choice((0, 0.3, 1.0)) if rng.random() < 0.3 else 0) for name in TERMS}
    return msgspec.structs.replace(
        hw, h2d=link(hw.h2d), d2h=link(hw.d2h), p2p=link(hw.p2p), contention=Contention(**terms),
        gpu=msgspec.structs.replace(
            gpu, memory_bandwidth_bytes_per_s=rate(gpu.memory_bandwidth_bytes_per_s),
            kernel_floor_s=seconds(gpu.kernel_floor_s), flops_per_s={k: rate(q) for k, q in gpu.flops_per_s.items()},
        ),
        host=msgspec.structs.replace(
            host, launch_s=seconds(host.launch_s), sync_s=seconds(host.sync_s),
            copy_launch_s=seconds(host.copy_launch_s),
        ),
        cpu=msgspec.structs.replace(
            cpu, memory_bandwidth_bytes_per_s=rate(cpu.memory_bandwidth_bytes_per_s),
            flops_per_s=rate(cpu.flops_per_s), expert_overhead_s=seconds(cpu.expert_overhead_s),
        ),
    )  # fmt: skip


def wild_stack(rng, stack):
    kernels = msgspec.structs.replace(
        stack.kernels, attention=rng.choice((1, 7, 26)), gate=rng.choice((1, 3)), head=rng.choice((1, 3, 23)),
        expert=rng.choice((1, 2, 3, 4, 5, 11)),
    )  # fmt: skip
    return msgspec.structs.replace(
        stack, kernels=kernels, per_layer_s=figure(rng.choice((0, 0, 1e-3))),
        per_expert_s=figure(rng.choice((0, 0, 1.5e-4, 2e-3))), per_copy_s=figure(rng.choice((0, 0, 1e-4))),
        per_iteration_s=figure(rng.choice((0, 1e-3))),
    )  # fmt: skip


def wild_model(rng):
    dense = rng.choice(((), (), (0,), (2, 5)))
    shared = rng.random() < 0.3
    return msgspec.structs.replace(
        MODEL, hidden_size=rng.choice((64, 1024, 4096)), expert_intermediate_size=rng.choice((64, 2048, 14336)),
        n_layers=seeded.N_LAYERS + len(dense), dense_layers=dense,
        dense_intermediate_size=rng.choice((64, 8192)) if dense else 0, n_shared_experts=int(shared),
        shared_intermediate_size=rng.choice((64, 4096)) if shared else 0,
    )  # fmt: skip


def wild_settings(rng, kind):
    found = {}
    for param in kind.params:
        choices = list(others(param)) if rng.random() < 0.2 else []
        if choices:
            found[param.name] = rng.choice(choices)
    return found


def wild_run(rng, kind, world):
    """(times, result, bound) of the policy in a world of chance; None where it does not fit there."""
    gpus, batch, experts = rng.choice((1, 1, 1, 2, 3)), rng.choice((1, 1, 2, 3)), rng.choice((3, 6, 8, 12, 16, 20, 24))
    model = wild_model(rng)
    try:
        made = world.setup(seeded.N_LAYERS * seeded.N_EXPERTS, wild_settings(rng, kind), gpus, batch)
    except BadInput:
        return None  # these settings do not go together
    made.hw, made.stack, made.model = wild_hardware(rng, world.hw), wild_stack(rng, world.stack), model
    room = int(experts * model.expert_bytes("bf16") * rng.choice((1, 1, 1.15)))
    made.memory = plan(model, made.hw, "bf16", Demand(kv_tokens=64 * batch, iteration_tokens=64, batch=batch),
                       BudgetRule(expert_cache_bytes=room), gpus, True, made.policy.keeps_all)  # fmt: skip
    made.pieces = Pieces(model.n_moe_layers, model.n_experts, "bf16", gpus, model.expert_bytes)
    try:
        outcome = execute(made, bounds=False)
        return outcome.clockwork, outcome.result, lower_bound(made)
    except (DoesNotFit, BadInput):
        return None


@pytest.mark.parametrize("kind", policies().values(), ids=lambda kind: kind.name)
def test_wild_machines(kind):
    """No policy stumbles on any machine, its time is accounted for, and no lossless one is faster than the bound."""
    rng, n_runs = Random(f"wild {kind.name}"), 0
    with World(kind) as world:
        for _ in range(30):
            seen = wild_run(rng, kind, world)
            if seen is None:
                continue
            clockwork, result, bound = seen
            n_runs += 1
            for phase in clockwork.phases.values():  # where the time went: all of it, to the phase it belongs to
                assert sum(phase.parts_s) == pytest.approx(phase.time_s, rel=1e-9, abs=1e-12)
            if "lossy" not in kind.traits:
                assert bound["tpot_s"] <= result["tpot_s"]["mean"]
                assert bound["ttft_s"] <= result["ttft_s"]["mean"]
    assert n_runs >= 5


# -- players who see the whole future, in parts, on several GPUs, with the CPU -----------------------------------------


class Player(Policy):
    """Decides by chance among what can help: what is wanted soonest comes, what is wanted last leaves."""

    name = "player"
    traits = frozenset({"oracle"})

    def __init__(self, rng, n_parts=1, matrices=False):
        super().__init__()
        self.rng, self.n_parts, self.by_matrix = rng, n_parts, matrices
        self.eager, self.cpu_frac = rng.choice((0, 1, 2, 5)), rng.choice((0.0, 0.2, 0.6))

    def cut(self, view, layer, expert):
        if self.n_parts == 1:
            return [view.piece(layer, expert)]
        if self.by_matrix:
            return view.matrices(layer, expert, self.n_parts)
        return [view.part(layer, expert, i / self.n_parts, (i + 1) / self.n_parts) for i in range(self.n_parts)]

    def due(self, view, piece):
        return view.future.next_use(piece.layer, piece.expert)

    def all_by_use(self, view):
        found = [(view.future.next_use(at, e), at, e) for at in range(view.n_layers) for e in range(view.n_experts)]
        return [(at, e) for due, at, e in sorted(found) if due < 1e9]

    def initial(self, view):
        left = [view.free_bytes(gpu) for gpu in range(view.n_gpus)]
        for at, e in self.all_by_use(view):
            for piece in self.cut(view, at, e):
                if piece.n_bytes <= left[piece.gpu] and self.rng.random() < 0.9:
                    left[piece.gpu] -= piece.n_bytes
                    yield piece

    def room(self, view, piece, before=float("inf")):
        """Evictions that make room; nothing wanted sooner than `before` leaves. Says whether there is room then."""
        while view.free_bytes(piece.gpu) < piece.n_bytes:
            free = [p for p in view.residents() if p.gpu == piece.gpu and view.evictable(p) and p is not piece]
            last = max(free, key=lambda p: (self.due(view, p), p.index), default=None)
            if last is None or (before < float("inf") and self.due(view, last) <= before):
                return False
            yield Evict(last)
        return True

    def iteration_start(self, iteration, view):
        yield from self.ahead(view)

    def gate_done(self, gate, view):
        order = list(gate.needs)
        self.rng.shuffle(order)
        order.sort(key=lambda e: not all(view.holds(p) for p in self.cut(view, gate.layer, e)))
        for expert in order:
            if "cpu" in self.traits and self.rng.random() < self.cpu_frac:
                yield RunCpu(expert)
                continue
            pieces = self.cut(view, gate.layer, expert)
            for piece in pieces:
                if not view.holds(piece):
                    yield from self.room(view, piece)
                yield Fetch(piece)
            if self.n_parts > 1 and self.rng.random() < 0.5:
                for piece in pieces:
                    yield RunPart(piece)
            else:
                yield RunGpu(expert)
            yield from self.ahead(view)

    def ahead(self, view):
        budget = self.eager * self.n_parts
        for at, e in self.all_by_use(view):
            for piece in self.cut(view, at, e):
                if budget <= 0:
                    return
                if not view.holds(piece):
                    if (yield from self.room(view, piece, self.due(view, piece))):
                        yield Prefetch(piece)
                    budget -= 1


class CpuPlayer(Player):
    traits = frozenset({"oracle", "cpu"})


@QUICK
@given(data=st.data())
def test_nobody_who_sees_all_beats_the_bound(data, tmp_path_factory):
    rng = Random(data.draw(st.integers(0, 10**6)))
    gpus, batch, n_parts = rng.choice((1, 1, 2)), rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 3))
    layers, experts, k = rng.choice(((2, 4, 1), (2, 5, 2), (3, 4, 2), (4, 3, 1)))
    room = rng.randint(k + 1, layers * experts)
    world = {
        "gpus": gpus, "batch": batch, "copy_s": rng.choice((0.25, 1.0, 3.0, 9.0)), "peer_s": rng.choice((0.0, 0.5)),
        "launch_s": rng.choice((0.0, 0.25, 1.0)), "sync_s": rng.choice((0.0, 0.5)), "shared": rng.random() < 0.3,
        "copy_launch_s": rng.choice((0.0, 0.125)), "dense_layers": rng.choice(((), (0, 2))),
        "cpu_s": rng.choice((0.5, 3.0, 9.0)),
        "kernels": {"expert": rng.choice((1, 2, 3, 4)), "attention": rng.choice((0, 1))},
    }  # fmt: skip
    path = tmp_path_factory.mktemp("player") / "t"
    tiny_trace(path, layers, experts, k, n_requests=4, prompt=2, outputs=4, levels=set(), seed=rng.randrange(99))
    kind = rng.choice((Player, CpuPlayer))
    with Trace(path) as trace:
        for _ in range(4):
            made = setup(kind(rng, n_parts, rng.random() < 0.5), trace, room, **world)
            made.stack = msgspec.structs.replace(made.stack, per_expert_s=figure(rng.choice((0.0, 0.5, 3.0))))
            more = rng.choice((0, 0, EXPERT_BYTES // 3 + 1, EXPERT_BYTES // 2))
            budgets = tuple(b + more for b in made.memory.expert_bytes)
            made.memory = replace(made.memory, expert_bytes=budgets)
            result, bound = execute(made, bounds=False).result, lower_bound(made)
            assert bound["tpot_s"] <= result["tpot_s"]["mean"]
            assert bound["ttft_s"] <= result["ttft_s"]["mean"]


# -- parts of experts --------------------------------------------------------------------------------------------------


class ByMatrix(Policy):
    """One expert fits. Its matrices leave one by one as they have been computed, and the next expert's follow them."""

    name = "by_matrix"
    traits = frozenset({"oracle"})

    def cut(self, view, layer):
        return view.matrices(layer % view.n_layers, 0, 4)

    def initial(self, view):
        return self.cut(view, 0)

    def gate_done(self, gate, view):
        yield RunGpu(0)
        for old, new in zip(self.cut(view, gate.layer), self.cut(view, gate.layer + 1), strict=True):
            yield Evict(old)
            yield Prefetch(new)


def test_only_part_of_an_expert_follows_the_last_copy(tmp_path):
    with Trace(from_rows(tmp_path / "t", [[[0], [0], [0]]] * 2, 1)) as trace:
        made = setup(ByMatrix(), trace, 1, copy_s=8.0, kernels={"expert": 4, "attention": 0, "head": 0})
        seen = execute_easy(made)
        # Copies of 8 s in quarters, an expert of 4 s in quarters, nothing else takes time. Prefill: 0.0 runs 0..4 and
        # leaves at 1, 2, 3, 4. 1.0 comes 1..9, its quarters run 4..6, 7..8 and 9..10. 2.0 comes 9..17, ends at 18.
        # Then a copy of 8 s per layer: 26, 34, 42.
        (times,) = seen.outcome.clockwork.requests
        assert (times.first_token_s, times.last_token_s) == (18, 42)
        assert lower_bound(made)["ttft_s"] == pytest.approx(2 * 8 + 1)


class HalfKept(Policy):
    """Experts 0 and 1 in turn, room for one and a half: the other half of each is kept."""

    name = "half_kept"
    traits = frozenset({"oracle"})

    def halves(self, view, expert):
        return [view.part(0, expert, 0.0, 0.5), view.part(0, expert, 0.5, 1.0)]

    def initial(self, view):
        return [*self.halves(view, 0), self.halves(view, 1)[0]]

    def gate_done(self, gate, view):
        (expert,) = gate.needs
        yield Fetch(self.halves(view, expert)[1])
        yield RunGpu(expert)
        yield Evict(self.halves(view, expert)[1])
        yield Prefetch(self.halves(view, 1 - expert)[1])


def test_room_for_half_an_expert_counts(tmp_path):
    with Trace(from_rows(tmp_path / "t", [[[i % 2]] for i in range(9)], 2)) as trace:
        made = setup(HalfKept(), trace, 1)
        made.memory = replace(made.memory, expert_bytes=(EXPERT_BYTES + EXPERT_BYTES // 2,))
        result = execute_easy(made).result
        # Half a copy of 5 s for each token, once the expert before has left, then 2 s; head and attention meanwhile.
        assert result["tpot_s"]["mean"] == 7
        assert lower_bound(made)["tpot_s"] <= 7  # two whole ones fit, in favour of whoever holds parts
        made.memory = replace(made.memory, expert_bytes=(EXPERT_BYTES,))
        assert lower_bound(made)["tpot_s"] > 7  # with room for one, 7 copies of 10 s in 8 tokens


def chained(cost, launches):
    """(host, stream) after these (launch, duration) from zero."""
    clocks = Clocks(0.0, 0.0)
    for launch, duration_s in launches:
        clocks.launch(launch, duration_s)
    return clocks.host_s, clocks.free_s


@pytest.mark.parametrize("kernels", [0, 1, 2, 3, 4, 5, 11])
@pytest.mark.parametrize("extra_s", [0.0, 0.5, 7.0])
@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_launching_an_expert_in_parts_is_never_quicker(kernels, extra_s, n, tmp_path):
    with Trace(from_rows(tmp_path / "t", [[[0, 1]]], 2)) as trace:
        for launch_s in (0.0, 0.25, 1.0, 5.0):
            made = setup(Lru(), trace, 2, launch_s=launch_s, kernels={"expert": kernels})
            made.stack = msgspec.structs.replace(made.stack, per_expert_s=figure(extra_s))
            cost = cost_of(made)
            whole_s = chained(cost, [(cost.launch_expert, cost.expert(1, "bf16").duration_s)])
            for matrices in (True, False):
                frac = 1 / n if matrices else 1.0
                part_s = cost.expert(1, "bf16", 1 / n, frac).duration_s
                parts = [(cost.launch_part(frac, i == 0) if matrices else cost.launch_expert, part_s) for i in range(n)]
                parts_s = chained(cost, parts)
                assert parts_s[0] >= whole_s[0] - 1e-9
                assert parts_s[1] >= whole_s[1] - 1e-9


# -- measured curves of any shape --------------------------------------------------------------------------------------


def curve(**points):
    at = tuple(float(x[1:]) for x in points)
    return Curve(at=at, seconds=tuple(points.values()), iqr_s=(0.0,) * len(at), n=(1,) * len(at))


def measured(made, operations, launches=None):
    """The setup with these curves for its model."""
    curves = Curves(model=made.model.id, precision="bf16", operations=operations,
                    launches={name: figure(s) for name, s in (launches or {}).items()})  # fmt: skip
    made.hw = msgspec.structs.replace(made.hw, curves=curves)
    return made


ATTENTION = {"attention": curve(_1=1.0), "attention_decode": curve(_1=1.0, _6=11.0, _20=12.0)}  # rises, then flattens


def test_attention_that_flattens_out(tmp_path):
    """Where price is not convex in context, the middle of a window costs more than its mean."""
    with Trace(tiny_trace(tmp_path / "t", 2, 4, 2, n_requests=2, prompt=2, outputs=14, levels=set())) as trace:
        made = measured(setup(GpuOnly(), trace, 8), ATTENTION)
        result = execute(made).result
        assert result["bound"]["above_frac"] == pytest.approx(0, abs=1e-9)
        assert result["bound"]["tpot_s"] <= result["tpot_s"]["mean"]
        # Positions 3..15: 5, 7, 9 and 11 s up to 6, then 1/14 s more for each: the first stretch, and the rest.
        (request,) = made.requests
        bound = Bounds(made, cpu=False)
        cuts = bound._convex(request.first_row + 2, 13, 2)
        assert [(a - request.first_row, b - request.first_row) for a, b in cuts] == [(2, 5), (5, 15)]
        attention_s = [5, 7, 9, *(11 + i / 14 for i in range(10))]
        others_s = 2 * 2 * 2.0 + 1  # two layers of two experts of 2 s, the head
        assert result["tpot_s"]["mean"] == pytest.approx(2 * sum(attention_s) / 13 + others_s)


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
                    assert bound["tpot_s"] <= result["tpot_s"]["mean"]
                    assert bound["ttft_s"] <= result["ttft_s"]["mean"]


class Ordered(Policy):
    """Everything is there; experts run in this order, those on the CPU first."""

    name = "ordered"
    traits = frozenset({"cpu"})

    def __init__(self, order=(), on_cpu=()):
        super().__init__()
        self.order, self.on_cpu = order, on_cpu

    def initial(self, view):
        return [view.piece(0, expert) for expert in range(view.n_experts)]

    def gate_done(self, gate, view):
        return [*map(RunCpu, self.on_cpu), *map(RunGpu, self.order)]


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
            ends.append(execute(made, bounds=False).result["ttft_s"]["mean"])
        assert lower_bound(made, cpu=False)["ttft_s"] == pytest.approx(min(ends), rel=1e-9)


def test_what_the_dearest_expert_costs(tmp_path):
    """One token takes 6 s and two take 2; the first goes to the CPU, for 1 s, and no more than 6 s are saved."""
    with Trace(from_rows(tmp_path / "t", TWO, 2, [(3, 1)])) as trace:
        operations = {"expert": curve(_1=6.0, _2=2.0), "cpu_expert": curve(_1=1.0)}
        made = measured(setup(Ordered((0,), (1,)), trace, 2, copy_s=0.1), operations)
        assert lower_bound(made)["ttft_s"] <= execute(made, bounds=False).result["ttft_s"]["mean"]


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
        made.hw = msgspec.structs.replace(made.hw, d2h=made.hw.p2p)
        assert lower_bound(made)["ttft_s"] <= execute(made, bounds=False).result["ttft_s"]["mean"]


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
        made.hw = msgspec.structs.replace(made.hw, d2h=made.hw.p2p)
        seen = execute_easy(made)
        assert seen.outcome.engine.tally.n_demand == 0
        assert lower_bound(made)["tpot_s"] <= seen.result["tpot_s"]["mean"]


# Three tokens, experts 1, 2 and 3, room for one: one is there, two are copied (10 s), or run on the CPU for 1 s up the
# link. A token computes for 4 s, 2 s of them the expert; after the last copy come a kernel of 1 s and the head (1 s).
@pytest.mark.parametrize(("world", "cpu", "least_s"), [
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
])  # fmt: skip
def test_bounds_by_hand(world, cpu, least_s, tmp_path):
    with Trace(from_rows(tmp_path / "t", [[[e]] for e in range(4)], 4)) as trace:
        assert lower_bound(setup(Lru(), trace, 1, **world), cpu)["tpot_s"] == pytest.approx(least_s / 3, rel=1e-9)


def test_two_links_by_hand(tmp_path):
    # Six tokens; each GPU uses three experts, of which two are copied: 40 s over two links. With so slow a CPU, less
    # than one part in 10,000 of an expert runs there: 1 + 10^6 x = 21 - 5 x.
    with Trace(from_rows(tmp_path / "t", [[[e]] for e in range(7)], 7)) as trace:
        bound = lower_bound(setup(Lru(), trace, 1, gpus=2, cpu_s=1e6), cpu=True)
        assert bound["tpot_s"] == pytest.approx((1 + 1e6 * 20 / 1_000_005) / 6, rel=1e-9)


def test_handing_an_expert_to_the_cpu_may_be_cheaper_than_a_copy(tmp_path):
    with Trace(tiny_trace(tmp_path / "t", 2, 6, 2, prompt=2, outputs=6, levels=set())) as trace:
        made = setup(AllOnCpu(), trace, 1, copy_s=0.1, copy_launch_s=9.0, cpu_s=0.1)
        made = measured(made, {"cpu_expert": curve(_1=0.1)}, {"cpu_expert": 0.1})
        result = execute(made).result
        assert result["bound"]["tpot_s"] <= result["tpot_s"]["mean"]


def test_a_part_of_a_measured_expert_is_launched_like_one(tmp_path):
    with Trace(from_rows(tmp_path / "t", [[[0, 1]]], 2)) as trace:
        cost: Cost = cost_of(measured(setup(Lru(), trace, 2), {"expert": curve(_1=2.0)}, {"expert": 0.5}))
        assert (cost.launch_part(1 / 3, True).all_s, cost.launch_part(1 / 3, False).first_s) == (0.5, 0.5)
