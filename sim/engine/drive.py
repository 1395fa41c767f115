"""The one loop: iterations and layers, the same over the simulator and over hardware."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sim.machine.lanes import CAUSES
from sim.workload.iterations import DECODE, PREFILL, Feed, Iteration, RequestInfo, Scheduler, decode_row

if TYPE_CHECKING:
    from sim.engine.engine import Engine
    from sim.machine.protocol import Machine
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


class Step:
    """What one iteration amounted to; yielded by `drive` after each."""

    __slots__ = ("end_s", "iteration", "start_s")

    def __init__(self, iteration: Iteration, start_s: float, end_s: float) -> None:
        self.iteration = iteration
        self.start_s = start_s
        self.end_s = end_s


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
    feed, index = Feed(trace), 0
    n_iterations = engine.tally.n_iterations
    while (ranges := scheduler.next(machine.now())) is not None:
        if isinstance(ranges, float):
            engine.idle()
            machine.wait_until(ranges)
            if engine.copies.polls:
                engine.copies.poll()
            clockwork.skip(machine.parts_s())
            continue
        iteration = compose(index, ranges, trace, decode_row(feed, ranges))
        start_s = machine.now()
        clockwork.begin(iteration, start_s, open_loop)
        engine.begin(iteration)
        engine.run_layers(iteration)
        end_s = machine.now()
        complete = clockwork.end(iteration, start_s, end_s, machine.parts_s())
        if complete and engine.on_request_end:
            for request in complete:
                engine.end_request(request)
            clockwork.skip(machine.parts_s())
        n_iterations[iteration.phase] += 1
        yield Step(iteration, start_s, end_s)
        index += 1
    machine.drain()
    engine.tally.prefetch.finish()
