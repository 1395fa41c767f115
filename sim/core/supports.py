"""Which runs the core carries out; the others go on with `sim.engine` and `sim.machine`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sim.options import CORE
from sim.policy.api import HOOKS, overrides

if TYPE_CHECKING:
    from sim.policy.api import Policy
    from sim.setup.setup import Setup

BEFORE = {"bind", "fits_smaller", "initial", "layer_budgets", "learn", "min_experts", "predictor_bytes", "stats"}
TOLD = {"accessed", "evicted", "placed", "victim"}
BETWEEN = {"layer_enter", "gate_input", "assign", "gate_done", "layer_done"}
AROUND = {"drafting", "request_start", "iteration_start", "iteration_end", "request_end", "idle"}
KNOWN = BEFORE | TOLD | BETWEEN | AROUND
"""Hooks that it asks and tells."""
UNKNOWN = re.compile(r"\b(RunPart|RunCpu|RunCpuAhead|WriteBack|matrices\(|\.part\(|joined=|precision=)")
"""Decisions that it does not know yet, as a policy's text names them."""
IMPORTS = re.compile(r"^from (policies[\w.]*) import", re.MULTILINE)


def supports(setup: Setup) -> bool:
    """Whether the core has every verb that a run may need."""
    spec, policy = setup.spec, setup.policy
    one_machine = setup.simulator == CORE and setup.machine is None and spec.gpus == 1 and setup.tier is None
    asked = {hook for hook in HOOKS if overrides(policy, hook)}
    plain = asked <= KNOWN and "cpu" not in policy.traits and not setup.all_kept
    return one_machine and setup.kv is None and plain and not (asked & (BETWEEN | AROUND) and names_unknown(policy))


def names_unknown(policy: Policy) -> bool:
    """Whether a policy's text, or that of policies it imports, names a decision that the core lacks; True also where
    nobody can read it."""
    todo = {kind.__module__ for kind in type(policy).__mro__ if not kind.__module__.startswith(("sim.", "builtins"))}
    done: set[str] = set()
    while todo:
        name = todo.pop()
        done.add(name)
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None or not file.endswith(".py"):
            return True
        text = Path(file).read_text(encoding="utf-8")
        if UNKNOWN.search(text):
            return True
        todo |= set(IMPORTS.findall(text)) - done
    return False
