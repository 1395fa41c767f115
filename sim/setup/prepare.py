"""Resolve a run's specification: names, shapes, needs, budgets and host memory, all checked before any work."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sim import __version__
from sim.base.errors import BadInput, DoesNotFit, did_you_mean
from sim.base.files import bundled
from sim.base.json import to_json
from sim.base.own_file import digest as text_digest
from sim.base.own_file import read_from
from sim.base.own_file import whole as whole_plug_in
from sim.base.units import show_count
from sim.machine.copy_prices import crowded
from sim.machine.cost import Cost
from sim.machine.several import APART, DATA, GPU0, PER_EXPERT, TENSOR, Several
from sim.policy.blame import blamed, check_traits
from sim.policy.pieces import Pieces
from sim.policy.policy_file import file_of, without_file
from sim.policy.registry import find
from sim.profiles.hardware import GPUS, load_hardware
from sim.profiles.models import PACKAGE as MODELS
from sim.profiles.models import load_model
from sim.profiles.overrides import Overrides, parse_set
from sim.profiles.stack import PACKAGE as STACKS
from sim.profiles.stack import load_stack
from sim.setup.kv_pool import check_host_room, demand_of, kv_pool
from sim.setup.memory import BudgetRule, Demand, MemoryPlan, check_host, plan
from sim.setup.pairing import check_shape, default_model, drawn_anew, model_of_shape, trace_for
from sim.setup.placement import read_placement
from sim.setup.profile import profiled
from sim.setup.replicas import MAX_REPLICAS, check_replicas
from sim.setup.spec import HIT_DEFINITIONS
from sim.workload import routers, schedulers
from sim.workload.batching import CONTINUOUS, STATIC, Batching
from sim.workload.batching import KINDS as BATCHINGS
from sim.workload.iterations import RequestInfo
from sim.workload.kv_memory import KvMemory, KvPool
from sim.workload.learn_split import no_store, requests_of
from sim.workload.load import NONE, PROCESSES, load_of
from sim.workload.profiled import Profiled
from sim.workload.router import Router
from sim.workload.scheduler import Scheduler
from sim.workload.slo import Slos
from traces.format.catalogue import bundled_traces, open_trace

if TYPE_CHECKING:
    from sim.policy.api import Policy
    from sim.profiles.hardware import Hardware
    from sim.profiles.models import Model
    from sim.profiles.stack import Stack
    from sim.setup.spec import RunSpec
    from traces.format.reader import Trace

MAX_GPUS = 256
MOST_TOKENS = 10**9  # of an iteration, so of a batch
WITHOUT_FILE = "policy given as a class whose text is in no file: run_id does not hold it"
SPLITS = ("test", "store", "all")
NEWER: dict[str, Any] = {
    "arrivals": None,
    "rate_scale": 1.0,
    "slo": {},
    "peer": PER_EXPERT,
    "host_links": APART,
    "dense": GPU0,
}
"""Fields that specifications did not always have, with what they stand for where they are left out."""
KV = ("kv_memory_bytes", "kv_page", "preempt")  # of a pool for keys and values
ENGINES = ARITHMETIC, SIMPY = "arithmetic", "simpy"


@dataclass
class Setup:
    """Everything a run needs, resolved and checked before any work starts."""

    spec: RunSpec
    policy: Policy
    hw: Hardware
    model: Model
    stack: Stack
    trace: Trace
    requests: list[RequestInfo]
    store: list[RequestInfo]
    memory: MemoryPlan
    host_bytes: int
    pieces: Pieces
    open_loop: bool
    clients: int = 0  # of a closed loop
    labels: tuple[str, ...] = ()  # of the load
    homes: tuple[int, ...] | None = None  # the GPU of each expert, layer by layer; None: dealt round-robin
    kv: KvPool | None = None  # pages for keys and values; None: as many as are ever needed
    machine: Callable[..., Any] | None = None  # a kind of one's own, in place of those that `engine` names
    run_id: str = ""  # before the policy is bound: binding may fill in parameters that were left to be derived

    def close(self) -> None:
        self.trace.close()

    @property
    def several(self) -> Several:
        """How its GPUs work together."""
        return Several(self.spec.gpus, self.spec.peer, self.spec.host_links, self.spec.dense, self.homes)

    def cost(self) -> Cost:
        """Prices of everything on its hardware."""
        return Cost(self.hw, self.model, self.stack, self.spec.precision, self.several)

    @property
    def slos(self) -> Slos:
        """What is promised to requests, by task."""
        return Slos(self.spec.slo)

    @cached_property
    def scheduler(self) -> type[Scheduler]:
        """Who says whose prompt runs next."""
        return schedulers.find(self.spec.scheduler or schedulers.DEFAULT)

    @property
    def router(self) -> type[Router]:
        """Who says which replica a request goes to."""
        return routers.find(self.spec.router or routers.DEFAULT)

    @property
    def timeless(self) -> bool:
        """Whether iterations are composed alike however long they take."""
        if not self.open_loop:
            return True
        return self.spec.batch == self.spec.replicas == 1 and self.scheduler.in_order and not self.clients

    def batching(self, open_loop: bool | None = None) -> Batching:
        """What composes iterations, with every request still waiting for its scheduler.

        Args:
            open_loop: honour arrivals; None: where the trace has any.
        """
        honoured = self.open_loop if open_loop is None else open_loop
        scheduler = self.scheduler(self.requests, honoured, self.clients, self.profiled)
        spec, kv = self.spec, None if self.kv is None else KvMemory(self.kv)
        return Batching(scheduler, spec.batch, kv, spec.prefill_chunk or 0, spec.batching == STATIC)

    @cached_property
    def profiled(self) -> Profiled:
        """What the scheduler may know of requests before they run."""
        return profiled(self, self.scheduler.needs)

    @property
    def arrivals_file(self) -> Path | None:
        """The log that requests arrive by, where it is one."""
        source = self.spec.arrivals
        named = source is None or source == NONE or source.startswith(PROCESSES)
        return None if source is None or named else Path(source)

    @cached_property
    def _log_sha256(self) -> str:
        """Of the log that requests arrive by."""
        assert self.arrivals_file is not None
        return _sha256(self.arrivals_file)

    @property
    def load_terms(self) -> dict[str, Any]:
        """What decides which requests come, and when; nothing where they are the trace's own."""
        spec, log = self.spec, self.arrivals_file
        if spec.arrivals is None:
            return {}
        source = spec.arrivals if log is None else self._log_sha256
        return {"arrivals": source, "rate_scale": spec.rate_scale, "seed": spec.seed}

    @property
    def batch_terms(self) -> dict[str, Any]:
        """What decides which tokens of them run together."""
        spec = self.spec
        terms: dict[str, Any] = {"batch": spec.batch, "scheduler": spec.scheduler}
        if spec.batching not in (None, CONTINUOUS):
            terms["batching"] = spec.batching
        if spec.prefill_chunk is not None:
            terms["prefill_chunk"] = spec.prefill_chunk
        if spec.kv_memory_bytes is not None:
            terms |= {name: getattr(spec, name) for name in KV}
        return terms

    def notes(self) -> list[str]:
        """What was asked for and cannot be had in full, one line each."""
        spec, has = self.spec, show_count(len(self.requests), "request")
        where = f"split {spec.split} of {self.trace.name}"
        found = []
        if spec.requests is not None and spec.requests > len(self.requests):
            found.append(f"note: --requests {spec.requests}: {where} has {has}, not more")
        if spec.batch > len(self.requests):
            found.append(f"note: --batch {spec.batch}: no more than {has} to run together")
        return found

    @property
    def engine(self) -> str:
        """What replays it: the one that was asked for, or SimPy where lanes slow one another."""
        if self.machine is not None:
            return self.machine.__name__
        contended = self.hw.contention.active or crowded(self.hw, self.stack, self.several)
        return self.spec.engine or (SIMPY if contended else ARITHMETIC)

    @cached_property
    def _digests(self) -> dict[str, str]:
        hw = self.hw
        if self.spec.host_links == APART:  # what has no part in a run does not tell it from others
            hw = hw.without_sharing
        return {"hw": _digest(hw), "model": _digest(self.model), "stack": _digest(self.stack)}

    def resolved(self) -> dict[str, Any]:
        """What the names of a configuration meant: ids, parameters, and digests of everything the figures rest on.

        An installed policy's code is the version's; one that is named by its file has a digest of it, and one that was
        typed at a prompt None.
        """
        digests = self._digests
        kind = type(self.policy)
        file = file_of(kind)
        code: dict[str, str | None] = {} if file is None else {"policy_sha256": file.sha256}
        if without_file(kind):
            code = {"policy_sha256": None}
        router_file = read_from(self.router) if self.spec.replicas > 1 else None
        if router_file is not None:
            code |= {"router": self.router.name, "router_sha256": router_file.sha256}
        scheduler_file = read_from(self.scheduler)
        if scheduler_file is not None:
            code |= {"scheduler": self.scheduler.name, "scheduler_sha256": scheduler_file.sha256}
        return {
            "version": __version__,
            "policy": self.policy.name,
            **code,
            "params": dict(self.policy.settings),
            "hw": self.hw.id,
            "hw_sha256": digests["hw"],
            "model": self.model.id,
            "model_sha256": digests["model"],
            "stack": self.stack.id,
            "stack_sha256": digests["stack"],
            "trace": self.trace.name,
            "trace_sha256": self.trace.sha256,
            **({} if self.homes is None else {"placement_sha256": text_digest(str(self.homes))}),
            **({} if self.arrivals_file is None else {"arrivals_sha256": self._log_sha256}),
        }

    def identity(self) -> str:
        """Twelve hex digits of everything that decides the numbers: equal inputs, equal id, wherever the files lie."""
        spec = {**msgspec.to_builtins(self.spec), "set": None}
        for name in ("policy", "hw", "link", "model", "stack", "trace"):
            del spec[name]  # `resolved` says what these meant
        del spec["engine"]  # either gives the same numbers
        del spec["unstable"]  # says what is shown of them
        if spec["replicas"] == 1:
            del spec["replicas"], spec["router"]
        elif read_from(self.router) is not None:
            del spec["router"]  # `resolved` has its text
        else:
            spec["router"] = self.router.name
        del spec["placement"]  # `resolved` has what it says
        for name, default in NEWER.items():
            if spec[name] == default:  # as it was before there were any
                del spec[name]
        for name in ("batching", "prefill_chunk", *KV):
            if name not in self.batch_terms:
                del spec[name]
        if self.arrivals_file is not None:
            del spec["arrivals"]
        if self.scheduler.name == schedulers.DEFAULT or read_from(self.scheduler) is not None:
            del spec["scheduler"]  # the default, or what `resolved` has the text of
        return hashlib.sha256(to_json({**spec, **self.resolved()}).encode()).hexdigest()[:12]

    def explicit(self) -> RunSpec:
        """The specification with no default left that may change: trace and model named, files by whole path."""
        spec, trace = self.spec, self.trace
        return msgspec.structs.replace(
            spec,
            policy=whole_plug_in(spec.policy),
            router=None if spec.router is None else whole_plug_in(spec.router),
            scheduler=None if spec.scheduler is None else whole_plug_in(spec.scheduler),
            hw=_whole(spec.hw, GPUS),
            stack=_whole(spec.stack, STACKS),
            placement=None if spec.placement is None else str(Path(spec.placement).resolve()),
            arrivals=spec.arrivals if self.arrivals_file is None else str(self.arrivals_file.resolve()),
            model=self.model.id if spec.model is None else _whole(spec.model, MODELS),
            trace=trace.name if _known(trace) else str(trace.path.resolve()),
        )


