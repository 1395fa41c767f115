"""What a run with a drive found in host memory, and what it read."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from sim.engine.host_tier import AHEAD, COPY, CPU, PREFETCH
from sim.engine.tiered import Tiered
from sim.results.schema import Found, HostMemory

if TYPE_CHECKING:
    from sim.engine.engine import Engine
    from sim.engine.host_tier import Reads
    from sim.machine.simulated import SimulatedMachine
    from sim.real.machine.machine import RealMachine
    from sim.setup.setup import Setup


def host_memory(setup: Setup, engine: Engine, machine: SimulatedMachine | RealMachine) -> HostMemory | None:
    """Of a run that is over; None where host memory held every expert."""
    if setup.tier is None or machine.measured is True or machine.cost.drive is None:
        return None
    above = engine.machine
    assert isinstance(above, Tiered)
    tier, host, drive = setup.tier, above.tier, machine.cost.drive
    reads = host.reads
    phases = list(reads.found)
    needed = _found(reads, phases, (COPY, CPU))
    return HostMemory(
        drive=tier.drive,
        reads_are=tier.reads,
        depth=tier.depth,
        block_bytes=drive.block_bytes,
        bytes_per_s=drive.bytes_per_s if math.isfinite(drive.bytes_per_s) else None,
        start=tier.start,
        ram_policy=tier.ram_policy,
        bytes=setup.host_bytes,
        peak_bytes=host.residency.peak_bytes[0],
        reads=machine.n_reads,
        read_bytes=machine.read_bytes,
        hit_rate=needed.hit / needed.asked if needed.asked else None,
        copies=_found(reads, phases, (COPY,)),
        prefetches=_found(reads, phases, (PREFETCH,)),
        cpu=_found(reads, phases, (CPU,)),
        read_ahead=_found(reads, phases, (AHEAD,)),
        by_phase={phase: found for phase in phases if (found := _found(reads, (phase,), (COPY, CPU))).asked},
        evicted=reads.n_evicted,
        passed=reads.n_passed,
        withdrawn=reads.n_withdrawn,
    )


def _found(reads: Reads, phases: Iterable[str], who: Iterable[str]) -> Found:
    of = [(phase, one) for phase in phases for one in who]
    hit, late, miss = (sum(reads.found[phase][one][how] for phase, one in of) for how in range(3))
    return Found(hit + late + miss, hit, late, miss, sum(reads.n_bytes[phase][one] for phase, one in of))
