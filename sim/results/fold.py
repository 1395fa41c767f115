"""The record of a run, folded from the report of a finished machine.

What only some runs have is worked out, and its module read, where a run has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim import __version__
from sim.base.plug_ins import read_from
from sim.base.units import show_bytes
from sim.figures import SCHEMA, Memory, PolicyFile, Scheduling, Shape
from sim.policy.api import overrides
from sim.policy.policy_file import file_of
from sim.results import metrics
from sim.results.by_layer import layer_rows
from sim.results.provenance import Waits, provenance, uncertainty
from sim.results.record import Result
from sim.results.routing_words import labels_of
from sim.setup.memory import BudgetRule
from sim.setup.naming import overrides_of, title_of
from sim.workload.iterations import DECODE
from sim.workload.schedulers import DEFAULT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sim.engine.report import Report
    from sim.figures import Load, Replica
    from sim.setup.setup import Setup

LOOKUP = "layer"  # what the engine looks up at once (`sim.engine.default_service`, `sim.engine.layer`)


def fold(setup: Setup, report: Report, by_layer: bool = True) -> Result:
    """The record of a run; its keys as JSON are documented in docs/output.md and stable.

    Args:
        by_layer: work out `by_layer` too, which is most of the record; without it that is empty.
    """
    spec, model, counts, lanes = setup.spec, setup.model, report.counts, report.lanes
    drive, replicas, requests = setup.tier is not None, report.replicas, report.requests
    makespan_s = max((t.last_token_s for t in requests), default=0.0)
    log, arrivals = setup.arrivals_file, "back to back"
    slo = load = rows = waits = draft = kv = host = unlike = energy = None
    if setup.open_loop:
        arrivals = log.name if log else spec.arrivals or "trace"
        waits = Waits([one.requests for one in replicas or (report,)], setup.clients > 0)
    if setup.open_loop or replicas or setup.slos:
        from sim.results import load as under_load

        if setup.open_loop:
            load = under_load.load(requests, arrivals, [one.requests for one in replicas], spec.batch)
        rows = under_load.by_replica(report, arrivals, spec.sim_hit, spec.batch) if replicas else None
        slo = under_load.attainment(requests, setup.slos) if setup.slos else None
    timed = metrics.times(report, setup.open_loop)
    off_by = uncertainty(report, timed, spec.together, waits)
    if setup.drafter is not None or report.kv is not None or setup.tier is not None:
        from sim.results import some_runs

        if setup.drafter is not None and report.drafted is not None:
            draft = some_runs.drafting(setup, report, setup.drafter, report.drafted)
        kv = None if report.kv is None else some_runs.kv_use(report, report.kv, spec.kv_preempt)
        host = None if setup.tier is None else some_runs.host_memory(setup, report, setup.tier)
    sizes, differ = model.expert_bytes_by_layer(spec.precision), False
    if lanes.figures is not None:
        differ = min(sizes) != max(sizes)
    layers = layer_rows(report, drive) if by_layer or differ else []
    if differ and lanes.figures is not None:
        from sim.results.some_runs import sizes_by_layer

        decode_s = report.phases[DECODE].time_s if spec.gpus == 1 and not drive else 0.0
        unlike = sizes_by_layer(sizes, counts.expert_bytes, layers, decode_s, lanes.figures.cost)
    if spec.sim_energy is not None:
        from sim.results.energy import energy as joules

        energy = joules(setup, report, makespan_s, report.n_decoded + len(requests), off_by)
    memory, file, own_scheduler = memory_of(setup, report), file_of(type(setup.policy)), read_from(setup.scheduler)
    slots = sum(counts.capacity_bytes) / counts.expert_bytes / model.n_moe_layers
    in_host_bytes = setup.in_host_bytes(counts.kept) if host is None else host.peak_bytes
    return Result(
        schema=SCHEMA,
        run_id=setup.run_id,
        name=title_of(setup),
        policy=setup.policy.name,
        params=dict(counts.settings),
        hw=setup.hw.id,
        model=model.id,
        precision=spec.precision,
        engine=setup.stack.id,
        overrides=overrides_of(spec),
        trace=setup.trace.name,
        split=spec.split,
        seed=spec.seed,
        gpus=spec.gpus,
        batch=spec.batch,
        batching="static" if spec.batch_static else None,
        prefill_chunk=spec.prefill_chunk,
        arrivals=arrivals,
        hit_definition=spec.sim_hit,
        router=setup.router.name if spec.replicas > 1 else None,
        simulator=setup.simulator,
        policy_file=None if file is None else PolicyFile(file.path.name, file.sha256),
        shape=Shape(model.n_moe_layers, model.n_experts, model.top_k),
        trace_sha256=setup.trace.sha256,
        n_requests=len(requests),
        decode_tokens=report.n_decoded,
        **timed._asdict(),
        load=load,
        slo=slo,
        **metrics.served(report, makespan_s),
        lookup=LOOKUP,
        **metrics.found(counts.tally, spec.sim_hit, model.n_moe_layers, slots),
        h2d_bytes=lanes.h2d_bytes,
        d2h_bytes=lanes.d2h_bytes,
        peak_vram_bytes=memory.peak_bytes,
        ram_peak_bytes=in_host_bytes + (0 if kv is None else kv.peak_swapped_bytes),
        memory=memory,
        expert_bytes=counts.expert_bytes,
        cache_capacity_bytes=list(counts.capacity_bytes),
        cache_peak_bytes=list(counts.peak_bytes),
        lower_bound=None,
        bottleneck=metrics.bottleneck(report.phases, drive),
        provenance=provenance(report),
        uncertainty=off_by,
        caveats=caveats(setup, report, load, rows or ()),
        _trace_kind=setup.trace.header.kind,
        policy_stats=counts.stats,
        simulated_s=makespan_s,
        wall_s=report.wall_s,
        version=__version__,
        draft=draft,
        host_memory=host,
        contention=metrics.contention(report, setup.hw),
        energy=energy,
        kv=kv,
        scheduling=None
        if own_scheduler is None and setup.scheduler.name == DEFAULT
        else Scheduling(
            setup.scheduler.name,
            None if own_scheduler is None else PolicyFile(own_scheduler.path.name, own_scheduler.sha256),
            report.scheduler_stats,
        ),
        replicas=rows,
        sizes_by_layer=unlike,
        by_layer=layers if by_layer else [],
    )


def memory_of(setup: Setup, report: Report) -> Memory:
    """GPU 0's memory by item; where each GPU has whole layers, that of the one that was fullest."""
    memory, counts, gpu = setup.memory, report.counts, 0
    if setup.several.in_turn:
        held = [memory.parts_of(gpu).all_bytes + peak for gpu, peak in enumerate(counts.peak_bytes)]
        gpu = held.index(max(held))
    parts = memory.parts_of(gpu)
    return Memory(
        dense_bytes=parts.dense_bytes,
        kv_cache_bytes=parts.kv_cache_bytes,
        activation_bytes=parts.activation_bytes,
        reserve_bytes=parts.reserve_bytes,
        predictor_bytes=memory.expert_bytes[gpu] - counts.capacity_bytes[gpu],
        cache_capacity_bytes=counts.capacity_bytes[gpu],
        cache_peak_bytes=counts.peak_bytes[gpu],
        vram_bytes=memory.vram_bytes,
        draft_bytes=parts.draft_bytes or None,
    )


def caveats(setup: Setup, report: Report, load: Load | None, replicas: Sequence[Replica]) -> list[str]:
    """What a reader must know of a run."""
    spec, policy = setup.spec, setup.policy
    said: list[str] = [trait for trait in ("lossy", "oracle") if trait in policy.traits]
    said += report.counts.labels
    said += [label for label in (*labels_of(setup.trace), *setup.labels) if label not in said]
    if load is not None and not load.stable:
        from sim.results.load import unstable

        said.append(unstable(load, replicas))
    if setup.memory.hypothetical:
        said.append(f"does not fit: needs {show_bytes(setup.memory.needs_bytes)}")
    rule = BudgetRule(None, spec.capacity)
    if policy.keeps_all and rule != BudgetRule():
        said.append(f"{rule.described()} not applied: every expert is kept")
    if overrides(policy, "learn") and {r.first_row for r in setup.store} & {r.first_row for r in setup.requests}:
        said.append("scored on requests it may have learned from")
    return said + sorted(f"beyond the calibrated range: {what}" for what in report.beyond)
