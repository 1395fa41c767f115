"""What is left of a run that is over, whichever machine it ran on: all that a result is made of.

A simulated machine, SimPy's, a real one and a recording that was timed again each give a `Report`; those of several
replicas add up to one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from sim.base.lanes import RESOURCES
from sim.engine.counts import Tally
from sim.engine.tiered import Tiered
from sim.machine.lanes import CAUSES
from sim.machine.waiting import Waiting
from sim.policy.mistakes import figures_of
from sim.workload.draft_steps import Drafted
from sim.workload.iterations import PHASES

if TYPE_CHECKING:
    from sim.engine.engine import Engine
    from sim.engine.host_tier import Reads
    from sim.engine.run_loop import Clockwork, PhaseTimes, RequestTimes
    from sim.machine.cost import Cost
    from sim.machine.simulated import SimulatedMachine
    from sim.workload.kv_memory import KvMemory, KvPool


class HostReport(NamedTuple):
    """One host's cache of the experts on its drive: what it read, and the most that it held."""

    reads: Reads
    peak_bytes: int


class Counts(NamedTuple):
    """What the engine counted and the policy says of itself, which no clock has a part in.

    Attributes:
        capacity_bytes, peak_bytes: room for experts by GPU, and the most that was taken. kept: layers whose experts
            stay on their GPUs. settings, labels, stats: the policy's, as it resolved them; several replicas have their
            own stats.
    """

    tally: Tally
    capacity_bytes: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    expert_bytes: int
    kept: frozenset[int]
    settings: dict[str, Any]
    labels: tuple[str, ...]
    stats: dict[str, float]
    hosts: tuple[HostReport, ...] = ()

    @classmethod
    def of(cls, engine: Engine) -> Counts:
        """Of an engine whose run is over."""
        room, policy, machine = engine.residency, engine.policy, engine.machine
        return cls(
            engine.tally,
            tuple(room.budget_bytes),
            tuple(room.peak_bytes),
            engine.view.expert_bytes,
            frozenset(engine.kept),
            dict(policy.settings),
            tuple(policy.labels),
            figures_of(policy),
            (HostReport(machine.tier.reads, machine.tier.residency.peak_bytes[0]),)
            if isinstance(machine, Tiered)
            else (),
        )

    @classmethod
    def sum(cls, several: Sequence[Counts]) -> Counts:
        """Of replicas: counts add up; of room, what one has, and the most that any took."""
        first = several[0]
        tally = Tally(first.tally.by_expert.n_layers, first.tally.by_expert.n_experts)
        for one in several:
            tally.take_in(one.tally)
        peaks = zip(*(one.peak_bytes for one in several), strict=True)
        hosts = tuple(host for one in several for host in one.hosts)
        return first._replace(tally=tally, peak_bytes=tuple(max(found) for found in peaks), stats={}, hosts=hosts)


class FigureTimes(NamedTuple):
    """Seconds of simulated lanes by the figures that their prices rest on, and what is counted of them.

    `gpu_s`, `cpu_s`, `side_s` are by the index of the figure in `cost.figures.entries`, `host_s` pairs of it and
    seconds. `links`: copies to each GPU, and the seconds that its link was busy.
    """

    cost: Cost
    gpu_s: Sequence[float]
    cpu_s: Sequence[float]
    side_s: Sequence[float]
    host_s: list[tuple[int, float]]
    links: tuple[tuple[int, float], ...]
    copies_slowed_s: float
    write_backs_slowed_s: float
    reads_slowed_s: float
    n_reads: int
    read_bytes: int

    @classmethod
    def of(cls, machine: SimulatedMachine) -> FigureTimes:
        """Of a machine whose run is over."""
        return cls(
            machine.cost,
            machine.gpu_s,
            machine.cpu_s,
            machine.side_s,
            machine.host_shares(),
            tuple((up.n_copies, up.busy_s) for up in machine.h2d),
            machine.copies_slowed_s,
            machine.write_backs_slowed_s,
            machine.reads_slowed_s,
            machine.n_reads,
            machine.read_bytes,
        )

    @classmethod
    def sum(cls, several: Sequence[FigureTimes]) -> FigureTimes:
        """Of replicas."""

        def added_s(name: str) -> list[float]:
            columns = zip(*(getattr(one, name) for one in several), strict=True)
            return [math.fsum(column) for column in columns]

        return cls(
            several[0].cost,
            added_s("gpu_s"),
            added_s("cpu_s"),
            added_s("side_s"),
            [share for one in several for share in one.host_s],
            tuple(link for one in several for link in one.links),
            math.fsum(one.copies_slowed_s for one in several),
            math.fsum(one.write_backs_slowed_s for one in several),
            math.fsum(one.reads_slowed_s for one in several),
            sum(one.n_reads for one in several),
            sum(one.read_bytes for one in several),
        )


