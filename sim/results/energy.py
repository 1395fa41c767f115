"""Joules of a run: the watts of each part of the machine, times the seconds that it waited and worked.

`docs/energy.md` has the law and its limits. Seconds are those that lanes were busy, so whichever engine replayed a run,
and whoever decided in it, its joules are counted alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from sim.base.quantities import Quantity
from sim.figures import Energy, Input, Provenance
from sim.profiles.drives import Drive, DrivePower
from sim.profiles.hardware import GPU, CpuPower, GpuPower
from sim.results.provenance import span

if TYPE_CHECKING:
    from sim.engine.report import FigureTimes, Lanes, Report
    from sim.figures import Uncertainty
    from sim.profiles.hardware import Hardware
    from sim.setup.setup import Setup

COMPUTE_BOUND = ("gpu.flops_per_s.", "gpu.quantised_flops_per_s", "engine.quantised.")
"""Figures that kernels rest on where arithmetic takes longest. Other kernels read memory, are too small for either, or
were measured whole: those count as bound by memory."""


_AT_REST = ("gpu_waiting", "cpu_waiting", "memory_waiting", "drive_waiting", "rest")
"""Lanes that draw while nothing is there to serve."""


class Drawn(NamedTuple):
    """One part of the machine in one state: its watts, and for how long."""

    lane: str
    figure: str
    watts: Quantity
    seconds: float

    @property
    def joules(self) -> float:
        return self.watts.value * self.seconds


class Spent(NamedTuple):
    """Seconds, summed over GPUs and replicas: in all, and of these at work; bytes that passed host memory on links."""

    gpus_s: float
    memory_bound_s: float
    compute_bound_s: float
    hosts_s: float
    cpu_s: float
    drive_s: float
    copied_bytes: int


def energy(
    setup: Setup,
    report: Report,
    makespan_s: float,
    n_outputs: int,
    uncertainty: Uncertainty,
) -> Energy | None:
    """Of a run that is over; None where nobody asked. Without the profile's watts it says what is lacking.

    Args:
        makespan_s: from the start to the last token, which every part draws its watts through. n_outputs: tokens.
    """
    counted = setup.spec.sim_energy
    figures, n_replicas = report.lanes.figures, report.n_machines
    if counted is None or figures is None:
        return None
    if missing := setup.hw.lacking(counted):
        return Energy(counted, missing, None, None, None, None, {}, None)
    time = spent(report.lanes, figures, makespan_s, setup.spec.gpus, n_replicas)
    drawn = list(parts(setup.hw, counted, time))
    total_j = math.fsum(one.joules for one in drawn)
    each_j = total_j / n_outputs if n_outputs else None
    ends = None
    if n_outputs and uncertainty.low_factor is not None and uncertainty.high_factor is not None:
        served_s = math.fsum(phase.time_s for phase in report.phases.values()) / n_replicas
        empty_frac = 1.0 - min(1.0, served_s / makespan_s) if setup.open_loop else 0.0
        low_j = _end_j(drawn, time, 0, uncertainty.low_factor, empty_frac)
        ends = low_j / n_outputs, _end_j(drawn, time, 1, uncertainty.high_factor, empty_frac) / n_outputs
    return Energy(
        counted,
        missing,
        total_j,
        each_j,
        ends,
        total_j / makespan_s if makespan_s else None,
        {one.lane: one.joules for one in drawn},
        _rests_on(drawn, total_j),
    )


def _end_j(drawn: list[Drawn], time: Spent, end: int, factor: float, empty_frac: float) -> float:
    """Joules with every watt at one end of its range and everything served in so many times its time.

    empty_frac: of the run, while nothing was there to serve; that lasts as long however long serving takes.
    """
    watts = {one.lane: span(one.watts)[end] for one in drawn}
    all_j = math.fsum(watts[one.lane] * one.seconds for one in drawn)
    whole_s = {lane: time.gpus_s if lane == "gpu_waiting" else time.hosts_s for lane in watts if lane in _AT_REST}
    empty_j = empty_frac * math.fsum(watts[lane] * seconds for lane, seconds in whole_s.items())
    return factor * all_j + (1.0 - factor) * empty_j


def spent(lanes: Lanes, figures: FigureTimes, makespan_s: float, n_gpus: int, n_replicas: int = 1) -> Spent:
    """What lanes did. Of replicas a lane's time is their mean."""
    busy_s: dict[str, float] = {}
    for lane, seconds in lanes.busy_s.items():
        kind = lane.rstrip("0123456789")
        busy_s[kind] = busy_s.get(kind, 0.0) + n_replicas * seconds
    by_figure = list(zip((name for name, _ in figures.cost.figures.entries), figures.gpu_s, strict=True))
    whole_s = math.fsum(seconds for _, seconds in by_figure)
    computing_s = math.fsum(seconds for name, seconds in by_figure if name.startswith(COMPUTE_BOUND))
    compute_bound_s = busy_s["gpu"] * computing_s / whole_s if whole_s else 0.0
    return Spent(
        n_replicas * n_gpus * makespan_s,
        busy_s["gpu"] - compute_bound_s,
        compute_bound_s,
        n_replicas * makespan_s,
        busy_s["cpu"],
        busy_s.get("nvme", 0.0),
        lanes.h2d_bytes + lanes.d2h_bytes + (figures.read_bytes if "nvme" in busy_s else 0),
    )


