"""The one loop: iterations and layers, the same over the simulator and over hardware."""

from __future__ import annotations

from collections.abc import Callable, MutableSequence
from typing import TYPE_CHECKING, Any

from sim.base.flat import floats
from sim.base.lanes import H2D, NVME, RESOURCES
from sim.machine.lanes import CAUSES
from sim.workload.batching import Batching
from sim.workload.draft_steps import Drafted
from sim.workload.iterations import DECODE, MIXED, PHASES, PREFILL, Feed, Iteration, Range, RequestInfo
from sim.workload.kv_memory import KvMemory

if TYPE_CHECKING:
    from traces.format.reader import Trace


_H2D, _NVME, _N_RESOURCES = H2D, NVME, len(RESOURCES)  # machine integers where this is compiled


class Spent:
    """How much time iterations took: those with prompts in them, of these what waited for copies and for a drive, and
    what of all others did."""

    __slots__ = ("decode_copies_s", "decode_drive_s", "prefill_copies_s", "prefill_drive_s", "prefill_s")

    def __init__(
        self,
        prefill_s: float = 0.0,
        prefill_copies_s: float = 0.0,
        prefill_drive_s: float = 0.0,
        decode_copies_s: float = 0.0,
        decode_drive_s: float = 0.0,
    ) -> None:
        self.prefill_s = prefill_s
        self.prefill_copies_s = prefill_copies_s
        self.prefill_drive_s = prefill_drive_s
        self.decode_copies_s = decode_copies_s
        self.decode_drive_s = decode_drive_s

    def since(self, before: Spent) -> Spent:
        """What has been added to it since."""
        return Spent(
            self.prefill_s - before.prefill_s,
            self.prefill_copies_s - before.prefill_copies_s,
            self.prefill_drive_s - before.prefill_drive_s,
            self.decode_copies_s - before.decode_copies_s,
            self.decode_drive_s - before.decode_drive_s,
        )

    def add(self, other: Spent) -> None:
        """Both together."""
        self.prefill_s += other.prefill_s
        self.prefill_copies_s += other.prefill_copies_s
        self.prefill_drive_s += other.prefill_drive_s
        self.decode_copies_s += other.decode_copies_s
        self.decode_drive_s += other.decode_drive_s


class RequestTimes:
    """When a request arrived, when its prompt began, when its tokens came out, and what had been spent by then.

    start_s: its arrival; without one `begun_s`, when its prompt began. n_preemptions: None where there are no pages.
    """

    __slots__ = (
        *("begun_s", "first_token_s", "last_row", "last_token_s", "request", "start_s"),
        *("until_begun", "until_first", "until_last"),
        *("answered", "away", "away_before_first_s", "away_s", "left_s", "n_preemptions", "until_left"),
    )

    def __init__(self, request: RequestInfo, start_s: float, begun_s: float, until_begun: Spent) -> None:
        self.request = request
        self.start_s = start_s
        self.begun_s = begun_s
        self.first_token_s = 0.0
        self.last_token_s = 0.0
        self.last_row = request.first_row + request.prompt_len + request.outputs - 1
        self.until_begun = self.until_first = self.until_last = until_begun
        self.answered = False  # its first token is out
        self.n_preemptions: int | None = None
        self.left_s = -1.0  # when it was pre-empted; negative while it runs
        self.away_s = 0.0  # waited after it was pre-empted
        self.away_before_first_s = 0.0  # of it, before its first token
        self.until_left = until_begun
        self.away = Spent()  # by others meanwhile, which the `until`s of what follows leave out

    @property
    def queue_s(self) -> float:
        """Waited before its prompt began."""
        return self.begun_s - self.start_s

    @property
    def service_s(self) -> float:
        """From there to the first token: with `queue_s` the TTFT."""
        return self.first_token_s - self.begun_s

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.first_token_s - self.start_s

    @property
    def tpot_s(self) -> float | None:
        """Time per further token; None where there was none."""
        further = self.request.outputs - 1
        return (self.last_token_s - self.first_token_s) / further if further else None

    @property
    def e2e_s(self) -> float:
        """From start to last token."""
        return self.last_token_s - self.start_s


