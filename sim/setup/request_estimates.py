"""What a scheduler may know of requests before they run: lengths, and what they cost on this very machine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from sim.setup.drafting import experts_s
from sim.workload.iterations import PREFILL, Iteration, Range
from sim.workload.known_requests import Profiled, by_task
from sim.workload.learn_split import StoreSplit
from sim.workload.token_paths import TokenPaths

if TYPE_CHECKING:
    from collections.abc import Collection

    from sim.machine.cost import Cost
    from sim.setup.setup import Setup


def estimated(setup: Setup, found: Profiled, needs: Collection[str]) -> Profiled:
    """What is known, with what `needs` names (`sim.workload.known_requests.NEEDS`) where that takes work."""
    if "prices" in needs:
        cost = setup.cost()
        tasks, every = by_task(missing_experts(setup))
        copy_s = max(cost.copies.expert_s(setup.model.expert_bytes(setup.spec.precision)), cost.launches.copy_s)
        each_s = copy_s / setup.several.n_at_once
        found = replace(
            found,
            token_s=token_s(setup, cost),
            loading_s={task: n * each_s for task, n in tasks.items()},
            any_loading_s=(every or 0.0) * each_s,
            max_tokens=max_tokens(setup),
        )
    if "paths" in needs:
        who = f"--scheduler {setup.scheduler.name}"
        found = replace(found, paths=TokenPaths(StoreSplit(setup.trace, setup.store), who))
    return found


def max_tokens(setup: Setup) -> float:
    """Tokens that there is room for in KV memory: its pages, or what is set aside for the longest that run together."""
    if setup.kv is not None:
        return setup.kv.n_pages * setup.kv.page_tokens
    return setup.memory.parts.kv_tokens or math.inf


def token_s(setup: Setup, cost: Cost) -> float:
    """What a prompt token takes on average in the prompts of the store split, whose experts are all there: for each the
    longer of what GPU and host spend on it, its experts shared evenly by the GPUs that have a layer's."""
    spent_s = n_tokens = 0.0
    for request in setup.store:
        stop = request.first_row + request.prompt_len
        iteration = Iteration(0, [Range(request, request.first_row, stop, PREFILL, 0)], setup.trace)
        spent_s += _iteration_s(setup, cost, iteration)
        n_tokens += iteration.n_tokens
    return spent_s / n_tokens


def _iteration_s(setup: Setup, cost: Cost, iteration: Iteration) -> float:
    launches, n, n_gpus = cost.launches, iteration.n_tokens, setup.several.n_at_once
    gpu_s, host_s = cost.head(1).duration_s, launches.head.all_s + launches.sync_s
    layer_s, layer_host_s = cost.attention(iteration).duration_s + cost.gate(n).duration_s, launches.sync_s
    layer_host_s += launches.attention.all_s + launches.gate.all_s
    if cost.has_shared:
        layer_s, layer_host_s = layer_s + cost.shared(n).duration_s, layer_host_s + launches.shared.all_s
    for layer in range(setup.model.n_moe_layers):
        counts = list(iteration.chosen(layer).values())
        gpu_s += layer_s + experts_s(cost, setup.spec.precision, counts) / n_gpus
        host_s += layer_host_s + launches.experts_s(len(counts))
    n_dense = sum(cost.n_dense_before)
    if n_dense:
        gpu_s += n_dense * cost.dense_layer(iteration).duration_s
        host_s += n_dense * launches.dense.all_s
    return max(gpu_s, host_s)


def missing_experts(setup: Setup) -> list[tuple[str, float]]:
    """(task, experts that its prompt is expected to find missing) of every request of the store split.

    Its prompt's experts, each counted once, of which a cache that knows nothing of it holds as large a share as of all.
    """
    trace, n_all = setup.trace, setup.model.n_moe_layers * setup.model.n_experts
    room = sum(setup.memory.expert_bytes) // setup.model.expert_bytes(setup.spec.precision)
    missing_frac = max(0.0, 1.0 - room / n_all)
    found = []
    first_ids = np.arange(trace.n_layers)[None, :, None] * trace.n_experts
    for request in setup.store:
        ids = trace.experts[request.first_row : request.first_row + request.prompt_len].astype(np.int64)
        found.append((request.task, missing_frac * len(np.unique(ids + first_ids))))
    return found
