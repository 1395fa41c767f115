"""Resolve a run's specification: names, shapes, needs, budgets and host memory, all checked before any work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from sim.base.errors import BadInput, DoesNotFit, IllegalDecision
from sim.machine.copy_prices import crowded
from sim.machine.memory_law import needs_events
from sim.machine.several import DATA, GPU0, PER_EXPERT, TENSOR, Several, homes_by_layer, way_of
from sim.options import CORE, option_meant
from sim.policy.api import overrides as implements
from sim.policy.contract import check_declared
from sim.policy.mistakes import blamed, located
from sim.policy.pieces import Pieces
from sim.policy.policy_file import without_file
from sim.policy.registry import find
from sim.profiles.hardware import load_hardware
from sim.profiles.models import load_model
from sim.profiles.overrides import Overrides
from sim.profiles.stack import load_stack
from sim.setup.checks import (
    check_beside,
    check_copies,
    check_options,
    check_replicas,
    check_scheduler,
    check_watts,
)
from sim.setup.memory import BudgetRule, Demand, check_host, check_host_room, demand_of, host_need, kv_pool, plan
from sim.setup.pairing import (
    check_shape,
    default_model,
    drawn_anew,
    model_named,
    said_of_requests,
    trace_for,
    unhurried,
)
from sim.setup.predictions import predicting, with_levels
from sim.setup.setup import Setup
from sim.setup.third_tier import BUFFERED, described, host_memory_of, maps_its_file, third_tier
from sim.workload.learn_split import requests_of
from sim.workload.load import load_of
from sim.workload.surrogate import SURROGATE
from traces.format.catalogue import open_trace

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sim.options import RunSpec
    from sim.policy.api import Policy
    from sim.profiles.hardware import Hardware
    from sim.profiles.models import Model
    from sim.profiles.stack import Stack
    from sim.setup.predictions import Predicting
    from sim.setup.third_tier import ThirdTier
    from traces.format.reader import Trace

WITHOUT_FILE = "policy given as a class whose text is in no file: run_id does not hold it"


def prepare(spec: RunSpec, kind: type[Policy] | None = None) -> Setup:
    """Resolve names, check shapes, needs, budgets and host memory.

    Args:
        kind: the policy, where a class was given instead of a name.

    Raises:
        BadInput: whatever the user has to change, in one line.
    """
    named = _resolve(spec, kind)
    name = trace_for(spec.model, named.overrides) if spec.trace is None else spec.trace
    if drawn_anew(name):
        _check_least_memory(spec, named, name)
    trace = open_trace(name)
    try:
        setup = _fit(unhurried(spec, trace), spec, named, trace)
        vars(setup)["run_id"] = setup.identity()  # nobody has it yet; a copy would take digests of files once more
        return setup
    except BaseException:
        trace.close()
        raise


class _Named(NamedTuple):
    """What a specification names apart from model and trace."""

    who: Predicting
    hw: Hardware
    stack: Stack
    overrides: Overrides
    tier: ThirdTier | None
    mapped: bool


def _resolve(spec: RunSpec, kind: type[Policy] | None = None) -> _Named:
    """What it names, its options checked. Raises BadInput."""
    overrides = spec.overrides
    kind = kind or find(spec.policy)
    who = _predicting(spec, overrides, kind)
    policy = who.policy
    policy.labels = (*policy.labels, *(f"predicts with {module}" for module in sorted(kind.predicts_with)))
    if without_file(kind):
        policy.labels = (*policy.labels, WITHOUT_FILE)
    check_options(spec)
    check_watts(spec, overrides)
    if not spec.sim_contention and (off := [key for key in overrides.hw if key.startswith("contention.")]):
        raise BadInput(
            f"--set hw.{off[0]}, got it with --set sim.contention=off: nothing shares memory then; leave one out"
        )
    loaded = load_stack(spec.engine, overrides.engine)
    tier = third_tier(spec, loaded, overrides.engine)
    hw = load_hardware(spec.hw, overrides.hw, spec.pcie, None if tier is None else tier.drive)
    if spec.sim_simulator == CORE and spec.sim_contention and needs_events(hw):
        raise BadInput(
            "--set sim.simulator, got 'core': it slows kernels and experts on the CPU by copies and copies by the "
            "CPU, and "
            "another coefficient of hw.contention is active; leave it out, or take --simpy"
        )
    stack = _copied_by(policy, loaded.on(hw, policy.keeps_all), overrides.engine)
    if tier is not None and tier.reads == BUFFERED:
        stack = msgspec.structs.replace(stack, pinned=False)  # the page cache's pages are pageable
    if spec.sim_simulator == CORE and crowded(hw, stack, spec.several):
        raise BadInput(
            "--set sim.simulator, got 'core': it cannot tell who shares host memory with whom, and "
            f"{spec.gpus} links ask for more than there is; leave it out, or take --set gpus.host_bandwidth=split"
        )
    return _Named(who, hw, stack, overrides, tier, maps_its_file(loaded, overrides.engine))


def _predicting(spec: RunSpec, overrides: Overrides, kind: type[Policy]) -> Predicting:
    check_declared(kind)
    settings = overrides.for_policy(kind.name, kind.aliases)
    known = {param.name for param in kind.params}
    for key, value in overrides.policy.items():
        if key not in known and (way_out := option_meant(key, value)):
            raise BadInput(f"--set {key}, got {value!r}: {kind.name} has no such parameter, a run has; {way_out}")
    if "seed" in known:
        settings = {"seed": spec.seed, **settings}
    with blamed(kind):
        return predicting(kind, settings, spec.predictor)


def check_words(spec: RunSpec) -> None:
    """Hold a policy's name and parameters against what there is, wherever it would run.

    Raises:
        BadInput: one of them is misspelt, or wrong.
    """
    _predicting(spec, spec.overrides, find(spec.policy))


def _copied_by(policy: Policy, stack: Stack, asked: Mapping[str, object]) -> Stack:
    """The stack with mapped weights where this policy copies straight out of them. Raises BadInput."""
    if "maps_weights" in asked and "pinned" in asked:
        raise BadInput("--set engine.maps_weights, got it with engine.pinned: both say what copies are; leave one out")
    if not stack.maps_weights or (policy.copies_mapped and "pinned" not in asked):
        return stack
    if "maps_weights" in asked:
        raise BadInput(
            f"--set engine.maps_weights, got true: {policy.name} copies through buffers of its own; leave it out, or "
            "take engine.pinned=false"
        )
    return msgspec.structs.replace(stack, maps_weights=False)


def _several_of(spec: RunSpec, hw: Hardware, model: Model) -> Several:
    """How GPUs work together on this model. Raises BadInput where they cannot."""
    several = spec.several
    if several.dense in (TENSOR, DATA) and hw.curves_of(model.id, spec.precision) is not None:
        raise BadInput(
            f"--parallel, got {spec.parallel!r}: {hw.id} has curves of {model.id}, measured on one GPU; take another "
            "--hw"
        )
    if several.dense == TENSOR and model.n_heads % spec.gpus:
        raise BadInput(
            f"--parallel, got 'tensor' on {spec.gpus} GPUs: {model.id} has {model.n_heads} heads, which must be dealt "
            "out "
            "evenly; take another --gpus, or --parallel data"
        )
    homes = None
    if several.in_turn:
        homes = homes_by_layer(model, several.stages_of(model.n_layers))
        if len(set(homes)) < spec.gpus:
            raise BadInput(
                f"--parallel, got {spec.parallel!r} on {spec.gpus} GPUs: dealt out with the head, the layers of "
                f"{model.id} "
                "leave a GPU without experts; take fewer --gpus, other shares, or --parallel gpu0"
            )
    if spec.gpus_map is not None:
        from sim.setup.placement import read_placement

        homes = read_placement(Path(spec.gpus_map), model.n_moe_layers, model.n_experts, spec.gpus)
    return msgspec.structs.replace(several, homes=homes)


def _as_its_engine(spec: RunSpec, stack: Stack) -> RunSpec:
    """The run with the way of using several GPUs that its stack's engine has, where nobody chose one."""
    way = GPU0 if spec.gpus == 1 else spec.parallel  # one GPU has all layers
    if way is None:
        chosen = spec.gpus_dispatch != PER_EXPERT or spec.gpus_map is not None
        way = GPU0 if chosen or stack.splits_by is None else stack.splits_by
        if way != GPU0 and spec.kv_memory is not None:
            raise BadInput(
                f"--kv-memory with --gpus {spec.gpus} and engine {stack.id}, which splits a model by {way}: pages are "
                "of one GPU's memory; leave it out, or add --parallel gpu0"
            )
    return msgspec.structs.replace(spec, parallel=way_of(way).said)


