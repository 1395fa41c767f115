"""The one loop: iterations and layers, the same over the simulator and over hardware."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from oracle.future import decode_row
from oracle.hooks import overrides
from oracle.iterations import DECODE, PREFILL, Feed, Gate, Iteration, RequestInfo, Scheduler
from oracle.lanes import CAUSES
from oracle.reassign import reassign

if TYPE_CHECKING:
    from oracle.engine import Engine
    from oracle.protocol import Machine
    from sim.policy.api import Policy
    from traces.format.reader import Trace


@dataclass
class RequestTimes:
    """When a request started (its arrival, in an open loop), and when its tokens came out."""

    request: RequestInfo
    start_s: float
    first_token_s: float = 0.0
    last_token_s: float = 0.0


@dataclass
class PhaseTimes:
    """Iterations of one phase and the makespan they took, partitioned by what GPU 0 did or waited for."""

    n_iterations: int = 0
    n_tokens: int = 0
    time_s: float = 0.0
    parts_s: list[float] = field(default_factory=lambda: [0.0] * len(CAUSES))


@dataclass(frozen=True)
class Step:
    """What one iteration amounted to; yielded by `drive` after each."""

    iteration: Iteration
    start_s: float
    end_s: float


class Clockwork:
    """Times gathered along the loop."""

    def __init__(self) -> None:
        self.requests: list[RequestTimes] = []
        self.phases = {PREFILL: PhaseTimes(), DECODE: PhaseTimes()}
        self._open: dict[int, RequestTimes] = {}
        self._before_s = [0.0] * len(CAUSES)

    def begin(self, iteration: Iteration, now_s: float, open_loop: bool) -> None:
        for r in iteration.ranges:
            if r.phase == PREFILL:
                arrival_s = r.request.arrival_s if open_loop else None
                times = RequestTimes(r.request, now_s if arrival_s is None else arrival_s)
                self._open[r.request.index] = times
                self.requests.append(times)

    def end(self, iteration: Iteration, start_s: float, end_s: float, parts_s: list[float]) -> list[RequestInfo]:
        """Close the iteration; return the requests that are complete."""
        phase = self.phases[iteration.phase]
        phase.n_iterations += 1
        phase.n_tokens += iteration.n_tokens
        phase.time_s += end_s - start_s
        for index, (after, before) in enumerate(zip(parts_s, self._before_s, strict=True)):
            phase.parts_s[index] += after - before
        self._before_s = parts_s
        complete = []
        for r in iteration.ranges:
            times = self._open[r.request.index]
            if r.phase == PREFILL:
                times.first_token_s = end_s
            times.last_token_s = end_s
            last_row = r.request.first_row + r.request.prompt_len + r.request.outputs - 1
            if r.stop_row == last_row:
                complete.append(r.request)
                del self._open[r.request.index]
        return complete

    def skip(self, parts_s: list[float]) -> None:
        """Time between iterations (waiting for an arrival) belongs to no phase."""
        self._before_s = parts_s


class Hooks:
    """Which hooks a policy implements; the others cost nothing."""

    def __init__(self, policy: Policy) -> None:
        for hook in (
            "request_start",
            "iteration_start",
            "layer_enter",
            "gate_input",
            "assign",
            "layer_done",
            "iteration_end",
            "request_end",
            "idle",
        ):
            setattr(self, hook, overrides(policy, hook))
        if "lossy" in type(policy).traits and "lossy" not in policy.traits:  # lossless as it is set
            self.assign = False

    request_start: bool
    iteration_start: bool
    layer_enter: bool
    gate_input: bool
    assign: bool
    layer_done: bool
    iteration_end: bool
    request_end: bool
    idle: bool


def drive(
    engine: Engine,
    machine: Machine,
    scheduler: Scheduler,
    trace: Trace,
    clockwork: Clockwork,
    open_loop: bool = False,
    compose: Callable[..., Iteration] = Iteration,
) -> Iterator[Step]:
    """Run every iteration the scheduler composes; yields after each, so that callers can report or stop."""
    policy, view, feed, hooks, index = engine.policy, engine.view, Feed(trace), Hooks(engine.policy), 0
    while (ranges := scheduler.next(machine.now_s)) is not None:
        if isinstance(ranges, float):
            if hooks.idle:
                engine.obey(policy.idle(view), "idle")
            machine.wait_until(ranges)
            engine.poll()
            clockwork.skip(machine.parts_s())
            continue
        iteration = compose(index, ranges, trace, decode_row(feed, ranges))
        start_s = machine.now_s
        clockwork.begin(iteration, start_s, open_loop)
        view.phase = iteration.phase
        engine.arrays.begin(iteration)
        machine.begin(iteration)
        if hooks.request_start:
            for r in ranges:
                if r.phase == PREFILL:
                    engine.obey(policy.request_start(r.request, view), "request_start")
        if hooks.iteration_start:
            engine.obey(policy.iteration_start(iteration, view), "iteration_start")
        for layer in range(trace.n_layers):
            run_layer(engine, machine, iteration, layer, hooks)
        engine.layer = -1
        machine.end()
        engine.poll()
        if hooks.iteration_end:
            engine.obey(policy.iteration_end(iteration, view), "iteration_end")
        end_s = machine.now_s
        complete = clockwork.end(iteration, start_s, end_s, machine.parts_s())
        if hooks.request_end and complete:
            for request in complete:
                engine.obey(policy.request_end(request, view), "request_end")
            clockwork.skip(machine.parts_s())
        engine.tally.n_iterations[iteration.phase] += 1
        yield Step(iteration, start_s, end_s)
        index += 1
    machine.drain()
    engine.tally.prefetch.finish()


def run_layer(engine: Engine, machine: Machine, iteration: Iteration, layer: int, hooks: Hooks) -> None:
    """Attention, gate, the policy's answer, the experts. The host blocks once: to read the gate's choice."""
    policy, view = engine.policy, engine.view
    engine.layer = view.layer = layer
    if engine.future is not None:
        engine.future.advance(iteration.index, layer)
    if engine.polls:
        engine.poll()
    if hooks.layer_enter:
        engine.obey(policy.layer_enter(layer, view), "layer_enter")
    if hooks.gate_input:
        machine.attention(layer)
        engine.obey(policy.gate_input(layer, view), "gate_input")
        ticket = machine.gate(layer)
        machine.shared(layer)
        machine.sync(ticket)
    else:
        machine.to_gate(layer)
    if engine.polls:
        engine.poll()
    gate = Gate(layer, iteration, iteration.chosen(layer), engine.arrays)
    if hooks.assign:
        gate = reassign(engine, gate)
    engine.serve(gate)
    if hooks.layer_done:
        engine.obey(policy.layer_done(layer, view), "layer_done")
    if engine.polls:
        engine.poll()
