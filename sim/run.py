"""Assemble a resolved run, drive it, and fold the result."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sim.base.errors import DoesNotFit, IllegalDecision
from sim.base.plug_ins import read_from
from sim.base.units import show_bytes
from sim.bounds.time_bound import lower_bound
from sim.core.driver import CoreEngine, CoreMachine
from sim.core.supports import supports
from sim.engine.copies import Log
from sim.engine.engine import Engine
from sim.engine.report import Counts, Lanes, Report
from sim.engine.residency import Residency
from sim.engine.run_loop import Clockwork, Loop, drive
from sim.machine.cost import Cost
from sim.machine.protocol import Machine
from sim.machine.simulated import SimulatedMachine
from sim.options import CORE, SIMPY
from sim.policy.api import overrides as implements
from sim.policy.contract import check_declared
from sim.policy.mistakes import PUZZLED, blamed, located, sound_number
from sim.policy.pieces import Pieces
from sim.policy.registry import find
from sim.policy.watchdog import watched as watched_hooks
from sim.results.fold import fold as fold
from sim.results.outcome import Outcome as Outcome
from sim.results.outcome import Progress as Progress
from sim.results.outcome import Watched
from sim.setup.prepare import prepare as prepare
from sim.setup.setup import Setup as Setup
from sim.workload.gate import Arrays
from sim.workload.learn_split import StoreSplit, TrainingTrace

if TYPE_CHECKING:
    from sim.engine.recording import Recording
    from sim.engine.run_loop import Step
    from sim.engine.tiered import Tiered
    from sim.machine.lanes import Spans
    from sim.policy.api import Policy
    from sim.policy.view import View
    from sim.setup.third_tier import ThirdTier
    from sim.workload.future import Future

use_core = True
"""Tests alone set it to False, to hold today's engine beside the core."""
NEW_OBJECTS = 20_000
"""Before a replay looks for cycles; some megabytes at most."""


def execute(
    setup: Setup,
    spans: Spans | None = None,
    log: Log | None = None,
    progress: Progress | None = None,
    on_step: Callable[[Step], None] | None = None,
    bounds: bool = True,
    begun: Callable[[Engine], None] | None = None,
    watched: Callable[[int], Watched] | None = None,
    by_layer: bool = True,
) -> Outcome:
    """Run it in simulation.

    Args:
        spans: receives every span. log: receives every decision. on_step: receives every iteration once it is over.
        progress: called with (tokens put out, in all) after an iteration, or after many in a row.
        bounds: work out the lower bound on time too (`sim.bounds.time_bound`); without it the key `bound` is None.
        begun: told of the engine, with all that lies in its cache, before the first iteration. Whoever looks into it as
            it runs (timelines, `check` of a log) is given today's: the core tells after each iteration.
        watched: of several replicas, what each is told of in place of `spans`, `log`, `on_step` and `begun`.
        by_layer: work out the key `by_layer` too, of a single replica; without it that is empty.
    """
    with blamed(setup.policy), watched_hooks():
        if setup.spec.replicas > 1:
            return _execute_replicas(setup, progress, watched)
        began_s = time.perf_counter()
        engine, machine = (assembled if begun is None else assemble)(setup, spans, log)
        if begun is not None:
            begun(engine)
        clockwork = run_through(setup, engine, machine, on_step, progress)
        outcome = finished(setup, report_of(engine, machine, clockwork, began_s), by_layer)
        if bounds:
            outcome.result.set_beside(lower_bound(setup, cost=machine.cost))
        return outcome


def report_of(engine: Engine, machine: SimulatedMachine, clockwork: Clockwork, began_s: float | None = None) -> Report:
    """Of a simulation that is over, which this computer began at `began_s`."""
    wall_s = 0.0 if began_s is None else time.perf_counter() - began_s
    return Report.of(Counts.of(engine), Lanes.of(machine), clockwork, engine.cost.measured.beyond, wall_s)


def finished(setup: Setup, report: Report, by_layer: bool = True) -> Outcome:
    """The run with its record."""
    return Outcome(fold(setup, report, by_layer), report, setup)


