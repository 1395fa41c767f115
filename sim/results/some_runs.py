"""Parts of a result that only some runs have: drafts, a pool of pages, a drive below host memory, layers whose experts
differ in size. Read where a run has one of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from sim.engine.host_tier import AHEAD, COPY, CPU, PREFETCH
from sim.figures import Drafting, Found, HostMemory, KvUse, SizesByLayer

if TYPE_CHECKING:
    from sim.engine.report import KvReport, Report
    from sim.machine.cost import Cost
    from sim.results.by_layer import Row
    from sim.setup.drafting import Drafter
    from sim.setup.setup import Setup
    from sim.setup.third_tier import ThirdTier
    from sim.workload.draft_steps import Drafted


def drafting(setup: Setup, report: Report, drafter: Drafter, found: Drafted) -> Drafting:
    """What speculative decoding came to: tokens a step, acceptance, what drafting took, bytes for each token."""
    accepted, steps = found.n_accepted, found.n_steps
    return Drafting(
        asked=drafter.draft.title,
        k=drafter.draft.k,
        steps=steps,
        drafted=found.n_drafted,
        accepted=accepted,
        tokens_per_step=(accepted + steps) / steps if steps else None,
        acceptance=accepted / found.n_drafted if found.n_drafted else None,
        acceptance_by_position=[n / of if of else None for n, of in zip(found.taken, found.tried, strict=True)],
        draft_time_s=found.took_s,
        draft_bytes=setup.memory.parts.draft_bytes,
        h2d_bytes_per_token=report.lanes.h2d_bytes / report.n_decoded if report.n_decoded else None,
    )


def kv_use(report: Report, memory: KvReport, preempt: str) -> KvUse:
    """What a pool of pages came to: how much of it was held, and what making room cost."""
    pool = memory.pool
    return KvUse(
        page_tokens=pool.page_tokens,
        page_bytes=pool.page_bytes,
        pages=pool.n_pages,
        peak_pages=memory.peak_pages,
        mean_pages=memory.mean_pages,
        preempt=preempt,
        preemptions=sum(memory.n_preemptions.values()),
        preempted_requests=len(memory.n_preemptions),
        preempted_s=math.fsum(times.away_s for times in report.requests),
        recomputed_tokens=memory.recomputed_tokens,
        kv_swap_out_bytes=memory.n_out_pages * pool.page_bytes,
        kv_swap_in_bytes=memory.n_in_pages * pool.page_bytes,
        peak_swapped_bytes=memory.peak_swapped_pages * pool.page_bytes,
    )


def host_memory(setup: Setup, report: Report, tier: ThirdTier) -> HostMemory | None:
    """What a run with a drive found in host memory, and what it read; None of a real run.

    Each replica is a machine with host memory and a drive of its own: what they read is added up.
    """
    figures, hosts = report.lanes.figures, report.counts.hosts
    if figures is None or figures.cost.drive is None:
        return None
    drive, reads = figures.cost.drive, [host.reads for host in hosts]
    phases = list(reads[0].found)

    def asked(who: Iterable[str], phases: Sequence[str] = phases) -> Found:
        of = [(host, phase, one) for host in reads for phase in phases for one in who]
        hit, late, miss = (sum(host.found[phase][one][how] for host, phase, one in of) for how in range(3))
        return Found(hit + late + miss, hit, late, miss, sum(host.n_bytes[phase][one] for host, phase, one in of))

    needed = asked((COPY, CPU))
    by_phase = {phase: asked((COPY, CPU), (phase,)) for phase in phases}
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
        copies=asked((COPY,)),
        prefetches=asked((PREFETCH,)),
        cpu=asked((CPU,)),
        read_ahead=asked((AHEAD,)),
        by_phase={phase: found for phase, found in by_phase.items() if found.asked},
        evicted=sum(one.n_evicted for one in reads),
        passed=sum(one.n_passed for one in reads),
        withdrawn=sum(one.n_withdrawn for one in reads),
    )


def sizes_by_layer(
    sizes: Sequence[int], mean_bytes: int, rows: Sequence[Row], decode_s: float, cost: Cost
) -> SizesByLayer:
    """What is left out when a file holds experts of unlike size and every layer's is taken to be as large as their
    mean.

    What a lane moves in decode is counted again by the sizes of the layers that it is of. Times follow to first order:
    more bytes at the lane's rate, nothing beside them, the same decisions. docs/formats.md holds that against replays.

    Args:
        sizes: bytes of an expert, by MoE layer; mean_bytes: what each was taken for.
        rows: what was counted by phase and layer. decode_s: simulated seconds of decode; 0 where several links, GPUs or
            a drive work side by side, so that their seconds do not add up.
    """
    moved: tuple[dict[int, int], ...] = ({}, {}, {})  # bytes by layer: copied, read by the CPU, read by the GPU
    for row in rows:
        if row["phase"] == "decode":
            copied = row["demand_copies_bytes"] + row["prefetch_issued_bytes"] - row["prefetch_cancelled_bytes"]
            on_cpu = row["experts_n"] - row["gpu_n"] + row["cpu_ahead_n"]
            for lane, n_bytes in zip(moved, (copied, mean_bytes * on_cpu, mean_bytes * row["gpu_n"]), strict=True):
                lane[row["layer"]] = n_bytes
    rates = cost.copies.h2d_bytes_per_s, cost.hw.cpu.memory_bandwidth_bytes_per_s.value, cost.of_experts.bandwidth
    more_s, fracs = 0.0, []
    for lane, bytes_per_s in zip(moved, rates, strict=True):
        more_bytes = sum(n_bytes * (sizes[layer] / mean_bytes - 1) for layer, n_bytes in lane.items())
        fracs.append(more_bytes / sum(lane.values()) if any(lane.values()) else None)
        more_s += more_bytes / bytes_per_s
    h2d_frac, cpu_frac, gpu_frac = fracs
    tpot_frac = more_s / decode_s if decode_s else None
    return SizesByLayer(min(sizes), max(sizes), h2d_frac, cpu_frac, gpu_frac, tpot_frac)
