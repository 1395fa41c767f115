"""A small world to run one policy in: a seeded trace, a small model, a described GPU; and what a run shows."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from sim.base.errors import CheckFailed
from sim.base.kinds import EXPERTS, Capacity
from sim.conformance import seeded
from sim.engine.engine import Engine
from sim.engine.residency import Residency
from sim.machine.cost import Cost
from sim.machine.forwarding import ForwardingMachine
from sim.machine.simulated import SimulatedMachine
from sim.options import RunSpec
from sim.policy.api import overrides
from sim.policy.pieces import Piece, Pieces
from sim.profiles.hardware import load_hardware
from sim.profiles.models import Model, ModelGate
from sim.profiles.stack import load_stack
from sim.results.record import plain
from sim.run import Setup, engine_of, fold, report_of, run_through
from sim.setup.drafting import Drafter
from sim.setup.memory import BudgetRule, Demand, plan
from sim.workload.gate import Arrays
from sim.workload.iterations import Iteration
from sim.workload.kv_memory import KvPool
from sim.workload.learn_split import requests_of
from traces.format.reader import Trace

if TYPE_CHECKING:
    from sim.engine.run_loop import Clockwork
    from sim.machine.protocol import Machine
    from sim.machine.turn import Turn
    from sim.policy.api import ParamValue, Policy
    from sim.policy.tickets import Ticket
    from sim.profiles.hardware import Hardware
    from sim.results.record import Result

N_TOTAL = seeded.N_LAYERS * seeded.N_EXPERTS
QUARTER, HALF, ALL = N_TOTAL // 4, N_TOTAL // 2, N_TOTAL
MODEL = Model(
    schema=1,
    id="seeded",
    name="seeded",
    source="sim/conformance",
    gate=ModelGate(score="softmax", renormalised=True),
    hidden_size=1024,
    n_layers=seeded.N_LAYERS,
    n_experts=seeded.N_EXPERTS,
    top_k=seeded.TOP_K,
    expert_intermediate_size=2048,
    n_heads=8,
    n_kv_heads=8,
    head_dim=128,
    vocab_size=4096,
)


class Skip(Exception):
    """The rule says nothing about this policy."""


class Advice(Exception):
    """The rule holds nobody up, and has something to say."""


def advise(holds: bool, message: str) -> None:
    """Raise Advice unless it holds."""
    if not holds:
        raise Advice(message)


def require(holds: bool, message: str) -> None:
    """Raise CheckFailed unless the rule holds."""
    if not holds:
        raise CheckFailed(message)


@dataclass(frozen=True)
class Event:
    """One decision as it was applied: where the pass stood, which experts were pending, bytes taken per GPU."""

    kind: str
    layer: int
    expert: int
    iteration: int
    at_layer: int
    pending: tuple[int, ...]
    used_bytes: tuple[int, ...]


class Computed(NamedTuple):
    """One computation as the machine was asked for it."""

    iteration: int
    layer: int
    expert: int
    start_frac: float
    stop_frac: float
    n_tokens: int


@dataclass
class Seen:
    """A finished run."""

    policy: Policy
    engine: Engine
    machine: SimulatedMachine
    clockwork: Clockwork
    result: Result
    events: list[Event]
    needs: list[dict[int, dict[int, int]]]  # iteration -> layer -> expert -> tokens, from the trace itself
    initial: list[tuple[Any, ...]]  # (layer, expert, start, stop, precision, GPU) of what was there before the first
    budgets: list[int]  # expert bytes per GPU, from the plan and not from the cache
    steps: list[int] = field(default_factory=list)  # decisions made by the end of each iteration
    computed: list[Computed] = field(default_factory=list)  # on GPUs, in order of launching

    @property
    def log(self) -> list[tuple[str, int, int]]:
        """(kind, layer, expert) of every decision."""
        return [(event.kind, event.layer, event.expert) for event in self.events]

    def facts(self) -> dict[str, Any]:
        """The result without what no two runs share."""
        return {key: value for key, value in plain(self.result).items() if key not in ("wall_s", "run_id")}


def faster(hw: Hardware, factor: float) -> Hardware:
    """The same machine with a link `factor` times as fast and a host half as much faster again."""

    def scaled(quantity: Any, by: float) -> Any:
        return msgspec.structs.replace(quantity, value=quantity.value * by)

    def link(of: Any) -> Any:
        bandwidth, latency = scaled(of.bandwidth_bytes_per_s, factor), scaled(of.latency_s, 1 / factor)
        return msgspec.structs.replace(of, bandwidth_bytes_per_s=bandwidth, latency_s=latency)

    host = msgspec.structs.replace(
        hw.host, launch_s=scaled(hw.host.launch_s, 1.5 / factor), sync_s=scaled(hw.host.sync_s, 1.5 / factor)
    )
    return msgspec.structs.replace(hw, h2d=link(hw.h2d), d2h=link(hw.d2h), host=host)


class World:
    """Runs one policy class; equal runs are made once. Use as a context manager: traces live in a temporary folder."""

    def __init__(self, kind: type[Policy]) -> None:
        self.kind = kind
        self.hw = load_hardware("rtx3090")
        self.stack = load_stack("bare")
        self._folder = tempfile.TemporaryDirectory(prefix="moesim-conformance-")
        self._traces: dict[tuple[frozenset[str], bool, int], Trace] = {}
        self._runs: dict[tuple[Any, ...], Seen] = {}
        self.scenario = ""  # the run under way, in words

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for trace in self._traces.values():
            trace.close()
        self._folder.cleanup()

    def trace(self, levels: Iterable[str] | None = None, changed: bool = False, from_layer: int = 0) -> Trace:
        """The seeded trace with the levels the policy needs with its defaults (or these), and no others."""
        key = (frozenset(self.kind.needs if levels is None else levels), changed, from_layer)
        if key not in self._traces:
            path = Path(self._folder.name) / f"trace{len(self._traces)}.safetensors"
            self._traces[key] = Trace(seeded.write(path, *key))
        return self._traces[key]

    def setup(
        self,
        experts: int,
        settings: dict[str, ParamValue] | None = None,
        gpus: int = 1,
        batch: int = 1,
        trace: Trace | None = None,
        static: bool = False,
        prefill_chunk: int | None = None,
        draft: str | None = None,
    ) -> Setup:
        """What `sim.setup.prepare` would make of it, for a class that need not be registered."""
        policy = self.kind(**(settings or {}))
        trace = trace or self.trace(self.kind.needs | policy.needs)
        trace.require_all(policy.needs, f"policy {policy.name}")
        requests = requests_of(trace, "test")
        demand = Demand(contexts=(64 * batch,), iteration_tokens=64, batch=batch)
        bound = "bound" in policy.traits
        memory = plan(
            MODEL, self.hw, "bf16", demand, BudgetRule(cache=Capacity(EXPERTS, experts)), gpus, bound, policy.keeps_all
        )
        return Setup(
            spec=RunSpec(
                policy=policy.name,
                hw=self.hw.id,
                gpus=gpus,
                batch=batch,
                cache=f"{experts}experts",
                batch_static=static,
                prefill_chunk=prefill_chunk,
                draft=draft,
            ),
            policy=policy,
            hw=self.hw,
            model=MODEL,
            stack=self.stack,
            trace=trace,
            requests=requests,
            store=requests_of(trace, "store"),
            memory=memory,
            host_bytes=0,
            pieces=Pieces(MODEL.n_moe_layers, MODEL.n_experts, "bf16", gpus, MODEL.expert_bytes),
            open_loop=any(r.arrival_s is not None for r in requests),
        )

    def smallest(self, gpus: int = 1, settings: dict[str, ParamValue] | None = None) -> int:
        """Whole experts over all GPUs of the smallest budget the policy accepts, its predictor included."""
        made = self.setup(ALL, settings, gpus)
        cost = made.cost()
        residency = Residency(made.pieces, made.memory.expert_bytes)
        machine, arrays = SimulatedMachine(cost, gpus), Arrays(made.trace, made.policy.needs)
        engine = Engine(made.policy, machine, residency, cost, arrays, made.model.top_k)
        predictor = -(-made.policy.predictor_bytes(engine.view) // engine.view.expert_bytes)
        least = made.policy.min_experts(engine.view)
        # The predictor sits on GPU 0, which is also where the odd expert of a budget goes.
        return least * gpus if not predictor else (least + predictor - 1) * gpus + 1

    def room(self, experts: int, gpus: int = 1, settings: dict[str, ParamValue] | None = None) -> int:
        """A budget, raised to the smallest the policy accepts."""
        return max(experts, self.smallest(gpus, settings))

    def run(
        self,
        experts: int,
        settings: dict[str, ParamValue] | None = None,
        gpus: int = 1,
        batch: int = 1,
        trace: Trace | None = None,
        pace: float = 1.0,
        again: int = 0,
        hides_later: bool = False,
        static: bool = False,
        prefill_chunk: int | None = None,
        kv_pages: int | None = None,
        draft: str | None = None,
    ) -> Seen:
        """Run it.

        Args:
            pace: the machine is this many times faster than the prices the policy sees. again: a number for runs
                that must not be shared. hides_later: see `sim.workload.iterations.Arrays`. kv_pages: of one token
                each; who makes room is prefilled anew. draft: as `--draft` has it.
        """
        together = (batch, static, prefill_chunk, kv_pages, draft)
        key = (experts, tuple(sorted((settings or {}).items())), gpus, together, id(trace), pace, again, hides_later)
        if key not in self._runs:
            self.scenario = _scenario(experts, settings, gpus, batch, trace is not None, pace)
            self.scenario += ", static batches" if static else ""
            self.scenario += f", {prefill_chunk} tokens an iteration" if prefill_chunk is not None else ""
            self.scenario += f", a KV cache of {kv_pages} tokens" if kv_pages is not None else ""
            self.scenario += f", drafts {draft}" if draft is not None else ""
            made = self.setup(experts, settings, gpus, batch, trace, static, prefill_chunk, draft)
            kv = None if kv_pages is None else KvPool(kv_pages, 1, 1)
            made = replace(made, drafter=Drafter.of(made.spec), kv=kv)
            self._runs[key] = observe(made, self.hw, pace, hides_later)
            self.scenario = ""  # told of errors only: what a rule says of finished runs is about several
        return self._runs[key]


def _scenario(
    experts: int, settings: dict[str, ParamValue] | None, gpus: int, batch: int, another_trace: bool, pace: float
) -> str:
    """A run in words, for whoever has to repeat it."""
    told = [f"room for {experts} experts of {N_TOTAL}", f"{gpus} GPUs" if gpus > 1 else "", f"batch {batch}"]
    told += [f"{key}={value}" for key, value in (settings or {}).items()]
    told += ["another trace"] if another_trace else []
    told += [f"a machine {pace:g} times as fast"] if pace != 1.0 else []
    return ", ".join(filter(None, told))


class Watched(ForwardingMachine):
    """Keeps what a machine was asked to compute."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.computed: list[Computed] = []
        self.steps: list[int] = []

    def expert(
        self, piece: Piece, n_tokens: int, arrived_s: float, after: tuple[Ticket, ...], parts: Sequence[Piece]
    ) -> Ticket | None:
        where = (len(self.steps), piece.layer, piece.expert, piece.start_frac, piece.stop_frac)
        self.computed.append(Computed(*where, n_tokens))
        return super().expert(piece, n_tokens, arrived_s, after, parts)

    def run_turn(self, turn: Turn) -> bool:
        if not super().run_turn(turn):
            return False
        for at in range(turn.n):
            self.computed.append(Computed(len(self.steps), turn.layer, turn.experts[at], 0.0, 1.0, 1))
        return True


