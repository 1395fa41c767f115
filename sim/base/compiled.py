"""Whether this process runs machine code: all modules that have a `.pxd` beside them, or none of them.

A build may compile those modules (`hatch_build.py`); the same bits come out either way. They cannot be mixed, since
compiled modules share the layout of their objects. So the source is taken where `MOESIM_PURE` asks for it, and in a
checkout whose sources are not, to the byte, those that were compiled.

A policy is an ordinary class whichever way its module runs, so each module is chosen by itself: what a build compiled
bears the digest of its source in its name, and is taken for a source of that digest. An edited one runs as it is.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT / "base" / "_shared.c"  # compiled with the others, which import it; no source of it is kept
STAMP = ROOT / "compiled.sha256"  # the `digest` of what lies compiled in a checkout; `hatch_build.py` puts it there
SEEN = STAMP.with_suffix(".seen")  # sizes and times of the sources that had that digest: unchanged, they are not read
DIGITS = 16  # of a source's SHA-256, in the name of what was compiled from it (`hatch_build.py`)

outdated = False
"""Whether this process runs sources that were edited after they had been compiled; `choose` finds out."""


class SourceFinder:
    """Finds the source of modules that may lie there compiled as well."""

    def __init__(self, sources: dict[str, Path]) -> None:
        self.sources = sources

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        source = self.sources.get(fullname)
        return None if source is None else spec_from_file_location(fullname, source)


class PolicyFinder:
    """Finds what a policy's source was compiled to, as it lies there now."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if not package.startswith("policies"):
            return None
        source = Path(*(path or ())[:1], f"{name}.py")
        binary = compiled_policy(source)
        if binary is None:
            return None
        return spec_from_file_location(fullname, source, loader=PolicyLoader(fullname, str(binary)))


class PolicyLoader(ExtensionFileLoader):
    """Runs machine code in a module whose file is its source: there is what a reader, or `inspect`, looks for."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = super().create_module(ModuleSpec(spec.name, self, origin=self.path))
        module.__file__ = spec.origin
        return module


def compiled_policy(source: Path) -> Path | None:
    """What was compiled from a policy's source, `NAME.DIGEST.SUFFIX` beside it; None where nothing was."""
    if not source.is_file():
        return None
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:DIGITS]
    binary = source.with_name(f"{source.stem}.{digest}{EXTENSION_SUFFIXES[0]}")
    return binary if binary.exists() else None


def sources() -> dict[str, Path]:
    """Modules that a build compiles, and their source."""
    found = {}
    for layout in sorted(ROOT.glob("*/*.pxd")):
        source = layout.with_suffix(".py")
        if source.exists():  # a .pxd alone holds C for others
            found[".".join((ROOT.name, *source.relative_to(ROOT).with_suffix("").parts))] = source
    return found


def binary_of(source: Path) -> Path | None:
    """What was compiled from a source, if anything was."""
    for suffix in EXTENSION_SUFFIXES:
        binary = source.with_suffix(suffix)
        if binary.exists():
            return binary
    return None


def _decide() -> Iterator[Path]:
    """All that decides what typed modules are compiled to: the builder, their layouts, their sources."""
    layouts = sorted(ROOT.glob("*/*.pxd"))
    for path in (ROOT.parent / "hatch_build.py", *(each for one in layouts for each in (one, one.with_suffix(".py")))):
        if path.exists():  # a .pxd alone holds C for others
            yield path


def digest() -> str:
    """SHA-256 of all that decides what typed modules are compiled to."""
    found = hashlib.sha256()
    for path in _decide():
        text = path.read_bytes()
        found.update(f"{path.relative_to(ROOT.parent).as_posix()} {len(text)}\n".encode() + text)
    return found.hexdigest()


def stale(of: dict[str, Path]) -> bool:
    """Whether a checkout's sources are others than what was compiled, or not all of them were."""
    binaries = [binary_of(source) for source in (*of.values(), SHARED)]
    if not any(binaries):
        return False  # nothing is compiled: there is nothing to choose
    if not all(binaries):
        return True
    if not (ROOT.parent / "pyproject.toml").exists():
        return False  # installed: all of it is from one build
    if not STAMP.exists():
        return True
    stamp = STAMP.read_text(encoding="ascii")
    stats = ((path, path.stat()) for path in _decide())
    now = "".join([stamp, *(f"\n{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in stats)])
    if SEEN.exists() and SEEN.read_text(encoding="utf-8", errors="replace") == now:
        return False
    if stamp != digest():
        return True
    with suppress(OSError):  # a checkout that may not be written to is read each time
        SEEN.write_text(now, encoding="utf-8")
    return False


def choose() -> None:
    """Decide once, before the first of these modules is imported."""
    global outdated  # found out before a command runs, told by it
    of, pure = sources(), os.environ.get("MOESIM_PURE", "0") not in ("", "0")
    outdated = not pure and stale(of)
    if pure or outdated:
        sys.meta_path.insert(0, SourceFinder(of))
    if not pure:
        sys.meta_path.insert(0, PolicyFinder())