def _execute_replicas(setup: Setup, progress: Progress | None, watched: Callable[[int], Watched] | None) -> Outcome:
    """Run every replica, each with its own engine, cache and policy, behind a router."""
    from sim.serving.service import Service  # with SimPy, which other runs never import
    from sim.setup.replicas import setups_of

    began_s = time.perf_counter()
    put_out, total = [0] * setup.spec.replicas, sum(request.outputs for request in setup.requests)
    served: list[tuple[Engine, SimulatedMachine, Clockwork]] = []
    loops: list[Loop] = []
    for number, own in enumerate(setups_of(setup)):
        told = Watched() if watched is None else watched(number)
        engine, machine = (assembled if told.begun is None else assemble)(own, told.spans, told.log)
        if told.begun is not None:
            told.begun(engine)
        clockwork = Clockwork()

        def step(step: Step, number: int = number, clockwork: Clockwork = clockwork, told: Watched = told) -> None:
            put_out[number] = clockwork.n_put_out
            if progress is not None:
                progress(sum(put_out), total)
            if told.on_step is not None:
                told.on_step(step)

        silent = progress is None and told.on_step is None
        on_step = None if silent else step
        loops.append(Loop(engine, machine, own.batching(), own.trace, clockwork, True, on_step=on_step))
        served.append((engine, machine, clockwork))
    with seldom_collected():
        Service(loops, setup.router, setup.requests, setup.clients).run()
    _all_served_once(setup, [clockwork for _, _, clockwork in served])
    for loop in loops:
        loop.finish()
    return finished(setup, Report.sum([report_of(*one) for one in served], time.perf_counter() - began_s))


def machine_kind(setup: Setup) -> Any:
    """The class of simulated machine that a run is carried out on."""
    if setup.simulator == SIMPY:
        from sim.machine.events.machine import EventMachine  # with SimPy, which other runs never import

        return EventMachine
    return setup.machine or SimulatedMachine


def assembled(setup: Setup, spans: Spans | None = None, log: Log | None = None) -> tuple[Any, Any]:
    """The core with its hooks, and what it runs on, for runs that it supports; else engine and machine."""
    if not (use_core and supports(setup)):
        return assemble(setup, spans, log)
    cost, policy, trace = setup.cost(), setup.policy, setup.trace
    pieces, arrays, top_k = setup.pieces, Arrays(trace, policy.needs), setup.model.top_k
    machine = CoreMachine(cost, pieces.n_layers, pieces.n_experts, pieces.all[0], spans)
    room, future = setup.memory.expert_bytes, future_of(setup)
    engine = CoreEngine(policy, machine, pieces, room, cost, arrays, top_k, future, log, spans)
    start_policy(engine, setup)
    return engine, machine


def assemble(setup: Setup, spans: Spans | None = None, log: Log | None = None) -> tuple[Engine, SimulatedMachine]:
    """Engine and simulated machine of a run, the policy bound and taught."""
    cost = setup.cost()
    machine = machine_kind(setup)(cost, setup.spec.gpus, spans, report_copies=implements(setup.policy, "copy_done"))
    return engine_of(setup, machine, cost, log), machine


def engine_of(setup: Setup, machine: Machine, cost: Cost, log: Log | None = None) -> Engine:
    """The engine of a run on any machine, the policy bound and taught.

    Args:
        cost: prices that the policy sees, whatever the machine's are.
    """
    policy, trace = setup.policy, setup.trace
    residency, arrays = Residency(setup.pieces, setup.memory.expert_bytes), Arrays(trace, policy.needs)
    if setup.tier is not None:
        machine = above_drive(setup, setup.tier, machine, cost, arrays)
    engine = Engine(policy, machine, residency, cost, arrays, setup.model.top_k, future_of(setup), log)
    start_policy(engine, setup)
    return engine


def future_of(setup: Setup) -> Future | None:
    """What will be asked for, for policies that may know."""
    if "oracle" not in setup.policy.traits:
        return None
    from sim.workload.future import Future

    return Future(setup.trace, setup.batching(open_loop=False))