def prepare(spec: RunSpec, kind: type[Policy] | None = None) -> Setup:
    """Resolve names, check shapes, needs, budgets and host memory.

    Args:
        kind: the policy, where a class was given instead of a name.

    Raises:
        BadInput: whatever the user has to change, in one line.
    """
    policy, hw, stack, overrides = _resolve(spec, kind)
    name = trace_for(spec.model, overrides) if spec.trace is None else spec.trace
    if drawn_anew(name):
        _check_least_memory(spec, policy, hw, overrides, name)
    trace = open_trace(name)
    try:
        setup = _fit(spec, policy, hw, stack, trace, overrides)
        setup.run_id = setup.identity()
        return setup
    except BaseException:
        trace.close()
        raise


def _resolve(spec: RunSpec, kind: type[Policy] | None = None) -> tuple[Policy, Hardware, Stack, Overrides]:
    """What a specification names apart from model and trace, its options checked. Raises BadInput."""
    overrides = _overrides(spec)
    kind = kind or find(spec.policy)
    settings = overrides.for_policy(kind.name, kind.aliases)
    if any(param.name == "seed" for param in kind.params):
        settings = {"seed": spec.seed, **settings}
    if spec.predictor is not None:
        if not any(param.name == "predictor" for param in kind.params):
            raise BadInput(f"--predictor, got {spec.predictor!r}: {kind.name} has no predictor to choose; leave it out")
        settings = {"predictor": spec.predictor, **settings}
    check_traits(kind)
    with blamed(kind):
        policy = kind(**settings)
    if without_file(kind):
        policy.labels = (*policy.labels, WITHOUT_FILE)
    if spec.hit_definition not in HIT_DEFINITIONS:
        hint = did_you_mean(spec.hit_definition, HIT_DEFINITIONS)
        raise BadInput(f"--hit-definition, got {spec.hit_definition!r}: no such definition; {hint}")
    if spec.gpus > MAX_GPUS:
        raise BadInput(f"--gpus, got {spec.gpus}: at most {MAX_GPUS}; lower it")
    if spec.replicas > MAX_REPLICAS:
        raise BadInput(f"--replicas, got {spec.replicas}: at most {MAX_REPLICAS}; lower it")
    routers.find(spec.router or routers.DEFAULT)
    for option, number in (("--gpus", spec.gpus), ("--batch", spec.batch), ("--replicas", spec.replicas)):
        if number < 1:
            raise BadInput(f"{option}, got {number}: at least 1; leave it out for 1")
    if spec.batch > MOST_TOKENS:
        raise BadInput(f"--batch, got {spec.batch}: at most {MOST_TOKENS}; lower it")
    _check_several(spec)
    _check_batching(spec)
    if not 0 <= spec.seed < 2**63:
        raise BadInput(f"--seed, got {spec.seed}: from 0 to 2**63 - 1; take another")
    if spec.requests is not None and spec.requests < 1:
        raise BadInput(f"--requests, got {spec.requests}: at least 1; leave it out for all of the split")
    if spec.split not in SPLITS:
        raise BadInput(f"--split, got {spec.split!r}: no such split; {did_you_mean(spec.split, SPLITS)}")
    if spec.engine is not None and spec.engine not in ENGINES:
        raise BadInput(f"--engine, got {spec.engine!r}: no such engine; {did_you_mean(spec.engine, ENGINES)}")
    hw = load_hardware(spec.hw, overrides.hw, spec.link)
    if spec.engine == ARITHMETIC and hw.contention.active:
        raise BadInput(
            "--engine, got 'arithmetic': it knows no contention, and a coefficient of hw.contention is active; "
            "leave it out, or take simpy"
        )
    stack = load_stack(spec.stack, overrides.stack)
    if spec.engine == ARITHMETIC and crowded(hw, stack, Several(spec.gpus, host_links=spec.host_links)):
        raise BadInput(
            "--engine, got 'arithmetic': it cannot tell who shares host memory with whom, and "
            f"{spec.gpus} links ask for more than there is; leave it out, or take --host-links split"
        )
    return policy, hw, stack, overrides


