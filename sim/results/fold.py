"""The record of a run, folded from the report of a finished machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sim import __version__
from sim.base.own_file import read_from
from sim.base.units import show_bytes
from sim.figures import SCHEMA, Copies, HitRates, Memory, PolicyFile, Scheduling, ServedRates, Shape, Value
from sim.policy.api import overrides
from sim.policy.policy_file import file_of
from sim.results import metrics
from sim.results.attainment import attainment
from sim.results.by_layer import layer_rows
from sim.results.contention import contention
from sim.results.drafting import drafting
from sim.results.energy import energy
from sim.results.host_memory import host_memory
from sim.results.kv_use import kv_use
from sim.results.layer_sizes import sizes_by_layer
from sim.results.load import load, unstable
from sim.results.provenance import provenance
from sim.results.record import Result
from sim.results.replicas import rows
from sim.results.routing_words import labels_of
from sim.results.uncertainty import Waits, uncertainty
from sim.setup.memory import BudgetRule
from sim.setup.naming import overrides_of, title_of
from sim.workload.iterations import DECODE, MIXED, PREFILL
from sim.workload.schedulers import DEFAULT

if TYPE_CHECKING:
    from sim.engine.report import Counts, Report
    from sim.setup.setup import Setup

LOOKUP = "layer"  # what the engine looks up at once (`sim.engine.default_service`, `sim.engine.layer`)


def memory_of(setup: Setup, counts: Counts) -> Memory:
    """GPU 0's memory by item; where each GPU has whole layers, that of the one that was fullest."""
    memory, gpu = setup.memory, 0
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


