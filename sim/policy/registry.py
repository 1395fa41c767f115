"""Find policies: `policies/`, third-party packages under the entry point `moesim.policies`, own files.

A file of `policies/` or a package that cannot be imported takes its own policy away and no other.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from stat import S_ISDIR
from types import ModuleType
from typing import Any, cast

from sim.base.errors import BadInput, did_you_mean
from sim.base.interrupts import pressed
from sim.base.paths import mode_of
from sim.base.plug_ins import failure, is_file, names_in
from sim.policy.api import Policy
from sim.policy.contract import PACKAGED
from sim.policy.policy_file import NO_POLICY, SORT, given, load, without_file

GROUP = "moesim.policies"


def policies() -> dict[str, type[Policy]]:
    """Name -> class of every policy found, sorted by name; what could not be loaded is in `unusable`."""
    return _scan()[0]


def unusable() -> dict[str, str]:
    """Entry point, or file of `policies/` -> why its policy cannot be used. Others go on without it."""
    return _scan()[1]


def _in(module: ModuleType) -> Iterable[type[Policy]]:
    """The policies that a module, or a package's own modules, define."""
    return SORT.has(module).values()


@cache
def _by_file(name: str) -> type[Policy] | None:
    """The policy that the file of its own name holds; None sends the reader to the scan, which says what is wrong.

    A run names one policy, and importing all of them takes longer than a short run.
    """
    if name not in names_in("policies"):
        return None
    try:
        module = importlib.import_module(f"policies.{name}")
    except BaseException as error:
        if pressed(error):
            raise
        return None
    return next((kind for kind in _in(module) if kind.name == name), None)


@cache
def _scan() -> tuple[dict[str, type[Policy]], dict[str, str]]:
    from importlib.metadata import entry_points

    found: dict[str, type[Policy]] = {}
    wrong: dict[str, str] = {}
    for name in names_in("policies"):
        try:
            module = importlib.import_module(f"policies.{name}")
        except BaseException as error:  # somebody is writing it, and it may fail in any way
            if pressed(error):
                raise
            wrong[name] = f"policy {name!r}, got {failure(error)}: correct that file"
            continue
        for kind in _in(module):
            if found.setdefault(kind.name, kind) is not kind:
                wrong[name] = _twice(found[kind.name], kind)
    for entry in entry_points(group=GROUP):
        named = f"entry point {entry.name} = {entry.value}"
        try:
            kind = entry.load()
            why = _undeclared(kind)
        except BaseException as error:  # a third party's import, and its classes, may fail in any way
            if pressed(error):
                raise
            wrong[entry.name] = (
                f"policy package {entry.value!r}, got {type(error).__name__} ({error}) on import: "
                "repair or uninstall that package"
            )
            continue
        if why:
            wrong[entry.name] = f"{named}, got {why}; repair or uninstall that package"
            continue
        PACKAGED.add(kind)
        if found.setdefault(kind.name, kind) is not kind:
            wrong[entry.name] = _twice(found[kind.name], kind)
    return dict(sorted(found.items())), wrong


def _undeclared(kind: Any) -> str:
    """What is wrong with what a third party's class says of itself, which lists and tables read; "" for nothing."""
    if not (inspect.isclass(kind) and issubclass(kind, Policy)):
        return f"{type(kind).__name__} {kind!r}: it must name a class derived from sim.policy.Policy, with a name"
    for field, rule, holds in DECLARED:
        value = getattr(kind, field)
        if not holds(value):
            return f"{field} {value!r}: {rule}"
    return ""


def _texts(value: Any) -> bool:
    return all(isinstance(one, str) for one in value)


DECLARED: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("name", "a text that can be printed", lambda v: isinstance(v, str) and v.isprintable() and bool(v.strip())),
    ("title", "a text", lambda v: isinstance(v, str)),
    ("source", "a text", lambda v: isinstance(v, str)),
    ("aliases", "a tuple of texts", lambda v: isinstance(v, tuple | list) and _texts(v)),
    ("from_notes", "True or False", lambda v: isinstance(v, bool)),
    ("traits", "a set of texts", lambda v: isinstance(v, set | frozenset) and _texts(v)),
    ("needs", "a set of texts", lambda v: isinstance(v, set | frozenset) and _texts(v)),
)


def _twice(first: type[Policy], second: type[Policy]) -> str:
    return (
        f"policy name {first.name!r}, got it from {first.__module__} and again from {second.__module__}: names are "
        "unique; rename the latter"
    )


def find(name: str) -> type[Policy]:
    """The policy of that name or alias, in any spelling (`LRU`, `fine-moe`), or of a file (`./mine.py:Class`).

    Raises:
        BadInput: no such policy, with the nearest name; or its file or package cannot be used, with the reason.
    """
    if is_file(name):
        return load(name)
    if (kind := _by_file(name)) is not None:
        return kind
    known = policies()
    if name in known:
        return known[name]
    aliases = {alias: kind for kind in known.values() for alias in kind.aliases}
    if name in aliases:
        return aliases[name]
    spelt = {_plain(other): kind for other, kind in (*aliases.items(), *known.items())}
    if _plain(name) in spelt:
        return spelt[_plain(name)]
    for other, why in unusable().items():
        if _plain(name) == _plain(other):
            raise BadInput(why)
    if ("/" in name or name in (".", "..")) and S_ISDIR(mode_of(Path(name))):
        raise BadInput(f"policy, got {name!r}: a folder; name the file in it, as in --policy ./mine.py")
    first, _, rest = name.partition(" ")
    if "=" in rest and first in (*known, *aliases):
        raise BadInput(
            f"policy, got {name!r}: one run takes a policy's parameters by themselves; write {first!r}, and "
            f"{' '.join(f'--set {one}' for one in rest.split())} (from Python set={{...}})"
        )
    raise BadInput(f"policy, got {name!r}: no such policy; {did_you_mean(name, [*known, *aliases])}")


def name_of(kind: object) -> str:
    """What a specification calls a policy that is given as a class: an installed one's name, else as its file says.

    Raises:
        BadInput: no class of a policy.
    """
    if isinstance(kind, Policy):
        raise BadInput(f"policy, got an instance of {type(kind).__name__}: give the class, and its parameters by set")
    if not (inspect.isclass(kind) and issubclass(kind, Policy) and isinstance(kind.name, str) and kind.name):
        raise BadInput(f"policy, got {kind!r}: {NO_POLICY}")
    from importlib.metadata import entry_points

    theirs = {entry.value for entry in entry_points(group=GROUP)}
    module = kind.__module__.removeprefix("policies.").partition(".")[0]
    known = module in names_in("policies") or f"{kind.__module__}:{kind.__qualname__}" in theirs
    same = known and (_by_file(kind.name) is kind or policies().get(kind.name) is kind)
    return kind.name if same else given(kind)


def name_in_file(kind: object) -> str:
    """`name_of` a class that other processes are to run, too.

    Raises:
        BadInput: no class of a policy, or one whose text is in no file.
    """
    name = name_of(kind)
    if without_file(cast("type[Policy]", kind)):
        raise BadInput(
            f"policy, got {kind!r}: its text is in no file, and other processes have to read it; save it in one"
        )
    return name


def _plain(name: str) -> str:
    """Case and punctuation do not matter, as in the names of hardware and models."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