def parts(hw: Hardware, counted: str, time: Spent) -> Iterator[Drawn]:
    """Every part that is counted, in each of its states; the states of one add up to the whole run."""
    gpu, cpu, drive = hw.gpu.power, hw.cpu.power, hw.drive
    assert isinstance(gpu, GpuPower)
    waiting_s = max(0.0, time.gpus_s - time.memory_bound_s - time.compute_bound_s)
    yield Drawn("gpu_waiting", "gpu.power.waiting_w", gpu.waiting_w, waiting_s)
    yield Drawn("gpu_memory_bound", "gpu.power.memory_bound_w", gpu.memory_bound_w, time.memory_bound_s)
    yield Drawn("gpu_compute_bound", "gpu.power.compute_bound_w", gpu.compute_bound_w, time.compute_bound_s)
    if counted == GPU:
        return
    assert isinstance(cpu, CpuPower)
    yield Drawn("cpu_waiting", "cpu.power.waiting_w", cpu.waiting_w, max(0.0, time.hosts_s - time.cpu_s))
    yield Drawn("cpu_busy", "cpu.power.busy_w", cpu.busy_w, time.cpu_s)
    read_s = _read_s(hw, time)
    yield Drawn("memory_waiting", "cpu.power.memory_waiting_w", cpu.memory_waiting_w, time.hosts_s - read_s)
    yield Drawn("memory_busy", "cpu.power.memory_busy_w", cpu.memory_busy_w, read_s)
    if isinstance(drive, Drive) and isinstance(drive.power, DrivePower):
        power = drive.power
        yield Drawn("drive_waiting", "drive.power.waiting_w", power.waiting_w, max(0.0, time.hosts_s - time.drive_s))
        yield Drawn("drive_busy", "drive.power.busy_w", power.busy_w, time.drive_s)
    if isinstance(cpu.rest_w, Quantity):
        yield Drawn("rest", "cpu.power.rest_w", cpu.rest_w, time.hosts_s)


def _read_s(hw: Hardware, time: Spent) -> float:
    """Seconds for which host memory, at its whole rate, would be at work: what links and drive moved, and the share of
    its rate that experts on the CPU read at. No more than there are."""
    whole_per_s = hw.cpu.shared_by_all.value
    by_cores_s = time.cpu_s * min(1.0, hw.cpu.memory_bandwidth_bytes_per_s.value / whole_per_s)
    return min(time.hosts_s, time.copied_bytes / whole_per_s + by_cores_s)


def _rests_on(drawn: list[Drawn], total_j: float) -> Provenance:
    """Shares of the joules by the source of the watts, and by each of these; the largest first."""

    def share(joules: float) -> float | None:
        return joules / total_j if total_j else None

    shares = {
        source: share(math.fsum(one.joules for one in drawn if one.watts.source == source))
        for source in ("measured", "datasheet", "assumed")
    }
    largest = sorted((one for one in drawn if one.joules), key=lambda one: -one.joules)
    figures = [
        Input(one.figure, one.joules / total_j, one.watts.source, one.watts.value, one.watts.ref) for one in largest
    ]
    return Provenance(**shares, figures=figures)