def _check_several(spec: RunSpec) -> None:
    """Raises BadInput for a way of sharing work among GPUs that there is not, or with one GPU."""
    for option, name, known in Several(spec.gpus, spec.peer, spec.host_links, spec.dense).chosen:
        if name not in known:
            raise BadInput(f"{option}, got {name!r}: no such way; {did_you_mean(name, known)}")
        if spec.gpus == 1 and name != known[0]:
            raise BadInput(f"{option}, got {name!r} with one GPU: there is no other to share with; add --gpus N")
    if spec.placement is not None and spec.gpus == 1:
        raise BadInput(f"--placement, got {spec.placement!r} with one GPU: there is nothing to place; add --gpus N")
    if spec.dense != GPU0 and spec.peer != PER_EXPERT:
        raise BadInput(f"--peer, got {spec.peer!r} with --dense {spec.dense}, which has collectives; leave one out")
    if spec.dense != GPU0 and spec.kv_memory_bytes is not None:
        raise BadInput(f"--kv-memory with --dense {spec.dense}: pages are of one GPU's memory; leave one of them out")


def _several_of(spec: RunSpec, hw: Hardware, model: Model) -> Several:
    """How GPUs work together on this model. Raises BadInput where they cannot."""
    if spec.dense != GPU0 and hw.curves_of(model.id, spec.precision) is not None:
        raise BadInput(
            f"--dense, got {spec.dense!r}: {hw.id} has curves of {model.id}, measured on one GPU; take another --hw"
        )
    if spec.dense == TENSOR and model.n_heads % spec.gpus:
        raise BadInput(
            f"--dense, got 'tensor' on {spec.gpus} GPUs: {model.id} has {model.n_heads} heads, which must be dealt out "
            "evenly; take another --gpus, or --dense data"
        )
    homes = None
    if spec.placement is not None:
        homes = read_placement(Path(spec.placement), model.n_moe_layers, model.n_experts, spec.gpus)
    return Several(spec.gpus, spec.peer, spec.host_links, spec.dense, homes)


