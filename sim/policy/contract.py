"""What a policy's class declares, held to the contract before it runs: a run and `moesim conformance` ask here alike.

What only a run shows (a level read without being declared, an illegal decision) the engine refuses, in both. What takes
several runs to see (chance, the future, the clock) is found by `moesim conformance` alone.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import re
import sys
from collections import deque
from functools import cache, lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from sim.base.errors import BadInput, did_you_mean
from sim.base.plug_ins import read_from
from sim.policy.api import HOOKS, TRAITS, Policy

if TYPE_CHECKING:
    from collections.abc import Iterator

NEAR = 0.85
"""How alike a method's name is to a hook's (`difflib`) before it is taken for that, misspelt."""
PREDICTORS = frozenset({"torch"})
"""Imported by a policy that names it in `predicts_with`, and by no other."""
# No clock, no simulation kernel, no threads, no unseeded chance, no network, no engine.
FORBIDDEN = (
    frozenset(
        {
            "time",
            "simpy",
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
    | PREDICTORS
)
PACKAGED: WeakSet[type[Policy]] = WeakSet()
"""Policies of installed packages, as the registry finds them."""
EXAMPLES = {"traits": "cpu", "needs": "experts", "predicts_with": "torch"}


def check_declared(kind: type[Policy]) -> None:
    """Hold a class to all of the contract that can be read off it; each class once.

    Raises:
        BadInput: the first thing that is wrong, with the way out.
    """
    one: Any = kind  # mypy takes no class of policies for hashable
    if (wrong := _first_wrong(one)) is not None:
        raise BadInput(wrong)


@cache
def _first_wrong(kind: Any) -> str | None:
    return next(wrong_words(kind), None) or next(wrong_imports(kind), None)


def wrong_words(kind: type[Policy]) -> Iterator[str]:
    """Everything that is wrong with a class's name, traits, needs, parameters and methods, one line each."""
    from traces.format.layout import LEVELS  # with safetensors, which listing policies does without

    who = f"policy {kind.name}"
    if re.fullmatch(r"[a-z][a-z0-9_]*", kind.name) is None:
        yield f"policy, got name {kind.name!r}: lower-case letters, digits and _, beginning with a letter; rename it"
    for field, example in EXAMPLES.items():
        if not isinstance(getattr(kind, field), set | frozenset):
            yield f"{who}, got {field} {getattr(kind, field)!r}: a set of words; write frozenset({{{example!r}}})"
            return
    for trait in sorted(kind.traits - set(TRAITS), key=str):
        yield f"{who}, got trait {trait!r}: no such trait; {did_you_mean(str(trait), TRAITS)}"
    for need in sorted(kind.needs - set(LEVELS), key=str):
        yield f"{who}, got need {need!r}: no such level of a trace; {did_you_mean(str(need), LEVELS)}"
    for module in sorted(kind.predicts_with - PREDICTORS, key=str):
        yield f"{who}, got predicts_with {module!r}: {did_you_mean(str(module), PREDICTORS)}; others need no word"
    if "experts" not in kind.needs:
        yield f"{who}, got needs {sorted(map(str, kind.needs))}: every policy needs 'experts'; add it"
    if "lossy" in kind.traits and not kind.needs & {"weights", "scores"}:
        yield (
            f"{who}, got trait 'lossy' with needs {sorted(map(str, kind.needs))}: without `weights` or `scores` nobody "
            "can tell what gate mass it kept; add one of them to `needs`"
        )
    yield from _wrong_params(kind)
    yield from misspelt(kind)


def _wrong_params(kind: type[Policy]) -> Iterator[str]:
    for param in kind.params:
        try:
            if (taken := param.check(param.default, kind.name)) != param.default:
                where = f"parameter {kind.name}.{param.name}"
                yield f"{where}, got default {param.default!r}: it would be taken as {taken!r}; write that"
        except BadInput as error:
            yield f"{error}; that is its own default"