def _keeps_all_if_room(policy: Policy, model: Model) -> bool:
    """What a policy says of it. Raises IllegalDecision for another answer than yes or no."""
    answer: object = policy.keeps_all_if_room(model.n_moe_layers)
    if not isinstance(answer, bool):
        wrong = IllegalDecision(f"got {answer!r}: it answers with True or False")
        raise located(wrong, policy, "keeps_all_if_room", -1)
    return answer


def to_draw(spec: RunSpec) -> str | None:
    """The trace that `prepare` has to draw first, which takes seconds to minutes; None where it is there.

    Raises:
        BadInput: as `prepare` does of what is checked before it draws.
    """
    if spec.model is None and spec.trace is None:
        return None
    name = trace_for(spec.model, spec.overrides) if spec.trace is None else spec.trace
    if not drawn_anew(name):
        return None
    _check_least_memory(spec, _resolve(spec), name)
    return name


def _check_least_memory(spec: RunSpec, named: _Named, trace: str) -> None:
    """Refuse what fits with no request at all before minutes go into drawing its trace. Raises BadInput."""
    from traces.synth.drawn import shape_named

    policy, hw = named.who.policy, named.hw
    name = spec.model or model_named(trace, shape_named(trace))
    if name is None:
        return  # `prepare` says so
    model = load_model(name, named.overrides.model)
    rule = BudgetRule(spec.vram, spec.capacity)
    least = Demand(contexts=(1,), iteration_tokens=1, batch=1)
    try:
        several = _several_of(_as_its_engine(spec, named.stack), hw, model)
        bound, all_stay = "bound" in policy.traits, policy.keeps_all
        memory = plan(model, hw, spec.precision, least, rule, spec.gpus, bound, all_stay, several)
        if _keeps_all_if_room(policy, model):
            all_stay = memory.holds_all(model, spec.precision, several)
        if not all_stay:
            check_copies(hw, policy)
            if spec.drive is None:
                less_bytes = None
                if implements(policy, "kept_layers"):
                    less_bytes = max(0, host_need(model, spec.precision) - sum(memory.expert_bytes))
                check_host(model, hw, spec.precision, spec.ram, less_bytes, named.mapped, sure=False)
    except DoesNotFit as error:
        told = f"{error}; counted for one token, before the trace {trace} is drawn"
        raise DoesNotFit(told, error.sizes) from None