def _check_batching(spec: RunSpec) -> None:
    """Raises BadInput for a kind of batching that there is not, or whose parts do not go together."""
    kind, most = spec.batching, spec.prefill_chunk
    if kind is not None and kind not in BATCHINGS:
        raise BadInput(f"--batching, got {kind!r}: no such batching; {did_you_mean(kind, BATCHINGS)}")
    if most is None:
        return
    if kind == STATIC:
        raise BadInput(f"--prefill-chunk, got {most} with --batching static: its prompts run whole; leave one out")
    if not max(1, spec.batch) <= most <= MOST_TOKENS:
        raise BadInput(
            f"--prefill-chunk, got {most} with --batch {spec.batch}: tokens of an iteration, one at least for each "
            f"request that runs, and at most {MOST_TOKENS}; take 512, or another number in between"
        )


def _overrides(spec: RunSpec) -> Overrides:
    return parse_set(f"{key}={json.dumps(value)}" for key, value in spec.set.items())  # JSON is YAML


def to_draw(spec: RunSpec) -> str | None:
    """The trace that `prepare` has to draw first, which takes seconds to minutes; None where it is there.

    Raises:
        BadInput: as `prepare` does of what is checked before it draws.
    """
    if spec.model is None and spec.trace is None:
        return None
    name = trace_for(spec.model, _overrides(spec)) if spec.trace is None else spec.trace
    if not drawn_anew(name):
        return None
    policy, hw, _, overrides = _resolve(spec)
    _check_least_memory(spec, policy, hw, overrides, name)
    return name