def observe(setup: Setup, hw: Hardware, pace: float = 1.0, hides_later: bool = False) -> Seen:
    """Run a setup with everything it decides."""
    events: list[Event] = []

    def log(kind: str, layer: int, expert: int) -> None:
        events.append(
            Event(
                kind,
                layer,
                expert,
                len(steps),
                engine.pending.layer,
                tuple(engine.pending.experts()),
                tuple(engine.residency.used_bytes),
            )
        )

    cost = Cost(hw if pace == 1.0 else faster(hw, pace), setup.model, setup.stack, setup.spec.precision, setup.several)
    machine = SimulatedMachine(cost, setup.spec.gpus, None, overrides(setup.policy, "copy_done"))
    watched = Watched(machine)
    engine = engine_of(setup, watched, setup.cost(), log)
    steps, computed = watched.steps, watched.computed
    engine.arrays.hides_later = hides_later
    initial = [
        (p.layer, p.expert, p.start_frac, p.stop_frac, p.precision, p.gpu) for p in engine.residency.resident_pieces()
    ]
    clockwork = run_through(setup, engine, watched, lambda _: steps.append(len(events)), None)
    layers = range(setup.trace.n_layers)
    needs = [{layer: dict(iteration.chosen(layer)) for layer in layers} for iteration in iterations(setup)]
    budgets = list(setup.memory.expert_bytes)
    budgets[0] -= setup.policy.predictor_bytes(engine.view)
    result = fold(setup, report_of(engine, machine, clockwork))
    return Seen(setup.policy, engine, machine, clockwork, result, events, needs, initial, budgets, steps, computed)


def iterations(setup: Setup) -> list[Iteration]:
    """The iterations a closed loop composes, made anew from the trace."""
    batching = setup.batching(open_loop=False)
    composed = iter(lambda: batching.next(float("inf")), None)
    return [Iteration(i, ranges, setup.trace, None) for i, ranges in enumerate(composed) if isinstance(ranges, list)]


RuleCheck = Callable[[World], None]

__all__ = ["ALL", "HALF", "QUARTER", "Advice", "RuleCheck", "Seen", "Skip", "World", "advise", "require"]
