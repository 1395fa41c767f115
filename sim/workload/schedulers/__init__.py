"""Schedulers, found by the name of their file: a newcomer is one file here, with one class of that name."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from sim.base.errors import BadInput, did_you_mean
from sim.workload.scheduler import Scheduler

DEFAULT = "fcfs"


def schedulers() -> tuple[str, ...]:
    """Names of those that there are."""
    return tuple(info.name for info in pkgutil.iter_modules(__path__))


@cache
def find(name: str) -> type[Scheduler]:
    """The scheduler of that name.

    Raises:
        BadInput: no such scheduler, with the nearest name.
    """
    if name not in schedulers():
        raise BadInput(f"--scheduler, got {name!r}: no such scheduler; {did_you_mean(name, schedulers())}")
    module = importlib.import_module(f"{__name__}.{name}")
    found = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Scheduler)]
    return next(kind for kind in found if kind.name == name)
