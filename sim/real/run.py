"""Assemble a run on real hardware, drive it, and fold its result; faults leave what was measured until then."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from sim.base.device_faults import DeviceFault, fault_of
from sim.base.interrupts import answered, heard, held
from sim.engine import report as told_of
from sim.engine.engine import Engine
from sim.engine.report import Counts, Report
from sim.engine.run_loop import Clockwork, Loop, RequestTimes, drive
from sim.figures import Measurement, Spent
from sim.machine.cost import Cost
from sim.policy.api import Policy
from sim.policy.api import overrides as implements
from sim.policy.mistakes import blamed
from sim.policy.watchdog import watched
from sim.real.devices.open import open_lanes
from sim.real.machine.machine import RealMachine
from sim.real.machine.routing import Routing
from sim.real.machine.warm_up import warm_up
from sim.real.requirements import check, check_memory, free_bytes, lower_precisions
from sim.real.watch import watch
from sim.real.weights.checkpoint_weights import checkpoint_weights
from sim.real.weights.random_weights import random_weights
from sim.real.weights.weights import Weights
from sim.results.fold import fold
from sim.run import engine_of

if TYPE_CHECKING:
    from pathlib import Path

    from sim.engine.copies import Log
    from sim.engine.run_loop import Step
    from sim.machine.lanes import Spans
    from sim.real.devices.lanes import Lanes
    from sim.results.record import Result
    from sim.run import Progress
    from sim.setup.setup import Setup


@dataclass(frozen=True)
class Measured:
    """A run on real hardware: its record, the report that this was folded from, and the machine with what only a real
    one knows. `fault` says why it stopped early."""

    result: Result
    report: Report
    machine: RealMachine
    setup: Setup
    fault: str = ""


def assemble_real(
    setup: Setup,
    lanes: Lanes,
    weights: Weights,
    spans: Spans | None = None,
    log: Log | None = None,
    keep: bool = False,
    routing: Routing | None = None,
) -> tuple[Engine, RealMachine]:
    """Engine and real machine of a run, the policy bound, taught and watched."""
    gc.collect()  # an earlier run's arena hangs in cycles of machine, cache and engine, and may be most of the device
    policy, trace, spec, model = setup.policy, setup.trace, setup.spec, setup.model
    routing = routing or Routing(trace, lanes.torch, weights.dtype, model.vocab_size, spec.precision)
    longest = max(r.prompt_len + r.outputs for r in setup.requests)
    widest = max(spec.batch, *(r.prompt_len for r in setup.requests))
    for precision in lower_precisions(setup):
        weights.form(precision, lanes.device)
    machine = RealMachine(
        lanes,
        model,
        weights,
        setup.memory.expert_bytes,
        routing,
        longest,
        widest,
        spans,
        report_copies=implements(policy, "copy_done"),
        keep=keep,
    )
    cost = Cost(setup.hw, model, setup.stack, spec.precision)  # prices that a policy may ask for
    engine = engine_of(setup, machine, cost, log)
    watch(policy, machine.ledger, lanes.now_s)
    return engine, machine


def open_weighed(setup: Setup, device: str, seed: int, checkpoint: Path | None = None) -> tuple[Lanes, Weights]:
    """Lanes and weights, random or a checkpoint's, for a setup; the caller closes the lanes."""
    check(setup)
    lanes = open_lanes(device, setup.spec.gpus, setup.spec.precision)
    try:
        host_bytes = check_memory(setup, lanes.device, free_bytes(lanes.device))
        try:
            if checkpoint is not None:
                return lanes, checkpoint_weights(checkpoint, setup.model, setup.spec.precision, lanes.device)
            return lanes, random_weights(setup.model, setup.spec.precision, lanes.device, seed, host_bytes)
        except (RuntimeError, MemoryError) as error:
            raise fault_of(error, f"making the weights of {setup.model.id}") from error
    except BaseException:
        lanes.close()
        raise


@contextmanager
def opened(setup: Setup, device: str, seed: int, checkpoint: Path | None = None) -> Iterator[tuple[Lanes, Weights]]:
    """`open_weighed`; memory and threads are given back whatever happens."""
    lanes, weights = open_weighed(setup, device, seed, checkpoint)
    try:
        yield lanes, weights
    finally:
        lanes.close()


def execute_real(
    setup: Setup,
    device: str,
    spans: Spans | None = None,
    log: Log | None = None,
    progress: Progress | None = None,
    on_step: Callable[[Step], None] | None = None,
    checkpoint: Path | None = None,
    begun: Callable[[Engine], None] | None = None,
) -> Measured:
    """Run it on real hardware. Arguments as for `sim.run.execute`; `checkpoint`: a folder of weights to compute with.

    Raises:
        BadInput: what cannot be carried out or does not fit, and a fault before the first iteration was over.
    """
    with opened(setup, device, setup.spec.seed, checkpoint) as (lanes, weights):
        done = measure(setup, lanes, weights, spans, log, progress, on_step, begun=begun)
    assert done.result.measured is not None
    weighed = "random" if checkpoint is None else checkpoint.name
    done.result.measured = msgspec.structs.replace(done.result.measured, weights=weighed)
    return done


