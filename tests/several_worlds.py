"""Random worlds with several GPUs that work together in a way of their own, on either engine.

Not a test: `python tests/several_worlds.py N [SEED]` compares the engines in N worlds and says where they differ.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import random_worlds

from sim.machine.several import LAYERS, Way, homes_by_layer, stages

WAYS: tuple[dict[str, Any], ...] = (
    {"gpus_dispatch": "all-to-all"},
    {"gpus_host_bandwidth": "split"},
    {"parallel": "tensor"},
    {"parallel": "data"},
    {"gpus_host_bandwidth": "split", "gpus_dispatch": "all-to-all"},
    {"parallel": "layers"},
)


def lives_with(model: Any, shares: list[int]) -> tuple[int, ...]:
    """The GPU of each expert where layers come in these shares."""
    return homes_by_layer(model, stages(model.n_layers, shares))


def several(seed: int, folder: Path, policy: str | None = None, **ways: Any) -> random_worlds.World:
    """The world of a seed with two to four GPUs and these ways, or drawn ones."""
    rng = Random(f"several {seed}")
    of = random_worlds.world(seed, folder, policy)
    model, spec = of.facts["model"], of.facts["spec"]
    gpus = min(rng.choice((2, 2, 3, 4)), model.n_experts)
    chosen = ways or rng.choice(WAYS)
    if chosen.get("parallel") == LAYERS:
        drawn = [[1] * n for n in range(1, gpus + 1)] + [[rng.randint(1, 4) for _ in range(gpus)]]
        dealt = [one for one in drawn if len({*lives_with(model, one)}) == len(one)]  # a GPU without experts is refused
        of_layers = dealt[-1]
        gpus = len(of_layers)
        chosen = {**chosen, "parallel": Way(LAYERS, tuple(of_layers)).said} if gpus > 1 else {}
    spec = msgspec.structs.replace(spec, gpus=gpus, **chosen)
    size, total = model.expert_bytes(spec.precision), model.n_moe_layers * model.n_experts
    shares = [total // gpus + (gpu < total % gpus) for gpu in range(gpus)]
    if spec.several.in_turn:
        shares = [lives_with(model, of_layers).count(gpu) for gpu in range(gpus)]
    memory = random_worlds.planned([rng.randint(min(share, model.top_k + 1), share) * size for share in shares])
    of.facts |= {"spec": spec, "memory": memory}
    of.facts["memory"] = random_worlds.planned(random_worlds.enough(of))
    return of


if __name__ == "__main__":
    sys.exit(random_worlds.hunt_engines(several))
