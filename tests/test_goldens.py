"""Golden decision logs: what each policy decided on one small trace, guarding refactors.

A change that is meant to alter decisions or times regenerates them, and its commit says why:

    python tests/test_goldens.py            # rewrites tests/goldens/*.json; `git diff` shows what moved

Each file holds, by budget in whole experts: the digest of the decision log, decisions by kind, and the makespan to the
last bit (hexadecimal). The trace and the machine are those of `sim.conformance.world`, on the stack that runs experts
one by one: what groups cost is no policy's decision.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sim.conformance.world import ALL, World
from sim.policy.api import Policy
from sim.policy.registry import policies
from sim.profiles.stack import load_stack

FOLDER = Path(__file__).parent / "goldens"
BUDGETS = (4, 8, 14, ALL)


def golden(kind: type[Policy]) -> dict[str, Any]:
    """What the policy does now."""
    found: dict[str, Any] = {}
    with World(kind) as world:
        world.stack = load_stack("separate")
        for budget in BUDGETS:
            seen = world.run(world.room(budget))
            text = "\n".join(f"{kind} {layer} {expert}" for kind, layer, expert in seen.log)
            found[str(budget)] = {
                "log_sha256": hashlib.sha256(text.encode()).hexdigest(),
                "decisions": dict(sorted(Counter(kind for kind, _, _ in seen.log).items())),
                "makespan": seen.result.simulated_s.hex(),
            }
    return found


@pytest.mark.parametrize("name", policies())
def test_golden(name):
    path = FOLDER / f"{name}.json"
    assert path.is_file(), f"no golden log of {name}: python tests/test_goldens.py writes it"
    assert golden(policies()[name]) == json.loads(path.read_text()), "it moved; see the docstring"


def test_no_golden_log_is_left_over():
    assert {path.stem for path in FOLDER.glob("*.json")} <= set(policies())


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, kind in policies().items():
        (FOLDER / f"{name}.json").write_text(json.dumps(golden(kind), indent=2) + "\n")
