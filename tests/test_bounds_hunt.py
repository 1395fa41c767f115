"""Hunting for anything faster than the lower bound: wild machines, every lossless policy, and players who see all.

`test_bounds` derives and searches exhaustively in small cases; here are the cases a proof forgets: parts of experts,
several GPUs and requests, frameworks that cost host time. `test_bounds_parts` and `test_bounds_curves` go on.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import msgspec
import pytest
from easy_numbers import EXPERT_BYTES, figure, setup
from grids import MANY_KINDS, few_each_time
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_traces import tiny_trace

from sim.base.errors import BadInput, DoesNotFit
from sim.base.kinds import BYTES, Capacity
from sim.bounds.time_bound import lower_bound
from sim.conformance import seeded
from sim.conformance.behaviour import others
from sim.conformance.world import MODEL, World
from sim.machine.events.bill import TERMS
from sim.policy.api import Policy
from sim.policy.decisions import Evict, Fetch, Prefetch, RunCpu, RunGpu, RunPart
from sim.policy.pieces import Pieces
from sim.policy.registry import policies
from sim.profiles.hardware import Contention
from sim.run import execute
from sim.setup.memory import BudgetRule, Demand, plan
from traces.format.reader import Trace

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
        hw,
        h2d=link(hw.h2d),
        d2h=link(hw.d2h),
        p2p=link(hw.p2p),
        contention=Contention(**terms),
        gpu=msgspec.structs.replace(
            gpu,
            memory_bandwidth_bytes_per_s=rate(gpu.memory_bandwidth_bytes_per_s),
            kernel_floor_s=seconds(gpu.kernel_floor_s),
            flops_per_s={k: rate(q) for k, q in gpu.flops_per_s.items()},
        ),
        host=msgspec.structs.replace(
            host,
            launch_s=seconds(host.launch_s),
            sync_s=seconds(host.sync_s),
            copy_launch_s=seconds(host.copy_launch_s),
        ),
        cpu=msgspec.structs.replace(
            cpu,
            memory_bandwidth_bytes_per_s=rate(cpu.memory_bandwidth_bytes_per_s),
            flops_per_s=rate(cpu.flops_per_s),
            expert_overhead_s=seconds(cpu.expert_overhead_s),
        ),
    )


def wild_stack(rng, stack):
    kernels = msgspec.structs.replace(
        stack.kernels,
        attention=rng.choice((1, 7, 26)),
        gate=rng.choice((1, 3)),
        head=rng.choice((1, 3, 23)),
        expert=rng.choice((1, 2, 3, 4, 5, 11)),
    )
    return msgspec.structs.replace(
        stack,
        kernels=kernels,
        per_layer_s=figure(rng.choice((0, 0, 1e-3))),
        per_expert_s=figure(rng.choice((0, 0, 1.5e-4, 2e-3))),
        per_copy_s=figure(rng.choice((0, 0, 1e-4))),
        per_iteration_s=figure(rng.choice((0, 1e-3))),
        grouped=rng.random() < 0.6,
        graphs=rng.random() < 0.5,
    )


def wild_model(rng):
    dense = rng.choice(((), (), (0,), (2, 5)))
    shared = rng.random() < 0.3
    return msgspec.structs.replace(
        MODEL,
        hidden_size=rng.choice((64, 1024, 4096)),
        expert_intermediate_size=rng.choice((64, 2048, 14336)),
        n_layers=seeded.N_LAYERS + len(dense),
        dense_layers=dense,
        dense_intermediate_size=rng.choice((64, 8192)) if dense else 0,
        n_shared_experts=int(shared),
        shared_intermediate_size=rng.choice((64, 4096)) if shared else 0,
    )


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
    made = replace(made, hw=wild_hardware(rng, world.hw), stack=wild_stack(rng, world.stack), model=model)
    room = int(experts * model.expert_bytes("bf16") * rng.choice((1, 1, 1.15)))
    made = replace(
        made,
        memory=plan(
            model,
            made.hw,
            "bf16",
            Demand(contexts=(64 * batch,), iteration_tokens=64, batch=batch),
            BudgetRule(cache=Capacity(BYTES, room)),
            gpus,
            True,
            made.policy.keeps_all,
        ),
        pieces=Pieces(model.n_moe_layers, model.n_experts, "bf16", gpus, model.expert_bytes),
    )
    try:
        outcome = execute(made, bounds=False)
        return outcome.report, outcome.result, lower_bound(made)
    except (DoesNotFit, BadInput):
        return None


@pytest.mark.parametrize("name", few_each_time(policies(), MANY_KINDS))
def test_wild_machines(name):
    """No policy stumbles on any machine, its time is accounted for, and no lossless one is faster than the bound."""
    kind = policies()[name]
    rng, n_runs = Random(f"wild {kind.name}"), 0
    with World(kind) as world:
        for _ in range(30):
            seen = wild_run(rng, kind, world)
            if seen is None:
                continue
            report, result, bound = seen
            n_runs += 1
            for phase in report.phases.values():  # where the time went: all of it, to the phase it belongs to
                assert sum(phase.parts_s) == pytest.approx(phase.time_s, rel=1e-9, abs=1e-12)
            if "lossy" not in kind.traits:
                assert bound.tpot_s <= result.tpot_s.mean
                assert bound.ttft_s <= result.ttft_s.mean
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
        "gpus": gpus,
        "batch": batch,
        "copy_s": rng.choice((0.25, 1.0, 3.0, 9.0)),
        "peer_s": rng.choice((0.0, 0.5)),
        "launch_s": rng.choice((0.0, 0.25, 1.0)),
        "sync_s": rng.choice((0.0, 0.5)),
        "shared": rng.random() < 0.3,
        "copy_launch_s": rng.choice((0.0, 0.125)),
        "dense_layers": rng.choice(((), (0, 2))),
        "cpu_s": rng.choice((0.5, 3.0, 9.0)),
        "kernels": {"expert": rng.choice((1, 2, 3, 4)), "attention": rng.choice((0, 1))},
    }
    path = tmp_path_factory.mktemp("player") / "t"
    tiny_trace(path, layers, experts, k, n_requests=4, prompt=2, outputs=4, levels=set(), seed=rng.randrange(99))
    kind = rng.choice((Player, CpuPlayer))
    with Trace(path) as trace:
        for _ in range(4):
            made = setup(kind(rng, n_parts, rng.random() < 0.5), trace, room, **world)
            made = replace(
                made, stack=msgspec.structs.replace(made.stack, per_expert_s=figure(rng.choice((0.0, 0.5, 3.0))))
            )
            more = rng.choice((0, 0, EXPERT_BYTES // 3 + 1, EXPERT_BYTES // 2))
            budgets = tuple(b + more for b in made.memory.expert_bytes)
            made = replace(made, memory=msgspec.structs.replace(made.memory, expert_bytes=budgets))
            result, bound = execute(made, bounds=False).result, lower_bound(made)
            assert bound.tpot_s <= result.tpot_s.mean
            assert bound.ttft_s <= result.ttft_s.mean
