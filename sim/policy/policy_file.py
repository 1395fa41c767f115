"""A policy in a file of one's own: `./mine.py` or `./mine.py:Class`, wherever a policy is named.

The file is one module: what decides a run's numbers is then its text, of which `run_id` holds a digest.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import re
import sys
import traceback
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple
from weakref import WeakKeyDictionary

from sim.base.errors import BadInput, did_you_mean
from sim.base.files import read_text
from sim.policy.api import Policy

MAX_BYTES = 1024 * 1024
NAMED = re.compile(r"(?P<path>.*\.py)(?::(?P<kind>\w+))?")
LEADING = re.compile(r"\s*([^=]*?\.py(?::\w+)?)(?:\s+(.*))?", re.DOTALL)
PREFIX = "moesim_policy_file_"  # of the modules' names: no file of one's own stands in for an installed module


class PolicyFile(NamedTuple):
    """Where a policy's class was read from, and the digest of what was read."""

    path: Path
    sha256: str


_FILES: dict[str, PolicyFile] = {}  # module name -> its file
_GIVEN: WeakKeyDictionary[type[Policy], PolicyFile | None] = WeakKeyDictionary()  # classes given -> theirs


def is_file(name: str) -> bool:
    """Whether a policy's name is that of a file."""
    return NAMED.fullmatch(name) is not None


def split(item: str) -> list[str]:
    """`./my file.py:Mine rank=3` as name and parameters; installed policies have no spaces in their names."""
    found = LEADING.fullmatch(item)
    return item.split() if found is None else [found[1], *(found[2] or "").split()]


def whole(name: str) -> str:
    """The name with its path made absolute, so that it works from any folder; an installed policy's as it is."""
    found = NAMED.fullmatch(name)
    if found is None:
        return name
    return f"{Path(found['path']).expanduser().resolve()}{':' + found['kind'] if found['kind'] else ''}"


def file_of(kind: type[Policy]) -> PolicyFile | None:
    """The file that a policy was named by, or given from as a class; None for one that is installed, or has none."""
    return _GIVEN.get(kind) or _FILES.get(kind.__module__)


def without_file(kind: type[Policy]) -> bool:
    """Whether a policy was given as a class whose text nobody can look up: typed at a prompt, or changed since."""
    return kind in _GIVEN and _GIVEN[kind] is None


def given(kind: type[Policy]) -> str:
    """Take a class that is not installed as a policy; what a specification calls it: `FILE.py:Class`, or its name.

    The digest is that of its file where the file still says what runs.
    """
    if kind not in _GIVEN and kind.__module__ not in _FILES:
        _GIVEN[kind] = _source_of(kind)
    file, title = file_of(kind), kind.__qualname__
    return kind.name if file is None or not title.isidentifier() else f"{file.path}:{title}"


def _source_of(kind: type[Policy]) -> PolicyFile | None:
    module = sys.modules.get(kind.__module__)
    path = Path(getattr(module, "__file__", None) or "")
    if path.suffix != ".py":
        return None
    try:
        text = read_text(path, MAX_BYTES)
        stored = _codes(compile(text, str(path), "exec", dont_inherit=True))
    except (BadInput, SyntaxError, ValueError):
        return None
    own = (value for base in kind.__mro__ if base.__module__ == kind.__module__ for value in vars(base).values())
    running = (value.__code__ for value in own if inspect.isfunction(value))
    return PolicyFile(path.resolve(), _digest(text)) if all(code in stored for code in running) else None


def _codes(code: CodeType) -> set[CodeType]:
    """Every function's code in a module's, however deep."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return {*inner, *(found for child in inner for found in _codes(child))}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def load(name: str) -> type[Policy]:
    """The policy of a file.

    Raises:
        BadInput: the file cannot be read or imported (with file, line and reason), or it holds no such policy, or
            several and none of them is named.
    """
    found = NAMED.fullmatch(name)
    assert found is not None
    path = Path(found["path"]).expanduser()
    try:
        text = read_text(path, MAX_BYTES)
    except BadInput as error:
        told = str(error).removeprefix(str(path)).lstrip(":, ")
        raise BadInput(
            f"policy, got {name!r}: {told} (--policy takes a file, or a name that `moesim policies` lists)"
        ) from None
    module = _module(path.resolve(), _digest(text))
    kinds = policies_in(module)
    if found["kind"] is not None:
        if found["kind"] not in kinds:
            raise BadInput(
                f"policy, got {name!r}: no policy of that class in the file; "
                f"{did_you_mean(found['kind'], kinds) if kinds else NO_POLICY}"
            )
        return kinds[found["kind"]]
    if len(kinds) != 1:
        rule = f"it holds {len(kinds)} policies; name one, {path}:{next(iter(kinds))}" if kinds else NO_POLICY
        raise BadInput(f"policy, got {name!r}: {rule}")
    return next(iter(kinds.values()))


NO_POLICY = "a policy is a class derived from sim.policy.Policy with a `name`; see docs/policies.md"


def policies_in(module: ModuleType) -> dict[str, type[Policy]]:
    """Class name -> policy, of those that a module, or a package's own modules, define."""
    return {
        title: value
        for title, value in inspect.getmembers(module, inspect.isclass)
        if issubclass(value, Policy) and value.name and f"{value.__module__}.".startswith(f"{module.__name__}.")
    }


@cache
def _module(path: Path, sha256: str) -> ModuleType:
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
        told = why if why.startswith(f"{path}:") else f"{str(path)!r}: {why}"
        raise BadInput(f"policy, got {told}; correct the file") from None
    _FILES[name] = PolicyFile(path, sha256)
    return module


def failure(error: BaseException) -> str:
    """What an import ended with: `FILE:LINE: SyntaxError: invalid syntax`."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen importlib")]
    where = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
    return f"{where}{type(error).__name__}: {error}"
