"""What cannot be asked for together, on this machine, of these requests: each refused in one line before any work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.base.errors import BadInput, DoesNotFit, did_you_mean
from sim.base.units import show_bytes
from sim.machine.several import DENSE_WAYS, GPU0, LAYERS, PER_EXPERT
from sim.options import MOST_TOKENS, OPTIONS, RunSpec
from sim.workload import routers
from sim.workload.learn_split import no_store
from sim.workload.scheduler import Scheduler

if TYPE_CHECKING:
    from sim.policy.api import Policy
    from sim.profiles.hardware import Hardware
    from sim.profiles.overrides import Overrides
    from sim.setup.setup import Setup


def check_options(spec: RunSpec) -> None:
    """Raises BadInput for the first option that cannot be, with what to do about it."""
    for row in OPTIONS.rows:
        row.check(getattr(spec, row.field))
    if spec.router is not None:
        routers.find(spec.router)
    _check_several(spec)
    _check_batching(spec)


def _check_several(spec: RunSpec) -> None:
    """Raises BadInput for a way of sharing work among GPUs that there is not, or with one GPU."""
    several = spec.several
    if several.dense not in DENSE_WAYS:
        raise BadInput(f"--parallel, got {several.dense!r}: no such way; {did_you_mean(several.dense, DENSE_WAYS)}")
    for option, name, usual in several.chosen:
        if spec.gpus == 1 and name not in (usual, LAYERS):  # one GPU has all layers
            raise BadInput(f"{option}, got {name!r} with one GPU: there is no other to share with; add --gpus N")
    if several.shares and len(several.shares) != spec.gpus:
        raise BadInput(
            f"--parallel, got {len(several.shares)} shares with --gpus {spec.gpus}: one for each GPU; give as many of "
            "both"
        )
    where = f"--set gpus.map, got {spec.gpus_map!r}"
    if spec.gpus_map is not None and spec.gpus == 1:
        raise BadInput(f"{where} with one GPU: there is nothing to place; add --gpus N")
    if several.dense != GPU0 and spec.gpus_dispatch != PER_EXPERT:
        instead = "where experts lie with their layers" if several.dense == LAYERS else "which has collectives"
        raise BadInput(
            f"--set gpus.dispatch, got {spec.gpus_dispatch!r} with --parallel {spec.parallel}, {instead}; leave one out"
        )
    if several.dense == LAYERS and spec.gpus_map is not None:
        raise BadInput(f"{where} with --parallel layers: experts lie with their layers; leave one out")
    if spec.gpus > 1 and several.dense != GPU0 and spec.kv_memory is not None:
        raise BadInput(
            f"--kv-memory with --parallel {spec.parallel}: pages are of one GPU's memory; leave one of them out"
        )


def _check_batching(spec: RunSpec) -> None:
    """Raises BadInput where parts of how requests are batched do not go together."""
    most = spec.prefill_chunk
    if most is None:
        return
    if spec.batch_static:
        raise BadInput(f"--prefill-chunk, got {most} with --set batch.static=on: its prompts run whole; leave one out")
    if most < max(1, spec.batch):
        raise BadInput(
            f"--prefill-chunk, got {most} with --batch {spec.batch}: tokens of an iteration, one at least for each "
            f"request that runs, and at most {MOST_TOKENS}; take 512, or another number in between"
        )


def check_watts(spec: RunSpec, overrides: Overrides) -> None:
    """Raises BadInput for watts that are set where no energy is counted."""
    watts = next((key for key in overrides.hw if key.split(".")[1:2] == ["power"]), None)
    if spec.sim_energy is None and watts is not None:
        raise BadInput(
            f"--set hw.{watts}, got {overrides.hw[watts]!r} without --set sim.energy: watts decide nothing else; add "
            "--set sim.energy=gpu or --set sim.energy=machine"
        )


def check_copies(hw: Hardware, policy: Policy) -> None:
    """Raises BadInput where a policy would copy experts within one memory."""
    if hw.one_memory:
        raise BadInput(
            f"policy {policy.name} on {hw.id}: CPU and GPU have one memory there, so that no expert is copied or left "
            "to the CPU; take gpu_only or llama_cpp with room for every expert (a lower --precision, no --vram, no cap)"
        )


def check_beside(setup: Setup) -> None:
    """Raises where what lies in host memory finds no room beside the rest, or would only move within one memory."""
    spec, hw, host_bytes = setup.spec, setup.hw, setup.model.host_bytes(setup.spec.precision)
    needs_bytes = setup.memory.needs_bytes + host_bytes
    if host_bytes and needs_bytes > setup.memory.vram_bytes and not setup.memory.hypothetical:
        raise DoesNotFit(
            f"{setup.model.id} in {spec.precision} on {hw.id}: with {show_bytes(host_bytes)} of tables beside it needs "
            f"{show_bytes(needs_bytes)} of {show_bytes(setup.memory.vram_bytes)}, which is all of its memory; take a "
            "lower precision or a smaller model",
            {**setup.memory.sizes(), "host_tables_bytes": host_bytes, "vram_bytes": setup.memory.vram_bytes},
        )
    if setup.kv is not None and setup.kv.swaps:
        raise BadInput(f"--set kv.preempt, got 'swap' on {hw.id}: within one memory it frees nothing; leave it out")


def check_scheduler(setup: Setup) -> None:
    """Raises BadInput where the scheduler lacks what it goes by, or an SLO names a task that no request has."""
    kind, slos = setup.scheduler, setup.slos
    who = f"--scheduler {kind.name}"
    if kind.passes is not Scheduler.passes and setup.drafter is not None:
        raise BadInput(f"{who} with --draft: it shares out decode steps of one token each; leave one of them out")
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


def check_replicas(setup: Setup) -> None:
    """Raises BadInput where requests do not come one after the other, or somebody would have to know who goes where."""
    spec, policy = setup.spec, setup.policy
    if spec.replicas == 1:
        return
    if not setup.open_loop:
        raise BadInput(
            f"--replicas, got {spec.replicas} with requests back to back: a router sends requests on as they come; add "
            "--arrivals poisson:RATE, or closed:CLIENTS for machines that are never idle"
        )
    if "oracle" in policy.traits:
        raise BadInput(
            f"policy {policy.name} with --replicas {spec.replicas}: which requests a replica gets depends on time, so "
            "there is no future to know; leave --replicas out, or take another policy"
        )
