"""Routers, found by the name of their file: a newcomer is one file here, with one class of that name; or one of the
user's own (`--router ./mine.py`)."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import TYPE_CHECKING

from sim.base.errors import BadInput, did_you_mean
from sim.base.own_file import Sort, classes_in, is_file, load

if TYPE_CHECKING:
    from types import ModuleType

    from sim.workload.router import Router

DEFAULT = "round_robin"
NO_ROUTER = "a router is a class derived from sim.workload.router.Router with a `name`; see docs/replicas.md"


def routers() -> tuple[str, ...]:
    """Names of those that are installed, without importing any."""
    return tuple(info.name for info in pkgutil.iter_modules(__path__))


def find(name: str) -> type[Router]:
    """The router of that name, or of a file (`./mine.py:Class`).

    Raises:
        BadInput: no such router, with the nearest name; or its file cannot be used, with the reason.
    """
    if is_file(name):
        kind: type[Router] = load(name, SORT)
        if not isinstance(kind.name, str):
            raise BadInput(f"router, got {name!r} with name {kind.name!r}: a word; correct the file")
        from sim.workload.router import Router

        if kind.choose is Router.choose:
            raise BadInput(f"router, got {name!r} without choose: it says who goes where; see docs/replicas.md")
        return kind
    if name not in routers():
        raise BadInput(f"--router, got {name!r}: no such router; {did_you_mean(name, routers())}")
    return _installed(name)


@cache
def _installed(name: str) -> type[Router]:
    found = routers_in(importlib.import_module(f"{__name__}.{name}"))
    return next(kind for kind in found.values() if kind.name == name)


def routers_in(module: ModuleType) -> dict[str, type[Router]]:
    from sim.workload.router import Router

    return classes_in(module, Router)


SORT = Sort(
    "router",
    "routers",
    f"--router takes a file, or one of {', '.join(routers())}",
    NO_ROUTER,
    routers_in,
)
