"""Compile the modules of `sim` that have a .pxd beside them, and some policies; the same results without.

hatchling calls `Compiled` while it builds a wheel or an editable install. A working tree is compiled again in place by

    python hatch_build.py            # needs Cython, setuptools and a C compiler

Either all modules of `sim` are compiled or none: a compiled class can only be extended and read by compiled modules.
Without Cython, a compiler or Python's headers, with MOESIM_PURE=1, or where pre-commit installs a hook, the plain
modules run. A wheel of a tree that is compiled in place already, by this Python and from these very sources, takes what
lies there.

A policy is compiled as it is, without a type, and bears the digest of its source in its name: `sim.base.compiled` takes
it for that source alone. So each stands by itself, and one that was edited runs as it is until it is compiled again.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # in place only
    BuildHookInterface = object  # type: ignore[assignment, misc]

ROOT = Path(__file__).resolve().parent
DIRECTIVES = {
    "language_level": 3,
    "boundscheck": False,
    "wraparound": False,
    "cdivision": True,
    "initializedcheck": False,
    "infer_types": True,
    "annotation_typing": False,
    "binding": True,
    "show_performance_hints": False,
}
# The same bits from every compiler, and as plain Python gives them: no fused multiply-add, no algebra on floats.
# With -O1 a replay runs 0.4 % more instructions than with -O2, and compiling takes a quarter less time.
FLAGS = ("-O1", "-ffp-contract=off", "-fno-fast-math", "-g0", "-w")
FLAGS_MSVC = ("/O2", "/fp:precise")
# The core, and loops over thousands of numbers: several at a time (-O3), where that changes none.
QUICK = {"sim.core.core", *(f"sim.policy.{name}" for name in ("likeness", "path_search", "standings", "vector_search"))}
# Policies whose own Python is much of a replay's time: a tenth of all of it goes (docs/speed.md).
POLICIES = (
    "policies/duoserve/policy.py",
    "policies/hybrimoe/gains.py",
    "policies/importance/cache.py",
    "policies/importance/policy.py",
    "policies/importance/router.py",
    "policies/moepic/policy.py",
    "policies/moepic/cache.py",
    "policies/promoe.py",
)
SHARED = Path("sim", "base", "_shared.c")  # what Cython would write into each typed module, memoryviews most of all
AS_PYTHON = {"language_level": 3, "annotation_typing": False, "show_performance_hints": False}
STAMP = Path("sim", "compiled.sha256")  # the digest of the sources that were compiled, as in `sim.base.compiled`
DIGITS = 16  # of a policy's, in the name of what it is compiled to, as there


class Compiled(BuildHookInterface):
    """The build hook: adds the compiled modules to a wheel, or puts them beside their sources for an editable one."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        self._folder = tempfile.mkdtemp(prefix="moesim-build-")
        root = Path(self.root)
        # pre-commit has no way to say MOESIM_PURE=1, and what it installs replays a baseline now and then.
        pure = os.environ.get("MOESIM_PURE", "0") not in ("", "0") or "PRE_COMMIT" in os.environ
        if self.target_name != "wheel" or pure:
            return
        into = root if version != "editable" and is_compiled(root) else Path(self._folder)
        if into != root:
            command = [sys.executable, str(Path(__file__).resolve()), "--root", str(root), "--into", self._folder]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")  # noqa: S603 - this very file
            if done.returncode:
                why = (done.stderr.strip() or "no reason given").splitlines()[-1]
                self.app.display_info(f"not compiled ({why}): the plain modules give the same results, slower")
                return
        built = {str(path): path.relative_to(into).as_posix() for path in modules_in(into)}
        if not built:
            return
        if version == "editable":
            put_in_place(root, into)
            return
        build_data["force_include"].update(built)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def modules_in(folder: Path) -> list[Path]:
    return sorted(
        path for top in ("policies", "sim") for path in (folder / top).rglob("*") if path.suffix in (".so", ".pyd")
    )


def digest(root: Path) -> str:
    """Of the typed sources, as `sim.base.compiled` will ask for it before it takes what was compiled from them."""
    found: str = runpy.run_path(str(root / "sim" / "base" / "compiled.py"))["digest"]()
    return found


def is_compiled(root: Path) -> bool:
    """Whether every module lies compiled beside its source, by this Python and from what is there now."""
    found = [root / binary for binary in binaries(root).values()]
    if not found or sorted(found) != modules_in(root) or not (root / STAMP).exists():
        return False
    return (root / STAMP).read_text(encoding="ascii") == digest(root)


def put_in_place(root: Path, folder: Path) -> None:
    """Replace what was compiled before by what has been compiled now."""
    for path in (*modules_in(root), root / STAMP):
        path.unlink(missing_ok=True)
    for each in (*binaries(root).values(), STAMP):  # the stamp last: all of it lies there
        whole = root / each
        part = shutil.copy(folder / each, whole.with_suffix(".part"))
        Path(part).replace(whole)  # half of a module would end every command in a crash


