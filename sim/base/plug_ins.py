"""Plug-ins of one sort: files of a folder of ours, found by their names, and files of a user's own."""

from __future__ import annotations

import importlib
import pkgutil

from sim.base.errors import BadInput, did_you_mean
from sim.base.own_file import Sort, is_file, load


def names_in(package: str) -> tuple[str, ...]:
    """Names of those that are installed, without importing any."""
    return tuple(info.name for info in pkgutil.iter_modules(importlib.import_module(package).__path__))


def find_in(package: str, name: str, sort: Sort) -> type:
    """The plug-in of that name, or of a file (`./mine.py:Class`).

    Raises:
        BadInput: there is none, with the nearest name; or its file cannot be used, with the reason.
    """
    if is_file(name):
        return load(name, sort)
    known = names_in(package)
    if name not in known:
        raise BadInput(f"--{sort.what}, got {name!r}: no such {sort.what}; {did_you_mean(name, known)}")
    found = sort.has(importlib.import_module(f"{package}.{name}"))
    return next(kind for title, kind in found.items() if getattr(kind, "name", title) == name)
