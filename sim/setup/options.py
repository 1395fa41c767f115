"""Options that are wrong whatever they meet: unknown words, numbers out of range, two that exclude each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sim.base.errors import BadInput, did_you_mean
from sim.machine.memory_law import WAYS as CONTENTIONS
from sim.machine.several import GPU0, LAYERS, PER_EXPERT
from sim.profiles.power import COUNTED
from sim.setup.replicas import MAX_REPLICAS
from sim.setup.spec import HIT_DEFINITIONS
from sim.workload import routers
from sim.workload.batching import KINDS as BATCHINGS
from sim.workload.batching import STATIC

if TYPE_CHECKING:
    from sim.setup.spec import RunSpec

MAX_GPUS = 256
MOST_TOKENS = 10**9  # of an iteration, so of a batch
SPLITS = ("test", "store", "all")
ENGINES = ARITHMETIC, SIMPY = "arithmetic", "simpy"


def check_options(spec: RunSpec) -> None:
    """Raises BadInput for the first option that cannot be, with what to do about it."""
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
    if spec.contention not in CONTENTIONS:
        raise BadInput(f"--contention, got {spec.contention!r}: on or off; leave it out for on")
    if spec.energy is not None and spec.energy not in COUNTED:
        raise BadInput(f"--energy, got {spec.energy!r}: whose joules? {did_you_mean(spec.energy, COUNTED)}")


def _check_several(spec: RunSpec) -> None:
    """Raises BadInput for a way of sharing work among GPUs that there is not, or with one GPU."""
    several = spec.several
    for option, name, known in several.chosen:
        if name not in known:
            raise BadInput(f"{option}, got {name!r}: no such way; {did_you_mean(name, known)}")
        if spec.gpus == 1 and name not in (known[0], LAYERS):  # one GPU has all layers
            raise BadInput(f"{option}, got {name!r} with one GPU: there is no other to share with; add --gpus N")
    if several.shares and len(several.shares) != spec.gpus:
        raise BadInput(
            f"--dense, got {len(several.shares)} shares with --gpus {spec.gpus}: one for each GPU; give as many of both"
        )
    if spec.placement is not None and spec.gpus == 1:
        raise BadInput(f"--placement, got {spec.placement!r} with one GPU: there is nothing to place; add --gpus N")
    if several.dense != GPU0 and spec.peer != PER_EXPERT:
        instead = "where experts lie with their layers" if several.dense == LAYERS else "which has collectives"
        raise BadInput(f"--peer, got {spec.peer!r} with --dense {spec.dense}, {instead}; leave one out")
    if several.dense == LAYERS and spec.placement is not None:
        raise BadInput(
            f"--placement, got {spec.placement!r} with --dense layers: experts lie with their layers; leave one out"
        )
    if spec.gpus > 1 and several.dense != GPU0 and spec.kv_memory_bytes is not None:
        raise BadInput(f"--kv-memory with --dense {spec.dense}: pages are of one GPU's memory; leave one of them out")


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
