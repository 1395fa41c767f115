"""A test bench with round numbers, so that a timeline can be worked out by hand.

Unless a test says otherwise: copying an expert takes 10 s (160 bytes at 16 bytes/s), the hidden state of one token 1 s
each way (16 bytes), an expert 2 s on the GPU and 5 s on the CPU, attention 1 s, the head 1 s, a dense FFN 1 s, a shared
expert 1 s; gates, kernel launches, copy launches and host synchronisation take no time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from random_policy import key
from tiny_traces import from_rows

from sim.engine.engine import Engine
from sim.engine.tiered import Tiered
from sim.machine.cost import Cost
from sim.options import RunSpec
from sim.policy.api import Policy
from sim.policy.pieces import Pieces
from sim.profiles.hardware import Bus, Contention, Cpu, Gpu, Hardware, Host, Link, Quantity
from sim.profiles.models import Model, ModelGate
from sim.profiles.stack import Kernels, Stack
from sim.run import Outcome, Setup, execute
from sim.setup.memory import DenseParts, MemoryPlan
from sim.workload.iterations import RequestInfo
from sim.workload.learn_split import requests_of
from traces.format.reader import Trace

EXPERT_BYTES = 160  # 2 matrices x 8 x 5 x 2 bytes
TOKEN_BYTES = 16  # 8 x 2 bytes
KERNELS = {"attention": 1, "gate": 0, "expert": 2, "shared_expert": 1, "head": 1, "dense_ffn": 1}


def figure(value: float) -> Quantity:
    return Quantity(value=float(value), source="assumed")


def hardware(
    copy_s: float = 10.0,
    kernel_s: float = 1.0,
    launch_s: float = 0.0,
    sync_s: float = 0.0,
    copy_launch_s: float = 0.0,
    cpu_s: float = 5.0,
    peer_s: float = 0.0,
) -> Hardware:
    """Kernels of `kernel_s`, copies of `copy_s` per expert, everything else free."""
    rate = EXPERT_BYTES / copy_s if copy_s else math.inf
    link = Link(latency_s=figure(0.0), bandwidth_bytes_per_s=figure(rate))
    gpu = Gpu(
        memory_bandwidth_bytes_per_s=figure(math.inf),
        flops_per_s={"bf16": figure(math.inf)},
        kernel_floor_s=figure(kernel_s),
        n_sms=1,
        l2_bytes=1,
        link=Bus(generation=1, lanes=1, theoretical_bytes_per_s=rate),
    )
    cpu = Cpu(
        id="easy",
        name="easy",
        n_cores=1,
        memory_bandwidth_bytes_per_s=figure(math.inf),
        flops_per_s=figure(math.inf),
        expert_overhead_s=figure(cpu_s),
        memory_bytes=figure(1e12),
    )
    none = figure(0.0)
    return Hardware(
        schema=1,
        id="easy",
        name="easy numbers",
        vram_bytes=figure(1e9),
        h2d=link,
        d2h=link,
        h2d_pageable=link,
        d2h_pageable=link,
        p2p=Link(latency_s=figure(peer_s), bandwidth_bytes_per_s=figure(math.inf)),
        gpu=gpu,
        host=Host(launch_s=figure(launch_s), sync_s=figure(sync_s), copy_launch_s=figure(copy_launch_s)),
        cpu=cpu,
        contention=Contention(
            gpu_slowdown_by_h2d=none, h2d_slowdown_by_gpu=none, cpu_slowdown_by_h2d=none, h2d_slowdown_by_cpu=none
        ),
    )


def stack(**kernels: int) -> Stack:
    none = figure(0.0)
    return Stack(
        schema=1,
        id="easy",
        name="easy",
        pinned=True,
        copy_efficiency_frac=figure(1.0),
        per_layer_s=none,
        per_expert_s=none,
        per_copy_s=none,
        per_iteration_s=none,
        kernels=Kernels(**KERNELS | kernels),
    )


def model(
    n_moe_layers: int, n_experts: int, top_k: int, dense_layers: tuple[int, ...] = (), shared: bool = False
) -> Model:
    return Model(
        schema=1,
        id="easy",
        name="easy",
        source="tests",
        gate=ModelGate(score="softmax", renormalised=True),
        hidden_size=8,
        n_layers=n_moe_layers + len(dense_layers),
        dense_layers=dense_layers,
        dense_intermediate_size=5 if dense_layers else 0,
        n_experts=n_experts,
        top_k=top_k,
        expert_intermediate_size=5,
        matrices_per_expert=2,
        n_shared_experts=int(shared),
        shared_intermediate_size=5 if shared else 0,
        n_heads=1,
        n_kv_heads=1,
        head_dim=1,
        vocab_size=16,
    )


@dataclass
class Run:
    """A finished run with everything it said along the way."""

    outcome: Outcome
    engine: Engine
    spans: list[tuple[Any, ...]] = field(default_factory=list)
    log: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def result(self) -> dict[str, Any]:
        return self.outcome.result

    @property
    def machine(self) -> Any:
        """The one that spent the time, below a drive's."""
        machine = self.engine.machine
        return machine.machine if isinstance(machine, Tiered) else machine

    @property
    def end_s(self) -> float:
        """When the last token came out."""
        return self.outcome.result.simulated_s

    def lane(self, name: str, zero: bool = False) -> list[tuple[str, float, float]]:
        """(what, start, end) on one lane, in order of time; work of no duration is left out unless `zero`."""
        return [(what, start_s, end_s) for what, start_s, end_s, _ in self._lane(name) if zero or end_s > start_s]

    def tokens(self, name: str) -> list[tuple[str, int]]:
        """(what, tokens) on one lane."""
        return [(what, n) for what, _, _, n in self._lane(name)]

    def _lane(self, name: str) -> list[tuple[str, float, float, int]]:
        rows = []
        for lane, op, layer, expert, n_tokens, _, start_s, end_s in self.spans:
            if lane == name:
                where = "" if layer < 0 else f" {layer}" if expert < 0 else f" {layer}.{expert}"
                rows.append((op + where, start_s, end_s, n_tokens))
        return sorted(rows, key=lambda row: row[1:3])

    def end_state(self) -> dict[str, Any]:
        """Where it has left its machine, its memory and its queue."""
        view, machine = self.engine.view, self.machine
        return {
            "now_s": machine.now_s,
            "residents": [key(piece) for piece in view.residents()],
            "free_bytes": [view.free_bytes(gpu) for gpu in range(view.n_gpus)],
            "queued": [key(piece) for piece in self.engine.copies.queue.pieces()],
            "busy_s": machine.lane_busy_s(),
            "ends_s": machine.lane_ends_s(),
            "parts_s": list(machine.parts_s()),
            "decisions": self.engine.tally.n_evicted,
        }

    def classes(self, phase: str) -> dict[str, int]:
        """How many experts the gate found in which way; classes of none are left out."""
        names = ("hit", "partial", "late", "miss", "cpu", "substituted", "dropped")
        counts = self.outcome.report.counts.tally.hits[phase].experts
        return {name: n for name, n in zip(names, counts, strict=True) if n}

    def prefetched(self) -> dict[str, int]:
        """What became of prefetches; classes of none are left out."""
        p = self.outcome.report.counts.tally.prefetch
        named = {"issued": p.n_issued, "cancelled": p.n_cancelled, "refused": p.n_dropped, **p.n}
        return {name: n for name, n in named.items() if n}


