"""Routers, found by the name of their file: a newcomer is one file here, with one class of that name."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from sim.base.errors import BadInput, did_you_mean
from sim.workload.router import Router

DEFAULT = "round_robin"


def routers() -> tuple[str, ...]:
    """Names of those that there are."""
    return tuple(info.name for info in pkgutil.iter_modules(__path__))


@cache
def find(name: str) -> type[Router]:
    """The router of that name.

    Raises:
        BadInput: no such router, with the nearest name.
    """
    if name not in routers():
        raise BadInput(f"--router, got {name!r}: no such router; {did_you_mean(name, routers())}")
    module = importlib.import_module(f"{__name__}.{name}")
    found = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Router)]
    return next(kind for kind in found if kind.name == name)