def above_drive(setup: Setup, tier: ThirdTier, machine: Machine, cost: Cost, arrays: Arrays) -> Tiered:
    """A machine whose host memory is a cache of what lies on the drive, its policy bound and taught."""
    from sim.engine.host_tier import HostTier
    from sim.engine.tiered import Tiered
    from sim.setup.third_tier import WARM

    kind, model = find(tier.evict), setup.model
    check_declared(kind)
    host_bytes = setup.host_bytes - model.host_bytes(setup.spec.precision)  # tables stay there, whatever leaves
    pieces = Pieces(model.n_moe_layers, model.n_experts, setup.spec.precision, 1, model.expert_bytes)
    with blamed(kind):
        policy = kind(**kind.as_one_list)
        host = HostTier(policy, machine, pieces, host_bytes, cost, arrays, model.top_k, tier.read_ahead)
        host.start(training_split(setup, policy), tier.start == WARM)
    return Tiered(machine, host)


def training_split(setup: Setup, policy: Policy) -> StoreSplit:
    """What a policy learns from, of the levels that it declares."""
    return StoreSplit(TrainingTrace(setup.trace, policy.needs), setup.store)


def tellable(setup: Setup) -> bool:
    """Whether decisions may be the same on all hardware; the run itself shows whether they are (`record`)."""
    return (
        "timing" not in setup.policy.traits
        and setup.spec.gpus == 1
        and not setup.open_loop
        and read_from(setup.scheduler) is None  # one of the user's own may look at the clock it is told
        and setup.simulator == CORE
        and setup.kv is None
        and setup.tier is None
    )


def record(setup: Setup, by_layer: bool = True) -> tuple[Outcome, Recording | None]:
    """Run it, and write down what others like it need; None where a time or a price had a part in its decisions."""
    from sim.engine.recorder import AskedPrices, Recorder
    from sim.engine.recording import Recording

    with blamed(setup.policy), watched_hooks():
        began_s = time.perf_counter()
        cost = setup.cost()
        machine = SimulatedMachine(cost, setup.spec.gpus)
        asked: Any = AskedPrices(cost)  # it answers whatever a Cost does
        recorder = Recorder(machine, setup.pieces)
        engine = engine_of(setup, recorder, asked)
        recorder.tape.budget_bytes = engine.residency.budget_bytes[0]
        clockwork = run_through(setup, engine, recorder, None, None)
        priced = asked.any
        outcome = finished(setup, report_of(engine, machine, clockwork, began_s), by_layer)
    if recorder.spoilt or priced:
        return outcome, None
    return outcome, Recording(recorder.tape, engine.pieces, outcome.report.counts, clockwork.scheduler_stats)


def timed(setup: Setup, recording: Recording, by_layer: bool = True) -> Outcome:
    """What `execute` gives without a bound, by a run of the same decisions on other hardware."""
    from sim.engine.replay import Player
    from sim.workload.draft_steps import Drafted

    began_s = time.perf_counter()
    setup.check_host(recording.counts.kept)
    cost, tape = setup.cost(), recording.tape
    machine, clockwork = SimulatedMachine(cost, setup.spec.gpus), Clockwork()
    clockwork.drafted = None if setup.drafter is None else Drafted()
    clockwork.scheduler_stats = recording.scheduler_stats
    with seldom_collected():
        Player(machine, recording.pieces, tape.budget_bytes, tape.placed).play(tape, clockwork)
    beyond, wall_s = cost.measured.beyond, time.perf_counter() - began_s
    return finished(setup, Report.of(recording.counts, Lanes.of(machine), clockwork, beyond, wall_s), by_layer)


