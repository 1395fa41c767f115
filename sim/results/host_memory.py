"""What a run with a drive found in host memory, and what it read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sim.engine.host_tier import AHEAD, COPY, CPU, PREFETCH
from sim.figures import Found, HostMemory

if TYPE_CHECKING:
    from sim.engine.host_tier import Reads
    from sim.engine.report import Report
    from sim.setup.setup import Setup


def host_memory(setup: Setup, report: Report) -> HostMemory | None:
    """Of a run that is over; None where host memory held every expert.

    Each replica is a machine with host memory and a drive of its own: what they read is added up.
    """
    figures, hosts = report.lanes.figures, report.counts.hosts
    if setup.tier is None or figures is None or figures.cost.drive is None:
        return None
    tier, drive = setup.tier, figures.cost.drive
    reads = [host.reads for host in hosts]
    phases = list(reads[0].found)
    needed = _found(reads, phases, (COPY, CPU))
    return HostMemory(
        drive=tier.drive,
        reads_are=tier.reads,
        depth=tier.depth,
        block_bytes=drive.block_bytes,
        bytes_per_s=drive.bytes_per_s if math.isfinite(drive.bytes_per_s) else None,
        start=tier.start,
        ram_policy=tier.evict,
        bytes=setup.host_bytes,
        peak_bytes=max(host.peak_bytes for host in hosts),
        reads=figures.n_reads,
        read_bytes=figures.read_bytes,
        hit_rate=needed.hit / needed.asked if needed.asked else None,
        copies=_found(reads, phases, (COPY,)),
        prefetches=_found(reads, phases, (PREFETCH,)),
        cpu=_found(reads, phases, (CPU,)),
        read_ahead=_found(reads, phases, (AHEAD,)),
        by_phase={phase: found for phase in phases if (found := _found(reads, (phase,), (COPY, CPU))).asked},
        evicted=sum(one.n_evicted for one in reads),
        passed=sum(one.n_passed for one in reads),
        withdrawn=sum(one.n_withdrawn for one in reads),
    )


def _found(reads: Sequence[Reads], phases: Iterable[str], who: Iterable[str]) -> Found:
    of = [(host, phase, one) for host in reads for phase in phases for one in who]
    hit, late, miss = (sum(host.found[phase][one][how] for host, phase, one in of) for how in range(3))
    return Found(hit + late + miss, hit, late, miss, sum(host.n_bytes[phase][one] for host, phase, one in of))
