"""Find policies: every file of `policies/`, and third-party packages under the entry point `moesim.policies`."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from functools import cache
from importlib.metadata import entry_points

from sim.api import Policy
from sim.errors import BadInput, did_you_mean

GROUP = "moesim.policies"


def _classes(module_name: str) -> list[type[Policy]]:
    module = importlib.import_module(module_name)
    return [
        value
        for _, value in inspect.getmembers(module, inspect.isclass)
        if issubclass(value, Policy) and value.name and value.__module__ == module.__name__
    ]


def policies() -> dict[str, type[Policy]]:
    """Name -> class of every policy found, sorted by name; what could not be loaded is in `unusable`."""
    return _scan()[0]


def unusable() -> dict[str, str]:
    """Entry point -> why its third-party policy cannot be used. Others go on without it."""
    return _scan()[1]


@cache
def _scan() -> tuple[dict[str, type[Policy]], dict[str, str]]:
    import policies as package

    found: dict[str, type[Policy]] = {}
    for info in pkgutil.iter_modules(package.__path__):
        if not info.name.startswith("_"):
            for kind in _classes(f"policies.{info.name}"):
                assert kind.name not in found, f"two policies of this package are named {kind.name}"
                found[kind.name] = kind
    wrong: dict[str, str] = {}
    for entry in entry_points(group=GROUP):
        try:
            kind = entry.load()
        except Exception as error:  # a third party's import may fail in any way
            wrong[entry.name] = (
                f"policy package {entry.value!r}, got {type(error).__name__} ({error}) on import: "
                "repair or uninstall that package"
            )
            continue
        if not (inspect.isclass(kind) and issubclass(kind, Policy) and kind.name):
            wrong[entry.name] = f"entry point {entry.name} = {entry.value}: must name a sim.api.Policy with a name"
        elif found.setdefault(kind.name, kind) is not kind:
            wrong[entry.name] = (
                f"policy name {kind.name!r}, got it from {found[kind.name].__module__} and again from "
                f"{kind.__module__}: names are unique; rename the latter"
            )
    return dict(sorted(found.items())), wrong


def find(name: str) -> type[Policy]:
    """The policy of that name or alias, in any spelling (`LRU`, `fine-moe`).

    Raises:
        BadInput: no such policy, with the nearest name; or its package cannot be used, with the reason.
    """
    known = policies()
    if name in known:
        return known[name]
    aliases = {alias: kind for kind in known.values() for alias in kind.aliases}
    if name in aliases:
        return aliases[name]
    spelt = {_plain(other): kind for other, kind in (*aliases.items(), *known.items())}
    if _plain(name) in spelt:
        return spelt[_plain(name)]
    if name in unusable():
        raise BadInput(unusable()[name])
    raise BadInput(f"policy, got {name!r}: no such policy; {did_you_mean(name, [*known, *aliases])}")


def _plain(name: str) -> str:
    """Case and punctuation do not matter, as in the names of hardware and models."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
