"""Assemble a resolved run in the frozen loop, drive it, and fold the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from oracle.cost import Cost
from oracle.drive import Clockwork, drive
from oracle.engine import Engine
from oracle.fold import fold
from oracle.future import Future
from oracle.hooks import overrides
from oracle.iterations import Arrays, Scheduler
from oracle.pieces import Pieces
from oracle.residency import Cache
from oracle.simulated import SimMachine
from sim.base.errors import DoesNotFit
from sim.workload.learn_split import StoreSplit

if TYPE_CHECKING:
    from oracle.lanes import Spans
    from oracle.transfers import Log
    from sim.setup.setup import Setup


@dataclass
class Outcome:
    """A finished run: its figures, and what they were folded from."""

    result: dict[str, Any]
    engine: Engine
    machine: SimMachine
    clockwork: Clockwork


def oracle_run(setup: Setup, spans: Spans | None = None, log: Log | None = None) -> Outcome:
    """Replay a resolved run. The policy is bound and taught here: hand in a setup that has not run yet.

    Args:
        spans: receives every span. log: receives every decision.
    """
    engine, machine = assemble(setup, spans, log)
    start_policy(engine, setup)
    clockwork = Clockwork()
    scheduler = Scheduler(setup.requests, setup.spec.batch, setup.open_loop, setup.batching().scheduler.passes)
    for _ in drive(engine, machine, scheduler, setup.trace, clockwork, setup.open_loop):
        pass
    return Outcome(fold(setup, engine, machine, clockwork), engine, machine, clockwork)


def assemble(setup: Setup, spans: Spans | None = None, log: Log | None = None) -> tuple[Engine, SimMachine]:
    """Engine and machine of a run, the policy not bound yet."""
    policy, trace, spec, model = setup.policy, setup.trace, setup.spec, setup.model
    cost = Cost(setup.hw, model, setup.stack, spec.precision)
    cache = Cache(list(setup.memory.expert_bytes), model.n_moe_layers * model.n_experts)
    future = None
    if "oracle" in policy.traits:
        future = Future(trace, setup.requests, spec.batch, setup.batching().scheduler.passes)
    pieces = Pieces(model.n_moe_layers, model.n_experts, spec.precision, spec.gpus, model.expert_bytes)
    machine = SimMachine(cost, spec.gpus, spans, report_copies=overrides(policy, "copy_done"))
    return Engine(policy, machine, cache, pieces, cost, Arrays(trace), model.top_k, future, log), machine


def start_policy(engine: Engine, setup: Setup) -> None:
    """Take the predictor's memory off the budget, check the minimum, bind, learn, place."""
    policy, view, cache = setup.policy, engine.view, engine.cache
    cache.budget_bytes[0] -= policy.predictor_bytes(view)
    for gpu, budget in enumerate(cache.budget_bytes):
        need = policy.min_experts(view)
        if budget < need * view.expert_bytes:
            raise DoesNotFit(f"policy {policy.name}, got {budget} bytes on GPU {gpu}: it needs {need} experts")
    divided = policy.layer_budgets(view)
    if divided is not None:
        cache.divide(divided)
    policy.bind(view)
    policy.learn(StoreSplit(setup.trace, setup.store))
    engine.start()
    engine.place(policy.initial(view))
