"""Plug-ins: installed ones by the names of their files, and those of a file of one's own, `./mine.py` or
`./mine.py:Class`, wherever a policy, a scheduler or a router is named.

A user's file is one module: what decides a run's numbers is then its text, of which `run_id` holds a digest.
"""

from __future__ import annotations

import importlib.util
import inspect
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from sim.base import digests
from sim.base.errors import BadInput, did_you_mean
from sim.base.files import read_text

MAX_BYTES = 1024 * 1024
NAMED = re.compile(r"(?P<path>.*\.py)(?::(?P<kind>\w+))?")
PREFIX = "moesim_own_file_"  # of the modules' names: no file of one's own stands in for an installed module


class OwnFile(NamedTuple):
    """Where a plug-in's class was read from, and the digest of what was read."""

    path: Path
    sha256: str


class Sort(NamedTuple):
    """A sort of plug-in.

    what: its word, `policy`. many: of several. rule: what makes a class one. base: what one derives from, which is
    imported when one is looked for.
    """

    what: str
    many: str
    rule: str
    base: Callable[[], type]

    def has(self, module: ModuleType) -> dict[str, type]:
        """Class name -> plug-in, of those that a module, or a package's own modules, define: they have a `name`."""
        return {
            title: value
            for title, value in inspect.getmembers(module, inspect.isclass)
            if issubclass(value, self.base())
            and bool(getattr(value, "name", None))
            and f"{value.__module__}.".startswith(f"{module.__name__}.")
        }


_FILES: dict[str, OwnFile] = {}  # module name -> its file


def is_file(name: str) -> bool:
    """Whether a plug-in's name is that of a file."""
    return NAMED.fullmatch(name) is not None


def whole(name: str) -> str:
    """The name with its path made absolute, so that it works from any folder; an installed plug-in's as it is."""
    found = NAMED.fullmatch(name)
    if found is None:
        return name
    return f"{Path(found['path']).expanduser().resolve()}{':' + found['kind'] if found['kind'] else ''}"


def read_from(kind: type) -> OwnFile | None:
    """The file that a class was loaded from; None for one that is installed."""
    return _FILES.get(kind.__module__)


def load(name: str, sort: Sort) -> type:
    """The plug-in of a file.

    Raises:
        BadInput: the file cannot be read or imported (with file, line and reason), or it holds no such plug-in, or
            several and none of them is named.
    """
    found = NAMED.fullmatch(name)
    assert found is not None
    path = Path(found["path"]).expanduser()
    try:
        text = read_text(path, MAX_BYTES)
    except BadInput as error:
        told = str(error).removeprefix(str(path)).lstrip(":, ")
        takes = f"--{sort.what} takes a file, or a name that `moesim {sort.many}` lists"
        raise BadInput(f"{sort.what}, got {name!r}: {told} ({takes})") from None
    try:
        kinds = sort.has(_module(path.resolve(), digests.of_text(text)))
    except ImportError as error:
        raise BadInput(f"{sort.what}, got {error}; correct the file") from None
    if found["kind"] is not None:
        if found["kind"] not in kinds:
            raise BadInput(
                f"{sort.what}, got {name!r}: no {sort.what} of that class in the file; "
                f"{did_you_mean(found['kind'], kinds) if kinds else sort.rule}"
            )
        return kinds[found["kind"]]
    if len(kinds) != 1:
        rule = f"it holds {len(kinds)} {sort.many}; name one, {path}:{next(iter(kinds))}" if kinds else sort.rule
        raise BadInput(f"{sort.what}, got {name!r}: {rule}")
    return next(iter(kinds.values()))


def names_in(package: str) -> tuple[str, ...]:
    """Names of those that are installed, without importing any: modules and packages of a folder of ours."""
    found = pkgutil.iter_modules(importlib.import_module(package).__path__)
    return tuple(info.name for info in found if not info.name.startswith("_"))


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


@cache
def _module(path: Path, sha256: str) -> ModuleType:
    """What a file defines. Raises ImportError, with file, line and reason."""
    name = f"{PREFIX}{path.stem}_{sha256[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and docstrings look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        why = failure(error)  # begins with the file, unless another one that it imports gave up
        raise ImportError(why if why.startswith(f"{path}:") else f"{str(path)!r}: {why}") from None
    _FILES[name] = OwnFile(path, sha256)
    return module


def failure(error: BaseException) -> str:
    """What an import ended with: `FILE:LINE: SyntaxError: invalid syntax`."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen importlib")]
    where = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
    return f"{where}{type(error).__name__}: {error}"