def fold(setup: Setup, report: Report, by_layer: bool = True) -> Result:
    """The record of a run; its keys as JSON are documented in docs/output.md and stable.

    Args:
        by_layer: work out `by_layer` too, which is most of the record; without it that is empty.
    """
    spec, policy, model, counts, lanes = setup.spec, setup.policy, setup.model, report.counts, report.lanes
    tally, replicas = counts.tally, report.replicas
    log = setup.arrivals_file
    source = "back to back" if not setup.open_loop else log.name if log else spec.arrivals or "trace"
    loaded = None
    if setup.open_loop:
        loaded = load(report.requests, source, [one.requests for one in replicas], spec.batch)
    by_replica = rows(report, source, spec.sim_hit, spec.batch) if replicas else None
    growing = loaded is not None and not loaded.stable
    timed = metrics.times(report, setup.open_loop)
    makespan_s = max((t.last_token_s for t in report.requests), default=0.0)
    waits = None
    if setup.open_loop:
        waits = Waits([one.requests for one in replicas or (report,)], setup.clients > 0)
    off_by = uncertainty(report, timed, spec.together, waits)
    n_outputs = report.n_decoded + len(report.requests)
    memory = memory_of(setup, counts)
    kv, host = kv_use(report, spec.kv_preempt), host_memory(setup, report)
    file = file_of(type(policy))
    rates, served = metrics.hit_rates(tally, spec.sim_hit), ServedRates(**tally.hits[DECODE].served())
    slots = sum(counts.capacity_bytes) / counts.expert_bytes / model.n_moe_layers
    labels: list[str] = [trait for trait in ("lossy", "oracle") if trait in policy.traits]
    labels += counts.labels
    labels += [label for label in (*labels_of(setup.trace), *setup.labels) if label not in labels]
    if loaded is not None and growing:
        labels.append(unstable(loaded, by_replica or ()))
    if setup.memory.hypothetical:
        labels.append(f"does not fit: needs {show_bytes(setup.memory.needs_bytes)}")
    rule = BudgetRule(None, spec.capacity)
    if policy.keeps_all and rule != BudgetRule():
        labels.append(f"{rule.described()} not applied: every expert is kept")
    if overrides(policy, "learn") and {r.first_row for r in setup.store} & {r.first_row for r in setup.requests}:
        labels.append("scored on requests it may have learned from")
    labels += sorted(f"beyond the calibrated range: {what}" for what in report.beyond)
    sizes, size = model.expert_bytes_by_layer(spec.precision), counts.expert_bytes
    differ = min(sizes) != max(sizes)
    layers, unlike = [], None
    if by_layer or (differ and lanes.figures is not None):
        layers = layer_rows(report, drive=setup.tier is not None)
    if differ and lanes.figures is not None:
        decode_s = report.phases[DECODE].time_s if spec.gpus == 1 and setup.tier is None else 0.0
        unlike = sizes_by_layer(sizes, size, layers, decode_s, lanes.figures.cost)
    return Result(
        schema=SCHEMA,
        run_id=setup.run_id,
        name=title_of(setup),
        **_asked(setup, counts.settings, source),
        policy_file=None if file is None else PolicyFile(file.path.name, file.sha256),
        shape=Shape(model.n_moe_layers, model.n_experts, model.top_k),
        trace_sha256=setup.trace.sha256,
        n_requests=len(report.requests),
        decode_tokens=report.n_decoded,
        ttft_s=timed.ttft_s,
        tpot_s=timed.tpot_s,
        e2e_s=timed.e2e_s,
        queue_s=timed.queue_s,
        service_s=timed.service_s,
        throughput_tokens_per_s=timed.throughput_tokens_per_s,
        load=loaded,
        slo=attainment(report.requests, setup.slos),
        lengths=metrics.lengths(report),
        phases=metrics.phases(report),
        lookup=LOOKUP,
        hit_rate=rates.hit,
        partial_hit_rate=rates.partial_hit,
        late_hit_rate=rates.late_hit,
        miss_rate=rates.miss,
        cpu_rate=rates.cpu,
        substituted_rate=rates.substituted,
        dropped_rate=rates.dropped,
        prefill_hit_rates=HitRates(**tally.hits[PREFILL].rates()),
        mixed_hit_rates=HitRates(**tally.hits[MIXED].rates()) if tally.n_iterations[MIXED] else None,
        token_hit_rates=HitRates(**tally.hits[DECODE].rates(tokens=True)),
        served_hit_rates=served,
        cache_ratio=metrics.cache_ratio(served),
        gate_mass_kept=tally.loss.gate_mass_kept(),
        activations_changed_frac=metrics.changed_frac(tally.loss),
        activations_lowered_frac=tally.loss.lowered / tally.n_executed if tally.n_executed else 0.0,
        distinct_experts=metrics.distinct_experts(tally, model.n_moe_layers, slots),
        prefetch=metrics.prefetching(tally),
        demand_copies=Copies(tally.n_demand, tally.demand_bytes),
        h2d_bytes=lanes.h2d_bytes,
        d2h_bytes=lanes.d2h_bytes,
        peak_vram_bytes=memory.peak_bytes,
        ram_peak_bytes=(setup.in_host_bytes(counts.kept) if host is None else host.peak_bytes)
        + (0 if kv is None else kv.peak_swapped_bytes),
        memory=memory,
        expert_bytes=size,
        cache_capacity_bytes=list(counts.capacity_bytes),
        cache_peak_bytes=list(counts.peak_bytes),
        lower_bound=None,
        bottleneck=metrics.bottleneck(report.phases, setup.tier is not None),
        provenance=provenance(report),
        uncertainty=off_by,
        caveats=labels,
        _trace_kind=setup.trace.header.kind,
        lane_utilisation=metrics.lane_utilisation(lanes, makespan_s),
        policy_stats=counts.stats,
        simulated_s=makespan_s,
        wall_s=report.wall_s,
        version=__version__,
        draft=drafting(setup, report),
        host_memory=host,
        contention=contention(report, setup.hw),
        energy=energy(setup, report, makespan_s, n_outputs, off_by),
        kv=kv,
        scheduling=_scheduling(setup, report),
        replicas=by_replica,
        sizes_by_layer=unlike,
        by_layer=layers if by_layer else [],
    )


def _asked(setup: Setup, settings: Mapping[str, Value], arrivals: str) -> dict[str, Any]:
    """What was asked for, as it was resolved, under the names of the options."""
    spec = setup.spec
    return {
        "policy": setup.policy.name,
        "params": dict(settings),
        "hw": setup.hw.id,
        "model": setup.model.id,
        "precision": spec.precision,
        "engine": setup.stack.id,
        "overrides": overrides_of(spec),
        "trace": setup.trace.name,
        "split": spec.split,
        "seed": spec.seed,
        "gpus": spec.gpus,
        "batch": spec.batch,
        "batching": "static" if spec.batch_static else None,
        "prefill_chunk": spec.prefill_chunk,
        "arrivals": arrivals,
        "hit_definition": spec.sim_hit,
        "router": setup.router.name if spec.replicas > 1 else None,
        "simulator": setup.simulator,
    }


def _scheduling(setup: Setup, report: Report) -> Scheduling | None:
    """The scheduler, where it is not the default one."""
    kind = setup.scheduler
    file = read_from(kind)
    if file is None and kind.name == DEFAULT:
        return None
    named = None if file is None else PolicyFile(file.path.name, file.sha256)
    return Scheduling(kind.name, named, report.scheduler_stats)
