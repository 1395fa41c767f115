"""A run with everything it needs, resolved and checked; what it is made of, and the digest that tells it apart."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sim import __version__
from sim.base.digests import of_data, of_file, of_text
from sim.base.files import bundled
from sim.base.json import to_json
from sim.base.plug_ins import read_from
from sim.base.plug_ins import whole as whole_plug_in
from sim.base.units import show_count
from sim.machine.copy_prices import crowded
from sim.machine.cost import Cost
from sim.machine.memory_law import needs_events
from sim.machine.several import GPU0, PER_LINK, Several
from sim.options import CORE, SIMPY, VALUE, unusual
from sim.policy.api import overrides
from sim.policy.pieces import Pieces
from sim.policy.policy_file import file_of, without_file
from sim.policy.registry import find
from sim.profiles.hardware import ASKED_FOR, GPUS, SHARED, WATTS
from sim.profiles.models import PACKAGE as MODELS
from sim.profiles.stack import PACKAGE as STACKS
from sim.setup.memory import MemoryPlan, check_host, host_need
from sim.workload import routers, schedulers
from sim.workload.batching import Batching
from sim.workload.iterations import RequestInfo
from sim.workload.known_requests import Profiled
from sim.workload.kv_memory import KvMemory, KvPool
from sim.workload.load import NONE, PROCESSES
from sim.workload.router import Router
from sim.workload.scheduler import Scheduler
from sim.workload.slo import Slos
from traces.format.bundled import bundled_traces

if TYPE_CHECKING:
    from sim.options import RunSpec
    from sim.policy.api import Policy
    from sim.profiles.hardware import Hardware
    from sim.profiles.models import Model
    from sim.profiles.stack import Stack
    from sim.setup.drafting import Drafter
    from sim.setup.third_tier import ThirdTier
    from traces.format.reader import Trace

KV = ("kv_memory", "kv_page", "kv_preempt")  # of a pool for keys and values


@dataclass(frozen=True)
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
    tier: ThirdTier | None = None  # a drive below host memory; None: that holds every expert
    mapped: bool = False  # its engine holds experts as pages of the file that it maps
    kv: KvPool | None = None  # pages for keys and values; None: as many as are ever needed
    all_kept: bool = False  # by a policy that keeps every expert where there is room for it
    drafter: Drafter | None = None  # of decode steps that verify drafts
    stand_in: str | None = None  # `surrogate:SHARE`, where the user named one
    idle: str | None = None  # of an option that has no part in this run: what to say where it is the only one
    said: str | None = None  # which requests were taken where nobody said which
    machine: Callable[..., Any] | None = None  # a kind of one's own, in place of those that `simulator` names
    run_id: str = ""  # before the policy is bound: binding may fill in parameters that were left to be derived

    def close(self) -> None:
        self.trace.close()

    def asking(self, n_outputs: int) -> Setup:
        """The same of requests that ask for so many tokens at most."""
        return replace(self, requests=[r._replace(outputs=min(r.outputs, n_outputs)) for r in self.requests])

    @cached_property
    def several(self) -> Several:
        """How its GPUs work together."""
        return msgspec.structs.replace(self.spec.several, homes=self.homes)

    def cost(self) -> Cost:
        """Prices of everything on its hardware."""
        cost = Cost(self.hw, self.model, self.stack, self.spec.precision, self.several, self.spec.sim_contention)
        if self.tier is not None:
            from sim.setup.third_tier import price_drive

            price_drive(cost, self.tier, self.pieces.whole[0][0].n_bytes)
        return cost

    def check_host(self, kept: Collection[int]) -> None:
        """Raises DoesNotFit where host memory is too small beside the layers whose experts are kept on GPUs."""
        if self.tier is None and self.host_bytes:
            model, precision = self.model, self.spec.precision
            need_bytes = host_need(model, precision, kept)
            check_host(model, self.hw, precision, self.spec.ram, need_bytes, self.mapped)

    def in_host_bytes(self, kept: Collection[int]) -> int:
        """Bytes of host memory for experts: all of a mapped file, else without layers that are kept on GPUs."""
        if not kept or self.mapped or self.tier is not None or not self.host_bytes:
            return self.host_bytes
        return host_need(self.model, self.spec.precision, kept)

    @property
    def leaves_unread(self) -> bool:
        """Whether its engine reads no router's choice in layers that the policy keeps on GPUs for good."""
        stack, loops = self.stack, self.hw.curves_of(self.model.id, self.spec.precision) is not None
        engine_does = stack.resident is not None and stack.reads_routers and not loops  # a measured loop reads them all
        one_lane = self.spec.gpus == 1 or self.several.in_turn  # what crosses to experts elsewhere waits for the gate
        return engine_does and one_lane and overrides(self.policy, "kept_layers")

    @cached_property
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
    def drawn(self) -> dict[str, Any] | None:
        """Levels of the trace that are drawn, and by what; None where all that is read was recorded."""
        drawn = self.trace.drawn
        return {"levels": sorted(drawn), "by": self.stand_in} if drawn else None

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
        drafts = None if self.drafter is None else self.drafter.drafts(spec, self.hw, self.stack)
        return Batching(scheduler, spec.batch, kv, spec.prefill_chunk or 0, spec.batch_static, drafts)

    @cached_property
    def profiled(self) -> Profiled:
        """What the scheduler may know of requests before they run."""
        known, needs = Profiled.of(self.store, self.slos), {"prices", "paths"}.intersection(self.scheduler.needs)
        if not needs:
            return known
        from sim.setup.request_estimates import estimated

        return estimated(self, known, needs)

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
        return of_file(self.arrivals_file)

    @cached_property
    def _params_sha256(self) -> dict[str, str]:
        """Of the files that parameters name."""
        given = self.policy.settings
        return {p.name: of_file(Path(str(given[p.name]))) for p in self.policy.params if p.names_file(given[p.name])}

    @property
    def load_terms(self) -> dict[str, Any]:
        """What decides which requests come, and when; nothing where they are the trace's own."""
        spec, log = self.spec, self.arrivals_file
        if spec.arrivals is None:
            return {}
        source = spec.arrivals if log is None else self._log_sha256
        return {"arrivals": source, "arrivals_scale": spec.arrivals_scale, "seed": spec.seed}

    @property
    def batch_terms(self) -> dict[str, Any]:
        """What decides which tokens of them run together."""
        spec = self.spec
        terms: dict[str, Any] = {"batch": spec.batch, "scheduler": spec.scheduler}
        if spec.batch_static:
            terms["batch_static"] = True
        if spec.prefill_chunk is not None:
            terms["prefill_chunk"] = spec.prefill_chunk
        if self.drafter is not None:
            terms["draft"] = self.drafter.terms(spec.seed)
        if spec.kv_memory is not None:
            terms |= {name: getattr(spec, name) for name in KV}
        return terms

    def notes(self) -> list[str]:
        """What was asked for and cannot be had in full, and which requests were taken unasked, one line each."""
        spec, has = self.spec, show_count(len(self.requests), "request")
        where = f"split {spec.split} of {self.trace.name}"
        found = [] if self.said is None else [self.said]
        if spec.requests is not None and spec.requests > len(self.requests):
            found.append(f"note: --requests {spec.requests}: {where} has {has}, not more")
        if spec.batch > len(self.requests):
            found.append(f"note: --batch {spec.batch}: no more than {has} to run together")
        return found

    @cached_property
    def simulator(self) -> str:
        """What replays it: the one that was asked for, or SimPy where arithmetic does not know what slows what."""
        if self.machine is not None:
            return self.machine.__name__
        return self.spec.sim_simulator or (SIMPY if self._needs_events else CORE)

    @property
    def _needs_events(self) -> bool:
        return crowded(self.hw, self.stack, self.several) or (self.spec.sim_contention and needs_events(self.hw))

    @cached_property
    def _digests(self) -> dict[str, str]:
        unread: list[str] = []  # what has no part in a run does not tell it from others
        unread += SHARED if self.spec.gpus_host_bandwidth == PER_LINK else ()
        unread += ASKED_FOR if self.stack.quantised is None and self.stack.graphs_from is None else ()
        unread += WATTS if self.spec.sim_energy is None else ()
        return {
            "hw": of_data(self.hw.without(unread)),
            "model": of_data(self.model.without_newer),
            "engine": of_data(self.stack.without_newer),
        }

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
        ram_file = None if self.tier is None else file_of(find(self.tier.evict))
        if ram_file is not None:
            code |= {"evict_sha256": ram_file.sha256}
        scheduler_file = read_from(self.scheduler)
        if scheduler_file is not None:
            code |= {"scheduler": self.scheduler.name, "scheduler_sha256": scheduler_file.sha256}
        return {
            "version": __version__,
            "policy": self.policy.name,
            **code,
            "params": dict(self.policy.settings),
            **({"params_sha256": self._params_sha256} if self._params_sha256 else {}),
            "hw": self.hw.id,
            "hw_sha256": digests["hw"],
            "model": self.model.id,
            "model_sha256": digests["model"],
            "engine": self.stack.id,
            "engine_sha256": digests["engine"],
            "trace": self.trace.name,
            "trace_sha256": self.trace.sha256,
            **({} if self.drawn is None else {"drawn": self.drawn}),
            **({"kept": "all"} if self.all_kept else {"kept": "layers"} if self.leaves_unread else {}),
            **({} if self.spec.gpus_map is None else {"map_sha256": of_text(str(self.homes))}),
            **({} if self.arrivals_file is None else {"arrivals_sha256": self._log_sha256}),
        }

    def identity(self) -> str:
        """Twelve hex digits of everything that decides the numbers: equal inputs, equal id, wherever the files lie."""
        asked, terms, resolved, files = self.spec, self.batch_terms, self.resolved(), self._params_sha256
        values = {row.field: value for row, value in unusual(asked) if row.identity == VALUE}
        for name in KV:
            if name not in terms:  # pages of no pool
                values.pop(name, None)
        if "predictor" in files:
            values.pop("predictor", None)  # `resolved` has its digest
        resolved["params"] = {name: value for name, value in resolved["params"].items() if name not in files}
        return of_text(to_json({**values, **self._meanings(), **resolved}))[:12]

    def _meanings(self) -> dict[str, Any]:
        """What decides numbers by what it means, and is not in `resolved`."""
        spec, found = self.spec, dict[str, Any]()
        if self.simulator == SIMPY and not self._needs_events and self.spec.sim_contention:
            found["simulator"] = SIMPY  # else either gives the same numbers, or none but one any
        if spec.replicas > 1 and read_from(self.router) is None:
            found["router"] = self.router.name
        if self.scheduler.name != schedulers.DEFAULT and read_from(self.scheduler) is None:
            found["scheduler"] = self.scheduler.name
        if spec.parallel not in (None, GPU0):
            found["parallel"] = spec.parallel
        if self.drafter is not None:
            found["draft"] = self.batch_terms["draft"]
        if spec.arrivals is not None and self.arrivals_file is None:
            found["arrivals"] = spec.arrivals
        if self.tier is not None:
            own_file = file_of(find(self.tier.evict)) is not None
            found["drive"] = self.tier._replace(why="", evict="" if own_file else self.tier.evict)
        return found

    def explicit(self) -> RunSpec:
        """The specification with no default left that may change: trace and model named, files by whole path."""
        spec, trace = self.spec, self.trace
        changed, predictor = dict(spec.set), spec.predictor
        for name in self._params_sha256:
            for key in changed:
                if key.rpartition(".")[2] == name:
                    changed[key] = str(Path(str(changed[key])).resolve())
            if name == "predictor" and predictor is not None:
                predictor = str(Path(predictor).resolve())
        return msgspec.structs.replace(
            spec,
            set=changed,
            predictor=predictor,
            policy=whole_plug_in(spec.policy),
            router=None if spec.router is None else whole_plug_in(spec.router),
            scheduler=None if spec.scheduler is None else whole_plug_in(spec.scheduler),
            drive_evict=None if spec.drive_evict is None else whole_plug_in(spec.drive_evict),
            **({} if self.tier is None else {"drive_reads": self.tier.reads, "drive_start": self.tier.start}),
            hw=_whole(spec.hw, GPUS),
            engine=_whole(spec.engine, STACKS),
            gpus_map=None if spec.gpus_map is None else str(Path(spec.gpus_map).resolve()),
            draft=None if self.drafter is None else self.drafter.explicit(lambda model: _whole(model, MODELS)),
            arrivals=spec.arrivals if self.arrivals_file is None else str(self.arrivals_file.resolve()),
            model=self.model.id if spec.model is None else _whole(spec.model, MODELS),
            trace=trace.name if _known(trace) else str(trace.path.resolve()),
        )


def _whole(name: str, package: str) -> str:
    """A bundled name as it is, the path of an own file made absolute, so that it works from any folder."""
    path = Path(name)
    return str(path.resolve()) if name not in bundled(package, ".yaml") and path.exists() else name


def _known(trace: Trace) -> bool:
    """Whether the trace's name alone finds it again: a bundled one, or one that is drawn when asked for."""
    from traces.synth.drawn import drawn_path

    return trace.path in (bundled_traces().get(trace.name), drawn_path(trace.name))
