"""A plug-in in a file of one's own: `./mine.py` or `./mine.py:Class`, wherever a policy or a scheduler is named.

The file is one module: what decides a run's numbers is then its text, of which `run_id` holds a digest.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, TypeVar

from sim.base import digests
from sim.base.errors import BadInput, did_you_mean
from sim.base.files import read_text

MAX_BYTES = 1024 * 1024
NAMED = re.compile(r"(?P<path>.*\.py)(?::(?P<kind>\w+))?")
T = TypeVar("T")
PREFIX = "moesim_own_file_"  # of the modules' names: no file of one's own stands in for an installed module


class OwnFile(NamedTuple):
    """Where a plug-in's class was read from, and the digest of what was read."""

    path: Path
    sha256: str


class Sort(NamedTuple):
    """A sort of plug-in.

    what: its word, `policy`. many: of several. takes: what its option takes, for whoever misspells a file. rule: what
    makes a class one. has: the classes of a module that are.
    """

    what: str
    many: str
    takes: str
    rule: str
    has: Callable[[ModuleType], dict[str, type]]


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
        raise BadInput(f"{sort.what}, got {name!r}: {told} ({sort.takes})") from None
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


def classes_in(module: ModuleType, base: type[T]) -> dict[str, type[T]]:
    """Class name -> plug-in, of those that a module, or a package's own modules, define: they derive from `base`, and
    have a `name`."""
    return {
        title: value
        for title, value in inspect.getmembers(module, inspect.isclass)
        if issubclass(value, base)
        and bool(getattr(value, "name", None))
        and f"{value.__module__}.".startswith(f"{module.__name__}.")
    }


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
