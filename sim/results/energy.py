"""Joules of a run: the watts of each part of the machine, times the seconds that it waited and worked.

`docs/energy.md` has the law and its limits. Seconds are those that lanes were busy, so whichever engine replayed a run,
and whoever decided in it, its joules are counted alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from sim.base.quantities import Quantity
from sim.figures import Energy
from sim.profiles.drives import DrivePower
from sim.profiles.hardware import GPU
from sim.results.provenance import rests_on, span

if TYPE_CHECKING:
    from sim.engine.report import FigureTimes, Lanes, Report
    from sim.figures import Uncertainty
    from sim.profiles.hardware import Hardware
    from sim.setup.setup import Setup

COMPUTE_BOUND = ("gpu.flops_per_s.", "gpu.quantised_flops_per_s", "engine.quantised.")
"""Figures that kernels rest on where arithmetic takes longest. Other kernels read memory, are too small for either, or
were measured whole: those count as bound by memory."""


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
    total_j, ends_j = math.fsum(one.joules for one in drawn), []
    if n_outputs and uncertainty.low_factor is not None and uncertainty.high_factor is not None:
        served_s = math.fsum(phase.time_s for phase in report.phases.values()) / n_replicas
        empty_frac = 1.0 - min(1.0, served_s / makespan_s) if setup.open_loop else 0.0
        # Watts at one end of their ranges, and everything served in so many times its time; but while nothing is there
        # to serve, which lasts as long however long serving takes, the machine is at rest.
        for end, factor in enumerate((uncertainty.low_factor, uncertainty.high_factor)):
            watts = {one.lane: span(one.watts)[end] for one in drawn}
            all_j = math.fsum(watts[one.lane] * one.seconds for one in drawn)
            resting = [lane for lane in watts if lane.endswith("waiting") or lane == "rest"]
            rest_j = math.fsum(watts[lane] * (time.gpus_s if lane[0] == "g" else time.hosts_s) for lane in resting)
            ends_j.append(factor * all_j + (1.0 - factor) * (empty_frac * rest_j))
    return Energy(
        counted,
        missing,
        total_j,
        total_j / n_outputs if n_outputs else None,
        (ends_j[0] / n_outputs, ends_j[1] / n_outputs) if ends_j else None,
        total_j / makespan_s if makespan_s else None,
        {one.lane: one.joules for one in drawn},
        rests_on((one.figure, one.joules, one.watts.source, one.watts.value, one.watts.ref) for one in drawn),
    )


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
    powers: dict[str, Any] = {**hw.power, "memory": hw.cpu.power}
    seconds = {
        "gpu_waiting": max(0.0, time.gpus_s - time.memory_bound_s - time.compute_bound_s),
        "gpu_memory_bound": time.memory_bound_s,
        "gpu_compute_bound": time.compute_bound_s,
    }
    if counted != GPU:
        # Host memory at its whole rate: for what links and drive moved, and for the share of its rate that experts on
        # the CPU read at; no longer than the run is.
        whole_per_s = hw.cpu.shared_by_all.value
        by_cores_s = time.cpu_s * min(1.0, hw.cpu.memory_bandwidth_bytes_per_s.value / whole_per_s)
        read_s = min(time.hosts_s, time.copied_bytes / whole_per_s + by_cores_s)
        seconds |= {"cpu_waiting": max(0.0, time.hosts_s - time.cpu_s), "cpu_busy": time.cpu_s}
        seconds |= {"memory_waiting": time.hosts_s - read_s, "memory_busy": read_s}
        if isinstance(powers.get("drive"), DrivePower):
            seconds |= {"drive_waiting": max(0.0, time.hosts_s - time.drive_s), "drive_busy": time.drive_s}
    for lane, spent_s in seconds.items():
        part, _, state = lane.partition("_")
        name = f"{lane if part == 'memory' else state}_w"
        yield Drawn(lane, f"{part.replace('memory', 'cpu')}.power.{name}", getattr(powers[part], name), spent_s)
    if counted != GPU and isinstance(powers["cpu"].rest_w, Quantity):
        yield Drawn("rest", "cpu.power.rest_w", powers["cpu"].rest_w, time.hosts_s)
