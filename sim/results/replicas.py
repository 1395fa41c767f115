"""Several replicas as one: what a result is folded from, summed over them, and a row of its own for each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.base.lanes import RESOURCES
from sim.engine.counts import Tally
from sim.machine.lanes import CAUSES
from sim.machine.waiting import Waiting
from sim.policy.mistakes import figures_of
from sim.results import metrics
from sim.results.load import Moments
from sim.results.schema import Replica
from sim.workload.draft_steps import Drafted
from sim.workload.iterations import PHASES

if TYPE_CHECKING:
    from sim.engine.engine import Engine
    from sim.engine.run_loop import Clockwork, PhaseTimes, RequestTimes, Step
    from sim.machine.simulated import SimulatedMachine
    from sim.workload.kv_memory import KvMemory


class Watched(NamedTuple):
    """Who is told what of one replica; the arguments of `execute`."""

    spans: Any = None
    log: Any = None
    on_step: Callable[[Step], None] | None = None
    begun: Callable[[Engine], None] | None = None


class Served(NamedTuple):
    """One replica after its last request."""

    engine: Engine
    machine: SimulatedMachine
    clockwork: Clockwork


class _Phase:
    def __init__(self, of: Sequence[PhaseTimes]) -> None:
        self.n_iterations = sum(one.n_iterations for one in of)
        self.n_tokens = sum(one.n_tokens for one in of)
        self.time_s = math.fsum(one.time_s for one in of)
        parts = [one.parts_s for one in of]
        self.parts_s = [math.fsum(part[cause] for part in parts) for cause in range(len(CAUSES))]
        paths = [one.path_s for one in of]
        self.path_s = [math.fsum(path[resource] for path in paths) for resource in range(len(RESOURCES))]


class _Pages:
    """Of the pools of pages: the most that any held, the mean over replicas, and sums of what moved."""

    def __init__(self, pools: Sequence[KvMemory]) -> None:
        self.pool = pools[0].pool
        self.peak_pages = max(one.peak_pages for one in pools)
        self.peak_swapped_pages = max(one.peak_swapped_pages for one in pools)
        self.mean_pages = _mean([one.mean_pages for one in pools])
        self.n_preemptions = {request: n for one in pools for request, n in one.n_preemptions.items()}
        self.recomputed_tokens = sum(one.recomputed_tokens for one in pools)
        self.n_out_pages = sum(one.n_out_pages for one in pools)
        self.n_in_pages = sum(one.n_in_pages for one in pools)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]  # nobody came to the others
    return math.fsum(known) / len(known) if known else None


class Clockworks:
    """Requests of all replicas in the order in which their prompts began; iterations and their time, summed."""

    def __init__(self, served: Sequence[Served]) -> None:
        self.replica_of = {
            times.request.index: number for number, one in enumerate(served) for times in one.clockwork.requests
        }
        self.requests: list[RequestTimes] = sorted(
            (times for one in served for times in one.clockwork.requests), key=lambda times: times.begun_s
        )
        self.n_decoded = sum(one.clockwork.n_decoded for one in served)
        self.scheduler_stats: dict[str, Any] = {}  # each replica's own are in its row
        pools = [one.clockwork.kv for one in served if one.clockwork.kv is not None]
        self.kv = _Pages(pools) if pools else None
        drafted = [one.clockwork.drafted for one in served if one.clockwork.drafted is not None]
        self.drafted = Drafted.summed(drafted) if drafted else None
        self.phases = {phase: _Phase([one.clockwork.phases[phase] for one in served]) for phase in PHASES}

    def request_rows(self) -> Iterator[tuple[Any, ...]]:
        """Of the table `requests`, each with its replica."""
        return ((*metrics.request_row(times), self.replica_of[times.request.index]) for times in self.requests)


def request_rows(clockwork: Clockwork | Clockworks) -> Iterator[tuple[Any, ...]]:
    """Of the table `requests`; where there are several replicas, each with its own."""
    if isinstance(clockwork, Clockworks):
        return clockwork.request_rows()
    return (metrics.request_row(times) for times in clockwork.requests)


class _Rooms:
    def __init__(self, served: Sequence[Served]) -> None:
        rooms = [one.engine.residency for one in served]
        self.budget_bytes = list(rooms[0].budget_bytes)
        self.peak_bytes = [max(peaks) for peaks in zip(*(room.peak_bytes for room in rooms), strict=True)]


class _Costs:
    def __init__(self, served: Sequence[Served]) -> None:
        self.measured = self
        self.beyond = set().union(*(one.engine.cost.measured.beyond for one in served))


class Engines:
    """Counts of all replicas, summed; of room, what one has, and the most that any used."""

    def __init__(self, served: Sequence[Served]) -> None:
        first = served[0].engine
        self.view, self.cost, self.residency = first.view, _Costs(served), _Rooms(served)
        self.kept = first.kept
        self.tally = Tally(first.pieces.n_layers, first.pieces.n_experts)
        for one in served:
            self.tally.take_in(one.engine.tally)


class Machines:
    """What all replicas spent, summed; busy time of a lane is the mean over them."""

    measured = False

    def __init__(self, served: Sequence[Served]) -> None:
        machines = [one.machine for one in served]
        self._machines = machines
        self.cost = machines[0].cost
        self.h2d = [up for machine in machines for up in machine.h2d]
        self.h2d_bytes = sum(machine.h2d_bytes for machine in machines)
        self.d2h_bytes = sum(machine.d2h_bytes for machine in machines)
        self.n_kv_out = sum(machine.n_kv_out for machine in machines)
        self.copies_slowed_s = math.fsum(machine.copies_slowed_s for machine in machines)
        self.write_backs_slowed_s = math.fsum(machine.write_backs_slowed_s for machine in machines)
        self.n_reads = sum(machine.n_reads for machine in machines)
        self.read_bytes = sum(machine.read_bytes for machine in machines)
        self.reads_slowed_s = math.fsum(machine.reads_slowed_s for machine in machines)
        self.kv_out_s = math.fsum(machine.kv_out_s for machine in machines)
        self.gpu_s = _summed([machine.gpu_s for machine in machines])
        self.cpu_s = _summed([machine.cpu_s for machine in machines])
        self.side_s = _summed([machine.side_s for machine in machines])
        self.waiting = Waiting(machines[0].waiting.n_layers)
        for machine in machines:
            self.waiting.take_in(machine.waiting)

    def host_shares(self) -> list[tuple[int, float]]:
        """Of all hosts, one after the other."""
        return [share for machine in self._machines for share in machine.host_shares()]

    def lane_busy_s(self) -> dict[str, float]:
        """The mean over replicas."""
        busy = [machine.lane_busy_s() for machine in self._machines]
        return {lane: math.fsum(one[lane] for one in busy) / len(busy) for lane in busy[0]}

    def lane_ends_s(self) -> dict[str, float]:
        """The last of any replica."""
        ends = [machine.lane_ends_s() for machine in self._machines]
        return {lane: max(one[lane] for one in ends) for lane in ends[0]}


def _summed(lists: Sequence[Sequence[float]]) -> list[float]:
    return [math.fsum(column) for column in zip(*lists, strict=True)]


def rows(served: Sequence[Served], source: str, definition: str, slots: int) -> list[Replica]:
    """One for each replica."""
    span_s = Moments([times for one in served for times in one.clockwork.requests], source).span_s
    return [_row(number, one, source, definition, span_s, slots) for number, one in enumerate(served)]


def _row(number: int, one: Served, source: str, definition: str, span_s: float, slots: int) -> Replica:
    requests = one.clockwork.requests
    own = Moments(requests, source, slots)
    outputs = sum(times.request.outputs for times in requests)

    def per_s(value: float) -> float | None:
        return value / span_s if span_s > 0 else None

    return Replica(
        replica=number,
        requests=len(requests),
        output_tokens=outputs,
        throughput_tokens_per_s=per_s(outputs),
        hit_rate=metrics.hit_rates(one.engine.tally, definition).hit,
        busy_frac=per_s(own.busy_s),
        requests_in_system=per_s(own.there_s),
        requests_waiting=per_s(own.waiting_s),
        queue_mean_s=own.waiting_s / len(requests) if requests else None,
        arrivals_per_s=own.arrivals_per_s,
        capacity_per_s=own.capacity_per_s,
        stable=own.stable,
        h2d_bytes=one.machine.h2d_bytes,
        policy_stats=figures_of(one.engine.policy),
        scheduler_stats=one.clockwork.scheduler_stats,
    )