def setup(
    policy: Policy,
    trace: Trace,
    room: int | Sequence[int],
    *,
    gpus: int = 1,
    batch: int = 1,
    scheduler: str | None = None,
    dense_layers: tuple[int, ...] = (),
    shared: bool = False,
    kernels: dict[str, int] | None = None,
    **machine: float,
) -> Setup:
    """A run of `policy` with `room` whole experts per GPU; `machine` are arguments of `hardware`."""
    geometry = model(trace.n_layers, trace.n_experts, trace.top_k, dense_layers, shared)
    rooms = [room] * gpus if isinstance(room, int) else list(room)
    budgets = tuple(n * EXPERT_BYTES for n in rooms)
    memory = MemoryPlan(DenseParts(0, 0, 0, 0, 0, reserve_bytes=0), budgets[0], budgets, False, sum(budgets))
    spec = RunSpec(policy=policy.name, hw="easy", gpus=gpus, batch=batch, scheduler=scheduler)
    requests: list[RequestInfo] = requests_of(trace, "test")
    return Setup(
        spec=spec,
        policy=policy,
        hw=hardware(**machine),
        model=geometry,
        stack=stack(**kernels or {}),
        trace=trace,
        requests=requests,
        store=requests_of(trace, "store"),
        memory=memory,
        host_bytes=0,
        pieces=Pieces(trace.n_layers, trace.n_experts, "bf16", gpus, geometry.expert_bytes),
        open_loop=any(r.arrival_s is not None for r in requests),
    )


def run(
    policy: Policy,
    tmp_path: Path,
    rows: Sequence[Sequence[Sequence[int]]],
    room: int | Sequence[int],
    *,
    n_experts: int | None = None,
    lengths: Sequence[tuple[int, int]] | None = None,
    **world: Any,
) -> Run:
    """Replay `rows[token][layer]` = expert ids (one request with a prompt of one token, unless `lengths`)."""
    with Trace(from_rows(tmp_path / "easy.safetensors", rows, n_experts, lengths)) as trace:
        return execute_easy(setup(policy, trace, room, **world))


def execute_easy(made: Setup) -> Run:
    """Run it and keep spans and decisions."""
    spans: list[tuple[Any, ...]] = []
    log: list[tuple[str, int, int]] = []
    engines: list[Engine] = []
    told = lambda *span: spans.append(span), lambda *entry: log.append(entry)
    return Run(execute(made, *told, begun=engines.append), engines[0], spans, log)


def cost_of(made: Setup) -> Cost:
    return Cost(made.hw, made.model, made.stack, made.spec.precision)
