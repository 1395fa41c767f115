"""A policy in a file of one's own (`sim.base.plug_ins`), or given as a class: which text its runs rest on."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from types import CodeType
from weakref import WeakKeyDictionary

from sim.base.digests import of_text
from sim.base.errors import BadInput
from sim.base.files import read_text
from sim.base.plug_ins import MAX_BYTES, OwnFile, Sort, read_from
from sim.base.plug_ins import load as load_plug_in
from sim.policy.api import Policy
from sim.policy.contract import misspelt

LEADING = re.compile(r"\s*([^=]*?\.py(?::\w+)?)(?:\s+(.*))?", re.DOTALL)
NO_POLICY = "a policy is a class derived from sim.policy.Policy with a `name`; see docs/policies.md"

_GIVEN: WeakKeyDictionary[type[Policy], OwnFile | None] = WeakKeyDictionary()  # classes given -> theirs


def split(item: str) -> list[str]:
    """`./my file.py:Mine rank=3` as name and parameters; installed policies have no spaces in their names."""
    found = LEADING.fullmatch(item)
    return item.split() if found is None else [found[1], *(found[2] or "").split()]


def file_of(kind: type[Policy]) -> OwnFile | None:
    """The file that a policy was named by, or given from as a class; None for one that is installed, or has none."""
    return _GIVEN.get(kind) or read_from(kind)


def without_file(kind: type[Policy]) -> bool:
    """Whether a policy was given as a class whose text nobody can look up: typed at a prompt, or changed since."""
    return kind in _GIVEN and _GIVEN[kind] is None


def given(kind: type[Policy]) -> str:
    """Take a class that is not installed as a policy; what a specification calls it: `FILE.py:Class`, or its name.

    The digest is that of its file where the file still says what runs.
    """
    if kind not in _GIVEN and read_from(kind) is None:
        _refuse_misspelt(kind)
        _GIVEN[kind] = _source_of(kind)
    file, title = file_of(kind), kind.__qualname__
    return kind.name if file is None or not title.isidentifier() else f"{file.path}:{title}"


def _source_of(kind: type[Policy]) -> OwnFile | None:
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
    return OwnFile(path.resolve(), of_text(text)) if all(code in stored for code in running) else None


def _codes(code: CodeType) -> set[CodeType]:
    """Every function's code in a module's, however deep."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return {*inner, *(found for child in inner for found in _codes(child))}


def load(name: str) -> type[Policy]:
    """The policy of a file. Raises BadInput as `sim.base.plug_ins.load` does, and for a hook that is misspelt."""
    kind: type[Policy] = load_plug_in(name, SORT)
    _refuse_misspelt(kind)
    return kind


def _refuse_misspelt(kind: type[Policy]) -> None:
    for wrong in misspelt(kind):
        raise BadInput(wrong)


SORT = Sort("policy", "policies", NO_POLICY, lambda: Policy)
