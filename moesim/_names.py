"""Six packages lie beside this one under names that others use too.

A `sim.py`, `policies/` or `traces/` of a user's own, beside a script or notebook, comes before them on `sys.path`, and
in `sys.modules` where it was imported first.

From `claim` on, the names mean the packages that were installed with this one. What these have not is looked up in the
user's of the same name: `sim.my_function` and `from policies.mine import Mine` go on working, whichever was imported
first. Only a name that both have means ours. Nothing of `sim` is imported here.
"""

from __future__ import annotations

# The first that a command imports, before it hears Ctrl-C: so it imports only what Python has loaded by then.
import importlib
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

NAMES = ("sim", "policies", "traces", "hwprofiles", "calibrate", "reports")
ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

_displaced: dict[str, ModuleType] = {}  # a user's modules that had the names before


class _Ours:
    """Finds the packages of `ROOT` first."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, [ROOT]) if name in NAMES else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    """Loads one of the packages, and lets it ask the user's module for what neither it nor its folder has."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)

        def theirs(name: str) -> object:
            ours = PathFinder.find_spec(f"{module.__name__}.{name}", module.__path__)
            other = None if name.startswith("__") or ours is not None else _their_module(module.__name__)
            if other is None:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            return getattr(other, name)

        vars(module).setdefault("__getattr__", theirs)


class _Theirs:
    """Finds last, in the user's folders, a submodule that our package of that name has not."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        top, *rest = name.split(".")
        if top not in NAMES or not rest:
            return None
        return PathFinder.find_spec(name, [os.path.join(folder, top, *rest[:-1]) for folder in _folders()])


def _folders() -> list[str]:
    """Where the user's modules are looked for: `sys.path` without the folder of our packages."""
    return [folder for folder in sys.path if os.path.realpath(folder) != ROOT]


def _their_module(name: str) -> ModuleType | None:
    """The user's module of one of our names, run when something of it is first asked for; None where there is none."""
    if name not in _displaced:
        spec = PathFinder.find_spec(name, _folders())
        if spec is None or spec.origin is None or spec.loader is None:
            return None
        from importlib.util import module_from_spec

        module = _displaced[name] = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del _displaced[name]
            raise
    return _displaced[name]


def claim() -> None:
    """Let the names mean our packages. Called twice, the second does nothing."""
    if any(isinstance(finder, _Ours) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Ours())
    sys.meta_path.append(_Theirs())
    for name in NAMES:
        found = sys.modules.get(name)
        if found is not None and not _is_ours(found):
            _displaced[name] = found
            for other in [key for key in sys.modules if key.startswith(f"{name}.")]:
                if PathFinder.find_spec(other, [os.path.join(ROOT, *other.split(".")[:-1])]) is not None:
                    del sys.modules[other]  # we have one of that name
            del sys.modules[name]
            importlib.import_module(name)


def _is_ours(module: ModuleType) -> bool:
    spec = module.__spec__
    return spec is not None and spec.origin is not None and os.path.realpath(spec.origin).startswith(ROOT + os.sep)