class Lanes(NamedTuple):
    """What a machine's lanes did.

    Attributes:
        busy_s: by lane. ends_s: when those that serve in order ended their last work; a real machine does not say.
        waiting: what GPU 0 waited for. figures: what simulated time rests on; None: it was measured.
    """

    busy_s: dict[str, float]
    ends_s: dict[str, float]
    waiting: Waiting
    h2d_bytes: int
    d2h_bytes: int
    figures: FigureTimes | None = None

    @classmethod
    def of(cls, machine: SimulatedMachine) -> Lanes:
        """Of a simulated machine whose run is over."""
        return cls(
            machine.lane_busy_s(),
            machine.lane_ends_s(),
            machine.waiting,
            machine.h2d_bytes,
            machine.d2h_bytes,
            FigureTimes.of(machine),
        )

    @classmethod
    def sum(cls, several: Sequence[Lanes]) -> Lanes:
        """Of replicas: bytes and waits add up, a lane's busy time is their mean, its end the last of any."""
        waiting = Waiting(several[0].waiting.n_layers)
        for one in several:
            waiting.take_in(one.waiting)
        figures = [one.figures for one in several if one.figures is not None]
        return cls(
            {lane: math.fsum(one.busy_s[lane] for one in several) / len(several) for lane in several[0].busy_s},
            {lane: max(one.ends_s[lane] for one in several) for lane in several[0].ends_s},
            waiting,
            sum(one.h2d_bytes for one in several),
            sum(one.d2h_bytes for one in several),
            FigureTimes.sum(figures) if figures else None,
        )


class PhaseReport(NamedTuple):
    """Iterations of one phase; their time by what GPU 0 did or waited for (`CAUSES`), and by the lane of the critical
    path (`RESOURCES`)."""

    n_iterations: int
    n_tokens: int
    time_s: float
    parts_s: list[float]
    path_s: list[float]

    @classmethod
    def of(cls, times: PhaseTimes) -> PhaseReport:
        """Of a run that is over."""
        return cls(times.n_iterations, times.n_tokens, times.time_s, times.parts_s, times.path_s)

    @classmethod
    def sum(cls, several: Sequence[PhaseReport]) -> PhaseReport:
        """Of replicas."""
        return cls(
            sum(one.n_iterations for one in several),
            sum(one.n_tokens for one in several),
            math.fsum(one.time_s for one in several),
            [math.fsum(one.parts_s[cause] for one in several) for cause in range(len(CAUSES))],
            [math.fsum(one.path_s[resource] for one in several) for resource in range(len(RESOURCES))],
        )


class KvReport(NamedTuple):
    """What a pool of pages held, and what making room in it moved."""

    pool: KvPool
    peak_pages: int
    peak_swapped_pages: int
    mean_pages: float | None
    n_preemptions: dict[int, int]
    recomputed_tokens: int
    n_out_pages: int
    n_in_pages: int

    @classmethod
    def of(cls, memory: KvMemory) -> KvReport:
        """Of a run that is over."""
        return cls(*(getattr(memory, name) for name in cls._fields))

    @classmethod
    def sum(cls, several: Sequence[KvReport]) -> KvReport:
        """Of replicas: the most that any held, the mean over those that somebody came to, sums of what moved."""
        means = [one.mean_pages for one in several if one.mean_pages is not None]
        return cls(
            several[0].pool,
            max(one.peak_pages for one in several),
            max(one.peak_swapped_pages for one in several),
            math.fsum(means) / len(means) if means else None,
            {request: n for one in several for request, n in one.n_preemptions.items()},
            sum(one.recomputed_tokens for one in several),
            sum(one.n_out_pages for one in several),
            sum(one.n_in_pages for one in several),
        )


class Report(msgspec.Struct, frozen=True):
    """A finished machine.

    Attributes:
        requests: those that were served, in the order in which their prompts began. n_decoded: tokens after the first
            of each. beyond: what was priced outside the range that it was calibrated in. wall_s: what the run took.
        replicas: the reports that this one is the sum of. replica_of: by the index of a request, where it was served.
    """

    counts: Counts
    lanes: Lanes
    requests: Sequence[RequestTimes]
    phases: dict[str, PhaseReport]
    n_decoded: int
    kv: KvReport | None
    drafted: Drafted | None
    scheduler_stats: dict[str, Any]
    beyond: Collection[str]
    wall_s: float
    replicas: tuple[Report, ...] = ()
    replica_of: dict[int, int] = {}

    @classmethod
    def of(
        cls, counts: Counts, lanes: Lanes, clockwork: Clockwork, beyond: Collection[str], wall_s: float = 0.0
    ) -> Report:
        """Of a run whose loop is over."""
        return cls(
            counts,
            lanes,
            clockwork.requests,
            {phase: PhaseReport.of(times) for phase, times in clockwork.phases.items()},
            clockwork.n_decoded,
            None if clockwork.kv is None else KvReport.of(clockwork.kv),
            clockwork.drafted,
            clockwork.scheduler_stats,
            beyond,
            wall_s,
        )

    @classmethod
    def sum(cls, reports: Sequence[Report], wall_s: float) -> Report:
        """Of several replicas; each scheduler's own stats stay in its report."""
        pools = [one.kv for one in reports if one.kv is not None]
        drafted = [one.drafted for one in reports if one.drafted is not None]
        every = (times for one in reports for times in one.requests)
        return cls(
            Counts.sum([one.counts for one in reports]),
            Lanes.sum([one.lanes for one in reports]),
            sorted(every, key=lambda times: times.begun_s),
            {phase: PhaseReport.sum([one.phases[phase] for one in reports]) for phase in PHASES},
            sum(one.n_decoded for one in reports),
            KvReport.sum(pools) if pools else None,
            Drafted.summed(drafted) if drafted else None,
            {},
            set().union(*(one.beyond for one in reports)),
            wall_s,
            tuple(reports),
            {times.request.index: number for number, one in enumerate(reports) for times in one.requests},
        )

    @property
    def n_machines(self) -> int:
        """How many machines it is the sum of."""
        return max(1, len(self.replicas))