def _check_least_memory(spec: RunSpec, policy: Policy, hw: Hardware, overrides: Overrides, trace: str) -> None:
    """Refuse what fits with no request at all before minutes go into drawing its trace. Raises BadInput."""
    from traces.synth.drawn import shape_named

    name = spec.model or model_of_shape(trace, shape_named(trace))
    if name is None:
        return  # `prepare` says so
    model = load_model(name, overrides.model)
    rule = BudgetRule(spec.vram_bytes, spec.expert_cache_bytes, spec.experts, spec.cache_frac)
    least = Demand(kv_tokens=1, iteration_tokens=1, batch=1)
    try:
        several = Several(spec.gpus, dense=spec.dense)
        plan(model, hw, spec.precision, least, rule, spec.gpus, "bound" in policy.traits, policy.keeps_all, several)
        if not policy.keeps_all:
            check_host(model, hw, spec.precision)
    except DoesNotFit as error:
        told = f"{error}; counted for one token, before the trace {trace} is drawn"
        raise DoesNotFit(told, error.sizes) from None


def _fit(spec: RunSpec, policy: Policy, hw: Hardware, stack: Stack, trace: Trace, overrides: Overrides) -> Setup:
    model = load_model(spec.model or default_model(trace), overrides.model)
    check_shape(model, trace)
    trace.require_all(policy.needs, f"policy {policy.name}")
    recorded = requests_of(trace, spec.split)
    if not recorded:
        raise BadInput(f"{trace.path}: split {spec.split!r} has no requests; --split all takes every request")
    load = load_of(recorded, spec.arrivals, spec.requests, spec.seed, spec.rate_scale)
    requests = load.requests
    together = min(spec.batch, len(requests))  # no more than there are ever run together
    longest = sorted((r.prompt_len + r.outputs for r in requests), reverse=True)[:together]
    prompts = sorted((r.prompt_len for r in requests), reverse=True)
    widest = prompts[0]
    if spec.prefill_chunk is not None:
        widest = min(spec.prefill_chunk, sum(prompts[:together]))
    elif spec.batching == STATIC:
        widest = sum(prompts[:together])
    widest = max(widest, together)
    several = _several_of(spec, hw, model)
    if several.dense == DATA:
        longest = longest[: -(-together // spec.gpus)]  # of the GPU that serves most
    demand = Demand(kv_tokens=sum(longest), iteration_tokens=widest, batch=together)
    kv = kv_pool(spec, model, requests)
    if kv is not None:
        demand = demand_of(kv, spec, requests, demand)
    rule = BudgetRule(spec.vram_bytes, spec.expert_cache_bytes, spec.experts, spec.cache_frac)
    bound = "bound" in policy.traits
    memory = plan(model, hw, spec.precision, demand, rule, spec.gpus, bound, policy.keeps_all, several)
    host_bytes = check_host(model, hw, spec.precision) if not policy.keeps_all else 0
    pieces = Pieces(model.n_moe_layers, model.n_experts, spec.precision, spec.gpus, model.expert_bytes, several.homes)
    if kv is not None:
        check_host_room(kv, hw, host_bytes, requests, together)
    store = requests_of(trace, "store")
    setup = Setup(spec, policy, hw, model, stack, trace, requests, store, memory, host_bytes, pieces, load.open_loop)
    setup.clients, setup.labels, setup.kv = load.clients, load.labels, kv
    ways = ", ".join(filter(None, (several.unusual, "" if spec.placement is None else "--placement FILE")))
    if ways:
        setup.labels += (f"several GPUs work together by {ways}",)
    _check_scheduler(setup)
    check_replicas(setup)
    if not setup.timeless and "oracle" in policy.traits:
        how = f"--batch {spec.batch}" if setup.scheduler.in_order else f"--scheduler {setup.scheduler.name}"
        raise BadInput(
            f"policy {policy.name} with arrivals and {how}: which tokens run together depends on time, so there is no "
            "future to know; use --batch 1 and first come, first served, or a trace without arrivals"
        )
    return setup


def _check_scheduler(setup: Setup) -> None:
    """Raises BadInput where the scheduler lacks what it goes by, or an SLO names a task that no request has."""
    kind, slos = setup.scheduler, setup.slos
    who = f"--scheduler {kind.name}"
    if "outputs" in kind.needs and not setup.store:
        raise no_store(setup.trace, f"{who} expects of a request what its task put out there")
    if "prices" in kind.needs and not setup.store:
        raise no_store(
            setup.trace, f"{who} expects a request's prompt to need the experts that its task's needed there"
        )
    if "paths" in kind.needs:
        setup.trace.require_all(frozenset({"token_ids"}), who)
        if not setup.store:
            raise no_store(setup.trace, f"{who} learns there where tokens of each id are routed")
    if "deadlines" in kind.needs and not (slos and setup.open_loop):
        raise BadInput(f"{who}: it goes by deadlines, which are arrivals and SLOs; give --arrivals and --slo")
    tasks = sorted({request.task for request in setup.requests})
    for task in slos.tasks():
        if task not in tasks:
            raise BadInput(f"--slo, got task {task!r}: no request has it; {did_you_mean(task, tasks)}")


def _whole(name: str, package: str) -> str:
    """A bundled name as it is, the path of an own file made absolute, so that it works from any folder."""
    path = Path(name)
    return str(path.resolve()) if name not in bundled(package, ".yaml") and path.exists() else name


def _known(trace: Trace) -> bool:
    """Whether the trace's name alone finds it again: a bundled one, or one that is drawn when asked for."""
    from traces.synth.drawn import drawn_path

    return trace.path in (bundled_traces().get(trace.name), drawn_path(trace.name))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(node: msgspec.Struct) -> str:
    return hashlib.sha256(msgspec.json.encode(node, order="sorted")).hexdigest()
