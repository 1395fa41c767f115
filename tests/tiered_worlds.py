"""Random worlds whose host memory does not hold all experts, on either engine.

Not a test: `python tests/tiered_worlds.py N [SEED]` compares the engines in N worlds and says where they differ.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import random_worlds

from sim.base.quantities import Quantity
from sim.profiles.drives import Drive
from sim.setup.third_tier import ThirdTier

RAM_POLICIES = ("lru", "lfu", "fifo", "lfru", "random")


def figure(value: float) -> Quantity:
    return Quantity(value=float(value), source="assumed")


def drive(bytes_per_s: float, latency_s: float = 0.0, alone_bytes_per_s: float = math.inf) -> Drive:
    return Drive(
        id="easy",
        bandwidth_bytes_per_s=figure(bytes_per_s),
        latency_s=figure(latency_s),
        request_bytes_per_s=figure(alone_bytes_per_s),
        request_s=figure(0.0),
    )


AS_FAST_AS_RAM = drive(math.inf)


def tiered(seed: int, folder: Path, policy: str | None = None, made: Drive | None = None, **terms: Any) -> Any:
    """The world of a seed above a drive, with room in host memory for a drawn number of experts."""
    rng = Random(f"tiered {seed}")
    of = random_worlds.world(seed, folder, policy)
    model, spec, hw = of.facts["model"], of.facts["spec"], of.facts["hw"]
    size, total = model.expert_bytes(spec.precision), model.n_moe_layers * model.n_experts
    if made is None:
        copy_s = hw.h2d.latency_s.value + size / hw.h2d.bandwidth_bytes_per_s.value
        rate = size / (copy_s * rng.choice((0.25, 1.0, 3.0)) or 1.0)
        made = drive(rate, rng.choice((0.0, 0.5, 2.0)) * copy_s, rate * rng.choice((0.5, 1.0)))
    drawn: dict[str, Any] = {
        "depth": rng.choice((1, 2, 8)),
        "block_bytes": max(1, size // rng.choice((1, 3))),
        "read_ahead": rng.choice((0, 0, 1, 3)),
        "start": rng.choice(("cold", "warm")),
        "evict": rng.choice(RAM_POLICIES),
    }
    of.facts |= {"hw": msgspec.structs.replace(hw, drive=made), "tier": ThirdTier("easy", **(drawn | terms))}
    of.host_bytes = rng.randint(1, total) * size
    return of


if __name__ == "__main__":
    sys.exit(random_worlds.hunt_engines(tiered))