class PhaseTimes:
    """Iterations of one phase and the makespan they took, partitioned by what GPU 0 did or waited for."""

    def __init__(self) -> None:
        self.n_iterations = 0
        self.n_tokens = 0
        self.time_s = 0.0
        self.spent_s = floats(len(CAUSES))
        self.charged_s = floats(len(RESOURCES))

    @property
    def parts_s(self) -> list[float]:
        """The makespan in the order of `CAUSES`."""
        return list(self.spent_s)

    @property
    def path_s(self) -> list[float]:
        """The makespan by the lane of the critical path, in the order of `RESOURCES`."""
        return list(self.charged_s)


class Step:
    """What one iteration amounted to; what `drive` tells after each."""

    __slots__ = ("end_s", "iteration", "start_s")

    def __init__(self, iteration: Iteration, start_s: float, end_s: float) -> None:
        self.iteration = iteration
        self.start_s = start_s
        self.end_s = end_s


class Clockwork:
    """Times gathered along the loop."""

    def __init__(self) -> None:
        self.requests: list[RequestTimes] = []
        self.phases = {phase: PhaseTimes() for phase in PHASES}
        self.n_put_out = 0  # tokens
        self.n_decoded = 0  # tokens that were decoded, also beside prompts
        self.kv: KvMemory | None = None
        self.drafted: Drafted | None = None
        self.scheduler_stats: dict[str, Any] = {}
        self._open: dict[int, RequestTimes] = {}
        self._n_away = 0
        self._before_s = floats(len(CAUSES))
        self._charged_s = floats(len(RESOURCES))

    def leave(self, request: RequestInfo, now_s: float) -> None:
        """A request has been pre-empted."""
        times: RequestTimes = self._open[request.index]
        times.n_preemptions = (times.n_preemptions or 0) + 1
        times.left_s = now_s
        times.until_left = self._spent()
        self._n_away += 1

    def _come_back(self, iteration: Iteration, now_s: float) -> None:
        """Requests that had been pre-empted run again."""
        for r in iteration.ranges:
            times: RequestTimes | None = self._open.get(r.request.index)
            if times is not None and times.left_s >= 0.0:
                times.away_s += now_s - times.left_s
                times.left_s = -1.0
                times.away.add(self._spent().since(times.until_left))
                self._n_away -= 1

    def begin(self, iteration: Iteration, now_s: float, open_loop: bool) -> None:
        """Requests whose prompt runs have started."""
        if self._n_away:
            self._come_back(iteration, now_s)
        for r in iteration.ranges:
            if r.phase == PREFILL and r.request.index not in self._open:
                arrival_s = r.request.arrival_s if open_loop else None
                start_s = now_s if arrival_s is None else arrival_s
                times = RequestTimes(r.request, start_s, now_s, self._spent())
                if self.kv is not None:
                    times.n_preemptions = 0
                self._open[r.request.index] = times
                self.requests.append(times)

    def end(
        self,
        iteration: Iteration,
        start_s: float,
        end_s: float,
        parts_s: list[float],
        path_s: MutableSequence[float],
    ) -> list[RequestInfo] | None:
        """Close the iteration; return the requests that are complete, if any."""
        phase: PhaseTimes = self.phases[iteration.counted]
        phase.n_iterations += 1
        phase.n_tokens += iteration.n_tokens
        phase.time_s += end_s - start_s
        for cause in range(len(parts_s)):
            after_s = parts_s[cause]
            phase.spent_s[cause] += after_s - self._before_s[cause]
            self._before_s[cause] = after_s
        for resource in range(_N_RESOURCES):
            phase.charged_s[resource] += path_s[resource] - self._charged_s[resource]
            self._charged_s[resource] = path_s[resource]
        complete = None
        for r in iteration.ranges:
            times: RequestTimes = self._open[r.request.index]
            if r.phase != PREFILL:
                n_taken = r.stop_row - r.start_row - r.n_rejected
                if self.drafted is not None:
                    self.drafted.verified(r, iteration.number == 1)
                if not n_taken:
                    continue
                self.n_decoded += n_taken
                self.n_put_out += n_taken
            elif r.puts_out:
                self.n_put_out += 1
            else:
                continue
            if not times.answered:
                times.answered = True
                times.first_token_s = end_s
                times.away_before_first_s = times.away_s
                times.until_first = self._spent_on(times)
            times.last_token_s = end_s
            if r.stop_row - r.n_rejected == times.last_row:
                times.until_last = self._spent_on(times)
                if complete is None:
                    complete = []
                complete.append(times.request)
                del self._open[times.request.index]
        return complete

    def decoding(self) -> list[float]:
        """What decoding has taken: seconds; of GPU 0's by cause, and what those were before; of the critical path by
        resource, and what those were before. Whoever decodes many tokens adds to them as `end` does."""
        phase: PhaseTimes = self.phases[DECODE]
        spent = list(phase.spent_s) + list(self._before_s)
        return [phase.time_s] + spent + list(phase.charged_s) + list(self._charged_s)  # noqa: RUF005

    def decoded(self, request: RequestInfo, n: int, sums: list[float], end_s: float) -> None:
        """The last `n` tokens of a request have been decoded, one by one."""
        phase: PhaseTimes = self.phases[DECODE]
        times: RequestTimes = self._open.pop(request.index)
        n_causes = len(CAUSES)
        times.last_token_s = end_s
        phase.n_iterations += n
        phase.n_tokens += n
        phase.time_s = sums[0]
        for cause in range(n_causes):
            phase.spent_s[cause] = sums[1 + cause]
            self._before_s[cause] = sums[1 + n_causes + cause]
        for resource in range(_N_RESOURCES):
            phase.charged_s[resource] = sums[1 + 2 * n_causes + resource]
            self._charged_s[resource] = sums[1 + 2 * n_causes + _N_RESOURCES + resource]
        self.n_decoded += n
        self.n_put_out += n
        times.until_last = self._spent_on(times)

    def _spent(self) -> Spent:
        prefill: PhaseTimes = self.phases[PREFILL]
        decode: PhaseTimes = self.phases[DECODE]
        mixed: PhaseTimes = self.phases[MIXED]
        return Spent(
            prefill.time_s + mixed.time_s,
            prefill.spent_s[_H2D] + mixed.spent_s[_H2D],
            prefill.spent_s[_NVME] + mixed.spent_s[_NVME],
            decode.spent_s[_H2D],
            decode.spent_s[_NVME],
        )

    def _spent_on(self, times: RequestTimes) -> Spent:
        """Without what passed while a request was pre-empted."""
        spent = self._spent()
        return spent if times.away_s == 0.0 else spent.since(times.away)

    def skip(self, parts_s: list[float], path_s: MutableSequence[float]) -> None:
        """Time between iterations (waiting for an arrival) belongs to no phase."""
        for cause in range(len(parts_s)):
            self._before_s[cause] = parts_s[cause]
        for resource in range(_N_RESOURCES):
            self._charged_s[resource] = path_s[resource]


