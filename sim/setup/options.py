"""Options that are wrong whatever they meet: each by its row of the table, and two that exclude each other."""

from __future__ import annotations

from sim.base.errors import BadInput, did_you_mean
from sim.machine.several import DENSE_WAYS, GPU0, LAYERS, PER_EXPERT
from sim.options import MOST_TOKENS, OPTIONS, RunSpec
from sim.workload import routers


def check_options(spec: RunSpec) -> None:
    """Raises BadInput for the first option that cannot be, with what to do about it."""
    for row in OPTIONS.rows:
        row.check(getattr(spec, row.field))
    routers.find(spec.router or routers.DEFAULT)
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
