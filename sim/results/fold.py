"""The record of a run, folded from what the engine counted and the machine spent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sim import __version__
from sim.base.own_file import read_from
from sim.base.units import show_bytes
from sim.engine.recording import Recording
from sim.policy.api import overrides
from sim.policy.mistakes import figures_of
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
from sim.results.schema import Copies, HitRates, Memory, PolicyFile, Scheduling, ServedRates, Shape
from sim.results.uncertainty import Waits, uncertainty
from sim.setup.memory import BudgetRule
from sim.setup.naming import overrides_of, title_of
from sim.workload.iterations import DECODE, MIXED, PREFILL
from sim.workload.schedulers import DEFAULT

if TYPE_CHECKING:
    from sim.engine.engine import Engine
    from sim.engine.run_loop import Clockwork
    from sim.machine.cost import Cost
    from sim.machine.simulated import SimulatedMachine
    from sim.real.machine.machine import RealMachine
    from sim.results.replicas import Served
    from sim.setup.setup import Setup

SCHEMA = 1
LOOKUP = "layer"  # what the engine looks up at once (`sim.engine.default_service`, `sim.engine.layer`)


def memory_of(setup: Setup, engine: Engine | Recording) -> Memory:
    """GPU 0's memory by item; where each GPU has whole layers, that of the one that was fullest."""
    memory, room, gpu = setup.memory, engine.residency, 0
    if setup.several.in_turn:
        held = [memory.parts_of(gpu).all_bytes + peak for gpu, peak in enumerate(room.peak_bytes)]
        gpu = held.index(max(held))
    parts = memory.parts_of(gpu)
    return Memory(
        dense_bytes=parts.dense_bytes,
        kv_cache_bytes=parts.kv_cache_bytes,
        activation_bytes=parts.activation_bytes,
        reserve_bytes=parts.reserve_bytes,
        predictor_bytes=memory.expert_bytes[gpu] - room.budget_bytes[gpu],
        expert_budget_bytes=room.budget_bytes[gpu],
        peak_expert_bytes=room.peak_bytes[gpu],
        vram_bytes=memory.vram_bytes,
        draft_bytes=parts.draft_bytes or None,
    )