def misspelt(kind: type[Policy]) -> Iterator[str]:
    """Methods that nobody calls, since a hook is called nearly so."""
    bases = [base for base in kind.__mro__ if issubclass(base, Policy)]
    methods = {name for base in bases for name, value in vars(base).items() if inspect.isfunction(value)} - HOOKS
    for method in sorted(name for name in methods if not name.startswith("_")):
        if near := difflib.get_close_matches(method, sorted(HOOKS), 1, NEAR):
            yield (
                f"policy {kind.name}, got a method {method!r}: no hook of that name, so nobody would call it; did you "
                f"mean {near[0]!r}? The name of a helper begins with _"
            )


def wrong_imports(kind: type[Policy]) -> Iterator[str]:
    """Imports that no policy may make, wherever they stand in its module and in what that imports of `policies`.

    The module of a class that was given in Python is a program, which may import what it likes: there the class's own
    lines count.
    """
    given = kind not in PACKAGED and read_from(kind) is None and not kind.__module__.startswith("policies.")
    seen: set[str] = set()
    waiting = [kind.__module__]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        own = kind if given and name == kind.__module__ else None
        for imported, line in sorted(imports_of(_module(name), own).items()):
            word = next((one for one in FORBIDDEN if imported == one or imported.startswith(f"{one}.")), None)
            if word is not None and word not in kind.predicts_with:
                yield f"policy {kind.name}, got an import of {imported} ({_file(name)}:{line}): {_way_out(word)}"
                break
            if imported.startswith("policies.") and _is_module(imported):
                waiting.append(imported)


def _way_out(word: str) -> str:
    if word in PREDICTORS:
        return f"a policy that predicts with it says so; add predicts_with = frozenset({{{word!r}}}) to the class"
    if word in ("time", "datetime"):
        return "a policy reads no clock; leave it out, and take what operations cost from view.prices"
    return "a policy decides and returns, by itself and the same each time; leave it out"


def _file(module: str) -> str:
    return str(getattr(sys.modules[module], "__file__", None) or module)


def _module(name: str) -> ModuleType | None:
    """None of a class whose code was run without a module, as in a console."""
    if name in sys.modules:
        return sys.modules[name]
    return importlib.import_module(name) if _is_module(name) else None


def _is_module(name: str) -> bool:
    """Whether that is a module, rather than a name in one."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def imports_of(module: ModuleType | None, used_by: type | None = None) -> dict[str, int]:
    """Every module (and `module.name`) its source imports, but for type checking, by the line of the import; none
    where there is no source, as of a class that was typed at a prompt.

    Args:
        used_by: a class of it, whose own lines make the import or name what was imported; None: all of the module.
    """
    try:
        source = "" if module is None else inspect.getsource(module)
        return dict(_imports_in(source, "" if used_by is None else used_by.__name__))
    except (OSError, TypeError, SyntaxError):
        return {}


@lru_cache(maxsize=256)  # policies share modules
def _imports_in(source: str, used_by: str) -> dict[str, int]:
    nodes = [*_walked(ast.parse(source), names=bool(used_by))]
    own: set[ast.AST] = set(nodes)
    if used_by:
        classes = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == used_by]
        own = {node for one in classes for node in ast.walk(one)}
    named = {node.id for node in own if isinstance(node, ast.Name)}
    found: dict[str, int] = {}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound = {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
            if node in own or bound & named:
                found |= dict.fromkeys(_imported_by(node), node.lineno)
    return found


def _walked(tree: ast.AST, names: bool) -> Iterator[ast.AST]:
    """Its nodes, but for what only type checkers read; without `names` no expressions, in which nothing is imported."""
    waiting = deque([tree])
    while waiting:
        node = waiting.popleft()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
        yield node
        waiting.extend(child for child in ast.iter_child_nodes(node) if names or not isinstance(child, ast.expr))


def _imported_by(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not node.module or node.level:
        return []
    return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
