"""A world's run with one resource a little quicker, every decision kept: what that is worth, by finite differences.

python tests/quicker.py N [SEED] [tiered|several]      # holds the critical path against it in N worlds
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import random_worlds
import several_worlds
import tiered_worlds
from random_worlds import World, setup_of

from sim.base.errors import MoesimError
from sim.base.lanes import RESOURCES
from sim.base.quantities import Quantity
from sim.machine.forwarding import ForwardingMachine
from sim.policy.api import overrides
from sim.profiles.curves import Curves
from sim.run import engine_of, machine_kind, run_through
from traces.format.reader import Trace

LANES = {"side": "predictor", "host": "host", "gpu": "gpu"}
BLOCKS = {"gpu": "gpu", "h2d": "h2d", "d2h": "d2h", "host": "host", "cpu": "cpu", "drive": "nvme"}
"""Blocks of a profile -> resources; their figures are times, or rates."""


class Quicker(ForwardingMachine):
    """Predictions on the lane of a resource take so many times as long."""

    def __init__(self, machine: Any, resource: str, factor: float) -> None:
        super().__init__(machine)
        self.resource, self.factor = resource, factor

    def predict(self, duration_s: float, lane: str, blocking: bool, basis: Any) -> Any:
        return self.machine.predict(
            duration_s * (self.factor if LANES[lane] == self.resource else 1.0), lane, blocking, basis
        )


def scaled(block: Any, factor: float, jitter: Random | None = None, small: float = 0.0) -> Any:
    """Every figure of a block: times by a factor, rates by its inverse; drawn anew near what they are."""

    def change(name: str, value: Any) -> Any:
        if isinstance(value, Quantity):
            by = factor if jitter is None else jitter.uniform(0.9, 1.1)
            more = 0.0 if jitter is None else jitter.uniform(0.1, 1.0) * small
            rate = "_per_s" in name
            return msgspec.structs.replace(value, value=value.value / by if rate else value.value * by + more)
        if isinstance(value, dict):
            return {key: change(name, one) for key, one in value.items()}
        return value

    fields = {name: change(name, getattr(block, name)) for name in block.__struct_fields__}
    kept = {"copy_efficiency_frac", "memory_bytes"} & fields.keys()
    return msgspec.structs.replace(block, **{name: value for name, value in fields.items() if name not in kept})


def timed(curves: Any, resource: str, factor: float) -> Any:
    operations = {
        name: msgspec.structs.replace(curve, seconds=tuple(second * factor for second in curve.seconds))
        if ("cpu" if name.startswith("cpu") else "gpu") == resource
        else curve
        for name, curve in curves.operations.items()
    }
    launches = {
        name: msgspec.structs.replace(one, value=one.value * (factor if resource == "host" else 1.0))
        for name, one in curves.launches.items()
    }
    return msgspec.structs.replace(curves, operations=operations, launches=launches)


def changed(facts: dict[str, Any], resource: str, factor: float) -> dict[str, Any]:
    hw, stack = facts["hw"], facts["stack"]
    for block, name in BLOCKS.items():
        if name == resource and isinstance(getattr(hw, block, None), msgspec.Struct):
            hw = msgspec.structs.replace(hw, **{block: scaled(getattr(hw, block), factor)})
    if resource in ("h2d", "d2h"):
        pageable = f"{resource}_pageable"
        hw = msgspec.structs.replace(hw, **{pageable: scaled(getattr(hw, pageable), factor)})
    # Where transfers to another GPU queue nowhere they are part of what that GPU does.
    if resource == ("p2p" if facts["spec"].several.gathers else "gpu"):
        hw = msgspec.structs.replace(hw, p2p=scaled(hw.p2p, factor))
    if isinstance(hw.curves, Curves):
        hw = msgspec.structs.replace(hw, curves=timed(hw.curves, resource, factor))
    if resource == "host":
        times = {name: one for name in stack.__struct_fields__ if isinstance(one := getattr(stack, name), Quantity)}
        spent = {
            name: msgspec.structs.replace(one, value=one.value * factor)
            for name, one in times.items()
            if name.endswith("_s") and not name.endswith("_per_s")
        }
        stack = msgspec.structs.replace(stack, **spent)
    return {**facts, "hw": hw, "stack": stack}


def generic(of: World) -> World:
    """The same world with times that coincide nowhere by chance."""
    rng, hw = Random(of.seed), of.facts["hw"]
    small = 1e-3 * (hw.gpu.kernel_floor_s.value or hw.h2d.latency_s.value or 1e-3)
    for block in (*BLOCKS, "p2p", "h2d_pageable", "d2h_pageable"):
        if isinstance(getattr(hw, block, None), msgspec.Struct):
            hw = msgspec.structs.replace(hw, **{block: scaled(getattr(hw, block), 1.0, rng, small)})
    if isinstance(hw.curves, Curves):
        drawn = {
            name: msgspec.structs.replace(one, seconds=tuple(s * rng.uniform(0.9, 1.1) for s in one.seconds))
            for name, one in hw.curves.operations.items()
        }
        hw = msgspec.structs.replace(hw, curves=msgspec.structs.replace(hw.curves, operations=drawn))
    of.facts["hw"] = hw
    return of


def run_of(of: World, resource: str = "", factor: float = 1.0) -> tuple[Any, Any, list[Any]]:
    """Clockwork, machine and decisions of a run; policies see the prices of the world as it is."""
    log: list[Any] = []
    with Trace(of.trace) as trace:
        setup = setup_of(of, trace)
        cost = setup.cost()
        other = World(of.seed, of.make_policy, changed(of.facts, resource, factor), of.trace, of.host_bytes)
        priced = setup_of(other, trace).cost()
        polls = overrides(setup.policy, "copy_done")
        machine = machine_kind(setup)(priced, setup.spec.gpus, None, report_copies=polls)
        engine_ = engine_of(setup, Quicker(machine, resource, factor), cost, lambda *entry: log.append(entry))
        clockwork = run_through(setup, engine_, Quicker(machine, resource, factor), None, None)
    return clockwork, machine, log


def worth(of: World, by: float) -> tuple[dict[str, float], dict[str, float], float, list[str]]:
    """Seconds charged to each resource, and seconds by which the run is shorter, over `by`, with each that much faster;
    the whole, and the resources with which something was decided otherwise."""
    clockwork, _, decided = run_of(of)
    path = {name: sum(phase.path_s[at] for phase in clockwork.phases.values()) for at, name in enumerate(RESOURCES)}
    whole_s = sum(phase.time_s for phase in clockwork.phases.values())
    gains, other = {}, []
    for name in RESOURCES:
        if name != "idle":
            quicker, _, log = run_of(of, name, 1.0 - by)
            gains[name] = (whole_s - sum(phase.time_s for phase in quicker.phases.values())) / by
            if log != decided:
                other.append(name)
    return path, gains, whole_s, other


def several(seed: int, folder: Path) -> World:
    """Several GPUs, with host memory for all links: where they share it, the CPU's figures are the links'."""
    of = several_worlds.several(seed, folder)
    of.facts["spec"] = msgspec.structs.replace(of.facts["spec"], gpus_host_bandwidth="per-link")
    return of


MAKES = {"plain": random_worlds.world, "tiered": tiered_worlds.tiered, "several": several}


def hunt(n: int, first: int, make: str) -> None:
    held = refused = moved = failed = 0
    for seed in range(first, first + n):
        with tempfile.TemporaryDirectory() as folder:
            of = generic(MAKES[make](seed, Path(folder)))
            try:
                path, gains, whole_s, other = worth(of, 1e-6)
            except MoesimError:
                refused += 1
                continue
        wrong = {
            name: (path[name], gains[name])
            for name in gains
            if name not in other and abs(path[name] - gains[name]) > 1e-6 * whole_s
        }
        moved += bool(other)
        if abs(sum(path.values()) - whole_s) > 1e-9 * whole_s:
            wrong["sum"] = (sum(path.values()), whole_s)
        if wrong:
            failed += 1
            random_worlds.say(f"{of}\n  {wrong} {whole_s}")
        else:
            held += 1
    random_worlds.say(f"{held} held, {failed} failed, {refused} refused, {moved} decided otherwise")


if __name__ == "__main__":
    words = sys.argv[1:]
    hunt(int(words[0]), int(words[1]) if len(words) > 1 else 0, words[2] if len(words) > 2 else "plain")