def fold(
    setup: Setup,
    engine: Engine | Recording,
    machine: SimulatedMachine | RealMachine,
    clockwork: Clockwork,
    wall_s: float,
    cost: Cost | None = None,
    replicas: Sequence[Served] = (),
    by_layer: bool = True,
) -> Result:
    """The record of a run; its keys as JSON are documented in docs/output.md and stable.

    Args:
        engine: or, of a run timed by it, the recording. cost: what priced that. replicas: of which the others are sums.
        by_layer: work out `by_layer` too, which is most of the record; without it that is empty.
    """
    spec, policy, model, tally = setup.spec, setup.policy, setup.model, engine.tally
    if isinstance(engine, Recording):
        assert cost is not None
        settings, own_labels, stats, engines = engine.settings, engine.labels, engine.stats, []
    else:
        settings, own_labels, cost = policy.settings, policy.labels, cost or engine.cost
        stats, engines = {} if replicas else figures_of(policy), [one.engine for one in replicas] or [engine]
    log = setup.arrivals_file
    source = "back to back" if not setup.open_loop else log.name if log else spec.arrivals or "trace"
    loaded = None
    if setup.open_loop:
        loaded = load(clockwork.requests, source, [one.clockwork.requests for one in replicas], spec.batch)
    by_replica = rows(replicas, source, spec.hit_definition, spec.batch) if replicas else None
    growing = loaded is not None and not loaded.stable
    timed = metrics.times(clockwork, growing and not spec.unstable, setup.open_loop)
    makespan_s = max((t.last_token_s for t in clockwork.requests), default=0.0)
    waits = None
    if setup.open_loop:
        waits = Waits([one.clockwork.requests for one in replicas] or [clockwork.requests], setup.clients > 0)
    off_by = uncertainty(machine, clockwork, timed, spec.together, waits)
    n_outputs = clockwork.n_decoded + len(clockwork.requests)
    memory = memory_of(setup, engine)
    kv, host = kv_use(clockwork, spec.preempt), host_memory(setup, engines, machine)
    file = file_of(type(policy))
    rates, served = metrics.hit_rates(tally, spec.hit_definition), ServedRates(**tally.hits[DECODE].served())
    slots = sum(engine.residency.budget_bytes) / engine.view.expert_bytes / model.n_moe_layers
    labels: list[str] = [trait for trait in ("lossy", "oracle") if trait in policy.traits]
    labels += own_labels
    labels += [label for label in (*labels_of(setup.trace), *setup.labels) if label not in labels]
    if loaded is not None and growing:
        labels.append(unstable(loaded, spec.unstable, by_replica or ()))
    if setup.memory.hypothetical:
        labels.append(f"does not fit: needs {show_bytes(setup.memory.needs_bytes)}")
    rule = BudgetRule(None, spec.expert_cache_bytes, spec.experts, spec.cache_frac)
    if policy.keeps_all and rule != BudgetRule():
        labels.append(f"{rule.described()} not applied: every expert is kept")
    if overrides(policy, "learn") and {r.first_row for r in setup.store} & {r.first_row for r in setup.requests}:
        labels.append("scored on requests it may have learned from")
    labels += sorted(f"beyond the calibrated range: {what}" for what in cost.measured.beyond)
    sizes, size = model.expert_bytes_by_layer(spec.precision), engine.view.expert_bytes
    differ = min(sizes) != max(sizes) and machine.measured is not True
    layers, unlike = [], None
    if by_layer or differ:
        layers = layer_rows(tally.by_expert, machine.waiting, clockwork, size, drive=setup.tier is not None)
    if differ:
        decode_s = clockwork.phases[DECODE].time_s if spec.gpus == 1 and setup.tier is None else 0.0
        unlike = sizes_by_layer(sizes, size, layers, decode_s, engines[0].cost if engines else cost)
    return Result(
        schema=SCHEMA,
        run_id=setup.run_id,
        name=title_of(setup),
        policy=policy.name,
        policy_file=None if file is None else PolicyFile(file.path.name, file.sha256),
        params=dict(settings),
        hw=setup.hw.id,
        model=model.id,
        precision=spec.precision,
        stack=setup.stack.id,
        overrides=overrides_of(spec),
        shape=Shape(model.n_moe_layers, model.n_experts, model.top_k),
        trace=setup.trace.name,
        trace_sha256=setup.trace.sha256,
        split=spec.split,
        seed=spec.seed,
        gpus=spec.gpus,
        batch=spec.batch,
        batching=spec.batching,
        prefill_chunk=spec.prefill_chunk,
        arrivals=source,
        n_requests=len(clockwork.requests),
        decode_tokens=clockwork.n_decoded,
        ttft_s=timed.ttft_s,
        tpot_s=timed.tpot_s,
        e2e_s=timed.e2e_s,
        queue_s=timed.queue_s,
        service_s=timed.service_s,
        throughput_tokens_per_s=timed.throughput_tokens_per_s,
        load=loaded,
        slo=attainment(clockwork.requests, setup.slos),
        lengths=metrics.lengths(clockwork),
        phases=metrics.phases(clockwork),
        hit_definition=spec.hit_definition,
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
        union_per_layer_step=metrics.union(tally, model.n_moe_layers, slots),
        prefetch=metrics.prefetching(tally),
        demand_copies=Copies(tally.n_demand, tally.demand_bytes),
        h2d_bytes=machine.h2d_bytes,
        d2h_bytes=machine.d2h_bytes,
        peak_vram_bytes=memory.peak_bytes,
        peak_host_bytes=(setup.in_host_bytes(engine.kept) if host is None else host.peak_bytes)
        + (0 if kv is None else kv.peak_swapped_bytes),
        memory=memory,
        expert_bytes=size,
        expert_budget_bytes=list(engine.residency.budget_bytes),
        peak_expert_bytes=list(engine.residency.peak_bytes),
        bound=None,
        bound_by=metrics.bound_by(clockwork, setup.tier is not None),
        provenance=provenance(machine, clockwork),
        uncertainty=off_by,
        labels=labels,
        _trace_kind=setup.trace.header.kind,
        lane_utilisation=metrics.lane_utilisation(machine, makespan_s),
        policy_stats=stats,
        simulated_s=makespan_s,
        wall_s=wall_s,
        engine=setup.engine,
        version=__version__,
        draft=drafting(setup, clockwork, machine.h2d_bytes),
        host_memory=host,
        contention=contention(machine, setup.hw, max(1, len(replicas))),
        energy=energy(setup, machine, clockwork, makespan_s, n_outputs, off_by, max(1, len(replicas))),
        kv=kv,
        scheduling=_scheduling(setup, clockwork),
        router=setup.router.name if replicas else None,
        replicas=by_replica,
        sizes_by_layer=unlike,
        by_layer=layers if by_layer else [],
    )


def _scheduling(setup: Setup, clockwork: Clockwork) -> Scheduling | None:
    """The scheduler, where it is not the default one."""
    kind = setup.scheduler
    file = read_from(kind)
    if file is None and kind.name == DEFAULT:
        return None
    named = None if file is None else PolicyFile(file.path.name, file.sha256)
    return Scheduling(kind.name, named, clockwork.scheduler_stats)
