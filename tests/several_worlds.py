"""Random worlds with several GPUs that work together in a way of their own, on either engine.

Not a test: `python tests/several_worlds.py N [SEED]` compares the engines in N worlds and says where they differ.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import random_worlds

WAYS: tuple[dict[str, Any], ...] = (
    {"peer": "all-to-all"},
    {"host_links": "split"},
    {"dense": "tensor"},
    {"dense": "data"},
    {"host_links": "split", "peer": "all-to-all"},
)


def several(seed: int, folder: Path, policy: str | None = None, **ways: Any) -> random_worlds.World:
    """The world of a seed with two to four GPUs and these ways, or drawn ones."""
    rng = Random(f"several {seed}")
    of = random_worlds.world(seed, folder, policy)
    model, spec = of.facts["model"], of.facts["spec"]
    gpus = min(rng.choice((2, 2, 3, 4)), model.n_experts)
    spec = msgspec.structs.replace(spec, gpus=gpus, **(ways or rng.choice(WAYS)))
    size, total = model.expert_bytes(spec.precision), model.n_moe_layers * model.n_experts
    shares = [total // gpus + (gpu < total % gpus) for gpu in range(gpus)]
    memory = random_worlds.planned([rng.randint(min(share, model.top_k + 1), share) * size for share in shares])
    of.facts |= {"spec": spec, "memory": memory}
    of.facts["memory"] = random_worlds.planned(random_worlds.enough(of))
    return of


def main() -> int:
    n, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    n_ran = n_failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + n):
            of = several(seed, Path(folder))
            told, seen = random_worlds.engines_disagree(of)
            of.trace.unlink()
            n_ran += not seen.error
            if told or seen.crash:
                n_failed += 1
                sys.stdout.write(f"{of}\n  {told}\n{seen.crash}\n")
                if n_failed == 5:
                    break
    sys.stdout.write(f"{n} worlds, {n_ran} ran, {n_failed} failed\n")
    return bool(n_failed)


if __name__ == "__main__":
    sys.exit(main())