def _fit(taken: RunSpec, asked: RunSpec, named: _Named, trace: Trace) -> Setup:
    who, hw, stack, settings, tier, mapped = named
    policy, said = who.policy, said_of_requests(asked, taken, trace)
    spec = _as_its_engine(taken, stack)
    model = load_model(spec.model or default_model(trace), settings.model)
    stack = stack.of(model.id)
    check_shape(model, trace)
    trace = with_levels(trace, who, spec.seed)
    idle = None
    if who.stand_in is not None and not who.own and not trace.drawn:
        idle = f"note: --predictor {who.stand_in}: {policy.name} reads nothing that it would draw"
        spec = msgspec.structs.replace(spec, predictor=None)  # it has no part in this run
    recorded = requests_of(trace, spec.split)
    if not recorded:
        raise BadInput(f"{trace.path}: split {spec.split!r} has no requests; --split all takes every request")
    load = load_of(recorded, spec.arrivals, spec.requests, spec.seed, spec.arrivals_scale)
    requests = load.requests
    together = min(spec.batch, len(requests))  # no more than there are ever run together
    longest = sorted((r.prompt_len + r.outputs for r in requests), reverse=True)[:together]
    prompts = sorted((r.prompt_len for r in requests), reverse=True)
    widest = prompts[0]
    if spec.prefill_chunk is not None:
        widest = min(spec.prefill_chunk, sum(prompts[:together]))
    elif spec.batch_static:
        widest = sum(prompts[:together])
    widest = max(widest, together)
    several = _several_of(spec, hw, model)
    if several.dense == DATA:
        longest = longest[: -(-together // spec.gpus)]  # of the GPU that serves most
    drafter, demand = None, Demand(tuple(longest), widest, together)
    if spec.draft is not None:
        from sim.setup.drafting import Drafter

        drafter = Drafter.of(spec)
    if drafter is not None:
        demand = drafter.demand(demand, spec.precision)
    kv = kv_pool(spec, model, requests)
    if kv is not None:
        demand = demand_of(kv, spec, requests, demand)
    rule = BudgetRule(spec.vram, spec.capacity)
    bound = "bound" in policy.traits
    memory = plan(model, hw, spec.precision, demand, rule, spec.gpus, bound, policy.keeps_all, several)
    host_bytes = 0
    keeps_all = policy.keeps_all
    all_kept = _keeps_all_if_room(policy, model) and memory.holds_all(model, spec.precision, several)
    if all_kept:
        keeps_all, stack = True, named.stack.on(hw, keeps_all=True).of(model.id)
    if keeps_all:
        tier = None
    else:
        check_copies(hw, policy)
        host_bytes = host_need(model, spec.precision)
        if tier is not None:
            host_bytes = min(host_bytes, host_memory_of(spec, hw))
        elif not implements(policy, "kept_layers"):
            check_host(model, hw, spec.precision, spec.ram)  # else once it has said which layers these are
    pieces = Pieces(model.n_moe_layers, model.n_experts, spec.precision, spec.gpus, model.expert_bytes, several.homes)
    if kv is not None:
        check_host_room(kv, hw, host_bytes, requests, together, tier is not None)
    labels = list(load.labels)
    if trace.drawn:
        labels += [SURROGATE, f"drawn: {', '.join(sorted(trace.drawn))}"]
    if drafter is not None:
        labels += drafter.labels()
    if tier is not None:
        labels.append(described(tier, host_memory_of(spec, hw)))
    ways = ", ".join(filter(None, (several.unusual, "" if spec.gpus_map is None else "--set gpus.map=FILE")))
    if ways:
        labels.append(f"several GPUs work together by {ways}")
    if named.tier is not None and tier is None:
        labels.append("drive not used: every expert is on the GPU")
    setup = Setup(
        spec=spec,
        policy=policy,
        hw=hw,
        model=model,
        stack=stack,
        trace=trace,
        requests=requests,
        store=requests_of(trace, "store"),
        memory=memory,
        host_bytes=host_bytes,
        pieces=pieces,
        open_loop=load.open_loop,
        clients=load.clients,
        labels=tuple(labels),
        homes=several.homes,
        tier=tier,
        mapped=mapped,
        kv=kv,
        all_kept=all_kept,
        drafter=drafter,
        stand_in=who.stand_in,
        idle=idle,
        said=said,
    )
    if hw.one_memory:
        check_beside(setup)
    check_scheduler(setup)
    check_replicas(setup)
    if not setup.timeless and "oracle" in policy.traits:
        how = f"--batch {spec.batch}" if setup.scheduler.in_order else f"--scheduler {setup.scheduler.name}"
        raise BadInput(
            f"policy {policy.name} with arrivals and {how}: which tokens run together depends on time, so there is no "
            "future to know; use --batch 1 and first come, first served, or a trace without arrivals"
        )
    return setup
