"""Rules about the source: what a policy declares and what it must not import."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from types import ModuleType
from typing import TYPE_CHECKING

from sim.conformance.world import World, require
from sim.policy.api import TRAITS
from traces.format.layout import LEVELS

if TYPE_CHECKING:
    pass

# No clock, no simulation kernel, no tensors, no threads, no unseeded chance, no files, no network.
FORBIDDEN = frozenset(
    {
        "time",
        "simpy",
        "torch",
        "datetime",
        "threading",
        "asyncio",
        "multiprocessing",
        "secrets",
        "socket",
        "subprocess",
        "sim.machine.simulated",
        "sim.engine.engine",
        "sim.engine.copies",
        "sim.engine.run_loop",
        "sim.run",
    }
)


def check_declares_itself(world: World) -> None:
    """Name, title, source and docstrings are there; traits and needs are known words; parameters are documented."""
    kind = world.kind
    require(re.fullmatch(r"[a-z][a-z0-9_]*", kind.name) is not None, f"name {kind.name!r}: lower case, digits, _")
    require(bool(kind.title.strip()), "no title")
    require(len(kind.source.strip()) >= 8, f"source {kind.source!r}: say where the policy is published")
    require(bool((kind.__doc__ or "").strip()), "the class has no docstring")
    require(bool((inspect.getmodule(kind).__doc__ or "").strip()), "its module has no docstring")
    unknown = sorted(kind.traits - set(TRAITS))
    require(not unknown, f"traits {unknown}: known are {sorted(TRAITS)}")
    known = "experts" in kind.needs and kind.needs <= set(LEVELS)
    require(known, f"needs {sorted(kind.needs)}: `experts` and any of {sorted(LEVELS)}")
    told = "lossy" not in kind.traits or bool(kind.needs & {"weights", "scores"})
    require(told, "a lossy policy needs `weights` or `scores`, or nobody can tell what gate mass it kept")
    names = [param.name for param in kind.params]
    require(len(names) == len(set(names)), f"parameters {names}: a name twice")
    for param in kind.params:
        require(len(param.doc.strip()) >= 8, f"parameter {param.name} says not what it is")
        require(param.name.isidentifier(), f"parameter {param.name!r} is not an identifier")


def check_imports_no_clock(world: World) -> None:
    """Its source (and that of what it imports of `policies`) imports no time, simpy, torch, engine or machine."""
    seen: set[str] = set()
    waiting = [world.kind.__module__]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        module = importlib.import_module(name)
        for imported in imports_of(module):
            for word in FORBIDDEN:
                require(imported != word and not imported.startswith(f"{word}."), f"{name} imports {imported}")
            if imported.startswith("policies.") and is_module(imported):
                waiting.append(imported)


def is_module(name: str) -> bool:
    """Whether that is a module, rather than a name in one."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def imports_of(module: ModuleType) -> set[str]:
    """Every module (and `module.name`) its source imports, wherever the import stands, but for type checking."""
    found: set[str] = set()
    tree = ast.parse(inspect.getsource(module))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


CHECKS = (check_declares_itself, check_imports_no_clock)
