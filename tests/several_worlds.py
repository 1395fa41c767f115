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

from sim.machine.several import LAYERS, homes_by_layer

WAYS: tuple[dict[str, Any], ...] = (
    {"peer": "all-to-all"},
    {"host_links": "split"},
    {"dense": "tensor"},
    {"dense": "data"},
    {"host_links": "split", "peer": "all-to-all"},
    {"dense": "layers"},
)


def several(seed: int, folder: Path, policy: str | None = None, **ways: Any) -> random_worlds.World:
    """The world of a seed with two to four GPUs and these ways, or drawn ones."""
    rng = Random(f"several {seed}")
    of = random_worlds.world(seed, folder, policy)
    model, spec = of.facts["model"], of.facts["spec"]
    gpus = min(rng.choice((2, 2, 3, 4)), model.n_experts)
    chosen = ways or rng.choice(WAYS)
    if chosen.get("dense") == LAYERS:
        gpus = max(n for n in range(1, gpus + 1) if len({*homes_by_layer(model, n)}) == n)
        chosen = chosen if gpus > 1 else {}
    spec = msgspec.structs.replace(spec, gpus=gpus, **chosen)
    size, total = model.expert_bytes(spec.precision), model.n_moe_layers * model.n_experts
    shares = [total // gpus + (gpu < total % gpus) for gpu in range(gpus)]
    if spec.dense == LAYERS:
        shares = [homes_by_layer(model, gpus).count(gpu) for gpu in range(gpus)]
    memory = random_worlds.planned([rng.randint(min(share, model.top_k + 1), share) * size for share in shares])
    of.facts |= {"spec": spec, "memory": memory}
    of.facts["memory"] = random_worlds.planned(random_worlds.enough(of))
    return of


if __name__ == "__main__":
    sys.exit(random_worlds.hunt_engines(several))
