"""Rules about the source: what a policy declares, what it must not import, and how it is described."""

from __future__ import annotations

import inspect

from sim.conformance.world import ALL, HALF, World, advise, require
from sim.policy.contract import wrong_imports, wrong_words


def check_declares_itself(world: World) -> None:
    """Name, traits, needs, parameters and methods are as the contract has them; a run refuses what is not."""
    wrong = [*wrong_words(world.kind)]
    require(not wrong, "; ".join(wrong))


def check_imports_no_clock(world: World) -> None:
    """Its source, and that of what it imports of `policies`, imports no clock, thread, engine or machine; torch where
    `predicts_with` names it; a run refuses others."""
    wrong = [*wrong_imports(world.kind)]
    require(not wrong, "; ".join(wrong))


def check_is_described(world: World) -> None:
    """Title, source, docstrings and what each parameter is: advice for whoever publishes it, no run needs them."""
    kind = world.kind
    lacks = [
        "no title" if not kind.title.strip() else "",
        f"source {kind.source!r}: say where the policy is published" if len(kind.source.strip()) < 8 else "",
        "the class has no docstring" if not (kind.__doc__ or "").strip() else "",
        "its module has no docstring" if not (inspect.getmodule(kind).__doc__ or "").strip() else "",
        *(f"parameter {param.name} says not what it is" for param in kind.params if len(param.doc.strip()) < 8),
    ]
    advise(not any(lacks), "; ".join(filter(None, lacks)))


def check_runs(world: World) -> None:
    """It runs where what it declares is there and nothing else, with room for half of the experts and for all."""
    for experts in (world.room(HALF), ALL):
        world.run(experts)


CHECKS = (check_declares_itself, check_imports_no_clock, check_is_described, check_runs)