def run_through(
    setup: Setup,
    engine: Engine,
    machine: Machine,
    on_step: Callable[[Step], None] | None,
    progress: Progress | None,
    clockwork: Clockwork | None = None,
) -> Clockwork:
    """Drive every iteration, telling whoever wants to know. clockwork: a new one that somebody looks at on the way."""
    clockwork = clockwork or Clockwork()
    on_stride = None
    if progress is not None:
        total = sum(r.outputs for r in setup.requests)

        def on_stride() -> None:
            progress(clockwork.n_put_out, total)

    told: dict[str, Any] = {"on_step": on_step, "on_stride": on_stride}
    with seldom_collected():
        drive(Loop(engine, machine, setup.batching(), setup.trace, clockwork, setup.open_loop, **told))
    _all_served_once(setup, [clockwork])
    _check_kept(engine, setup.policy, "kept_layers", engine.kept)
    return clockwork


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Python looks for cycles after more new objects than by default: layers and points make many, which form none."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(before[0], NEW_OBJECTS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _all_served_once(setup: Setup, clockworks: Sequence[Clockwork]) -> None:
    """Raises IllegalDecision where a plug-in of the user's own took requests out of a queue, or put them in twice."""
    n_served, n_asked = sum(len(one.requests) for one in clockworks), len(setup.requests)
    if n_served != n_asked:
        who = f"scheduler {setup.scheduler.name}"
        if len(clockworks) > 1:
            who += f" or router {setup.router.name}"
        error = IllegalDecision(
            f"{who}, got {n_served} requests served of {n_asked}: `waiting` and replicas are looked at, and requests "
            "move by what is answered alone; change neither"
        )
        error.located = True  # it is no policy's
        raise error


def start_policy(engine: Any, setup: Setup) -> None:
    """Take the predictor's memory off the budget, check the minimum, bind, learn, place."""
    policy, view, residency = setup.policy, engine.view, engine.residency
    predictor_bytes = sound_number(policy, "predictor_bytes", policy.predictor_bytes(view))
    residency.budget_bytes[0] -= predictor_bytes
    size = view.expert_bytes
    least = sound_number(policy, "min_experts", policy.min_experts(view))
    for gpu, budget in enumerate(residency.budget_bytes):
        need = least if setup.homes is None else min(least, setup.homes.count(gpu))  # no more than lives there
        if budget < need * size:
            smaller = policy.fits_smaller(view)
            raise DoesNotFit(
                f"policy {policy.name}, got an expert budget of {show_bytes(max(0, budget))} on GPU {gpu}: it needs at "
                f"least {need} whole expert{'s' * (need != 1)} ({show_bytes(need * size)}); raise the budget, "
                f"or {smaller or 'take another policy'}",
                setup.memory.sizes(predictor_bytes, gpu),
            )
    divided = policy.layer_budgets(view)
    if divided is not None:
        try:
            residency.divide(divided)
        except PUZZLED as error:
            wrong = IllegalDecision(f"got {divided!r}: it answers with bytes by GPU and layer")
            raise located(wrong, policy, "layer_budgets", -1) from error
    policy.bind(view)
    policy.learn(training_split(setup, policy))
    engine.start()
    engine.copies.place(policy.initial(view))
    if setup.all_kept:
        _check_kept(engine, policy, "keeps_all_if_room", range(view.n_layers))
    elif implements(policy, "kept_layers"):
        kept = _kept_layers(policy, view)
        _check_kept(engine, policy, "kept_layers", kept)
        setup.check_host(kept)
        engine.kept = kept
        if kept and setup.leaves_unread:
            engine.machine.leave_unread(kept)


def _kept_layers(policy: Policy, view: View) -> frozenset[int]:
    """What a policy says of them. Raises IllegalDecision for an answer that is no layers."""
    answer = policy.kept_layers(view)
    try:
        found = list(answer)
    except PUZZLED as error:
        raise _no_layers(policy, answer, view) from error
    if any(type(layer) is not int or not 0 <= layer < view.n_layers for layer in found):
        raise _no_layers(policy, found, view)
    return frozenset(found)


def _no_layers(policy: Policy, answer: object, view: View) -> IllegalDecision:
    wrong = IllegalDecision(f"got {answer!r}: it answers with layers, 0 to {view.n_layers - 1}")
    return located(wrong, policy, "kept_layers", -1)


def _check_kept(engine: Engine, policy: Policy, hook: str, layers: Collection[int]) -> None:
    """Raises IllegalDecision where experts of layers that are kept for good are not on their GPUs."""
    pieces, holds = engine.pieces, engine.residency.holds
    missing = next((piece for layer in sorted(layers) for piece in pieces.whole[layer] if not holds(piece)), None)
    if missing is not None:
        wrong = IllegalDecision(f"{missing} is not there: every expert of a layer that is kept is, for good")
        raise located(wrong, policy, hook, -1)