def measure(
    setup: Setup,
    lanes: Lanes,
    weights: Weights,
    spans: Spans | None = None,
    log: Log | None = None,
    progress: Progress | None = None,
    on_step: Callable[[Step], None] | None = None,
    keep: bool = False,
    prepared: Callable[[RealMachine], None] | None = None,
    begun: Callable[[Engine], None] | None = None,
) -> Measured:
    """Run it on open lanes. An interrupt or a fault ends it early; what was measured until then is folded."""
    began_s = time.perf_counter()
    with blamed(setup.policy), watched():
        engine, machine = assemble_real(setup, lanes, weights, spans, log, keep)
        if prepared is not None:
            prepared(machine)
        if begun is not None:
            begun(engine)
        return run_real(setup, engine, machine, progress, on_step, began_s)


def cut(times: RequestTimes, n_tokens: int) -> RequestTimes:
    """The times of a request as if it had asked for the tokens it has put out, and no more."""
    times.request = times.request._replace(outputs=n_tokens)
    return times


def run_real(setup: Setup, engine: Engine, machine: RealMachine, *rest: Any, **loop: Any) -> Measured:
    """Drive every iteration; see `measure`. Ctrl-C is heard where the host waits for the device, and after a step."""
    with held():
        return _run_real(setup, engine, machine, *rest, **loop)


def _run_real(
    setup: Setup,
    engine: Engine,
    machine: RealMachine,
    progress: Progress | None,
    on_step: Callable[[Step], None] | None,
    began_s: float,
    **loop: Any,
) -> Measured:
    clockwork, fault, n_steps = Clockwork(), "", 0
    total = sum(r.outputs for r in setup.requests)
    put_out: Counter[int] = Counter()  # tokens by request

    def told(step: Step) -> None:
        nonlocal n_steps
        n_steps += 1
        put_out.update(r.request.index for r in step.iteration.ranges)
        if progress is not None:
            progress(clockwork.n_put_out, total)
        if on_step is not None:
            on_step(step)
        heard()

    warm_up(machine.lanes, setup.model, machine.weights, machine.decoder, max(r.prompt_len for r in setup.requests))
    machine.lanes.restart_clock()
    machine.ledger.start(machine.now_s)
    try:
        drive(Loop(engine, machine, setup.batching(), setup.trace, clockwork, setup.open_loop, on_step=told, **loop))
    except KeyboardInterrupt:
        if not n_steps:
            raise
        fault = "interrupted"
        answered()
    except (RuntimeError, MemoryError, DeviceFault) as error:
        found = fault_of(error, "running")
        if not n_steps or not isinstance(found, DeviceFault):
            raise found from error
        fault = str(found)
    if fault:  # a request that was under way counts with the tokens it has put out
        clockwork.requests[:] = [
            cut(times, put_out[times.request.index]) for times in clockwork.requests if put_out[times.request.index]
        ]
    lanes = told_of.Lanes(machine.lane_busy_s(), {}, machine.waiting, machine.h2d_bytes, machine.d2h_bytes)
    wall_s = time.perf_counter() - began_s
    report = Report.of(Counts.of(engine), lanes, clockwork, engine.cost.measured.beyond, wall_s)
    return Measured(fold_real(setup, report, machine, fault), report, machine, setup, fault)


def fold_real(setup: Setup, report: Report, machine: RealMachine, fault: str) -> Result:
    """Keys as in docs/output.md, and `real`, `device`, `measured` of docs/validate.md."""
    result = fold(setup, report)
    ledger, weights = machine.ledger, machine.weights
    n_all = setup.model.n_moe_layers * setup.model.n_experts
    labels = result.caveats
    if weights.distinct < n_all:
        labels.append(f"{n_all} experts share {weights.distinct} host buffers")
    if fault:
        n_out, n_wanted = (
            sum(r.outputs for r in requests)
            for requests in ((times.request for times in report.requests), setup.requests)
        )
        labels.append(f"stopped early, after {n_out} of {n_wanted} tokens")
    n_tokens = sum(phase.n_iterations for phase in report.phases.values())
    result.simulator, result.real, result.device = "real", True, machine.lanes.title
    result.measured = Measurement(
        output_digest=f"{machine.output.digest:08x}",
        policy_code_s=ledger.policy_s,
        policy_code_per_iteration_s=ledger.policy_s / n_tokens if n_tokens else None,
        predictor_asked_s=ledger.predict_asked_s,
        distinct_host_experts=weights.distinct,
        spilt_arena_bytes=machine.store.spilt_bytes,
        operations={f"{lane}: {op}": Spent(cost.n, cost.total_s) for (lane, op), cost in sorted(ledger.by_op.items())},
        host={op: Spent(cost.n, cost.total_s) for op, cost in sorted(ledger.host_by.items())},
        fault=fault,
    )
    return result


__all__ = ["Measured", "Policy", "execute_real", "measure"]