class Loop:
    """The loop over iterations, to be taken step by step: whoever drives it asks `next`, and runs or waits.

    Args:
        compose: makes an iteration of its ranges. on_step: told after each; what it raises ends the loop. on_stride:
            told after each, or after many in a row.
    """

    def __init__(
        self,
        engine: Any,
        machine: Any,
        batching: Batching,
        trace: Trace,
        clockwork: Clockwork,
        open_loop: bool = False,
        compose: Callable[..., Iteration] = Iteration,
        on_step: Callable[[Step], None] | None = None,
        on_stride: Callable[[], None] | None = None,
    ) -> None:
        self.engine = engine
        self.machine = machine
        self.batching = batching
        self.trace = trace
        self.clockwork = clockwork
        self.end_s = 0.0  # of the last iteration
        self._open_loop = open_loop
        self._compose = compose
        self._on_step = on_step
        self._on_stride = on_stride
        self._strides = on_step is None and engine.strides
        self._feed = Feed(trace)
        self._index = 0
        self._n_iterations = engine.tally.n_iterations
        clockwork.kv = batching.kv
        if batching.drafts is not None:
            clockwork.drafted = Drafted([batching.drafts])
            engine.drafts = batching.drafts
        engine.take_hooks()

    def next(self) -> list[Range] | float | None:
        """What runs next, the time to wait for because nobody is there before, or None: nobody is."""
        composed: list[Range] | float | None = self.batching.next(self.machine.now())
        return composed

    def run(self, ranges: list[Range]) -> list[RequestInfo] | None:
        """Run one iteration; return the requests that it completes, if any."""
        engine, machine, clockwork = self.engine, self.machine, self.clockwork
        iteration = self._compose(self._index, ranges, self.trace, self._feed.row(ranges))
        start_s = machine.now()
        if clockwork.kv is not None:
            self._make_room(clockwork.kv, start_s)
        clockwork.begin(iteration, start_s, self._open_loop)
        if self.batching.owed_s > 0.0:
            machine.predict(self.batching.owed_s, "host", False, "assumed")
            self.batching.owed_s = 0.0
        engine.begin(iteration)
        engine.run_layers(iteration)
        end_s = machine.now()
        self.end_s = end_s
        complete = clockwork.end(iteration, start_s, end_s, machine.parts_s(), machine.path_s())
        if self.batching.listens:
            self.batching.scheduler.ran(ranges)
        if complete is not None:
            self.batching.served(complete, end_s)
            if engine.on_request_end:
                for request in complete:
                    engine.end_request(request)
                clockwork.skip(machine.parts_s(), machine.path_s())
        self._n_iterations[iteration.counted] += 1
        if self._on_step is not None:
            self._on_step(Step(iteration, start_s, end_s))
        if self._on_stride is not None:
            self._on_stride()
        self._index += 1
        return complete

    def stride(self) -> bool:
        """Decode all that is left of the only request, where nobody asks or comes in between; False where one may."""
        if not self._strides or not self.engine.ready_to_stride():
            return False
        rest = self.batching.rest()
        if rest is None:
            return False
        request, row, n = rest
        sums = self.clockwork.decoding()
        self.end_s = self.engine.stride(self._feed, request, row, n, sums)
        self.clockwork.decoded(request, n, sums, self.end_s)
        self.batching.served([request], self.end_s)
        self._index += n
        self._n_iterations[DECODE] += n
        if self._on_stride is not None:
            self._on_stride()
        return True

    def _make_room(self, kv: KvMemory, now_s: float) -> None:
        """Tell of requests that were pre-empted for this iteration, and move the pages that it cannot begin before."""
        for request in kv.left:
            self.clockwork.leave(request, now_s)
        for n_pages in kv.outs:
            self.machine.move_kv(n_pages, kv.pool.page_bytes, True)
        for n_pages in kv.ins:
            self.machine.move_kv(n_pages, kv.pool.page_bytes, False)
        kv.told()

    def wait(self, until_s: float) -> None:
        """Nobody is there until then."""
        self.engine.wait_until(until_s)
        self.clockwork.skip(self.machine.parts_s(), self.machine.path_s())

    def finish(self) -> None:
        """Nobody comes any more: let what is under way end, and close the counts."""
        self.engine.finish()
        self.clockwork.scheduler_stats = self.batching.scheduler.stats()


def drive(loop: Loop) -> None:
    """Run every iteration that batching composes, and wait where nobody is there."""
    while True:
        if loop.stride():
            continue
        composed = loop.next()
        if composed is None:
            break
        if isinstance(composed, float):
            loop.wait(composed)
        else:
            loop.run(composed)
    loop.finish()