def typed(root: Path) -> list[Path]:
    """Modules with a .pxd beside them, and what all of them share, which Cython writes."""
    every = (path.with_suffix(".py") for path in sorted((root / "sim").glob("*/*.pxd")))
    found = [path.relative_to(root) for path in every if path.exists()]
    return [*found, SHARED] if found else []


def dotted(source: Path) -> str:
    return ".".join(source.with_suffix("").parts)


def policies(root: Path) -> list[Path]:
    return [Path(name) for name in POLICIES if (root / name).exists()]


def binaries(root: Path) -> dict[Path, Path]:
    """Each source, and what it is compiled to."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    found = {source: source.with_suffix(suffix) for source in typed(root)}
    for source in policies(root):
        digest = hashlib.sha256((root / source).read_bytes()).hexdigest()[:DIGITS]
        found[source] = source.with_name(f"{source.stem}.{digest}{suffix}")
    return found


def build(root: Path, folder: Path, scratch: Path) -> None:
    """Compile every source into `folder`, in the layout of the packages; raises whatever goes wrong.

    What lies in `folder` and `scratch` from the last time is used again where its sources have not changed since.
    """
    from Cython.Build import cythonize
    from setuptools import Distribution, Extension
    from setuptools.command.build_ext import build_ext

    class BuildExt(build_ext):
        def build_extensions(self) -> None:
            for extension in self.extensions:
                if self.compiler.compiler_type == "msvc":
                    extension.extra_compile_args = list(FLAGS_MSVC)
                else:
                    extension.extra_compile_args = [*FLAGS, *(["-O3"] if extension.name in QUICK else [])]
            super().build_extensions()

    def in_c(found: list[Path], directives: dict[str, Any], force: bool = False) -> list[Any]:
        named = [Extension(dotted(path), [path.as_posix()]) for path in found]
        return cythonize(
            named,
            build_dir=str(scratch),
            compiler_directives=directives,
            nthreads=min(n_cores, len(named)),
            shared_utility_qualified_name=dotted(SHARED) if SHARED in found else None,
            force=force,
            quiet=True,
        )

    def compiled(modules: list[Any], into: Path) -> None:
        command = BuildExt(Distribution({"name": "sim", "packages": [], "ext_modules": modules}))
        command.build_lib, command.build_temp, command.parallel = str(into), str(scratch), n_cores
        command.ensure_finalized()
        command.run()

    os.chdir(root)
    n_cores = os.cpu_count() or 1
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "probe.c").write_text("#include <Python.h>\nvoid PyInit_probe(void) {}\n", encoding="ascii")
    compiled([Extension("probe", [str(scratch / "probe.c")])], scratch)  # no compiler: nobody waits for Cython
    before = digest(root)  # whoever edits a source meanwhile has not had it compiled
    wanted = binaries(root)
    for old in set(modules_in(folder)) - {folder / binary for binary in wanted.values()}:
        old.unlink()
    changed = [source for source in policies(root) if not (folder / wanted[source]).exists()]
    modules = in_c(typed(root), DIRECTIVES) + in_c(changed, AS_PYTHON, force=True)
    if not modules:
        return
    compiled(modules, folder)
    for source in changed:
        (folder / source.with_suffix(sysconfig.get_config_var("EXT_SUFFIX"))).replace(folder / wanted[source])
    (folder / STAMP).write_text(before, encoding="ascii")


def reason(error: Exception) -> str:
    """In a few words; `python hatch_build.py` says all."""
    if isinstance(error, ImportError):
        return f"no {error.name}"
    return "no working C compiler" if "distutils" in type(error).__module__ else f"{type(error).__name__} in Cython"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile sim's typed modules, and some policies, in place.")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout; default: this one")
    parser.add_argument("--into", type=Path, help="a folder for what is built, instead of in place")
    parser.add_argument("--force", action="store_true", help="compile what has not changed, too")
    told = parser.parse_args()
    root = told.root.resolve()
    if told.into is not None:
        with tempfile.TemporaryDirectory(prefix="moesim-c-") as scratch:
            try:
                build(root, told.into.resolve(), Path(scratch))
            except Exception as error:  # whatever it is: the package is whole without
                sys.exit(reason(error))
        return
    folder, scratch = root / "build" / "compiled", root / "build" / "c"
    for kept in (folder, scratch) if told.force else ():
        shutil.rmtree(kept, ignore_errors=True)
    build(root, folder, scratch)
    put_in_place(root, folder)
    sys.stderr.write(f"compiled {len(modules_in(root))} of {len(binaries(root))} modules\n")


if __name__ == "__main__":
    main()
